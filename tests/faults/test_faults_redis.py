"""Redis dies, freezes, forgets, and runs out of memory and disk, in the middle of a load."""

import asyncio
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis

from faults.invariants import check_ledger, check_leftovers, ledger
from faults.processes import System, until
from faults.run import asks, run
from penstock.compose.server import Server
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.errors import JobNotFound

WORKER = ("--fake-step-ms", "10", "--max-num-seqs", "16")


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    """Everything outlives what these tests do to Redis, so one serves them all."""
    with System() as system:
        for _ in range(2):
            system.worker(*WORKER)
        system.gateway("--ping-s", "1")
        yield system.ready()


@pytest.mark.slow
def test_killed_and_started_again_it_has_everything(system):
    run(system, asks(16, max_tokens=120), lambda: system.restart_server(0.3), at_tokens=200)


@pytest.mark.slow
def test_where_every_write_waits_for_the_disk_it_has_everything_too():
    with System(appendfsync="always", durability="fsync") as system:
        system.worker(*WORKER)
        system.gateway("--ping-s", "1")
        system.ready()
        run(system, asks(16, max_tokens=120), lambda: system.restart_server(0.3), at_tokens=200)
        with redis.Redis.from_url(system.url, decode_responses=True) as client:
            assert client.config_get("appendfsync") == {"appendfsync": "always"}
            assert int(client.info("commandstats")["cmdstat_waitaof"]["calls"]) > 0


def test_killed_it_still_knows_what_an_idempotency_key_stands_for(system):
    """Of a job that ended before, one that ran meanwhile, and one that waits for its time."""
    url, lane = f"{system.gateway_urls()[0]}/v1/jobs", system.lane
    kinds: dict[str, dict[str, object]] = {
        "ended": {"max_tokens": 5},
        "runs": {"max_tokens": 300, "ignore_eos": True},
        "waits": {"max_tokens": 5, "delay_ms": 600_000},
    }

    def submit(kind: str, **other: object) -> httpx.Response:
        body = {"model": "fake", "prompt": kind, **kinds[kind], **other}
        return httpx.post(url, json=body, headers={"idempotency-key": kind}, timeout=60)

    def shown(job_id: str) -> dict[str, object]:
        found: dict[str, object] = httpx.get(f"{url}/{job_id}", timeout=60).json()
        return found

    with redis.Redis.from_url(system.url) as store, system.telling():
        paid = ledger(store, lane)
        ids = {kind: submit(kind).json()["id"] for kind in kinds}
        until(lambda: shown(ids["ended"])["state"] == "succeeded", "the first to end")
        until(lambda: shown(ids["runs"])["num_tokens"] != 0, "the second to run")
        before = shown(ids["ended"])
        system.restart_server()
        refused = [submit(kind, prompt="another").status_code for kind in kinds]
        assert refused == [422] * 3
        assert shown(ids["ended"]) == before
        assert {kind: submit(kind).json()["id"] for kind in kinds} == ids
        assert shown(ids["waits"])["reason"] == "delayed"
        until(lambda: shown(ids["runs"])["state"] == "succeeded", "the second to end")
        assert httpx.post(f"{url}/{ids['waits']}/cancel", timeout=60).is_success
        check_ledger(store, lane, ids.values(), paid)
        check_leftovers(store, lane)


@pytest.mark.slow
@pytest.mark.parametrize("lasts_s", [0.7, 3.0])
def test_frozen_it_is_waited_for(system, lasts_s):
    """Shorter than a lease, and twice as long: then all workers come back under new names."""
    run(system, asks(16, max_tokens=120), lambda: system.freeze_server(lasts_s), at_tokens=200)


def test_its_script_cache_is_flushed_all_the_time(system):
    def act() -> None:
        with redis.Redis.from_url(system.url) as client:
            for _ in range(50):
                client.script_flush()
                time.sleep(0.01)

    run(system, asks(16, max_tokens=100), act)


