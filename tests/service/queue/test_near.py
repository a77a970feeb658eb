"""Who gets a job whose prompt begins as one that a worker has in its cache."""

from collections import Counter

import pytest

from penstock.schemas.account import Account, Quota
from penstock.schemas.delivery import Entry
from penstock.schemas.job import Job
from penstock.schemas.model import WorkerCard
from penstock.schemas.queue.worker_queue import WorkerQueue
from plain import plain
from scripted import LANE, a_job, finish, on_a_lane

STEP_US = 10_000
ROOM = 8


def of(conversation: str, **fields: object) -> Job:
    return a_job(prompt_cache_key=conversation, background=True, **fields)


class Taker:
    """A worker that says what it holds, and reads for as much as it has room."""

    def __init__(self, queue: WorkerQueue, name: str, room: int = ROOM) -> None:
        self.queue, self.name, self.room = queue, name, room
        self.taken: list[Job] = []
        self._held: dict[str, tuple[Job, object]] = {}

    async def register(self) -> "Taker":
        await self.queue.register(self.name, WorkerCard(max_num_seqs=self.room))
        await self.read()
        return self

    async def read(self, most: int | None = None) -> list[Job]:
        """Take and start what there is."""
        room = self.room - len(self._held)
        count = room if most is None else min(room, most)
        entries: list[Entry] = await self.queue.read(self.name, count, step_us=STEP_US) or []
        found = []
        for entry in entries:
            started = await self.queue.start(self.name, entry)
            assert started is not None
            self._held[started.job.job_id] = (started.job, started)
            found.append(started.job)
        self.taken += found
        return found

    async def finish(self) -> None:
        for _, started in self._held.values():
            assert await finish(self.queue, started, [], self.name)  # type: ignore[arg-type]
        self._held.clear()


async def two(queue: WorkerQueue, room: int = ROOM) -> tuple[Taker, Taker]:
    """Two workers with room, of which the first has had conversation `a`."""
    await queue.unregister("w")
    first, second = await Taker(queue, "w1", room).register(), Taker(queue, "w2", room)
    await queue.enqueue(of("a"), None)
    assert await first.read()
    await first.finish()
    assert not await first.read()
    await second.register()
    return first, second


@on_a_lane
async def test_the_next_turn_goes_to_the_worker_that_had_the_last(queue: WorkerQueue) -> None:
    first, second = await two(queue)
    for _ in range(4):
        job = of("a")
        await queue.enqueue(job, None)
        assert await second.read() == []
        assert [each.job_id for each in await first.read()] == [job.job_id]
    await queue.enqueue(of("b"), None)  # a new one, for whoever comes
    assert len(await second.read()) == 1


@on_a_lane
async def test_it_is_left_for_a_moment_only(queue: WorkerQueue) -> None:
    _, second = await two(queue)
    job = of("a")
    await queue.enqueue(job, None)
    assert await second.read() == []
    await plain(queue.connection.redis).hincrby(
        f"{LANE.prefix}job:{job.job_id}", "created_ms", -100
    )
    assert len(await second.read()) == 1
    await queue.enqueue(of("a"), None)
    assert len(await second.read()) == 1, "it has the conversation now"


@on_a_lane
async def test_no_job_passes_over_one_of_a_lower_number(queue: WorkerQueue) -> None:
    first, _ = await two(queue)
    for conversation, number in (("b", 1), ("a", 2)):
        await queue.enqueue(of(conversation, priority=number), None)
    await plain(queue.connection.redis).set(f"{LANE.prefix}near:{of('b').affinity}", "w2")
    assert [job.prompt_cache_key for job in await first.read(1)] != ["a"]


@on_a_lane
async def test_who_leaves_it_looks_again_soon(queue: WorkerQueue) -> None:
    _, second = await two(queue)
    await queue.enqueue(of("a"), None)
    while not await second.read():
        assert second.queue._idle is not None and second.queue._idle[1] == 100, "milliseconds"
        await second.queue.news(60_000)


@pytest.mark.parametrize("why", ["full", "gone", "drains", "busy", "silent"])
def test_who_cannot_take_it_is_not_waited_for(redis_url: str, why: str) -> None:
    @on_a_lane
    async def run(queue: WorkerQueue) -> None:
        first, second = await two(queue)
        if why == "full":
            first.room = 0
            await first.read()
        elif why == "gone":
            await queue.unregister("w1")
        elif why == "drains":
            await queue.register("w1", WorkerCard(draining=True))
        elif why == "busy":
            for _ in range(5):
                await queue.enqueue(of("a"), None)
                await first.read()
            assert len(first.taken) == 6
        else:
            redis = plain(queue.connection.redis)
            await redis.hset(LANE.prefix + "worker:w1", "stated_ms", 1)
        await queue.enqueue(of("a"), None)
        assert len(await second.read()) == 1

    run(redis_url)


