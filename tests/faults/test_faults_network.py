"""The way to Redis is held, parted, slow, or cut in the middle of an answer."""

import time
from collections.abc import Iterator

import pytest

from faults.processes import System, until
from faults.run import asks, run

WORKER = ("--fake-step-ms", "10", "--max-num-seqs", "16")


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    """Two of each, each behind a relay of its own; all outlive what happens to it."""
    with System() as system:
        for _ in range(2):
            system.worker(*WORKER)
            system.gateway("--ping-s", "1")
        yield system.ready()


@pytest.mark.slow
@pytest.mark.parametrize("held", ["up", "down", "both"])
def test_a_worker_is_parted_past_its_lease_and_its_jobs_go_on_elsewhere(system, held):
    """What it decoded meanwhile, and sends once it is heard again, is neither kept nor shown."""
    parted, other = system.workers
    before = parted.logged().count(" started serving ")
    handed = other.logged().count("handed on")

    def act() -> None:
        if held != "down":
            parted.proxy.up.is_held = True
        if held != "up":
            parted.proxy.down.is_held = True
        until(lambda: other.logged().count("handed on") > handed, "the lease to lapse")
        parted.proxy.heal()

    run(system, asks(24, max_tokens=120), act, at_tokens=200)
    until(lambda: parted.logged().count(" started serving ") > before, "it to come back")


@pytest.mark.slow
def test_a_machine_is_lost_and_redis_hears_no_connection_end(system):
    """Its cable is pulled, then it dies: only the lease tells."""
    others, lost = list(system.workers), system.worker(*WORKER).ready()

    def num_handed_on() -> int:
        return sum(other.logged().count("handed on") for other in others)

    before = num_handed_on()

    def act() -> None:
        num_open = lost.proxy.num_connections
        lost.proxy.part()
        lost.kill()
        taken = "lost machine's jobs to be taken over"
        until(lambda: num_handed_on() > before, taken, patience_s=60)
        assert lost.proxy.num_connections == num_open > 0

    run(system, asks(24, max_tokens=120), act, at_tokens=200)
    system.workers.remove(lost)
    lost.close()


@pytest.mark.slow
def test_a_gateway_is_parted_and_its_readers_go_on(system):
    """What was on its way meanwhile is lost; the jobs outlast it. Half of them are read there."""
    parted = system.gateways[0]

    def act() -> None:
        parted.proxy.part()
        time.sleep(1)
        parted.proxy.cut()
        parted.proxy.heal()

    asked = asks(24, max_tokens=300, by_sdk=False, is_late=False)
    run(system, asked, act, at_tokens=400)


def test_answers_are_cut_in_the_middle(system):
    """The command was applied, half its answer arrived: it is asked again, and counts once."""

    def act() -> None:
        for _ in range(10):
            for process in (*system.workers, *system.gateways):
                process.proxy.down.num_cuts = 1
            time.sleep(0.1)

    run(system, asks(24, max_tokens=120), act, at_tokens=100)


@pytest.mark.parametrize("script", [b"commit", b"finish", b"read", b"start"])
def test_the_answer_to_a_script_is_lost_each_time(system, script):
    """By content: the request with this word passes, then the connection goes."""
    words = {b"commit": b"delta", b"finish": b"done", b"read": b"EVALSHA", b"start": b"resume"}

    def act() -> None:
        for _ in range(8):
            for worker in system.workers:
                worker.proxy.up.cut_after = words[script]
            time.sleep(0.08)
        for worker in system.workers:
            worker.proxy.heal()

    run(system, asks(12, max_tokens=100), act, at_tokens=50)


@pytest.mark.slow
def test_connections_are_half_closed_and_reset(system):
    def act() -> None:
        for number in range(10):
            for process in (*system.workers, *system.gateways):
                process.proxy.half_close() if number % 2 else process.proxy.cut()
            time.sleep(0.1)

    run(system, asks(24, max_tokens=120), act, at_tokens=100)


def test_a_slow_way_changes_nothing_but_the_time(system):
    def act() -> None:
        for process in (*system.workers, *system.gateways):
            process.proxy.down.delay_s = 0.02
        time.sleep(1)
        for process in (*system.workers, *system.gateways):
            process.proxy.heal()

    run(system, asks(12, max_tokens=100), act, at_tokens=50)
