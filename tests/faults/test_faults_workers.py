"""Workers die at every point, freeze and are told to go; their jobs end once and whole."""

import itertools
import random
import signal
import time
from collections.abc import Iterator

import pytest
import redis

from faults.invariants import END_STATES
from faults.processes import System, Worker, until
from faults.run import asks, run
from penstock.schemas.keys import Lane

NAMES = (f"model-{number}" for number in itertools.count())
SLOW = ("--fake-step-ms", "10", "--max-num-seqs", "16")


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    """Redis and a gateway. Each test serves a model of its own with workers of its own."""
    with System() as system:
        system.gateway("--ping-s", "1")
        yield system.ready()


@pytest.fixture
def model(system: System) -> Iterator[str]:
    yield next(NAMES)
    for worker in system.workers:
        worker.close()
    system.workers.clear()


def serve(system: System, model: str, *flags: str, **env: str) -> Worker:
    return system.worker("--served-model-name", model, *SLOW, *flags, **env)


@pytest.mark.slow
@pytest.mark.parametrize(
    "point",
    [
        "workers/start.asked",  # read, and not started
        "workers/start.answered:3",
        "workers/commit.asked:5",
        "workers/commit.answered:5",
        "workers/finish.asked:2",
        "workers/finish.answered:2",
        "engine.step:40",
    ],
)
def test_a_worker_dies_at_a_named_point_and_its_jobs_go_on(system, model, tmp_path, point):
    """Its own supervisor starts it again, and nothing is lost or said twice."""
    mark = tmp_path / "mark"
    crash = {"PENSTOCK_CRASH_AT": point, "PENSTOCK_CRASH_MARK": str(mark)}
    serve(system, model, **crash).ready()
    run(system, asks(6, max_tokens=50), model=model)
    assert mark.exists(), "the point was never reached"


@pytest.mark.slow
@pytest.mark.parametrize(
    "point", ["workers/start.answered:2", "workers/finish.asked", "workers/release.answered"]
)
def test_a_machine_is_lost_at_a_named_point_and_another_takes_over(system, model, tmp_path, point):
    mark = tmp_path / "mark"
    crash = {
        "PENSTOCK_CRASH_AT": point,
        "PENSTOCK_CRASH_MARK": str(mark),
        "PENSTOCK_CRASH_GROUP": "1",
    }
    lost = serve(system, model, "--drain-s", "0.1", **crash).ready()
    other = serve(system, model).ready()

    def act() -> None:
        if point.startswith("workers/release"):
            lost.terminate()

    run(system, asks(18, max_tokens=60), act, at_tokens=60, model=model)
    until(lambda: not lost.is_alive, "the machine to be lost")
    assert mark.exists()
    assert other.is_alive


@pytest.mark.slow
def test_all_workers_are_killed_at_once_and_a_new_one_ends_their_jobs(system, model):
    first, second = serve(system, model), serve(system, model)
    first.ready()
    second.ready()

    def act() -> None:
        first.kill()
        second.kill()
        serve(system, model)

    run(system, asks(12, max_tokens=120), act, at_tokens=200, model=model)


@pytest.mark.slow
def test_ten_workers_are_killed_at_random_points_of_a_hundred_jobs(system, model):
    """Each with jobs in work, and with all of its processes; another is started in its place."""
    few, chance = ("--max-num-seqs", "8"), random.Random(10)
    for worker in [serve(system, model, *few) for _ in range(2)]:
        worker.ready()

    def act() -> None:
        for num_ended in sorted(chance.sample(range(70), 10)):
            while not (at_work := owners(system, model, num_ended)):
                time.sleep(0.02)
            killed = chance.choice(at_work)
            killed.kill()
            killed.close()
            system.workers.remove(killed)
            serve(system, model, *few)

    told = run(system, asks(100, max_tokens=100), act, at_tokens=200, model=model)
    assert [each.end.state for each in told if each.end] == ["succeeded"] * 100


def owners(system: System, model: str, num_ended: int) -> list[Worker]:
    """Of running jobs, once so many have ended."""
    with redis.Redis.from_url(system.url, decode_responses=True) as store:
        jobs = list(store.scan_iter(f"{Lane(model).prefix}job:*", _type="hash"))
        known = [store.hmget(key, "owner", "state") for key in jobs]
    ended = [state in END_STATES for _, state in known]
    assert not all(ended), "all was over before the last was killed"
    names = [name for name, state in known if state in ("admitting", "decoding")]
    if sum(ended) < num_ended:
        return []
    return [each for each in system.workers if any(name in each.logged() for name in names)]


@pytest.mark.slow
def test_a_frozen_worker_comes_back_and_can_write_nothing_of_what_it_lost(system, model):
    frozen, other = serve(system, model), serve(system, model)
    frozen.ready()
    other.ready()

    def act() -> None:
        frozen.send(signal.SIGSTOP)
        until(lambda: "handed on" in other.logged(), "the lease to lapse")
        frozen.send(signal.SIGCONT)

    run(system, asks(16, max_tokens=150), act, at_tokens=200, model=model)
    frozen.wait_for("lost its lease")


@pytest.mark.slow
def test_sigterm_under_load_hands_everything_on(system, model):
    going, staying = serve(system, model, "--drain-s", "0.2"), serve(system, model)
    going.ready()
    staying.ready()

    def act() -> None:
        going.terminate()
        assert going.process.wait(60) == 0, going.logged()

    run(system, asks(16, max_tokens=150), act, at_tokens=200, model=model)


@pytest.mark.slow
@pytest.mark.parametrize("comes_back", [False, True])
def test_told_to_go_while_redis_is_away_a_worker_ends_in_order(system, model, comes_back):
    """What it cannot hand back others take from its lapsed lease; where Redis is back, all ends."""
    flags = ("--drain-s", "60" if comes_back else "2", "--lease-ttl-ms", "30000")
    going = serve(system, model, *flags).ready()

    def act() -> None:
        going.proxy.is_refusing = True
        going.proxy.cut()
        going.terminate()
        if comes_back:
            going.wait_for("engine was paused")
            going.proxy.heal()
        else:
            serve(system, model)
        assert going.process.wait(60) == 0, going.logged()
        if not comes_back:
            assert "was left to the reapers" in going.logged()
            lapse(system, model)

    run(system, asks(8, max_tokens=150), act, at_tokens=100, model=model)
    assert "CRITICAL" not in going.logged()


def lapse(system: System, model: str) -> None:
    """All leases, now: a worker that lives takes a new one."""
    with redis.Redis.from_url(system.url) as store:
        key = f"{Lane(model).prefix}workers"
        for worker in store.zrange(key, 0, -1):
            store.zadd(key, {worker: 0})
