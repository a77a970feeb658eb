"""A grammar that would take the engine down ends a child of the sandbox, and no one else's work."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from penstock.schemas.errors import InvalidJob
from penstock.schemas.params.sampling import MAX_CONSTRAINT_BYTES, StructuredOutputs
from penstock.worker.bundled.paths import BUNDLED_MODEL
from penstock.worker.engine.grammar.constraints import Grammar, Grammars
from penstock.worker.engine.grammar.sandbox import Sandbox, SandboxLimits, Tried
from penstock.worker.engine.grammar.structured import (
    MAX_DEPTH,
    MAX_OPTIONAL,
    MAX_REPETITION,
    alternatives,
    grammar_of,
)
from stage import eventually

VOCAB_SIZE, EOS = 4096, 2
ENDLESS = "[" * 60_000  # many seconds of looking for where each set ends
WIDE = "\\p{L}" * 10_000  # some 60 MB


def sandbox_of(limits: SandboxLimits) -> Sandbox:
    backend = (BUNDLED_MODEL / "tokenizer.json").read_text()
    return Sandbox(backend, VOCAB_SIZE, [EOS], limits)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    made = sandbox_of(SandboxLimits(cpu_s=1))
    yield made
    made.close()


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars(BUNDLED_MODEL, VOCAB_SIZE, frozenset([EOS]), limits=SandboxLimits(cpu_s=1))
    yield made
    made.close()


def children_of(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_limits_are_as_written() -> None:
    assert SandboxLimits() == SandboxLimits(cpu_s=2, wall_s=10, memory_bytes=2**30)
    assert (MAX_CONSTRAINT_BYTES, MAX_DEPTH) == (65536, 32)
    assert (MAX_REPETITION, MAX_OPTIONAL) == (1000, 256)


def test_what_compiles_comes_back_as_its_grammar(sandbox: Sandbox) -> None:
    tried = sandbox.attempt("regex", "a{1000}")
    assert tried.grammar == grammar_of("regex", "a{1000}")
    assert sandbox.attempt("regex", WIDE).num_bytes > tried.num_bytes + (8 << 20)


def test_a_grammar_that_takes_too_long_is_ended(sandbox: Sandbox) -> None:
    with pytest.raises(ValueError, match=r"takes more than 1 s; make it simpler"):
        sandbox.attempt("regex", ENDLESS)


def test_a_grammar_that_stands_still_is_ended() -> None:
    waiting = sandbox_of(SandboxLimits(cpu_s=60, wall_s=0.5))
    try:
        with pytest.raises(ValueError, match=r"took more than 0\.5 s"):
            waiting.attempt("regex", ENDLESS)
    finally:
        waiting.close()


def test_a_grammar_that_takes_too_much_memory_is_ended() -> None:
    small = sandbox_of(SandboxLimits(memory_bytes=24 << 20))
    try:
        assert small.attempt("regex", "a{3}").grammar
        with pytest.raises(ValueError, match=r"takes more than 24 MiB"):
            small.attempt("regex", WIDE)
        assert small.attempt("regex", "a{3}").grammar
    finally:
        small.close()


def test_masks_that_would_hold_up_the_others_are_refused() -> None:
    nested = 'start: X\nX: Y{100}\nY: Z{100}\nZ: "a"{100}'  # hidden behind names
    patient = sandbox_of(SandboxLimits(cpu_s=60, wall_s=100))
    try:
        with pytest.raises(ValueError, match=r"its masks take more than 50 ms"):
            patient.attempt("grammar", nested)
    finally:
        patient.close()


def test_others_are_tried_while_one_takes_its_time(sandbox: Sandbox) -> None:
    sandbox.attempt("regex", "a")
    assert sandbox._process is not None
    pid = sandbox._process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children")
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(sandbox.attempt, "regex", ENDLESS)
        while not children.read_text():  # until it is at work
            time.sleep(0.001)
        quick: Future[Tried] = pool.submit(sandbox.attempt, "regex", "a")
        done, _ = wait([slow, quick], 60, FIRST_COMPLETED)
        assert done == {quick} and quick.result().grammar
        with pytest.raises(ValueError, match="takes more than"):
            slow.result(60)


def called(lenient: bool, style: str = "json") -> StructuredOutputs:
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": ENDLESS}}}
    form = {"type": "json_schema", "json_schema": schema, "lenient": lenient, "style": style}
    tag = {"type": "tag", "begin": "<tool_call>", "content": form, "end": "</tool_call>"}
    return StructuredOutputs.model_validate({"structural_tag": {"format": tag}})


@pytest.mark.parametrize("style", ["json", "qwen_xml"])
def test_what_need_not_be_held_is_held_as_far_as_it_can(grammars: Grammars, style: str) -> None:
    assert grammars.compile(called(True, style)).result(60).num_bytes
    if style == "json":
        with pytest.raises(InvalidJob, match=r"structural_tag: .*takes more than 1 s"):
            grammars.compile(called(False)).result(60)


def test_a_sandbox_that_was_killed_is_started_again(sandbox: Sandbox) -> None:
    sandbox.attempt("regex", "a")
    process = sandbox._process
    assert process is not None
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert sandbox.attempt("regex", "b").grammar
    assert sandbox._process is not None and sandbox._process.pid != process.pid


def test_a_closed_sandbox_leaves_no_process_behind() -> None:
    closed = sandbox_of(SandboxLimits())
    closed.attempt("regex", "a")
    process = closed._process
    assert process is not None
    eventually(lambda: not any(map(lives, children_of(process.pid))))
    closed.close()
    assert process.returncode is not None


def test_it_ends_with_the_process_that_started_it() -> None:
    code = (
        "import os, sys\nfrom penstock.worker.engine.grammar.sandbox import Sandbox\n"
        "made = Sandbox(open(sys.argv[1]).read(), 4096, [2])\nmade.attempt('regex', 'a')\n"
        "print(made._process.pid, flush=True)\nos.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(BUNDLED_MODEL / "tokenizer.json")],
        capture_output=True,
        text=True,
    )
    eventually(lambda: not lives(int(done.stdout)), within_s=60)


def test_it_stays_small() -> None:
    """It is forked for each grammar, and a thread in it would be a lock that nobody opens."""
    code = "import sys, threading, penstock.worker.engine.grammar.sandbox_process\n"
    code += "print(threading.active_count(), *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    threads, *loaded = done.stdout.split()
    heavy = {"torch", "transformers", "outlines", "numpy", "tokenizers", "redis"}
    assert threads == "1" and heavy.isdisjoint(name.split(".")[0] for name in loaded)


def test_no_pattern_of_a_callers_reaches_pythons_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    compiled = re._compile  # type: ignore[attr-defined]
    monkeypatch.setattr(re, "_compile", lambda *given: seen.append(given[0]) or compiled(*given))
    grammar_of("regex", "marked+")
    grammar_of("json", '{"pattern": "marked+", "patternProperties": {"marked*": {}}}')
    grammar_of("grammar", "start: /marked+/")
    grammar_of("grammar", 'root ::= [m] "arked+"')
    grammar_of("regex", alternatives(["marked+"]))
    re.search("seen", "")
    assert "seen" in seen and not [each for each in seen if "arked" in str(each)]


def ended(future: Future[Grammar]) -> str:
    error = future.exception(60)
    assert isinstance(error, InvalidJob) and error.param == "structured_outputs"
    return error.message


def test_the_engine_compiles_nothing_that_the_sandbox_did_not() -> None:
    nothing = SandboxLimits(wall_s=0.000001)
    grammars = Grammars(BUNDLED_MODEL, VOCAB_SIZE, frozenset([EOS]), limits=nothing)
    try:
        for form in (
            StructuredOutputs(regex="a"),
            StructuredOutputs(choice=["a", "b"]),
            StructuredOutputs(grammar='start: "a"'),
            StructuredOutputs(json_object=True),
        ):
            kind, _ = form.constraint
            assert re.match(
                rf"structured_outputs\.{kind}.*took more than 1e-06 s",
                ended(grammars.compile(form)),
            )
    finally:
        grammars.close()


def test_a_refusal_is_kept_like_a_grammar(grammars: Grammars) -> None:
    killer = StructuredOutputs(regex=ENDLESS)
    first = grammars.compile(killer)
    assert "structured_outputs.regex: compiling it takes more than 1 s" in ended(first)
    assert grammars.compile(StructuredOutputs(regex=ENDLESS)) is first
    assert grammars.compile(StructuredOutputs(regex="a")).result(60).constraint([]).error is None


def test_what_is_kept_is_bounded_by_its_memory() -> None:
    few = Grammars(BUNDLED_MODEL, VOCAB_SIZE, frozenset([EOS]), max_kept_bytes=16 << 20)
    try:
        wide, small = StructuredOutputs(regex=WIDE), StructuredOutputs(regex="a")
        first = few.compile(wide)
        assert first.result(60).num_bytes > 16 << 20
        few.compile(small).result(60)
        assert few.compile(wide) is not first
    finally:
        few.close()
