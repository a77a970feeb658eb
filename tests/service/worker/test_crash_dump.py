"""A crash leaves a file that says what the engine was about to compute, and none of the words."""

import asyncio
import json
import os
import signal
from pathlib import Path
from tempfile import TemporaryFile

import pytest
from test_stalls import STORY, tokens

from penstock.compose.cli import main
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.params.sampling import SamplingParams
from penstock.worker.bundled.paths import BUNDLED_MODEL
from penstock.worker.process.black_box import Recorder, Ring
from penstock.worker.process.settings import WorkerSettings
from penstock.worker.supervisor.crash_dump import MOST_FILES, shown, write_dump
from worker_process import WorkerProcess, ask, incarnations, until

CANARY = "CANARY-141421"
SECRET = "a salt of CANARY-141421"


def worker(url: str, folder: Path, *flags: str, model: str | Path = "fake") -> WorkerProcess:
    own = ("--crash-dump-folder", str(folder), "--cache-salt-secret", SECRET)
    return WorkerProcess(url, model, "--fake-poison", "poison", *own, *flags)


def dumps(folder: Path) -> dict[str, dict]:
    """By worker, as they are written; none holds a word of what was said."""
    found = {}
    for path in sorted(folder.glob("*.crash.json"), key=lambda path: path.stat().st_mtime):
        text = path.read_text()
        assert CANARY not in text and path.stat().st_mode & 0o777 == 0o600
        found[path.name.removesuffix(".crash.json")] = json.loads(text)
    return found


def wait_for_dumps(folder: Path, count: int) -> list[dict]:
    until(lambda: len(list(folder.glob("*.crash.json"))) >= count, f"{count} crash dumps")
    return list(dumps(folder).values())


def test_a_ring_keeps_the_latest_whole_records_in_order():
    with TemporaryFile() as file:
        file.truncate(4 * 4096)
        writes, reads = (Ring(file.fileno(), 0, 4, 4096) for _ in range(2))
        assert reads.records() == []
        for number in range(7):
            assert writes.write(b"%d" % number * number)
        assert reads.records() == [b"333", b"4444", b"55555", b"666666"]
        assert not writes.write(b"x" * 4096)
        reads._memory[3 * 4096 : 3 * 4096 + 8] = bytes(8)  # 3's slot, while it is written
        assert reads.records() == [b"4444", b"55555", b"666666"]


def test_of_a_step_too_large_the_counts_are_kept():
    with TemporaryFile() as file:
        file.truncate(1 << 21)
        recorder = Recorder(file.fileno())
        for width in (1, 400):
            recorder.note_plan([(f"job:{'x' * width}:{number}", 2, 5) for number in range(900)])
        small, large = (json.loads(record) for record in recorder._steps.records())
        assert small["num_seqs"] == large["num_seqs"] == 900
        assert small["num_tokens"] == large["num_tokens"] == 1800
        assert small["seqs"][799] == ["job:x:799", 2, 5] and "seqs" not in large


def test_a_folder_holds_the_latest_few(tmp_path):
    folder = tmp_path / "new" / "crashes"
    (tmp_path / "new").mkdir()
    for number in range(MOST_FILES + 3):
        path = write_dump(folder, f"w{number}", {"why": "x"})
        os.utime(path, (number, number))
    (folder / "notes.json").touch()
    write_dump(folder, "last", {"why": "x"})
    left = {path.name for path in folder.iterdir()}
    kept = {f"w{number}.crash.json" for number in range(4, MOST_FILES + 3)}
    assert left == kept | {"notes.json", "last.crash.json"}


def test_settings_are_shown_without_what_is_secret():
    url = f"redis://user:{CANARY}@127.0.0.1:6379/0"
    settings = WorkerSettings(
        model="m",
        engine="openai",
        engine_url=["http://here"],
        engine_api_key=CANARY,
        redis_url=url,
        cache_salt_secret=SECRET,
        max_num_seqs=7,
    )
    told = shown(settings)
    assert CANARY not in json.dumps(told)
    assert told["max_num_seqs"] == 7 and told["model"] == "m"


