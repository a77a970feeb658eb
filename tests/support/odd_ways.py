"""Ways to sample, of every kind beside each other."""

import numpy as np

from penstock.kernels.sampling.sample import WAY, Ways


def ways_of(seed: int, rows: int) -> Ways:
    """Rows that draw in every way, some by a grammar's mask."""
    rng, ways = np.random.default_rng(seed), np.zeros(rows, WAY)
    ways["temperature"] = rng.choice([0, 1e-5, 0.3, 1, 2], rows)
    ways["top_k"] = rng.choice([0, 0, 1, 2, 7, 50, 1000, 2**31 - 1], rows)
    ways["top_p"] = rng.choice([1, 1, 1e-9, 0.2, 0.9, 0.999999], rows)
    ways["min_p"] = rng.choice([0, 0, 1e-300, 1e-9, 0.05, 0.5, 1], rows)
    ways["seed"] = rng.integers(2**64, size=rows, dtype=np.uint64)
    ways["choice"], ways["is_masked"] = rng.integers(16, size=rows), rng.integers(2, size=rows)
    return ways
