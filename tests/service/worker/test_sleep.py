"""Workers that sleep, by an order or for want of work, and that forget what they computed."""

import asyncio
import json
import signal

import httpx
import pytest

import api_keys
from penstock.compose.server import Server
from penstock.gateway.commands import workers
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.errors import NoWorker
from penstock.worker.bundled.paths import BUNDLED_DRAFT
from stage import GatewayProcess
from worker_process import WorkerProcess, ask, until

PROMPT = "The river is long, and the town lies on it. " * 4


def states(server: Server, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The state of each worker, by its name."""
    capsys.readouterr()
    assert workers.main(["list", "--json", "--redis-url", server.url]) == 0
    return {each["worker"]: each["state"] for each in json.loads(capsys.readouterr().out)}


def tell(server: Server, order: str, *worker: str) -> int:
    return workers.main([order, *worker, "--redis-url", server.url])


async def answer(client: QueueClient, **more: object) -> tuple[list[int], int]:
    job = await client.enqueue(PROMPT, model=BUNDLED_DRAFT.name, temperature=0, **more)  # type: ignore[arg-type]
    result = await client.result(job)
    assert result.state == "succeeded", result.error
    return list(result.choices[0].token_ids), result.usage.cached_tokens


def test_a_worker_sleeps_and_wakes_as_it_is_told(
    spare: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    with WorkerProcess(spare.url, BUNDLED_DRAFT, "--drain-s", "60") as worker:
        worker.ready()
        [name] = states(spare, capsys)
        first = list[tuple[list[int], int]]()

        async def before(client: QueueClient) -> None:
            first.append(await answer(client))
            long = await client.enqueue(
                PROMPT, model=BUNDLED_DRAFT.name, max_tokens=300, ignore_eos=True, background=True
            )
            while (await client.status(long)).state != "decoding":
                await asyncio.sleep(0.01)
            await asyncio.to_thread(tell, spare, "sleep", name)
            assert (await client.result(long)).state == "succeeded", "what it has it finishes"

        ask(spare.url, before)
        until(lambda: states(spare, capsys)[name] == "asleep", "sleep")
        until(lambda: "engine sleeps" in worker.log.read_text(), "memory back")

        async def meanwhile(client: QueueClient) -> None:
            with pytest.raises(NoWorker):
                await answer(client)
            waiting = await client.enqueue(
                PROMPT, model=BUNDLED_DRAFT.name, temperature=0, background=True
            )
            await asyncio.sleep(0.3)
            assert (await client.status(waiting)).state == "ready"
            await asyncio.to_thread(tell, spare, "wake", name)
            result = await client.result(waiting)
            assert list(result.choices[0].token_ids) == first[0][0]
            assert await answer(client) == (first[0][0], result.usage.prompt_tokens // 16 * 16)

        ask(spare.url, meanwhile)
        until(lambda: states(spare, capsys)[name] == "serving", "it says so")
        assert tell(spare, "sleep", name) == 0
        until(lambda: states(spare, capsys)[name] == "asleep", "sleep again")
        assert tell(spare, "drain", name) == 0
        assert worker.process.wait(60) == 0
        assert "Traceback" not in worker.log.read_text()


def test_one_that_is_falling_asleep_hands_back_at_once_when_it_must(
    spare: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a second SIGTERM, though it had a minute to finish what it has."""
    with WorkerProcess(spare.url, "fake", "--fake-step-ms", "50", "--drain-s", "60") as worker:
        worker.ready()
        [name] = states(spare, capsys)

        async def asks(client: QueueClient) -> None:
            job = await client.enqueue("hi", model="fake", max_tokens=4000, background=True)
            while (await client.status(job)).state != "decoding":
                await asyncio.sleep(0.01)
            assert await asyncio.to_thread(tell, spare, "sleep", name) == 0
            while "told to sleep" not in worker.log.read_text():
                await asyncio.sleep(0.01)
            worker.process.send_signal(signal.SIGTERM)
            while "began to drain" not in worker.log.read_text():
                await asyncio.sleep(0.01)
            worker.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(worker.process.wait, 60) == 0
            assert (await client.status(job)).state == "ready"

        ask(spare.url, asks)
        assert "worker was drained" in worker.log.read_text()


def test_one_that_loses_its_lease_sleeps_on(
    spare: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    with WorkerProcess(spare.url, "fake") as worker:
        worker.ready()
        [first] = states(spare, capsys)
        assert tell(spare, "sleep", first) == 0
        until(lambda: states(spare, capsys)[first] == "asleep", "sleep")
        worker.signal_all(signal.SIGSTOP)
        until(lambda: states(spare, capsys).get(first) != "asleep", "the lease lapses")
        worker.signal_all(signal.SIGCONT)

        def others() -> dict[str, str]:
            found = states(spare, capsys)
            return {name: state for name, state in found.items() if name != first}

        until(lambda: [*others().values()] == ["asleep"], "it sleeps under its next name")
        [name] = others()

        async def asks(client: QueueClient) -> None:
            job = await client.enqueue("hi", model="fake", background=True)
            await asyncio.sleep(0.5)
            assert (await client.status(job)).state == "ready"
            assert await asyncio.to_thread(tell, spare, "wake", name) == 0
            assert (await client.result(job)).state == "succeeded"

        ask(spare.url, asks)


def test_one_without_work_sleeps_until_a_job_comes(
    spare: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    with WorkerProcess(spare.url, BUNDLED_DRAFT, "--sleep-idle-s", "0.2") as worker:
        worker.ready()

        async def asks(client: QueueClient) -> None:
            answers = []
            for number in range(3):
                while worker.log.read_text().count("engine sleeps") <= number:
                    await asyncio.sleep(0.02)
                answers.append(await answer(client))
            assert answers == [(answers[0][0], 0)] * 3

        ask(spare.url, asks)
        until(lambda: [*states(spare, capsys).values()] == ["asleep"], "it says so")


def test_over_http_under_a_key_of_operators(
    spare: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        WorkerProcess(spare.url, BUNDLED_DRAFT) as worker,
        GatewayProcess(spare.url) as gateway,
        httpx.Client(base_url=gateway.url, timeout=60) as http,
    ):
        worker.ready()
        [name] = states(spare, capsys)
        found = []

        async def asks(client: QueueClient) -> None:
            for number in range(3):
                found.append((await answer(client))[1])
                if number == 1:
                    told = await asyncio.to_thread(http.post, "/reset_prefix_cache")
                    assert told.json() == {"workers": [name]}
                    await asyncio.sleep(1)  # it learns of it at its next beat

        ask(spare.url, asks)
        assert found[0] == found[2] == 0 < found[1]
        admin, other = (
            api_keys.issue(spare.url, scopes=[scope]) for scope in ("admin", "inference")
        )
        path = f"/v1/admin/workers/{name}/sleep"
        assert http.post(path, headers=api_keys.bearer(other)).status_code == 403
        refused = http.post("/reset_prefix_cache", headers=api_keys.bearer(other))
        assert refused.status_code == 403
        told = http.post(path, headers=api_keys.bearer(admin))
        assert told.json() == {"worker": name, "told": "sleep"}
        until(lambda: states(spare, capsys)[name] == "asleep", "sleep")
        unknown = http.post("/v1/admin/workers/none/wake", headers=api_keys.bearer(admin))
        assert unknown.json()["error"]["code"] == "worker_not_found"
