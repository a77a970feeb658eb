"""What a worker knows of its engine's room, and that each of its lanes gets its part of it."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice

import pytest

from penstock.gateway.queue_client import QueueClient
from penstock.schemas.keys import Lane
from penstock.schemas.model import ModelCard, WorkerCard
from penstock.schemas.params.sampling import SamplingParams, StructuredOutputs
from penstock.schemas.queue.registry import Registry
from penstock.schemas.queue.worker_queue import WorkerQueue
from penstock.schemas.redis.connection import connect
from penstock.worker.bundled.paths import BUNDLED_DRAFT
from penstock.worker.engine.any_engine import AnyEngine
from penstock.worker.engine.fake import FakeEngine
from penstock.worker.engine.io.limits import EngineLimits
from penstock.worker.engine.io.messages import AddSequence, CancelSequence, Load, Output
from penstock.worker.engine_loader import load_engine
from penstock.worker.engine_process import EngineLoop
from penstock.worker.jobs.capacity import Capacity
from penstock.worker.jobs.service import Service
from penstock.worker.process.ipc import (
    BeginSession,
    BlockingWire,
    Channel,
    EngineCommand,
    EngineEvent,
    Prepared,
    Pulse,
    Renewed,
    Step,
    WorkerCommand,
    WorkerEvent,
)
from penstock.worker.process.sampling_defaults import Generation
from penstock.worker.process.settings import WorkerSettings
from penstock.worker.text.model_tokenizer import load_tokenizer
from stage import PATIENCE_S
from worker_process import until

LIMITS = EngineLimits(
    100, 256, num_blocks=9000, block_size=16, max_num_seqs=148, eos_token_ids=frozenset()
)


async def counts(capacity: Capacity, readers: list[str]) -> list[int]:
    """What each of the readers may read now, while those before it read; 0: it waits."""
    asked = []
    for reader in readers:
        try:
            async with asyncio.timeout(0.05):
                asked.append((await capacity.wait(reader)).count)
        except TimeoutError:
            asked.append(0)
    return asked


def test_lanes_that_read_at_once_share_the_room_alike():
    assert asyncio.run(counts(Capacity(LIMITS, 3), ["a", "b", "c"])) == [49, 49, 49]


def test_the_first_lane_to_read_leaves_room_for_the_others_whatever_ran_before():
    async def scenario() -> None:
        capacity = Capacity(LIMITS, 3)
        capacity.enter([AddSequence("s", [1], SamplingParams(max_tokens=8))])
        capacity.note(Step([Output("s", [1])], Load(1, 1)))
        capacity.leave("s")
        capacity.note(Step([], Load()))
        assert await counts(capacity, ["a", "b", "c"]) == [49, 49, 49]

    asyncio.run(scenario())


@pytest.fixture(params=["fake", "model"])
def engine(request: pytest.FixtureRequest) -> AnyEngine:
    name = str(BUNDLED_DRAFT) if request.param == "model" else "fake"
    settings = WorkerSettings.model_validate(
        {"model": name, "load_format": "auto" if request.param == "model" else "fake"}
    )
    return load_engine(settings)


@pytest.fixture
def io(engine: AnyEngine) -> Iterator[BlockingWire[EngineEvent, list[EngineCommand]]]:
    """The I/O side's end of the wire to a running engine."""
    ours, theirs = socket.socketpair()
    pulses, _kept = socket.socketpair()
    loop = EngineLoop(engine, BlockingWire(theirs), BlockingWire(pulses), 60.0)
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    yield BlockingWire(ours)
    ours.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def test_an_engine_that_raised_has_no_pulse_any_more() -> None:
    """In one process with its supervisor nothing else would tell that it is gone."""
    settings = {"model": "fake", "load_format": "fake", "fake_poison": "bad"}
    engine = load_engine(WorkerSettings.model_validate(settings))
    (_io, theirs), (told, pulses) = socket.socketpair(), socket.socketpair()
    loop = EngineLoop(engine, BlockingWire(theirs), BlockingWire(pulses), 0.01)
    engine.add(AddSequence("0", [*b"bad:raise:0"], SamplingParams(max_tokens=5)))
    with pytest.raises(RuntimeError):
        loop.run()
    told.settimeout(0.1)
    until(lambda: _is_silent(told), "the pulses to end")


