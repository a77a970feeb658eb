"""`penstock bench latency`: the time of one batch; options and result keys are vLLM's."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import Field

from penstock.loadtest.engines.own import OwnSettings
from penstock.loadtest.machine.usage import Neighbours
from penstock.loadtest.requests.workload import random_requests
from penstock.schemas.params.sampling import SamplingParams
from penstock.schemas.process.start import load_settings
from penstock.worker.llm import LLM

PROGRAM = "penstock bench latency"
PERCENTAGES = (10, 25, 50, 75, 90, 99)


class LatencySettings(OwnSettings):
    """Seconds until a batch of requests of one length is answered, all handed over at once.

    Each setting of a worker is one of the engine's here.
    """

    enable_prefix_caching: bool = Field(False, description="each turn asks the same")
    batch_size: int = Field(8, ge=1)
    input_len: int = Field(32, ge=1, description="tokens")
    output_len: int = Field(128, ge=1, description="tokens")
    num_iters_warmup: int = Field(10, ge=0, description="turns that do not count")
    num_iters: int = Field(30, ge=1, description="turns that count")
    output_json: Path | None = Field(None, description="write the result there")


def main(argv: Sequence[str]) -> int:
    settings = load_settings(LatencySettings, PROGRAM, argv)
    prefix_cache = {"enable_prefix_caching": settings.enable_prefix_caching}
    llm = LLM(settings.model, **settings.given() | prefix_cache)
    requests = random_requests(
        settings.batch_size, settings.input_len, settings.output_len, settings.own_vocab_size
    )
    prompts = [request.prompt for request in requests]
    params = SamplingParams(max_tokens=settings.output_len, ignore_eos=True, seed=0)

    def turn() -> float:
        begin_s = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begin_s

    for _ in range(settings.num_iters_warmup):
        turn()
    with Neighbours() as neighbours:
        latencies = [turn() for _ in range(settings.num_iters)]
    percentiles = dict(
        zip(PERCENTAGES, np.percentile(latencies, PERCENTAGES).tolist(), strict=True)
    )
    result = {
        "avg_latency": float(np.mean(latencies)),
        "std_latency": float(np.std(latencies)),
        "latencies": latencies,
        "percentiles": percentiles,
    }
    print(f"Avg latency: {result['avg_latency']:.4f} seconds")
    print(f"Std latency: {result['std_latency']:.4f} seconds")
    for percentage, latency in percentiles.items():
        print(f"{percentage}% percentile latency: {latency:.4f} seconds")
    print(f"CPU used by others: {neighbours.share:.0%}")
    if settings.output_json is not None:
        settings.output_json.write_text(json.dumps(result, indent=4) + "\n")
    return 0
