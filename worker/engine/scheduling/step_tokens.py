"""The most tokens and the most time of a step, where the settings do not say.

Running sequences wait for each step, and the prompts read in a step make it longer. A CPU gains
nothing by long steps: from some dozens of tokens on, each token takes as long. How long depends on
model and processor, so it is measured in a warm-up, and at each step from then on.
"""

import logging
import time
from collections.abc import Callable

import torch

from penstock.worker.engine.io.config import EngineConfig
from penstock.worker.engine.scheduling.step_time import StepTime
from penstock.worker.layers.batch import Batch
from penstock.worker.models.contract.served import Model

LEAST_TOKENS, CPU_TOKENS, GPU_TOKENS = 64, 512, 2048
PATIENCE_S = 0.2
_MEASURE_S = 0.05
_MEASURED_CONTEXT = 1024  # tokens before those of a step that is timed
_MULTIPLE = 32

_log = logging.getLogger("penstock.worker.engine")


def max_step_tokens(config: EngineConfig, device: torch.device) -> int:
    """Return the configured number of tokens, or one that suits the device."""
    if config.max_num_batched_tokens is not None:
        return config.max_num_batched_tokens
    usual = CPU_TOKENS if device.type == "cpu" else GPU_TOKENS
    return max(usual, config.max_num_seqs)


def step_time(config: EngineConfig, model: Model, device: torch.device) -> StepTime:
    """Return what predicts the time of steps, and bounds it where that is asked for.

    On a CPU it is bounded too where nothing is said of tokens or time; a bound there knows from
    the beginning how long some steps take, as they are timed now.
    """
    asked_ms, is_cpu = config.max_step_ms, device.type == "cpu"
    if asked_ms == 0 or (asked_ms is None and (not is_cpu or config.max_num_batched_tokens)):
        return StepTime()
    if asked_ms is not None and not is_cpu:
        return StepTime(asked_ms / 1000)
    longest = 0 if model.states is not None else model.config.max_model_len - LEAST_TOKENS
    before = max(0, min(_MEASURED_CONTEXT, longest))
    timings = [
        (count, start, _best_s(model, count, start, config.block_size))
        for count, start in ((1, 0), (LEAST_TOKENS, 0), (LEAST_TOKENS, before))
    ]
    single_s = timings[0][-1]
    most_s = max(PATIENCE_S, 2 * single_s) if asked_ms is None else asked_ms / 1000
    _log.info(
        "a step takes %.0f ms at most where it reads prompts; one of a token takes %.1f",
        most_s * 1000,
        single_s * 1000,
    )
    return StepTime(most_s, timings)


def _best_s(model: Model, count: int, start: int, block_size: int) -> float:
    """Return the least seconds of a few steps: the first sets up, and any may be disturbed."""
    tries_s = [_step_s(model, count, start, block_size)]
    while len(tries_s) < 2 or sum(tries_s[1:]) < _MEASURE_S:
        tries_s.append(_step_s(model, count, start, block_size))
    return min(tries_s)


def most_in_time(most: int, step_s: Callable[[int], float]) -> int:
    """Return how many tokens a step computes in `PATIENCE_S`, or in twice the time of one token.

    The longer of the two times counts, and the result is at most `most`.

    step_s  returns the seconds that a step of so many tokens takes. With many tokens each takes no
            longer than with few, so an estimate from `LEAST_TOKENS` is never too high
    """
    single_s = min(step_s(1), step_s(1))  # the first call includes one-time set-up
    patience_s = max(PATIENCE_S, 2 * single_s)
    fits, took_s = 0, 0.0
    while fits < most and took_s < _MEASURE_S:  # the best try counts: one may be disturbed
        least_s = step_s(LEAST_TOKENS)
        took_s += least_s
        fits = max(fits, int(patience_s / least_s * LEAST_TOKENS))
    return min(most, max(LEAST_TOKENS, fits // _MULTIPLE * _MULTIPLE))


def _step_s(model: Model, count: int, start: int, block_size: int) -> float:
    begin_s = time.perf_counter()
    try_step(model, count, 1, block_size, model.dtype, torch.device("cpu"), start)
    return time.perf_counter() - begin_s


@torch.inference_mode()
def try_step(
    model: Model,
    count: int,
    num_draws: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    start: int = 0,
) -> None:
    """Run one forward pass over `count` tokens of one sequence, and `num_draws` rows of logits.

    dtype  the KV cache's
    start  tokens before them, whose keys and values are zeros
    """
    num_blocks = -(-(start + count) // block_size)
    batch = Batch(
        token_ids=torch.zeros(count, dtype=torch.int64, device=device),
        # Position 0, which every model has.
        positions=torch.zeros(count, dtype=torch.int64, device=device),
        slot_mapping=torch.arange(start, start + count, device=device),
        query_start=torch.tensor([0, count], dtype=torch.int32, device=device),
        context_lens=torch.tensor([start + count], dtype=torch.int32, device=device),
        block_tables=torch.arange(num_blocks, dtype=torch.int32, device=device)[None],
        max_query_len=count,
        max_context_len=start + count,
    )
    caches = {
        kv: kv.zeros(num_blocks, block_size, dtype, device) for kv in set(model.config.kv_shapes)
    }
    hidden = model(batch, [caches[kv] for kv in model.config.kv_shapes])
    model.logits(hidden[:num_draws])
