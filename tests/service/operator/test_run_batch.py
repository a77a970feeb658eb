"""`penstock run-batch`: a file of requests is answered, whatever ends the command on the way."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from penstock.compose.run_batch import main
from penstock.schemas.job import Job
from penstock.worker.bundled.paths import BUNDLED_MODEL
from stage import MODEL, Actor, Wait, eventually, failed, spoken

COMMAND = [sys.executable, "-m", "penstock.compose.cli", "run-batch"]
URLS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    "/v1/responses": {"input": "hi"},
}


def line(number: int, **body: object) -> dict[str, object]:
    asked = {"model": MODEL, "prompt": f"{number}?"}
    return {
        "custom_id": f"line-{number}",
        "method": "POST",
        "url": "/v1/completions",
        "body": asked | body,
    }


def written(folder: Path, *lines: dict[str, object] | str) -> list[str]:
    texts = [each if isinstance(each, str) else json.dumps(each) for each in lines]
    (folder / "in.jsonl").write_text("".join(f"{text}\n" for text in texts))
    return [*COMMAND, str(folder / "in.jsonl"), str(folder / "out.jsonl")]


def ran(command: list[str], *flags: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": "."}
    return subprocess.run(
        [*command, *flags], env=env, capture_output=True, text=True, timeout=120, check=False
    )


@contextmanager
def started(command: list[str], *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([*command, *flags], env=os.environ | {"PYTHONPATH": "."}) as process:
        try:
            yield process
        finally:
            process.kill()


def answers(folder: Path) -> dict[str, dict[str, object]]:
    """By custom id; each is there once."""
    lines = [json.loads(text) for text in (folder / "out.jsonl").read_text().splitlines()]
    names = [each["custom_id"] for each in lines]
    assert len(names) == len(set(names))
    return dict(zip(names, lines, strict=True))


def statuses(folder: Path) -> Counter[int]:
    return Counter(each["response"]["status_code"] for each in answers(folder).values())  # type: ignore[index]


def test_lines_of_any_endpoint_are_answered_in_its_form(actor: Actor, tmp_path: Path) -> None:
    actor.script = lambda job: spoken("Hello", " world")
    lines = [
        {"custom_id": url, "method": "POST", "url": url, "body": body} for url, body in URLS.items()
    ]
    done = ran(written(tmp_path, *lines), "--redis-url", actor.redis_url)
    assert done.returncode == 0, done.stderr
    assert "4 of 4 lines, 0 failed" in done.stderr
    kinds = {
        url: each["response"]["body"].get("object") or each["response"]["body"]["type"]  # type: ignore[index]
        for url, each in answers(tmp_path).items()
    }
    assert kinds == {
        "/v1/chat/completions": "chat.completion",
        "/v1/completions": "text_completion",
        "/v1/messages": "message",
        "/v1/responses": "response",
    }
    assert {job.priority_class for job in actor.jobs[-4:]} == {"batch"}


def test_a_killed_run_goes_on_and_asks_no_line_twice(actor: Actor, tmp_path: Path) -> None:
    """Also where its last answer was not written whole."""
    wait, before = Wait(), len(actor.jobs)

    def play(job: Job) -> list[object]:
        prompt = job.prompts[0]
        assert isinstance(prompt, str)
        return [*spoken("a"), *([] if int(prompt[:-1]) < 20 else [wait]), *spoken("b")]

    actor.script = play  # type: ignore[assignment]
    command = written(tmp_path, *(line(number) for number in range(60)))
    flags = ("--redis-url", actor.redis_url, "--max-concurrency", "32")
    out = tmp_path / "out.jsonl"
    with started(command, *flags) as process:
        eventually(lambda: out.exists() and len(out.read_bytes().splitlines()) == 20)
        eventually(lambda: len(actor.jobs) - before == 52)
        process.send_signal(signal.SIGKILL)
    whole = out.read_bytes()
    out.write_bytes(whole + whole.splitlines()[0][:50])
    wait.set()
    done = ran(command, *flags)
    assert done.returncode == 0, done.stderr
    assert "60 of 60 lines, 0 failed" in done.stderr
    assert "20 of them before" in done.stderr
    assert out.read_bytes().startswith(whole)
    assert set(answers(tmp_path)) == {f"line-{number}" for number in range(60)}
    runs = Counter(job.job_id for job in actor.jobs[before:])
    assert len(runs) == 60 and set(runs.values()) == {1}


@pytest.mark.slow
def test_a_stopped_run_leaves_nothing_in_the_queue_and_goes_on(
    actor: Actor, tmp_path: Path
) -> None:
    wait, before = Wait(), len(actor.jobs)
    actor.script = lambda job: [*spoken("a"), wait, *spoken("b")]
    command = written(tmp_path, *(line(number) for number in range(40)))
    with started(command, "--redis-url", actor.redis_url) as process:
        eventually(lambda: len(actor.jobs) - before == 40)
        second = ran(command, "--redis-url", actor.redis_url)
        assert second.returncode == 1
        assert "another process writes it" in second.stderr
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    eventually(lambda: len(actor.cancelled) >= 40)
    wait.set()
    assert ran(command, "--redis-url", actor.redis_url).returncode == 0
    assert statuses(tmp_path) == {200: 40}


def test_lines_that_failed_are_told_and_asked_again_when_that_is_wanted(
    actor: Actor, tmp_path: Path
) -> None:
    actor.script = lambda job: [failed()] if job.prompts[0] == "1?" else spoken("a")
    command = written(tmp_path, line(0), line(1), line(2, temperature=-1), line(3))
    flags = ("--redis-url", actor.redis_url)
    done = ran(command, *flags)
    assert done.returncode == 1
    assert "4 of 4 lines, 2 failed" in done.stderr
    assert statuses(tmp_path) == {200: 2, 500: 1, 400: 1}
    before = len(actor.jobs)
    assert ran(command, *flags).returncode == 0  # nothing is left to ask
    assert len(actor.jobs) == before
    actor.script = lambda job: spoken("a")
    again = ran(command, *flags, "--retry-failed")
    assert "4 of 4 lines, 1 failed" in again.stderr
    assert statuses(tmp_path) == {200: 3, 400: 1}
    assert len(actor.jobs) == before + 1


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([], "no lines"),
        (["{"], "line 1: not valid JSON"),
        ([line(0), line(1), line(0)], "line 3: custom_id: 'line-0' is given twice"),
        ([line(0) | {"url": "/v1/jobs"}], "line 1: url: give one of /v1/chat/completions"),
        ([line(0) | {"method": "GET"}, "x"], "line 1: method: must be POST (and 1 more)"),
    ],
)
def test_a_file_that_is_wrong_is_refused_before_anything_runs(
    actor: Actor,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    lines: list[dict[str, object] | str],
    told: str,
) -> None:
    before = len(actor.jobs)
    words = written(tmp_path, *lines)[len(COMMAND) :]
    assert main([*words, "--redis-url", actor.redis_url]) == 1
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()
    assert len(actor.jobs) == before


@pytest.mark.parametrize("text", ["", "\n", "some notes", '{"id": "batch_req"}\n', "[]\n"])
def test_a_file_of_another_kind_is_not_written_over(
    actor: Actor, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    words = written(tmp_path, line(0))[len(COMMAND) :]
    flags = ["--redis-url", actor.redis_url]
    out, asked = tmp_path / "out.jsonl", (tmp_path / "in.jsonl").read_text()
    out.write_text(text)
    assert main([*words, *flags]) == (1 if text else 0)
    assert (text == "") or out.read_text() == text
    assert main([words[0], words[0], *flags]) == 1  # the requests themselves
    assert (tmp_path / "in.jsonl").read_text() == asked
    if text:
        assert capsys.readouterr().err.count("is no answer to a line of a batch") == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["in.jsonl"], "name two files"),
        (["in.jsonl", "out.jsonl", "--model", "m", "--fd", "3"], "--fd is not taken here"),
        (["none.jsonl", "out.jsonl"], "No such file or directory: 'none.jsonl'"),
        ([], "--input-file: Field required"),
    ],
)
def test_files_that_are_not_there_are_named(
    actor: Actor, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    with suppress(SystemExit):
        assert main([*words, "--redis-url", actor.redis_url]) in (1, 2)
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_runs_in_the_command_as_in_vllm(tmp_path: Path) -> None:
    lines = [line(number, max_tokens=8) for number in range(50)]
    for each in lines:
        del each["body"]["model"]  # type: ignore[attr-defined]
    command = written(tmp_path, *lines)
    named = [*COMMAND, "-i", command[-2], "-o", command[-1], "--model", str(BUNDLED_MODEL)]
    done = ran(named)
    assert done.returncode == 0, done.stderr
    assert statuses(tmp_path) == {200: 50}
