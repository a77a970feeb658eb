"""`penstock bench offline`: throughput through `LLM`; options and result keys are vLLM's.

vLLM calls it `vllm bench throughput`.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from penstock.loadtest.engines.own import OwnSettings
from penstock.loadtest.engines.timed_llm import TimedLLM
from penstock.loadtest.machine.usage import Neighbours
from penstock.loadtest.requests.dataset import DatasetSettings
from penstock.schemas.process.start import load_settings

PROGRAM = "penstock bench offline"


class OfflineSettings(OwnSettings, DatasetSettings):
    """Requests a second and tokens a second through `LLM`, all requests handed over at once.

    Each setting of a worker is one of the engine's here. Answers go on to their last token,
    whatever the model says.
    """

    temperature: float = Field(0.0, ge=0, le=2, description="0: greedily")
    output_json: Path | None = Field(None, description="write the result there")


def main(argv: Sequence[str]) -> int:
    settings = load_settings(OfflineSettings, PROGRAM, argv)
    requests = settings.requests(settings.own_vocab_size)
    llm = TimedLLM(settings.model, **settings.given())
    llm.answer(requests[:1], settings.temperature)  # set-up on first use is not measured
    with Neighbours() as neighbours:
        measurement = llm.answer(requests, settings.temperature)
    num_tokens = measurement.num_prompt_tokens + measurement.num_tokens
    result = {
        "elapsed_time": measurement.wall_s,
        "num_requests": len(measurement.timelines),
        "total_num_tokens": num_tokens,
        "requests_per_second": len(measurement.timelines) / measurement.wall_s,
        "tokens_per_second": num_tokens / measurement.wall_s,
        "output_tokens_per_second": measurement.tokens_per_s,
    }
    print(
        f"Throughput: {result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} total tokens/s, "
        f"{result['output_tokens_per_second']:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {measurement.num_prompt_tokens}")
    print(f"Total num output tokens:  {measurement.num_tokens}")
    print(f"CPU used by others:       {neighbours.share:.0%}")
    if settings.output_json is not None:
        settings.output_json.write_text(json.dumps(result, indent=4) + "\n")
    return 0
