"""A job kills each engine of a real model that takes it: it ends as dead, and no other by it."""

import asyncio
from pathlib import Path

import pytest

from faults.processes import System
from penstock.gateway.client import Client
from penstock.schemas.event import Result
from penstock.worker.bundled.paths import BUNDLED_MODEL

NUM_JOBS, POISON_AT, POISON_TOKENS = 24, 9, 77
POISONED = Path(__file__).parent / "poisoned"


@pytest.mark.slow
def test_a_poison_job_of_a_real_model_dies_alone() -> None:
    async def asked(client: Client, prompt: str, max_tokens: int) -> str:
        return await client.enqueue(
            prompt, model=BUNDLED_MODEL.name, max_tokens=max_tokens, temperature=0, background=True
        )

    async def end(client: Client, job_id: str) -> Result:
        result = await client.result(job_id)
        assert result is not None
        return result

    async def main(url: str) -> None:
        async with Client.from_url(url) as client, asyncio.timeout(150):
            prompts = [f"Tell me {number}" for number in range(NUM_JOBS)]
            alone = [await end(client, await asked(client, each, 40)) for each in prompts]
            ids = [await asked(client, each, 40) for each in prompts[:POISON_AT]]
            poison = await asked(client, "Tell me all", POISON_TOKENS)
            ids += [await asked(client, each, 40) for each in prompts[POISON_AT:]]
            ends = await asyncio.gather(*(end(client, each) for each in ids))
            assert [each.choices for each in ends] == [each.choices for each in alone]
            assert (await end(client, poison)).state == "dead"

    path = f"{POISONED}:{POISONED.parents[2]}"
    with System(model=BUNDLED_MODEL) as system:
        for _ in range(2):
            system.worker("--max-num-seqs", "8", "--deterministic", PYTHONPATH=path)
        system.ready()
        asyncio.run(main(system.url))
