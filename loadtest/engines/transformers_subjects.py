"""transformers, called by its public interface with the workloads as token ids, greedily."""

import logging as stdlib_logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, GenerationMixin
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from penstock.loadtest.requests.measurement import Measurement, Timeline
from penstock.loadtest.requests.workload import Request

NO_END = -1  # an end token that no model draws, so that the workload sets the lengths


def generate(folder: Path, requests: Sequence[Request], begin_s: float) -> Measurement:
    """Measure transformers' `generate`, one request after the other.

    begin_s  the time at which the process began
    """
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

    start_s = answer(_short(requests)).tokens_s[0] - begin_s
    begin, cpu_s = time.perf_counter(), time.process_time()
    timelines = [answer(request) for request in requests]
    wall_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu_s
    return Measurement(timelines, wall_s, cpu_s, start_s)


def generate_batch(
    folder: Path, requests: Sequence[Request], concurrency: int, begin_s: float
) -> Measurement:
    """Measure transformers' own continuous batching, with as many pages as it can use."""
    model = _load(folder)
    with _continuous_batching(model, requests) as manager:

        def answer_all(batch: Sequence[Request]) -> Measurement:
            begin, cpu_s = time.perf_counter(), time.process_time()
            timelines: dict[str, Timeline] = {}

            def add(request: Request) -> None:
                name = manager.add_request(
                    request.ids,
                    max_new_tokens=request.max_tokens,
                    eos_token_id=NO_END,
                    record_timestamps=True,
                )
                assert name is not None
                timelines[name] = Timeline(time.perf_counter(), len(request.ids))

            waiting = iter(batch)
            for request in islice(waiting, concurrency):
                add(request)
            for _ in batch:
                result = manager.get_result(timeout=1200)
                assert result is not None and result.timestamps is not None, result
                timelines[result.request_id].tokens_s.extend(result.timestamps)
                for request in islice(waiting, 1):
                    add(request)
            wall_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu_s
            return Measurement(list(timelines.values()), wall_s, cpu_s)

        (first,) = answer_all([_short(requests)]).timelines
        return replace(answer_all(requests), start_s=first.tokens_s[0] - begin_s)


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
    """A streamer that notes when each token comes; its first call brings the prompt."""

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


def _short(requests: Sequence[Request]) -> Request:
    """Return a short request, sent first so that set-up on first use is not measured."""
    return Request(requests[0].ids[::-1][:16], 4)
