"""An engine that sleeps: what it says is the same, and while it sleeps it holds nothing."""

import gc
import threading
import time
import weakref

import pytest

from forgetful import ForgetfulRunner, addition, make_engine
from penstock.schemas.errors import InvalidJob
from penstock.worker.engine.engine import Engine
from penstock.worker.engine.io.messages import Output, ResetPrefixCache, Sleep, StoredBlock, Wake
from penstock.worker.llm import LLM
from penstock.worker.sleeper import SleepingEngine

PROMPT = [*range(1, 20)]


class Stage:
    """An engine that sleeps, and weak references to the runners that it ever had."""

    def __init__(self, idle_s: float | None = None) -> None:
        self.runners: list[weakref.ref[ForgetfulRunner]] = []
        self.engine = SleepingEngine(self.load(), self.load, idle_s)

    def load(self) -> Engine:
        engine, runner = make_engine()
        self.runners.append(weakref.ref(runner))
        return engine

    def run(self, seq_id: str) -> list[int]:
        """The tokens of one sequence, as the engine's loop gets them."""
        self.engine.add(addition(seq_id, PROMPT, 6))
        return self.finished(seq_id)[0]

    def finished(self, seq_id: str) -> tuple[list[int], int]:
        tokens, found = list[int](), 0
        for _ in range(500):
            outputs: list[Output] = self.engine.step() if self.engine.wait(0.01) else []
            for each in outputs:
                assert each.seq_id == seq_id and each.error is None
                tokens += each.token_ids
                found = each.num_cached
                if each.finish_reason:
                    return tokens, found
        raise AssertionError("it never ends")

    def until(self, is_asleep: bool) -> None:
        while self.engine.stats().is_asleep != is_asleep:
            assert not self.engine.wait(0.001)


def test_it_wakes_to_say_the_same_and_holds_nothing_meanwhile() -> None:
    stage = Stage()
    first = stage.run("a")
    stage.engine.put(Sleep())
    stage.until(is_asleep=True)
    gc.collect()
    assert [each() for each in stage.runners] == [None]
    assert not stage.engine.busy
    stage.engine.put(Wake())
    stage.until(is_asleep=False)
    assert stage.run("b") == first
    assert len(stage.runners) == 2


def test_what_is_added_wakes_it() -> None:
    stage = Stage(idle_s=0.0)
    first = stage.run("a")
    for number in range(3):
        stage.until(is_asleep=True)
        assert stage.run(f"{number}") == first
    assert len(stage.runners) == 4


def test_it_does_not_sleep_over_what_is_to_be_done() -> None:
    stage = Stage(idle_s=60)
    stage.engine.put(Sleep())
    assert stage.run("a")
    stage.until(is_asleep=True)


def test_llm_has_no_worker_to_let_sleep() -> None:
    with pytest.raises(InvalidJob, match="sleep_idle_s: lets a worker sleep"):
        LLM("penstock-5m", sleep_idle_s=1)


@pytest.mark.parametrize("call", ["wait", "put"])  # before it looks a last time, and after
def test_what_comes_as_it_falls_asleep_is_computed(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(idle_s=0.0)
    engine = stage.load()
    stage.engine = SleepingEngine(engine, stage.load, idle_s=0.0)
    put = engine.put

    def meanwhile(argument: object) -> bool:
        monkeypatch.undo()
        stage.engine.add(addition("a", PROMPT, 6))
        if isinstance(argument, ResetPrefixCache):
            put(argument)
        return False

    monkeypatch.setattr(engine, call, meanwhile)
    assert len(stage.finished("a")[0]) == 6


def test_what_is_cancelled_while_it_sleeps_is_never_computed() -> None:
    stage = Stage()
    stage.engine.put(Sleep())
    stage.until(is_asleep=True)
    stage.engine.add(addition("a", PROMPT, 6))
    assert stage.engine.busy
    stage.engine.cancel("a")
    stage.engine.add(addition("b", PROMPT, 6))
    assert len(stage.finished("b")[0]) == 6


def test_counters_go_on_and_gauges_are_those_of_now() -> None:
    stage = Stage()
    before = None
    for number in range(3):
        stage.run(f"{number}")
        stats = stage.engine.stats()
        if before is not None:
            assert stats.num_steps > before.num_steps
            assert stats.generation_tokens == before.generation_tokens + 6
            dump, earlier = (each.histograms["step_tokens"] for each in (stats, before))
            assert sum(dump[1:]) > sum(earlier[1:]) and dump[0] > earlier[0]
        before = stats
        assert before.num_cached_blocks > 0
        stage.engine.put(Sleep())
        stage.until(is_asleep=True)
        asleep = stage.engine.stats()
        assert (asleep.num_cached_blocks, asleep.num_steps) == (0, stats.num_steps)
        assert stage.engine.num_steps == stats.num_steps
        stage.engine.put(Wake())
        stage.until(is_asleep=False)


def test_who_follows_its_cache_sees_it_emptied() -> None:
    stage = Stage()
    changes, known = stage.engine.follow_blocks(False), set[bytes]()

    def follow() -> None:
        for each in changes.take():
            if isinstance(each, StoredBlock):
                known.add(each.digest)
            else:
                known.remove(each)

    for number in range(2):
        stage.run(f"{number}")
        follow()
        assert len(known) >= len(PROMPT) // 4
        stage.engine.put(Sleep())
        stage.until(is_asleep=True)
        follow()
        assert not known


def test_a_reset_cache_finds_nothing_and_computes_the_same() -> None:
    stage = Stage()
    engine = stage.engine
    first = stage.run("a")
    engine.add(addition("b", PROMPT, 6))
    assert stage.finished("b") == (first, 16)
    engine.put(ResetPrefixCache())
    engine.add(addition("c", PROMPT, 6))
    assert stage.finished("c") == (first, 0)
    engine.add(addition("d", PROMPT, 6))
    for _ in range(3):
        assert engine.wait(0.01)
        engine.step()
    engine.put(ResetPrefixCache())  # in the middle of one
    tokens, _ = stage.finished("d")
    assert tokens == first[-len(tokens) :]
    assert engine.stats().num_held_blocks == 0


def test_many_threads_may_add_while_it_falls_asleep() -> None:
    stage, done = Stage(idle_s=0.0), list[str]()

    def add(name: str) -> None:
        for number in range(20):
            stage.engine.add(addition(f"{name}{number}", PROMPT, 1))
            time.sleep(0.001)

    threads = [threading.Thread(target=add, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    while len(done) < 60:
        if stage.engine.wait(0.001):
            done += [each.seq_id for each in stage.engine.step() if each.finish_reason]
    assert len({*done}) == 60
