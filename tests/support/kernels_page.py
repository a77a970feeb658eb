"""Compiles each Triton kernel for GPUs that need not be here, and writes docs/kernels.md.

`python tests/support/kernels_page.py` writes the page; with `--rows` it prints its rows as JSON.
It must not run under Triton's interpreter.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from penstock.kernels.attention.latent_attention_triton import (  # noqa: E402
    _latent_attention,
    fitting_latent_tile,
)
from penstock.kernels.attention.paged_attention_triton import _paged_attention, fitting_tile  # noqa: E402
from penstock.kernels.attention.split_keys_triton import _merge  # noqa: E402
from penstock.kernels.cache.rotate_and_store_triton import _rotate_and_store  # noqa: E402
from penstock.kernels.cache.store_latents_triton import _store_latents  # noqa: E402
from penstock.kernels.linear.experts_triton import (  # noqa: E402
    LARGE_TILE,
    SMALL_TILE,
    ProductTile,
    _grouped_product,
)
from penstock.kernels.linear.quantised_triton import (  # noqa: E402
    STEP_DEPTH,
    TILE_COLUMNS,
    _quantised_product,
)
from penstock.kernels.numbers.fp8_triton import _quantise_rows  # noqa: E402
from penstock.kernels.rows.activation_triton import _activate  # noqa: E402
from penstock.kernels.rows.norm_triton import _normalise  # noqa: E402
from penstock.kernels.sampling.sample_triton import _sample  # noqa: E402

VERSION = triton.__version__
PAGE = ROOT / "docs" / "kernels.md"
# What code is made for, and the KiB that a block may share.
TARGETS = {
    "sm_90": (GPUTarget("cuda", 90, 32), 227),
    "sm_80": (GPUTarget("cuda", 80, 32), 163),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64),
}
# Latents are compiled for these too: no formula gives what their programs share.
OF_LATENTS = {
    "sm_86": (GPUTarget("cuda", 86, 32), 99),
    "sm_89": (GPUTarget("cuda", 89, 32), 99),
    "sm_120": (GPUTarget("cuda", 120, 32), 99),
}
# Query heads, key heads, size of a head, hidden, width of the feed-forward layer; head norms.
MODELS = {
    "Llama-3 8B, Mixtral": (32, 8, 128, 4096, 14_336, False),
    "Llama-3 70B": (64, 8, 128, 8192, 28_672, False),
    "Qwen3-32B": (64, 8, 128, 5120, 25_600, True),
    "Gemma 2 9B": (16, 8, 256, 3584, 14_336, False),
    "Llama-3.2-1B": (32, 8, 64, 2048, 8192, False),
}
OTHERS_HAVE = ("Llama-3 8B, Mixtral", "Gemma 2 9B")  # than sm_90
# Experts, how many are chosen, hidden, width of one.
# Experts, those chosen, hidden, width, and whether they have biases.
EXPERTS = {
    "Mixtral": (8, 2, 4096, 14_336, False),
    "Qwen3-30B-A3B": (128, 8, 2048, 768, False),
    "DeepSeek-V3": (256, 8, 7168, 2048, False),
    "gpt-oss-20b": (32, 4, 2880, 2880, True),
}
LATENTS = {"DeepSeek-V3": 128, "DeepSeek-V2-Lite": 16}  # heads; latents of 512, keys of 64 more
SMALL = ("Llama-3 70B", "Qwen3-32B")  # whose small operations are shown too
# What, whether it decodes, and in how many parts.
ATTENTIONS = (
    ("decode", True, 1),
    ("split", True, 8),
    ("prompt", False, 1),
    ("prompt with window, cap and sinks", False, 1),
)
_OF_AMD = ("vgpr_count", "private_segment_fixed_size")  # registers and spilled bytes
STRIDES = ("query_row", "query_head", "cache_block", "cache_head", "cache_value", "tables_row")
COLUMNS = ("kernel", "shapes of", "for", "registers", "spilled bytes", "shared KiB", "uses")
_ATTENTION = {
    **dict.fromkeys(("query_ptr", "cache_ptr", "out_ptr"), "*bf16"),
    **dict.fromkeys(("lse_ptr", "sinks_ptr"), "*fp32"),
    **dict.fromkeys(("query_start_ptr", "context_lens_ptr", "tables_ptr"), "*i32"),
    **dict.fromkeys((*STRIDES, "tokens", "heads", "window"), "i32"),
    **dict.fromkeys(("scale", "softcap"), "fp32"),
}


def rows() -> Iterator[tuple[Any, ...]]:
    """Give a row of the page for each kernel, shape and target."""
    for target, (made_for, shared_kib) in TARGETS.items():
        for name, (heads, kv_heads, head_dim, hidden, width, has_norms) in MODELS.items():
            if target != "sm_90" and name not in OTHERS_HAVE:
                continue
            group = heads // kv_heads
            for what, decodes, splits in ATTENTIONS:
                tile = fitting_tile(decodes, 2 * head_dim, shared_kib * 1024)
                has_all = what.endswith("sinks")
                constants = {
                    "tables_column": 1, "GROUP": group, "ROWS": tile.rows, "KEYS": tile.keys,
                    "BLOCK_SIZE": 16, "HEAD_DIM": head_dim, "COLUMNS": head_dim, "SPLITS": splits,
                    "HAS_WINDOW": has_all, "HAS_CAP": has_all, "HAS_SINKS": has_all,
                    "IS_INTERPRETED": False,
                }  # fmt: skip
                types = _ATTENTION | ({"out_ptr": "*fp32"} if splits > 1 else {})
                found = compiled(
                    _paged_attention, types, constants, made_for, tile.num_warps, tile.num_stages
                )
                yield (f"attention, {what}", name, target, *found)
                if target == "sm_90" and name == OTHERS_HAVE[0] and not has_all:
                    types["cache_ptr"] = "*fp8e4nv"
                    how = tile.num_warps, tile.num_stages
                    found = compiled(_paged_attention, types, constants, made_for, *how)
                    yield (f"attention, {what}, over fp8", name, target, *found)
            if name not in SMALL:
                continue
            yield ("norm", name, target, *_norm(hidden, made_for))
            yield ("rows in fp8", name, target, *_fp8_rows(hidden, made_for))
            yield ("silu, times up", name, target, *_silu(width, made_for))
            found = _store(heads, kv_heads, head_dim, has_norms, made_for)
            yield ("rotate and store", name, target, *found)
        for bits, group in ((8, 4096), (4, 128)):
            for tile_rows in (16, 64):
                found = _quantised(bits, group, tile_rows, made_for)
                yield (f"{bits} bits, {tile_rows} rows", "Llama-3 8B", target, *found)
        for name, shape in EXPERTS.items():
            for what, tile in (("few", SMALL_TILE), ("many", LARGE_TILE)):
                found = _experts(*shape, tile, made_for)
                yield (f"experts, {what} rows", name, target, *found)
                if target == "sm_90":
                    found = _experts(*shape, tile, made_for, is_fp8=True)
                    yield (f"experts, {what} rows, fp8", name, target, *found)
        for name, heads in LATENTS.items():
            yield from _latent_rows(name, target, made_for, shared_kib)
            yield ("store latents", name, target, *_stored_latents(heads, made_for))
        yield ("merge of 8", "all of 128", target, *_merged(made_for))
        yield ("sample", "all", target, *_sampled(made_for))
    for target, (made_for, shared_kib) in OF_LATENTS.items():
        for name in LATENTS:
            yield from _latent_rows(name, target, made_for, shared_kib)


def _latent_rows(
    name: str, target: str, made_for: GPUTarget, shared_kib: int
) -> Iterator[tuple[Any, ...]]:
    for what, splits in (("", 1), (", split", 8)):
        found = _latents(LATENTS[name], splits, made_for, shared_kib * 1024)
        yield (f"latents{what}", name, target, *found)


def _norm(hidden: int, made_for: GPUTarget) -> tuple[Any, ...]:
    block = triton.next_power_of_2(hidden)
    types = {"x_ptr": "*bf16", "weight_ptr": "*fp32", "bias_ptr": "*fp32", "out_ptr": "*bf16"}
    constants = {"HIDDEN": hidden, "BLOCK": block, "CENTERS": False, "HAS_BIAS": False}
    return compiled(
        _normalise, types | {"eps": "fp32"}, constants | {"ADDS": False}, made_for, block // 512
    )


def _fp8_rows(hidden: int, made_for: GPUTarget) -> tuple[Any, ...]:
    block = triton.next_power_of_2(hidden)
    types = {"x_ptr": "*bf16", "out_ptr": "*fp8e4nv", "scales_ptr": "*fp32"}
    constants = {"WIDTH": hidden, "BLOCK": block, "IS_INTERPRETED": False}
    return compiled(_quantise_rows, types, constants, made_for, block // 512)


def _silu(width: int, made_for: GPUTarget) -> tuple[Any, ...]:
    constants = {"WIDTH": 2 * width, "HIDDEN": width, "MULTIPLIES": True, "KIND": "silu"}
    types = {"x_ptr": "*bf16", "out_ptr": "*bf16"}
    return compiled(_activate, types, constants | {"BLOCK": 1024}, made_for)


def _store(
    heads: int, kv_heads: int, head_dim: int, has_norms: bool, made_for: GPUTarget
) -> tuple[Any, ...]:
    types = {"qkv_ptr": "*bf16", "query_weight_ptr": "*fp32", "key_weight_ptr": "*fp32"}
    types |= dict.fromkeys(("cos_ptr", "sin_ptr", "query_ptr", "cache_ptr"), "*bf16")
    types |= {"slots_ptr": "*i64"} | dict.fromkeys(("eps", "key_scale", "value_scale"), "fp32")
    types |= dict.fromkeys(("cache_block", "cache_head", "cache_value"), "i32")
    constants = {
        "HEADS": heads, "KV_HEADS": kv_heads, "HALF": head_dim // 2, "BLOCK_SIZE": 16,
        "ROWS": 2048 // head_dim, "COLUMNS": head_dim // 2, "NORMALISES": has_norms,
        "ROTATES": True, "HAS_SCALES": False, "IS_INTERPRETED": False,
    }  # fmt: skip
    return compiled(_rotate_and_store, types, constants, made_for)


def _experts(
    num_experts: int,
    num_chosen: int,
    hidden: int,
    width: int,
    has_biases: bool,
    tile: ProductTile,
    made_for: GPUTarget,
    is_fp8: bool = False,
) -> tuple[Any, ...]:
    types = dict.fromkeys(("x_ptr", "weights_ptr"), "*fp8e4nv" if is_fp8 else "*bf16")
    types |= {"out_ptr": "*bf16", "biases_ptr": "*bf16"}
    types |= {"x_scales_ptr": "*fp32", "scales_ptr": "*fp32"}
    types |= {"pairs_ptr": "*i32", "experts_ptr": "*i32", "count": "i32"}
    constants = {
        "NUM_EXPERTS": num_experts, "OUTER": 2 * width, "INNER": hidden, "NUM_CHOSEN": num_chosen,
        "ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth,
        "BITS": 8 if is_fp8 else 16, "GROUP": hidden, "GROUPS": 1,
        "HAS_SCALES": is_fp8, "HAS_BIASES": has_biases, "IS_FP8": is_fp8, "IS_INTERPRETED": False,
    }  # fmt: skip
    how = tile.num_warps, tile.num_stages
    return compiled(_grouped_product, types, constants, made_for, *how)


def _latents(heads: int, splits: int, made_for: GPUTarget, shared: int) -> tuple[Any, ...]:
    tile = fitting_latent_tile(heads, 2 * 576, shared)
    constants = {
        "tables_column": 1, "HEADS": heads, "ROWS": tile.rows, "KEYS": tile.keys, "BLOCK_SIZE": 16,
        "SIZE": 576, "LATENT": 512, "COLUMNS": 512, "REST": 64, "SPLITS": splits,
        "IS_INTERPRETED": False,
    }  # fmt: skip
    types = {name: _ATTENTION[name] for name in _latent_attention.arg_names if name in _ATTENTION}
    types |= {"out_ptr": "*fp32"} if splits > 1 else {}
    how = tile.num_warps, tile.num_stages
    return compiled(_latent_attention, types, constants, made_for, *how)


def _stored_latents(heads: int, made_for: GPUTarget) -> tuple[Any, ...]:
    names = ("query_ptr", "latents_ptr", "cos_ptr", "sin_ptr", "out_ptr", "cache_ptr")
    types = dict.fromkeys(names, "*bf16") | {"weight_ptr": "*fp32", "slots_ptr": "*i64"}
    strides = ("query_row", "query_head", "latents_row", "cache_block")
    types |= dict.fromkeys(strides, "i32") | {"eps": "fp32"}
    constants = {
        "HEADS": heads, "HALF": 32, "LATENT": 512, "BLOCK_SIZE": 16, "ROWS": heads,
        "HALF_COLUMNS": 32, "COLUMNS": 512, "IS_INTERPRETED": False,
    }  # fmt: skip
    return compiled(_store_latents, types, constants, made_for)


def _quantised(bits: int, group: int, tile_rows: int, made_for: GPUTarget) -> tuple[Any, ...]:
    hidden, width = 4096, 14_336
    types = {"x_ptr": "*bf16", "numbers_ptr": "*i8" if bits == 8 else "*u8", "out_ptr": "*bf16"}
    types |= {"scales_ptr": "*bf16", "bias_ptr": "*bf16", "rows": "i32", "factor": "fp32"}
    constants = {
        "OUTER": 2 * width, "INNER": hidden, "BITS": bits, "GROUP": group,
        "GROUPS": hidden // group, "HAS_BIAS": False, "ADDS": False, "ROWS": tile_rows,
        "COLUMNS": TILE_COLUMNS, "DEPTH": STEP_DEPTH, "IS_INTERPRETED": False,
    }  # fmt: skip
    return compiled(_quantised_product, types, constants, made_for, 4, 4)


def _merged(made_for: GPUTarget) -> tuple[Any, ...]:
    types = {"parts_ptr": "*fp32", "lse_ptr": "*fp32", "out_ptr": "*bf16"}
    constants = {"SPLITS": 8, "SIZE": 128, "COLUMNS": 128}
    return compiled(_merge, types | {"tokens": "i32", "heads": "i32"}, constants, made_for, 1)


def _sampled(made_for: GPUTarget) -> tuple[Any, ...]:
    types = {"logits_ptr": "*fp32", "scales_ptr": "*fp32", "top_ks_ptr": "*i32"}
    types |= {"top_ps_ptr": "*fp64", "least_powers_ptr": "*fp32", "uniforms_ptr": "*fp64"}
    types |= {"tokens_ptr": "*i64", "vocab": "i32"}
    return compiled(_sample, types, {"BLOCK": 4096}, made_for, 8, fuses=False)


def compiled(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    made_for: GPUTarget,
    num_warps: int = 4,
    num_stages: int = 3,
    *,
    fuses: bool = True,
) -> tuple[int, int, float, str]:
    """Return registers, spilled bytes a thread, shared KiB, and the instructions of note."""
    signature = types | dict.fromkeys(constants, "constexpr")
    # As at a launch: addresses and strides are multiples of 16.
    aligned = [name for name in signature if name.endswith("_ptr") or name in STRIDES]
    aligned += [name for name in signature if name.startswith("cache_") and types[name] == "i32"]
    attrs = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in set(aligned)}
    ordered = {name: signature[name] for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=ordered, constexprs=constants, attrs=attrs)
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": fuses}
    built = triton.compile(source, target=made_for, options=options)
    shared_kib = built.metadata.shared / 1024
    if made_for.backend == "hip":
        code = built.asm["amdgcn"]
        counts = (_number(rf"\.{each}: *(\d+)", code) for each in _OF_AMD)
        return *counts, shared_kib, "mfma" if "v_mfma" in code else ""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.check_output([tool, "-res-usage", file.name], text=True)
    registers, stack = (_number(rf"{name}:(\d+)", usage) for name in ("REG", "STACK"))
    ptx = built.asm["ptx"]
    uses = [word for word in ("wgmma", "cp.async") if word in ptx]
    if "wgmma" not in ptx and "mma.sync" in ptx:
        uses.insert(0, "mma")
    if not fuses:
        assert "fma" not in ptx, "its bits are a CPU's"
        uses.append("no fma")
    return registers, stack, shared_kib, ", ".join(uses)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, pattern
    return int(found[1])


def page(found: list[tuple[Any, ...]]) -> str:
    table = [_line(COLUMNS), "|" + "---|" * len(COLUMNS), *map(_line, found)]
    return f"""# Kernels for GPUs, as they are compiled

`make kernels` writes this page: each Triton kernel, in bf16, compiled by triton {VERSION}
for GPUs that need not be there. A test compares it with what the same version of triton makes.
[benchmarks.md](benchmarks.md#gpu) has times.

{chr(10).join(table)}

The tile of prompts for heads of 128 spills some bytes on purpose: on an H200 the one that spills
none was slower. That of latents with 128 heads, for sm_90, spills mostly addresses, outside its
loops. A gfx942 has 512 registers for a thread; nothing ran on one yet.
"""


def _line(cells: Iterable[Any]) -> str:
    return "| " + " | ".join(f"{x:g}" if isinstance(x, float) else str(x) for x in cells) + " |"


def main() -> None:
    found = list(rows())
    if "--rows" in sys.argv:
        print(json.dumps({"version": VERSION, "page": page(found), "rows": found}))
    else:
        PAGE.write_text(page(found))


if __name__ == "__main__":
    main()
