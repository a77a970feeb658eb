"""The engines under measurement, each fed the same requests as token ids, greedily.

Each is called in a process of its own by `loadtest.compare`, so that none inherits another's memory
or threads. Transformers' figures are those of its own public interface.
"""

import logging as stdlib_logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, GenerationMixin
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from loadtest.measurement import Measurement, Timeline
from loadtest.workload import Request
from schemas.sampling import SamplingParams
from worker.engine.build import build_engine
from worker.engine.config import EngineConfig
from worker.engine.engine import Engine
from worker.engine.messages import Addition

PENSTOCK = "penstock"
ONE_BY_ONE = "generate, one by one"
BATCHED = "generate_batch"

KV_CACHE_BYTES = 512 * 2**20
NO_END = -1  # an end token that no model draws: lengths are the workload's


class Subject(Protocol):
    def __call__(self, folder: Path, requests: Sequence[Request]) -> Measurement:
        """Answer all requests, handed over at once."""


def penstock(folder: Path, requests: Sequence[Request]) -> Measurement:
    engine = build_engine(EngineConfig(folder, kv_cache_memory_bytes=KV_CACHE_BYTES))
    _warm_up(lambda request: _answer_all(engine, [request]), requests)
    return _answer_all(engine, requests)


def _answer_all(engine: Engine, requests: Sequence[Request]) -> Measurement:
    begin = time.perf_counter()
    timelines = {
        str(number): Timeline(begin, len(request.prompt)) for number, request in enumerate(requests)
    }
    for number, request in enumerate(requests):
        params = SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True)
        engine.add(Addition(str(number), request.ids, params))
    while engine.busy:
        for output in engine.step():
            assert output.error is None, output.error
            timelines[output.seq_id].tokens_s.append(time.perf_counter())
    return Measurement(list(timelines.values()), time.perf_counter() - begin)


def generate(folder: Path, requests: Sequence[Request]) -> Measurement:
    """transformers' `generate`, one request after the other."""
    model = _load(folder)

    def answer(request: Request) -> Timeline:
        clock = Clock(Timeline(time.perf_counter(), len(request.prompt)))
        prompt = torch.tensor([request.ids])
        config = GenerationConfig(
            max_new_tokens=request.max_tokens, do_sample=False, eos_token_id=NO_END, pad_token_id=0
        )
        mask = torch.ones_like(prompt)
        model.generate(  # type: ignore[misc]  # its own type for `self` is a protocol
            prompt, attention_mask=mask, generation_config=config, streamer=clock
        )
        return clock.timeline

    _warm_up(answer, requests)
    begin = time.perf_counter()
    timelines = [answer(request) for request in requests]
    return Measurement(timelines, time.perf_counter() - begin)


def generate_batch(folder: Path, requests: Sequence[Request]) -> Measurement:
    """transformers' own continuous batching, its pages and budget as large as ours."""
    model = _load(folder)
    with _continuous_batching(model, requests) as manager:

        def answer_all(some: Sequence[Request]) -> Measurement:
            begin = time.perf_counter()
            timelines = {}
            for request in some:
                name = manager.add_request(
                    request.ids,
                    max_new_tokens=request.max_tokens,
                    eos_token_id=NO_END,
                    record_timestamps=True,
                )
                timelines[name] = Timeline(begin, len(request.prompt))
            for _ in some:
                result = manager.get_result(timeout=1200)
                assert result is not None and result.timestamps is not None, result
                timelines[result.request_id].tokens_s.extend(result.timestamps)
            return Measurement(list(timelines.values()), time.perf_counter() - begin)

        _warm_up(lambda request: answer_all([request]), requests)
        return answer_all(requests)


@contextmanager
def _continuous_batching(
    model: GenerationMixin, requests: Sequence[Request]
) -> Iterator[ContinuousBatchingManager]:
    page_size = 16
    most = sum(-(-(len(request.prompt) + request.max_tokens) // page_size) for request in requests)
    config = ContinuousBatchingConfig(
        page_size=page_size, num_blocks=most + 64, max_batch_tokens=512, use_cuda_graph=False
    )
    ends = GenerationConfig(
        do_sample=False, eos_token_id=NO_END, pad_token_id=0, max_new_tokens=256
    )
    with model.continuous_batching_context_manager(
        generation_config=ends, continuous_batching_config=config, timeout=5
    ) as manager:
        yield manager


class Clock(BaseStreamer):
    """Notes when each token comes; the first call brings the prompt."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self._prompt_seen = False

    def put(self, value: object) -> None:
        if self._prompt_seen:
            self.timeline.tokens_s.append(time.perf_counter())
        self._prompt_seen = True

    def end(self) -> None:
        pass


def _load(folder: Path) -> GenerationMixin:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    stdlib_logging.disable()  # its batching warns through a logger of its own
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    return model.eval()


def _warm_up(answer: Callable[[Request], object], requests: Sequence[Request]) -> None:
    """One short request: what is set up on first use is not measured."""
    answer(Request(requests[0].ids[::-1][:16], 4))


SUBJECTS: dict[str, Subject] = {
    PENSTOCK: penstock,
    ONE_BY_ONE: generate,
    BATCHED: generate_batch,
}
