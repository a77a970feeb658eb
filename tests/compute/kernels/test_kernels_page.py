"""The kernels as they are compiled for GPUs that need not be here, and the page that shows them."""

import json
import os
import subprocess
import sys

import pytest

from paths import ROOT, SUPPORT

# What a program may share, as the makers of the processors say.
SHARED_KIB = {"sm_90": 227, "sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_120": 99, "gfx942": 64}
LEFT_TO_SPILL = 400  # bytes a thread, of tiles of prompts and of latents' many heads


@pytest.mark.slow
@pytest.mark.timeout(1200)  # every kernel, for every chip and shape: minutes of two cores
def test_the_kernels_compile_as_their_page_says() -> None:
    """In a process of its own: here triton was imported to interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SUPPORT / "kernels_page.py"), "--rows"]
    found = json.loads(subprocess.check_output(command, env=environment, text=True))
    assert {row[2] for row in found["rows"]} == SHARED_KIB.keys()
    for what, shapes, target, registers, spilled, shared_kib, uses in found["rows"]:
        kernel = what, shapes, target
        assert shared_kib <= SHARED_KIB[target], kernel
        has_many_heads = (what.startswith("latents"), shapes) == (True, "DeepSeek-V3")
        if target == "gfx942":
            assert registers <= 512 and not spilled, kernel
            has_products = what.startswith(("attention", "latents", "experts", "4 bits", "8 bits"))
            assert ("mfma" in uses) == has_products, kernel
            continue
        may_spill = "prompt" in what or has_many_heads
        assert registers <= 255 and spilled <= may_spill * LEFT_TO_SPILL + 8, kernel
        has_steps = what.startswith(("attention", "latents", "experts", "4 bits", "8 bits"))
        assert ("cp.async" in uses) == has_steps, kernel
        has_tiles = any(word in what for word in ("prompt", "many rows", "64 rows"))
        has_tiles = has_tiles or (has_many_heads and "store" not in what)
        assert ("wgmma" in uses) == (has_tiles and target == "sm_90"), kernel
        assert ("no fma" in uses) == (what == "sample"), kernel
    page = (ROOT / "docs" / "kernels.md").read_text()
    if f"triton {found['version']}\n" in page:
        assert page == found["page"], "`make kernels` writes it again"
