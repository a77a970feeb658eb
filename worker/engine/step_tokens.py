"""The most tokens that a step computes, where the settings do not say.

Running sequences wait for each step, and the prompts read in a step make it longer. A CPU gains
nothing by long steps: from some dozens of tokens on, each token takes as long. How long depends on
model and processor, so it is measured.
"""

import logging
import time
from collections.abc import Callable

import torch

from penstock.worker.engine.config import EngineConfig
from penstock.worker.layers.batch import Batch
from penstock.worker.models.served import Model

LEAST_TOKENS, CPU_TOKENS, GPU_TOKENS = 64, 512, 2048
PATIENCE_S = 0.2
_MEASURE_S = 0.05
_MULTIPLE = 32

_log = logging.getLogger("penstock.worker.engine")


def max_step_tokens(config: EngineConfig, model: Model, device: torch.device) -> int:
    """Return the configured number of tokens, or one that suits the device.

    On a CPU it suits the model too: steps are timed.
    """
    if config.max_num_batched_tokens is not None:
        return config.max_num_batched_tokens
    if device.type != "cpu":
        return max(GPU_TOKENS, config.max_num_seqs)
    most = max(CPU_TOKENS, config.max_num_seqs)
    tokens = most_in_time(most, lambda count: _step_s(model, count, config.block_size))
    _log.info("a step has at most %d tokens, as this processor takes for them", tokens)
    return tokens


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


def _step_s(model: Model, count: int, block_size: int) -> float:
    begin_s = time.perf_counter()
    try_step(model, count, 1, block_size, model.dtype, torch.device("cpu"))
    return time.perf_counter() - begin_s


@torch.inference_mode()
def try_step(
    model: Model,
    count: int,
    num_draws: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Run one forward pass over `count` tokens of one sequence, and `num_draws` rows of logits.

    dtype  of keys and values
    """
    num_blocks = -(-count // block_size)
    batch = Batch(
        token_ids=torch.zeros(count, dtype=torch.int64, device=device),
        # Position 0, which every model has.
        positions=torch.zeros(count, dtype=torch.int64, device=device),
        slot_mapping=torch.arange(count, device=device),
        query_start=torch.tensor([0, count], dtype=torch.int32, device=device),
        context_lens=torch.tensor([count], dtype=torch.int32, device=device),
        block_tables=torch.arange(num_blocks, dtype=torch.int32, device=device)[None],
        max_query_len=count,
        max_context_len=count,
    )
    caches = {
        kv: kv.zeros(num_blocks, block_size, dtype, device) for kv in set(model.config.kv_shapes)
    }
    hidden = model(batch, [caches[kv] for kv in model.config.kv_shapes])
    model.logits(hidden[:num_draws])