def test_a_step_in_which_something_is_computed_is_not_taken_for_a_wedged_one() -> None:
    """A long text is one step, which may take longer than a step may: its layers are seen."""
    settings = {"model": "fake", "load_format": "fake"}
    engine = load_engine(WorkerSettings.model_validate(settings))
    assert isinstance(engine, FakeEngine)
    is_moving, is_over = threading.Event(), threading.Event()
    is_moving.set()

    def step(*_: object) -> None:
        while not is_over.wait(0.01):
            engine._stats.num_steps += is_moving.is_set()

    engine.note_plan = step
    (_io, theirs), (told, pulses) = socket.socketpair(), socket.socketpair()
    loop = EngineLoop(engine, BlockingWire(theirs), BlockingWire(pulses), 0.01)
    engine.add(AddSequence("0", [65], SamplingParams()))
    threading.Thread(target=loop.run, daemon=True).start()
    pulses_of: Iterator[Pulse] = BlockingWire[None, Pulse](told).received()
    unmoved_s = (each.unmoved_s for each in pulses_of)
    told.settimeout(PATIENCE_S)
    try:
        assert list(islice(unmoved_s, 1000))[-100:].count(0.0) > 50
        is_moving.clear()
        late = list(islice(unmoved_s, 100))[-50:]
        assert late[0] > 0 and late == sorted(set(late))
    finally:
        is_over.set()


def _is_silent(told: socket.socket) -> bool:
    """Whether nothing came for ten pulses' time."""
    try:
        return not told.recv(1 << 20)
    except TimeoutError:
        return True


def steps_until(received: Iterator[EngineEvent], is_last: Callable[[Step], bool]) -> list[Step]:
    steps = list[Step]()
    while not (steps and is_last(steps[-1])):
        step = next(received)
        if isinstance(step, Step):
            steps.append(step)
    return steps


@pytest.mark.timeout(100)  # nothing more would come
def test_a_cancelled_sequence_is_told_to_hold_nothing_although_no_token_follows(io):
    endless = SamplingParams(max_tokens=None, ignore_eos=True)
    names, received = ["0", "1", "2"], io.received()
    io.send([AddSequence(name, [65, 66, 67], endless) for name in names])
    running = steps_until(received, lambda step: bool(step.outputs))
    assert running[-1].load.num_held_blocks == 3 and running[-1].num_commands == 3
    io.send([CancelSequence(name) for name in names])
    last = steps_until(received, lambda step: step.num_commands == 6)[-1]
    assert (last.load[:2], last.outputs) == ((0, 0), [])


@pytest.mark.parametrize("engine", ["model"], indirect=True)
def test_who_waits_for_a_grammar_lacks_no_room(engine, io):
    formed = StructuredOutputs.model_validate({"regex": "[a-z]{2}"})
    asked = {
        "plain": SamplingParams(max_tokens=40, ignore_eos=True),
        "formed": SamplingParams(max_tokens=4, structured_outputs=formed),
    }
    io.send([AddSequence(name, [65], params) for name, params in asked.items()])
    received, open_ = io.received(), set(asked)
    while open_:
        [step] = steps_until(received, lambda step: True)
        assert step.load.num_waiting == 0
        open_ -= {output.seq_id for output in step.outputs if output.finish_reason}
    assert step.load[:2] == (0, 0)


async def at_work(url: str) -> None:
    """A job is answered although the room was counted wrong, by a shift that begins anew."""
    given = {"model": "stuck", "load_format": "fake", "redis_url": url, "step_timeout_s": 2.0}
    settings = WorkerSettings.model_validate(given)
    (io, to_engine), (_pulses, pulses), (supervisor, io_end) = (socket.socketpair() for _ in "123")
    loop = EngineLoop(load_engine(settings), BlockingWire(to_engine), BlockingWire(pulses), 60.0)
    threading.Thread(target=loop.run, daemon=True).start()
    async with connect(url) as redis, QueueClient.from_url(url) as client:
        engine: Channel[EngineEvent, list[EngineCommand]] = await Channel.open(io)
        text, end = load_tokenizer(settings), await Channel.open(io_end)
        service = Service(settings, text, Generation({}), redis, engine, end)
        running = asyncio.create_task(service.run())
        await WorkerQueue(redis, Lane("stuck"), lease_ms=100_000).register("w", WorkerCard())
        await Registry(redis).register(ModelCard(name="stuck"))
        told: Channel[WorkerEvent, WorkerCommand] = await Channel.open(supervisor)
        assert isinstance(await anext(told.received()), Prepared)
        told.send(BeginSession("w"))
        told.send(Renewed(time.monotonic() + 100))
        while service._session is None:
            await asyncio.sleep(0.01)
        first = service._session
        first._capacity._num_preparing += 10**6
        async with asyncio.timeout(60):
            job_id = await client.enqueue("x", model="stuck", max_tokens=3)
            assert [event async for event in client.stream(job_id)][-1].type == "done"
        assert service._session is not first and service._session.lease is first.lease
        told.close()
        await running
        engine.close()


def test_a_worker_that_reads_nothing_although_it_could_begins_anew(redis_url, caplog):
    asyncio.run(at_work(redis_url))
    assert "nothing was read for 2 s" in caplog.text
