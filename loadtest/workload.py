"""The workloads of the speed comparisons, as token ids, from one seed."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

NUM_REQUESTS = 64
SEED = 20261121
FIRST_ID = 10  # below it lie special tokens
NUM_IDS = 32_000

Name = Literal["W", "P", "U"]
DESCRIPTIONS: dict[Name, str] = {
    "W": "64 requests, lognormal lengths: median 160 tokens in, 96 out",
    "P": "64 requests that share 512 tokens and have 32 of their own, 64 out",
    "U": "64 requests of 544 tokens with nothing shared, 64 out",
}


@dataclass(frozen=True, slots=True)
class Request:
    """What one client asks: exactly `max_tokens` tokens, whatever the model would say."""

    prompt: list[int]
    max_tokens: int


def workloads(vocab_size: int = NUM_IDS, seed: int = SEED) -> dict[Name, list[Request]]:
    """All three; the ids of a smaller vocabulary are folded into it."""
    rng = np.random.default_rng(seed)
    prompts = _lognormal(rng, median=160, sigma=0.7, low=16, high=768)
    outputs = _lognormal(rng, median=96, sigma=0.6, low=8, high=256)
    top = min(vocab_size, NUM_IDS)

    def ids(count: int) -> list[int]:
        drawn = rng.integers(FIRST_ID, NUM_IDS, count)
        return [int(number) for number in (drawn - FIRST_ID) % (top - FIRST_ID) + FIRST_ID]

    mixed = [
        Request(ids(num_in), num_out) for num_in, num_out in zip(prompts, outputs, strict=True)
    ]
    prefix = ids(512)
    shared = [Request(prefix + ids(32), 64) for _ in range(NUM_REQUESTS)]
    unshared = [Request(ids(544), 64) for _ in range(NUM_REQUESTS)]
    return {"W": mixed, "P": shared, "U": unshared}


def _lognormal(
    rng: np.random.Generator, median: int, sigma: float, low: int, high: int
) -> list[int]:
    drawn = np.round(np.exp(np.log(median) + sigma * rng.standard_normal(NUM_REQUESTS)))
    return [int(number) for number in np.clip(drawn, low, high)]
