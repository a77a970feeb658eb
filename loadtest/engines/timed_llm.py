"""`LLM` with the time of each token.

The time of all that `generate` does counts, its text included.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Sequence

from penstock.loadtest.requests.measurement import Measurement, Timeline
from penstock.loadtest.requests.workload import Request
from penstock.schemas.params.sampling import SamplingParams, StructuredOutputs
from penstock.worker.engine.io.messages import Output
from penstock.worker.llm import LLM, _Request
from penstock.worker.progress import Progress


class TimedLLM(LLM):
    def answer(self, requests: Sequence[Request], temperature: float = 0.0) -> Measurement:
        """Answer all requests, handed over at once, and measure them."""
        self._times_s: defaultdict[int, list[float]] = defaultdict(list)  # number -> tokens' times
        params = [_params(request, temperature) for request in requests]
        cpu_s, begin_s = time.process_time(), time.perf_counter()
        prompts = [request.prompt for request in requests]
        outputs = self.generate(prompts, params, use_tqdm=sys.stderr.isatty())
        wall_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - cpu_s
        timelines = [
            Timeline(begin_s, len(output.prompt_token_ids), self._times_s[number])
            for number, output in zip(sorted(self._times_s), outputs, strict=True)
        ]
        return Measurement(timelines, wall_s, cpu_s)

    def _take(
        self, output: Output, running: dict[str, tuple[_Request, int]], progress: Progress
    ) -> None:
        self._times_s[int(output.seq_id)] += [time.perf_counter()] * len(output.token_ids)
        super()._take(output, running, progress)


def _params(request: Request, temperature: float) -> SamplingParams:
    if request.schema is None:
        return SamplingParams(
            temperature=temperature, max_tokens=request.max_tokens, ignore_eos=True
        )
    form = StructuredOutputs(json_schema=request.schema)
    return SamplingParams(
        temperature=temperature, max_tokens=request.max_tokens, structured_outputs=form
    )
