"""Conversations on several workers: what each has computed is found by their next turns."""

import asyncio
import random

import pytest

from penstock.compose.server import Server
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.event import Usage
from penstock.worker.bundled.paths import BUNDLED_MODEL
from worker_process import WorkerProcess, ask

CONVERSATIONS, TURNS = 12, 4
QUESTION = "Please tell me all that you know of the town and its river. " * 6


async def cached(client: QueueClient, first: str, are_apart: bool) -> tuple[int, int]:
    """The tokens of all prompts after the first, and how many of them were found.

    No conversation goes on before all have their answer: a worker that has just answered one would
    be the first with room for its next turn.
    """
    said = [[{"role": "user", "content": f"{first}{n}: {QUESTION}"}] for n in range(CONVERSATIONS)]
    found = total = 0

    async def ask_next(number: int, turn: int) -> Usage:
        key = f"{first}{number} {turn}" if are_apart else None
        job = await client.enqueue(messages=said[number], prompt_cache_key=key, max_tokens=8)
        result = await client.result(job)
        assert result.state == "succeeded"
        said[number] += [
            {"role": "assistant", "content": result.choices[0].text},
            {"role": "user", "content": f"And in the year {turn}? {QUESTION}"},
        ]
        return result.usage

    for turn in range(TURNS):
        order = random.Random(turn).sample(range(CONVERSATIONS), CONVERSATIONS)
        usages = await asyncio.gather(*(ask_next(number, turn) for number in order))
        if turn:
            found += sum(usage.cached_tokens for usage in usages)
            total += sum(usage.prompt_tokens for usage in usages)
    return total, found


@pytest.mark.slow
def test_a_conversation_finds_its_beginning_on_one_of_three_workers() -> None:
    shares = dict[bool, float]()

    async def measure(client: QueueClient) -> None:
        for are_apart in (True, False):
            total, found = await cached(client, f"{are_apart}", are_apart)
            shares[are_apart] = found / total

    model = BUNDLED_MODEL
    with (
        Server() as server,
        WorkerProcess(server.url, model, "--max-num-seqs", "4") as one,
        WorkerProcess(server.url, model, "--max-num-seqs", "4") as two,
        WorkerProcess(server.url, model, "--max-num-seqs", "4") as three,
    ):
        for worker in (one, two, three):
            worker.ready()
        ask(server.url, measure)
    print(f"found: {shares[False]:.2f} of the tokens, {shares[True]:.2f} where nothing is known")
    most = sum(range(TURNS)) / sum(range(2, TURNS + 1))  # of each prompt all but its last question
    assert shares[False] > 0.8 * most and shares[False] > 1.25 * shares[True]
