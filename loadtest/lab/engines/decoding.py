"""Decoding speed of engines beside each other, with nothing around them."""

import time
from collections.abc import Mapping
from statistics import median
from typing import TypeVar

from penstock.schemas.params.sampling import SamplingParams
from penstock.worker.engine.engine import Engine
from penstock.worker.engine.io.messages import AddSequence

PROMPT = 64  # tokens
_BURSTS, _BURST_STEPS = 20, 4

Name = TypeVar("Name")


def decoding_speeds(engines: Mapping[Name, Engine], count: int) -> dict[Name, float]:
    """Return each engine's tokens a second with `count` sequences, by its median step.

    The engines take turns in bursts. All prompts must fit into one step.
    """
    steps_s: dict[Name, list[float]] = {name: [] for name in engines}
    for engine in engines.values():
        for seq in range(count):
            prompt = [10 + (31 * seq + at) % 1000 for at in range(PROMPT)]
            params = SamplingParams(
                temperature=0, max_tokens=_BURSTS * _BURST_STEPS + 1, ignore_eos=True
            )
            engine.add(AddSequence(str(seq), prompt, params))
        engine.step()  # the prompts
    for _ in range(_BURSTS):
        for name, engine in engines.items():
            for _ in range(_BURST_STEPS):
                begin_s = time.perf_counter()
                outputs = engine.step()
                steps_s[name].append(time.perf_counter() - begin_s)
                assert len(outputs) == count
    assert not any(engine.busy for engine in engines.values())
    return {name: count / median(times_s) for name, times_s in steps_s.items()}
