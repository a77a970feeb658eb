"""Each program of docs/examples runs against real processes and prints what it got."""

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from paths import ROOT
from penstock.compose.server import Server
from penstock.gateway.queue_client import QueueClient
from penstock.gateway.webhooks.webhooks import Webhooks
from penstock.schemas.keys import Lane
from penstock.schemas.model import ModelCard, WorkerCard
from penstock.schemas.queue.registry import Registry
from penstock.schemas.queue.worker_queue import WorkerQueue
from penstock.schemas.redis.connection import connect
from stage import MODEL, Actor, GatewayProcess, HousekeepingProcess

EXAMPLES = ROOT / "docs" / "examples"
TEXT = "Hello world"  # what an Actor answers


def command(name: str, *words: str) -> list[str]:
    return [sys.executable, str(EXAMPLES / name), *words]


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)} | more


def printed(name: str, *words: str) -> str:
    """What an example says until it ends by itself."""
    ran = subprocess.run(
        command(name, *words), env=environment(), capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


async def secret_of(redis_url: str) -> str:
    async with QueueClient.from_url(redis_url) as client:
        return await Webhooks(client.redis).secret("default")


@dataclass
class Stack:
    redis_url: str
    gateway_url: str
    receiver_url: str
    receiver: subprocess.Popen[str]

    def next_line(self) -> str:
        assert self.receiver.stdout is not None
        return self.receiver.stdout.readline()


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Gateway, housekeeping and a worker, with the example of a receiver that they may call."""
    with Server() as server:
        receiver = subprocess.Popen(
            command("webhook_receiver.py", "0"),
            env=environment(WEBHOOK_SECRET=asyncio.run(secret_of(server.url))),
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert receiver.stdout is not None
            listens = re.fullmatch(r"listens on (http://\S+)\n", receiver.stdout.readline())
            assert listens is not None
            allowed = ("--webhook-private", listens[1])
            with (
                Actor(server.url),
                HousekeepingProcess(server.url, *allowed),
                GatewayProcess(server.url, *allowed) as gateway,
            ):
                yield Stack(server.url, gateway.url, listens[1], receiver)
        finally:
            receiver.kill()
            receiver.wait()


async def register_embedder(url: str, is_there: bool) -> None:
    """A worker of another model, whose name is the first of all, comes or goes."""
    async with connect(url) as link:
        registry, queue = Registry(link), WorkerQueue(link, Lane("AAA"), 600_000)
        if is_there:
            await queue.register("e", WorkerCard())
            await registry.register(ModelCard(name="AAA", features={"task": "embed"}))
        else:
            await registry.forget("AAA")
            await queue.unregister("e")


def test_the_openai_client_streams_a_chat(stack: Stack) -> None:
    asyncio.run(register_embedder(stack.redis_url, is_there=True))
    said = printed("openai_client.py", f"{stack.gateway_url}/v1")
    asyncio.run(register_embedder(stack.redis_url, is_there=False))
    assert said == f"{TEXT}\n{MODEL} made 2 tokens\n"


def test_the_sdk_follows_a_job_and_again_from_the_middle(stack: Stack) -> None:
    first, second, third = printed("sdk.py", stack.redis_url).splitlines()
    assert first == TEXT
    assert re.match(r"job_\S+ ended as succeeded: .*completion_tokens=2", second)
    assert third == "after the first token:  world"


def test_the_sdk_without_a_loop_waits_for_a_result(stack: Stack) -> None:
    said = printed("sync_sdk.py", stack.redis_url)
    assert re.fullmatch(rf"job_\S+ ended as succeeded: {TEXT}\n", said)


def test_plain_redis_puts_a_job_in_and_reads_its_events(stack: Stack) -> None:
    said = printed("plain_redis.py", stack.redis_url, MODEL)
    assert re.fullmatch(rf"job_\S+: accepted\n{TEXT}\nended: done\n", said)
    refused = printed("plain_redis.py", stack.redis_url, "nobody/serves-it")
    assert re.fullmatch(r"job_\S+: no_worker\n", refused)


def test_the_receiver_takes_what_is_signed_and_refuses_what_is_not(stack: Stack) -> None:
    now = f"{time.time():.0f}"
    forged = {"webhook-id": "wh_1", "webhook-timestamp": now, "webhook-signature": "v1,none"}
    assert httpx.post(stack.receiver_url, headers=forged, content=b"{}").status_code == 401
    job = {"model": MODEL, "prompt": "hi", "webhook": f"{stack.receiver_url}/hook"}
    answer = httpx.post(f"{stack.gateway_url}/v1/jobs", json=job, timeout=60)
    assert answer.status_code == 202, answer.text
    assert stack.next_line() == f"job.succeeded {answer.json()['id']} succeeded\n"


@pytest.mark.slow
def test_a_model_answers_in_process() -> None:
    said = printed("in_process.py")
    assert said.startswith("Once upon a time ->") and "\nHow to bake a cake: ->" in said
    assert said.endswith("\nThe capital of Norway is Oslo.\n")