@pytest.mark.slow
def test_restarted_empty_it_is_found_empty_and_serves_again(tmp_path):
    """What it held is lost, and said to be: unknown jobs, and no trace of them. New ones run."""
    server = Server(folder=tmp_path / "redis")
    with System(server) as system:
        system.worker(*WORKER)
        system.gateway("--ping-s", "1")
        system.ready()

        async def lose() -> None:
            async with QueueClient.from_url(system.url) as client:
                lost = [
                    await client.enqueue(f"lost {number}", max_tokens=2000, ignore_eos=True)
                    for number in range(4)
                ]
                events = client.stream(lost[0])
                await anext(events)
                server.kill()
                for path in sorted((tmp_path / "redis").rglob("*"), reverse=True):
                    path.unlink() if path.is_file() else path.rmdir()
                system.start_server()
                with pytest.raises(JobNotFound):
                    async for _ in events:
                        pass
                for job_id in lost:
                    with pytest.raises(JobNotFound):
                        await client.status(job_id)

        asyncio.run(lose())
        (gateway,) = system.gateway_urls()
        until(lambda: bool(httpx.get(f"{gateway}/v1/models").json()["data"]), "a worker in Redis")
        run(system, asks(6, max_tokens=30))


def test_over_maxmemory_it_refuses_new_jobs_and_ends_the_old(system):
    """Each in a way that the caller may try again; nothing accepted is dropped."""
    refusals: list[int] = []

    def act() -> None:
        with redis.Redis.from_url(system.url) as client:
            client.config_set("maxmemory", 1)
            try:
                for number in range(5):
                    body = {"model": "fake", "prompt": f"refused {number}"}
                    reply = httpx.post(f"{system.gateway_urls()[0]}/v1/jobs", json=body, timeout=30)
                    refusals.append(reply.status_code)
                    assert int(reply.headers["retry-after-ms"]) > 0
            finally:
                client.config_set("maxmemory", 0)

    run(system, asks(12, max_tokens=150), act)
    assert refusals == [429] * 5


class SmallDisk(Server):
    """Files may grow so far and no further; what goes beyond is refused, as on a full disk."""

    def _command(self) -> list[str]:
        return ["sh", "-c", 'trap "" XFSZ; exec "$@"', "sh", *super()._command()]

    def limit(self, most_bytes: int) -> None:
        assert self.pid is not None
        hard = resource.prlimit(self.pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (most_bytes, hard))

    def written(self) -> int:
        return max(path.stat().st_size for path in self.folder.rglob("*.aof"))


@pytest.mark.slow
def test_with_its_disk_full_nothing_is_lost_and_all_goes_on_once_there_is_room(tmp_path: Path):
    server = SmallDisk(folder=tmp_path / "redis")
    with System(server) as system:
        system.worker(*WORKER)
        system.gateway("--ping-s", "1")
        system.ready()

        def refuses() -> bool:
            with redis.Redis.from_url(system.url) as client:
                try:
                    client.set("probe", 1)
                    client.delete("probe")
                    return False
                except redis.ResponseError as error:
                    return "MISCONF" in str(error)

        def act() -> None:
            server.limit(server.written() + 1000)
            until(refuses, "writes to be refused")
            body = {"model": "fake", "prompt": "no room"}
            reply = httpx.post(f"{system.gateway_urls()[0]}/v1/jobs", json=body, timeout=60)
            assert reply.status_code in (429, 503), reply.text
            server.limit(resource.RLIM_INFINITY)
            until(lambda: not refuses(), "writes to be taken")

        run(system, asks(12, max_tokens=150), act)


@pytest.mark.slow
def test_of_what_a_cut_took_back_nobody_reads_a_letter_twice(system):
    """A job that it forgot is unknown, and a reader goes on or is told; all others end right."""
    asked = asks(24, max_tokens=150)
    told = run(system, asked, lambda: system.lose_tail(40_000), at_tokens=400, may_lose=True)
    assert any(each.end for each in told)


@pytest.mark.slow
def test_of_what_a_replica_had_not_heard_nobody_reads_a_letter_twice(system):
    asked = asks(24, max_tokens=150)
    told = run(system, asked, lambda: system.promote(0.3), at_tokens=400, may_lose=True)
    assert any(each.end for each in told)
