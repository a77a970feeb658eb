"""Measures the CPU that the prefix cache costs where nothing is shared.

It compares the host's work with the cache and without. The runner answers at once, so the work is a
few tenths of a second of scheduling and no model. The difference of two runs with a model would be
lost in the noise of the machine.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from penstock.loadtest.lab.memory import BLOCK_SIZE, MAX_MODEL_LEN, NUM_BLOCKS, InstantRunner
from penstock.loadtest.requests.workload import Request
from penstock.schemas.params.sampling import SamplingParams
from penstock.worker.engine.cache.block_pool import BlockPool
from penstock.worker.engine.engine import Engine
from penstock.worker.engine.grammar.constraints import Grammars
from penstock.worker.engine.io.limits import EngineLimits
from penstock.worker.engine.io.messages import AddSequence
from penstock.worker.engine.scheduling.scheduler import Scheduler

_TRIES = 7


def cache_cost_s(requests: Sequence[Request], concurrency: int) -> float:
    """Return the CPU seconds that the cache costs for all requests.

    That is the least of several tries with the cache, less the least without.
    """
    times_s: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(_TRIES):
        for remembers, tries in times_s.items():
            tries.append(_host_s(requests, concurrency, remembers))
    return min(times_s[True]) - min(times_s[False])


def _host_s(requests: Sequence[Request], concurrency: int, remembers: bool) -> float:
    num_blocks = max(NUM_BLOCKS, concurrency * MAX_MODEL_LEN // BLOCK_SIZE)
    vocab_size = max(max(request.ids) for request in requests) + 1
    limits = EngineLimits(
        MAX_MODEL_LEN, vocab_size, num_blocks, BLOCK_SIZE, concurrency, frozenset()
    )
    pool = BlockPool(num_blocks, BLOCK_SIZE, remembers=remembers)
    scheduler = Scheduler(pool, concurrency, 2048)
    engine = Engine(limits, scheduler, InstantRunner(), Grammars(Path(), vocab_size, frozenset()))
    for number, request in enumerate(requests):
        params = SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True)
        engine.add(AddSequence(str(number), request.ids, params))
    begin_s = time.process_time()
    while engine.busy:
        engine.step()
    return time.process_time() - begin_s
