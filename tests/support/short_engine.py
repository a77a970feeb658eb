"""An engine that is short of everything, so that slices, cache hits and preemption all happen."""

from pathlib import Path

from penstock.worker.engine.build import build_engine
from penstock.worker.engine.engine import Engine
from penstock.worker.engine.io.config import EngineConfig


def make_engine(folder: Path, **changes: object) -> Engine:
    settings: dict[str, object] = {
        "dtype": "float32",
        "num_gpu_blocks_override": 30,
        "max_num_seqs": 24,
        "max_num_batched_tokens": 40,
    }
    return build_engine(EngineConfig(model=folder, **(settings | changes)))
