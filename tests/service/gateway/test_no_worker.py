"""Jobs that are put in before any worker is there: they wait, are counted, and run once."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import redis
from test_gateway_service import samples

from faults.invariants import check_ledger, check_leftovers, check_logs, ledger
from penstock.compose.server import Server
from penstock.schemas.keys import Lane
from penstock.schemas.metrics import names
from penstock.schemas.model import ModelCard
from penstock.schemas.queue.registry import Registry
from penstock.schemas.redis.connection import connect
from stage import GatewayProcess, eventually
from worker_process import WorkerProcess

MODEL, LANE, NUM_JOBS = "fake", Lane("fake"), 100
HERE, QUEUE = ("0", MODEL), ("queue:0", MODEL)  # label values of a lane's gauges, and of vLLM's


async def announce(url: str) -> None:
    """The model was served once; so the gateway knows it."""
    async with connect(url) as link:
        await Registry(link).register(ModelCard(name=MODEL))


@pytest.mark.slow
def test_a_hundred_jobs_wait_for_the_first_worker_and_are_counted_until_they_ended() -> None:
    with (
        Server() as server,
        GatewayProcess(server.url) as gateway,
        httpx.Client(base_url=gateway.url, timeout=60) as http,
        redis.Redis.from_url(server.url) as store,
    ):
        asyncio.run(announce(server.url))
        paid = ledger(store, LANE)

        def submit(number: int) -> str:
            body = {"model": MODEL, "prompt": [number, number], "max_tokens": 10}
            answer = http.post("/v1/jobs", json=body)
            assert answer.status_code == 202, answer.text
            job_id: str = answer.json()["id"]
            return job_id

        def gauges() -> tuple[float, float]:
            """Pending and in flight; all that is neither has ended."""
            least = num_ended(store)
            shown = samples(http)
            pending, in_flight = (
                shown[name, HERE] for name in (names.JOBS_QUEUED, names.JOBS_RUNNING)
            )
            assert least <= NUM_JOBS - pending - in_flight <= num_ended(store)
            assert shown[names.REQUESTS_WAITING, QUEUE] == pending
            assert (shown[names.NUM_QUEUED_TOKENS, HERE] > 0) == (pending > 0)
            return pending, in_flight

        with ThreadPoolExecutor(8) as pool:
            job_ids = list(pool.map(submit, range(NUM_JOBS)))
        assert gauges() == (NUM_JOBS, 0)
        shown = samples(http)
        assert shown[names.WORKERS_ALIVE, (MODEL,)] == shown[names.LANE_WORKERS, HERE] == 0
        assert shown[names.REQUESTS_WAITING_BY_REASON, (*QUEUE, "no_worker")] == NUM_JOBS
        assert shown[names.NUM_QUEUED_TOKENS, HERE] == 2 * NUM_JOBS
        for job_id in job_ids[:: NUM_JOBS - 1]:
            status = http.get(f"/v1/jobs/{job_id}").json()
            assert (status["reason"], status["eta_ms"]) == ("no_worker", None)
        flags = ("--max-num-seqs", "8", "--fake-step-ms", "20")
        with WorkerProcess(server.url, MODEL, *flags):
            eventually(lambda: 0 < gauges()[1] <= 8)
            eventually(lambda: gauges() == (0, 0))
            assert num_ended(store) == NUM_JOBS
        assert {store.hget(LANE.job(job_id), "epoch") for job_id in job_ids} == {b"1"}
        check_logs(store, LANE, job_ids)
        check_ledger(store, LANE, job_ids, paid)
        check_leftovers(store, LANE)


def test_a_request_that_is_refused_wants_a_worker_until_one_comes() -> None:
    with (
        Server() as server,
        GatewayProcess(server.url) as gateway,
        httpx.Client(base_url=gateway.url, timeout=60) as http,
        redis.Redis.from_url(server.url) as store,
    ):
        asyncio.run(announce(server.url))
        assert samples(http)[names.WORKERS_WANTED, HERE] == 0
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 4}
        assert http.post("/v1/completions", json=body | {"model": "invented"}).status_code == 404
        assert http.post("/v1/jobs", json=body).status_code == 202  # it waits, and counts itself
        assert samples(http)[names.WORKERS_WANTED, HERE] == 0
        refused = http.post("/v1/completions", json=body)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "no_worker"
        assert samples(http)[names.WORKERS_WANTED, HERE] == 1
        assert 0 < store.pttl(f"{LANE.prefix}wanted") <= 120_000
        with WorkerProcess(server.url, MODEL).ready():
            assert samples(http)[names.WORKERS_WANTED, HERE] == 0
            assert http.post("/v1/completions", json=body).status_code == 200
        assert not store.exists(f"{LANE.prefix}wanted")


def num_ended(store: redis.Redis) -> int:
    return int(store.hget(f"{LANE.prefix}counts", "ended") or 0)