@pytest.mark.slow
def test_a_killed_engine_leaves_its_last_plan_and_its_letter_names_the_file(
    redis_url, tmp_path, capsys
):
    """The poison job is killed three times, and is in each file what the engine was computing."""
    with worker(redis_url, tmp_path) as process:
        process.ready()
        prompt = f"poison:crash:0 {CANARY}"

        async def asks(client: QueueClient) -> None:
            job_id = await client.enqueue(prompt, params=STORY, background=True)
            result = await client.result(job_id)
            assert result is not None and result.state == "dead"
            names.append(job_id)

        names: list[str] = []
        ask(redis_url, asks)
        wait_for_dumps(tmp_path, 3)
        assert "what the crash left is in" in process.logged()
    [job_id] = names
    told = dumps(tmp_path)
    for number, dump in enumerate(told.values(), 1):
        assert dump["why"] == "a process ended" and dump["engine"]["exit"] == "SIGKILL"
        assert dump["card"]["fingerprint"] and dump["settings"]["fake_poison"] == "poison"
        seq_id = f"{job_id}:{number}:0"
        last = dump["steps"][-1]
        assert last["seqs"] == [[seq_id, len(prompt), 0]] and last["num_tokens"] == len(prompt)
        assert dump["events"][-1][1:] == ["added", seq_id, len(prompt), 0]
    flags = ["--json", "--redis-url", redis_url, "--crash-dump-folder", str(tmp_path)]
    assert main(["dlq", "show", job_id, *flags]) == 0
    letter = json.loads(capsys.readouterr().out)
    paths = [str(tmp_path / f"{name}.crash.json") for name in letter["workers"].split()]
    assert letter["crash_dumps"] == paths
    assert set(letter["workers"].split()) == set(told)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, exit_status, place", [("hang", None, "_fails"), ("raise", 1, "RuntimeError")]
)
def test_a_stack_says_where_it_hung_or_was_raised(redis_url, tmp_path, kind, exit_status, place):
    with worker(redis_url, tmp_path, "--step-timeout-s", "6") as process:
        process.ready()

        async def asks(client: QueueClient) -> None:
            prompt = f"poison:{kind}:5 {CANARY}"
            job_id = await client.enqueue(prompt, params=STORY, background=True)
            await tokens(client, job_id, 5)
            if kind == "hang":
                await see_it_stand_still(client)
            [dump] = wait_for_dumps(tmp_path, 1)
            await client.cancel(job_id)
            assert ("engine did not move" in dump["why"]) == (kind == "hang")
            assert dump["engine"]["exit"] == exit_status
            stack = "\n".join(dump["engine"]["stack"])
            assert place in stack and "worker/engine/fake.py" in stack
            if kind == "hang":  # asked for, by the one that was not at fault too
                assert "worker/jobs/service.py" in "\n".join(dump["io"]["stack"])
                assert dump["steps"][-1]["seqs"][0][0] == f"{job_id}:1:0"
            assert CANARY not in process.logged()

        ask(redis_url, asks)


async def see_it_stand_still(client: QueueClient) -> None:
    """As /metrics shows it, before anybody ends it."""
    [queue] = await client.queues()
    while not any(one.stats.get("unmoved_s", 0.0) > 1 for one in await queue.workers()):
        await asyncio.sleep(0.02)


@pytest.mark.slow
def test_a_real_engine_leaves_its_plan(redis_url, tmp_path):
    params = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0)
    with worker(redis_url, tmp_path, "--deterministic", model=BUNDLED_MODEL) as process:
        process.ready()

        async def asks(client: QueueClient) -> None:
            job_id = await client.enqueue(f"Once {CANARY}", params=params, background=True)
            await tokens(client, job_id, 20)
            os.kill(process.child("penstock.worker.engine_process"), signal.SIGSEGV)
            [dump] = wait_for_dumps(tmp_path, 1)
            last = dump["steps"][-1]["seqs"]
            assert last[0][:2] == [f"{job_id}:1:0", 1] and last[0][2] >= 20
            assert dump["engine"]["exit"] == "SIGSEGV"
            assert any("Segmentation fault" in line for line in dump["engine"]["stack"])
            assert dump["stats"]["num_blocks"] > 0
            await client.cancel(job_id)

        ask(redis_url, asks)


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_stops_nobody(redis_url, tmp_path):
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    with worker(redis_url, in_the_way / "crashes") as process:
        process.ready()
        [name] = incarnations(redis_url)
        os.kill(process.child("penstock.worker.engine_process"), signal.SIGKILL)
        until(lambda: incarnations(redis_url) not in ({name}, set()), "a new name")
        assert "crash dump could not be written" in process.logged()
        assert list(tmp_path.iterdir()) == [in_the_way]
