"""Jobs on a real cluster: over all of its servers, through slots that move and servers that die."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress

import pytest
import redis.crc

from cluster import NODE_TIMEOUT_MS, Cluster
from faults.reference import answer
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.errors import JobNotFound, NotDurable, Unavailable
from penstock.schemas.job import Job
from penstock.schemas.keys import Lane
from penstock.schemas.params.sampling import SamplingParams
from penstock.schemas.redis.cluster import slot_of
from penstock.schemas.redis.server_check import check_disks
from worker_process import WorkerProcess, text_of

MODEL = "fake"
NUM_LANES = 8
LANES = [Lane(MODEL, number) for number in range(NUM_LANES)]
MAX_TOKENS = 60


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(num_replicas=1) as cluster:
        flags = ["--num-lanes", str(NUM_LANES), "--lease-ttl-ms", "2500", "--fake-step-ms", "10"]
        with WorkerProcess(cluster.url, MODEL, *flags) as worker:
            worker.ready()
            yield cluster


def over(cluster: Cluster, test: Callable[[QueueClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with QueueClient.from_url(cluster.url) as client, asyncio.timeout(100):
            await test(client)

    asyncio.run(main())


def slot(lane: Lane) -> int:
    return slot_of(lane.prefix.encode())


async def put(client: QueueClient, lane: Lane, seed: int) -> str:
    """A job in this lane, and no other, however often it takes."""
    job = job_in(lane, seed)
    while True:
        with suppress(Unavailable):
            await client.submit(job)
            return job.job_id
        await asyncio.sleep(0.1)


def job_in(lane: Lane, seed: int) -> Job:
    params = SamplingParams(seed=seed, max_tokens=MAX_TOKENS, ignore_eos=True)
    return Job(job_id=lane.new_job_id(), model=MODEL, prompts=["x"], params=params)


def expected(seed: int) -> str:
    return answer("x", seed, max_tokens=MAX_TOKENS, ignore_eos=True).text


async def all_end_as_undisturbed(client: QueueClient, jobs: dict[str, int]) -> None:
    texts = await asyncio.gather(*(text_of(client, job_id) for job_id in jobs))
    assert texts == [expected(seed) for seed in jobs.values()]


async def all_lanes_come_to_rest(client: QueueClient) -> None:
    for queue in await client.queues():
        while True:
            with suppress(Unavailable):
                counts = await queue.counts()
                if (counts.num_queued, counts.num_running) == (0, 0):
                    break
            await asyncio.sleep(0.1)


def test_a_key_lies_where_redis_says() -> None:
    keys = ["", "a", "{a}b", "{}a", "a{b}c{d}", "a{b", "penstock:{some model:63}:job:x", "日本"]
    for key in keys:
        assert slot_of(key.encode()) == redis.crc.key_slot(key.encode())


@pytest.mark.slow
def test_lanes_lie_on_every_server_and_their_jobs_end(cluster: Cluster) -> None:
    assert {cluster.owner(slot(lane)) for lane in LANES} == set(cluster.primaries)

    async def test(client: QueueClient) -> None:
        jobs = {await put(client, LANES[seed % NUM_LANES], seed): seed for seed in range(40)}
        await all_end_as_undisturbed(client, jobs)
        for lane in LANES:  # sweeping counts readers where the lane is
            inbox = lane.inbox(client.name)
            owner = cluster.owner(slot(lane))
            assert cluster.ask(owner, "PUBSUB", "NUMSUB", inbox) == [inbox, 1]
        await all_lanes_come_to_rest(client)

    over(cluster, test)


def test_each_lane_waits_for_a_replica_of_its_own_server(cluster: Cluster) -> None:
    """Of these servers one has a replica."""
    has, lacks = (
        next(lane for lane in LANES if cluster.owner(slot(lane)) is each)
        for each in cluster.primaries[:2]
    )

    async def main() -> None:
        async with QueueClient.from_url(cluster.url, durability="replicas") as client:
            job = job_in(has, 1)
            await client.submit(job)
            assert await text_of(client, job.job_id) == expected(1)
            with pytest.raises(NotDurable, match=rf"{cluster.primaries[1].port} has no replica"):
                await client.submit(job_in(lacks, 1))
            faults = await check_disks(client.redis, "replicas")
            named = [str(each.port) for each in cluster.primaries[1:]]
            assert sorted(text.split(" has no replica")[0][-5:] for text in faults) == sorted(named)

    asyncio.run(main())


def test_a_slot_moves_key_by_key_while_its_jobs_run(cluster: Cluster) -> None:
    lane = LANES[0]
    source = cluster.owner(slot(lane))
    target = next(each for each in cluster.primaries[1:] if each is not source)

    async def test(client: QueueClient) -> None:
        jobs = {await put(client, lane, seed): seed for seed in range(20)}
        reading = asyncio.create_task(all_end_as_undisturbed(client, jobs))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(cluster.move, slot(lane), source, target)
        await reading
        late = {await put(client, lane, seed): seed for seed in range(20, 25)}
        await all_end_as_undisturbed(client, late)
        inbox = lane.inbox(client.name)
        while cluster.ask(target, "PUBSUB", "NUMSUB", inbox) != [inbox, 1]:
            await asyncio.sleep(0.1)
        assert cluster.ask(target, "CLUSTER", "COUNTKEYSINSLOT", slot(lane))
        assert not cluster.ask(source, "CLUSTER", "COUNTKEYSINSLOT", slot(lane))
        await all_lanes_come_to_rest(client)

    over(cluster, test)


def test_who_asks_while_a_slot_is_about_to_move_waits_for_a_moment(cluster: Cluster) -> None:
    lane = LANES[1]  # the first one's slot was moved above
    source = cluster.owner(slot(lane))
    target = next(each for each in cluster.primaries if each is not source)

    async def test(client: QueueClient) -> None:
        first, second = await put(client, lane, 1), job_in(lane, 2)
        cluster.ask(source, "CLUSTER", "SETSLOT", slot(lane), "MIGRATING", cluster.name(target))
        submitting = asyncio.create_task(client.submit(second))
        await asyncio.sleep(0.02)
        cluster.ask(source, "CLUSTER", "SETSLOT", slot(lane), "STABLE")
        await submitting
        await all_end_as_undisturbed(client, {first: 1, second.job_id: 2})

    over(cluster, test)


def test_a_server_dies_and_its_replica_goes_on(cluster: Cluster) -> None:
    """The last of this file: the server stays dead."""
    dead = cluster.primaries[0]
    lanes = [lane for lane in LANES[1:] if cluster.owner(slot(lane)) is dead]

    async def test(client: QueueClient) -> None:
        jobs = {await put(client, lanes[seed % len(lanes)], seed): seed for seed in range(20)}
        reading = asyncio.create_task(all_end_as_undisturbed(client, jobs))
        await asyncio.sleep(NODE_TIMEOUT_MS / 4000)
        await asyncio.to_thread(dead.kill)
        try:
            await reading
        except JobNotFound as error:  # replication trails by what a kill can cut off
            raise AssertionError("a job was lost that was accepted half a second ago") from error
        late = {await put(client, lane, seed): seed for seed, lane in enumerate(LANES)}
        await all_end_as_undisturbed(client, late)
        await all_lanes_come_to_rest(client)

    over(cluster, test)