@on_a_lane
async def test_it_is_taken_beyond_the_share_of_who_has_more(queue: WorkerQueue) -> None:
    first, second = await two(queue)
    await queue.enqueue(of("x"), None)
    await queue.enqueue(of("y"), None)
    assert len(await first.read(2)) == 1, "it leaves the other one its share"
    await second.read()
    await second.finish()
    assert not await second.read()
    job = of("a")
    await queue.enqueue(job, None)
    assert [each.job_id for each in await first.read()] == [job.job_id]
    await queue.enqueue(a_job(background=True), None)
    assert await first.read() == [], "what begins otherwise is the other's"


@on_a_lane
async def test_full_workers_choose_their_own_and_nobody_waits_for_ever(queue: WorkerQueue) -> None:
    """Of a long backlog each takes what it has the beginning of; the rest keeps its order."""
    first, second = await two(queue, 1)
    await queue.enqueue(of("b"), None)
    assert await second.read()
    await second.finish()
    order = [("b", of("b")), *(("a", of("a")) for _ in range(40)), ("c", of("c"))]
    for _, job in order:
        await queue.enqueue(job, None)
    taken = []
    for _ in range(17):
        taken += await first.read()
        await first.finish()
    names = {job.job_id: name for name, job in order}
    assert [names[job.job_id] for job in taken[:16]] == ["a"] * 16
    assert names[taken[16].job_id] == "b", "it was passed over often enough"
    assert [job.job_id for job in taken[:16]] == [job.job_id for _, job in order[1:17]]


@on_a_lane
async def test_a_job_with_a_deadline_is_passed_over_by_none(queue: WorkerQueue) -> None:
    first, second = await two(queue)
    await queue.enqueue(of("b"), None)
    assert await second.read()
    await second.finish()
    second.room = 0
    await second.read()
    urgent = of("b", timeout_ms=60_000)
    await queue.enqueue(urgent, None)
    await queue.enqueue(of("a"), None)
    assert [job.job_id for job in await first.read(1)] == [urgent.job_id]


@on_a_lane
async def test_one_that_waits_for_a_rate_passes_over_none(queue: WorkerQueue) -> None:
    """It would hold up its account, whose first job may begin."""
    first, second = await two(queue, 1)
    await queue.enqueue(of("b"), None)
    assert await second.read()
    await second.finish()
    account = Account(name="acme", limits=Quota(tokens_per_minute=100))
    begins = of("b")
    await queue.enqueue(begins, None, account=account)
    large = of("a", over_limit="wait", params={"max_tokens": 1000})
    await queue.enqueue(large, None, account=account)
    assert [job.job_id for job in await first.read()] == [begins.job_id]


@on_a_lane
async def test_conversations_stay_where_they_are_while_all_slots_are_full(
    queue: WorkerQueue,
) -> None:
    """Thirty conversations of six turns on three workers of four slots, and far too few slots."""
    await queue.unregister("w")
    takers = [await Taker(queue, f"w{number}", 4).register() for number in range(3)]
    turns, last = Counter[str](), dict[str, str]()
    moves = had = 0
    for number in range(30):
        await queue.enqueue(of(f"{number}"), None)
    while turns.total() < 180:
        for taker in takers:
            for job in await taker.read():
                key = f"{job.prompt_cache_key}"
                turns[key] += 1
                if key in last:
                    had += 1
                    moves += last[key] != taker.name
                last[key] = taker.name
        for taker in takers:
            ended = [job for job, _ in taker._held.values()]
            await taker.finish()
            for job in ended:
                if turns[f"{job.prompt_cache_key}"] < 6:
                    await queue.enqueue(of(f"{job.prompt_cache_key}"), None)
    assert had == 150 and moves < 50, (moves, had)


def test_turns_of_a_chat_share_their_first_question_and_nothing_with_other_tenants() -> None:
    def chat(*said: object, **fields: object) -> Job:
        roles = ("user", "assistant") * len(said)
        messages = [
            {"role": role, "content": text} for role, text in zip(roles, said, strict=False)
        ]
        return a_job(prompts=[], chat={"messages": messages}, **fields)

    first = chat("hi").affinity
    assert first is not None
    assert chat("hi", "yes?", "go on").affinity == first
    assert chat([{"type": "text", "text": "hi"}], "yes?", "go on").affinity == first
    others = [chat("ho"), chat("hi", tenant="b"), chat("hi", cache_salt="s")]
    others += [of("hi"), of("hi", tenant="b")]
    assert len({first, *(job.affinity for job in others)}) == 6
    assert a_job().affinity is None
