"""Checks and measures everything that runs on a GPU: `python -m penstock.loadtest.lab.gpu`.

It needs a GPU, torch, triton, transformers and the engine's few packages; no network, no Redis, no
argument. Every part prints its rows as they come, and one that fails costs its own rows alone. The
figures go into a JSON file beside the table. With TRITON_INTERPRET=1 it tries itself on a CPU, in
toy sizes whose times mean nothing.
"""

import argparse
import json
import platform
import sys
import time
import traceback
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers
import triton

from penstock.kernels.numbers import device as kernels_device
from penstock.loadtest.lab.gpu.checks import checks
from penstock.loadtest.lab.gpu.engines import beside_transformers, engines, prompts, same_text
from penstock.loadtest.lab.gpu.figures import Figures
from penstock.loadtest.lab.gpu.given import (
    TOY,
    empty,
)
from penstock.loadtest.lab.gpu.speeds import (
    attention_speed,
    experts_speed,
    latents_speed,
    limits,
    quantised_speed,
    small_ops_speed,
)

PARTS = (
    limits,
    same_text,
    attention_speed,
    latents_speed,
    small_ops_speed,
    experts_speed,
    quantised_speed,
    engines,
    prompts,
    beside_transformers,
    checks,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", default="gpu.json", help="the file of figures")
    names = [part.__name__ for part in PARTS]
    parser.add_argument("--parts", default=",".join(names), help="which, by commas; all as a rule")
    options = parser.parse_args()
    if not TOY and not torch.cuda.is_available():
        parser.error("there is no GPU; TRITON_INTERPRET=1 tries this script without one")
    if TOY:
        kernels_device.TRITON_DEVICES.add("cpu")
    selection, figures, began_s = set(options.parts.split(",")), Figures(), time.monotonic()
    for part in PARTS:
        if part.__name__ not in selection:
            continue
        try:
            with torch.inference_mode():
                part(figures)
        except Exception as error:
            figures.failures[part.__name__] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        print(f"-- {part.__name__}: after {time.monotonic() - began_s:.0f} s", flush=True)
        empty()
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": "interpreter" if TOY else torch.cuda.get_device_name(),
        "versions": {
            "python": platform.python_version(),
            **{library.__name__: library.__version__ for library in (torch, triton, transformers)},
        },
        "rows": [asdict(row) for row in figures.rows],
        "failures": figures.failures,
    }
    Path(options.out).write_text(json.dumps(result, indent=1) + "\n")
    for name, failure in figures.failures.items():
        print(f"FAILED {name}: {failure}"[:500])
    return 1 if figures.failures else 0


if __name__ == "__main__":
    sys.exit(main())
