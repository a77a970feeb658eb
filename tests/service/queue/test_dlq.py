"""`penstock dlq`: jobs that were given up are listed, submitted again once, and dropped."""

import asyncio
import json

import pytest
import redis

from penstock.compose.cli import main
from penstock.schemas.delivery import Outcome
from penstock.schemas.model import WorkerCard
from scripted import bury, delta, finish, queue_at, started


def dlq(capsys: pytest.CaptureFixture[str], url: str, *words: str) -> tuple[int, str, str]:
    status = main(["dlq", *words, "--redis-url", url])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def test_the_dead_are_listed_and_shown_without_their_words(redis_url, capsys):
    job_ids = [bury(redis_url), bury(redis_url)]
    status, out, _ = dlq(capsys, redis_url, "list")
    assert status == 0 and all(job_id in out for job_id in job_ids) and "acme" in out
    status, out, _ = dlq(capsys, redis_url, "list", "--json")
    listed = json.loads(out)
    assert [letter["job"] for letter in listed["letters"]] == job_ids[::-1]
    assert listed["dropped"] == 0
    for flag in ([], ["--json"]):
        status, shown, _ = dlq(capsys, redis_url, "show", job_ids[0], *flag)
        assert status == 0 and job_ids[0] in shown and "worker_crashed" in shown
        assert "CANARY" not in shown + out
    assert json.loads(shown)["can_be_requeued"] is True


def test_crash_dumps_are_named_where_they_are_and_not_where_none_was_left(
    redis_url, capsys, tmp_path
):
    job_id = bury(redis_url)
    at = ("show", job_id, "--crash-dump-folder", str(tmp_path))
    letter = json.loads(dlq(capsys, redis_url, *at, "--json")[1])
    assert letter["crash_dumps"] == []
    words = dlq(capsys, redis_url, *at)[1].replace("│", " ").split()  # the table breaks lines
    assert "where its --crash-dump-folder" in " ".join(words)
    left = tmp_path / f"{letter['workers'].split()[0]}.crash.json"
    left.write_text("{}")
    assert json.loads(dlq(capsys, redis_url, *at, "--json")[1])["crash_dumps"] == [str(left)]


def test_a_requeued_job_runs_once_however_often_it_is_asked_for(redis_url, capsys):
    job_id = bury(redis_url)

    async def half(url: str) -> None:
        """The letter was not dropped: the first try failed in between."""
        async with queue_at(url) as queue:
            drop, queue.drop_dead = queue.drop_dead, lambda job_id: asyncio.sleep(0, True)
            assert (await queue.requeue_dead(job_id)).outcome is Outcome.ACCEPTED
            queue.drop_dead = drop

    asyncio.run(half(redis_url))
    status, out, _ = dlq(capsys, redis_url, "requeue", job_id, "--json")
    assert status == 0
    again = json.loads(out)["requeued_as"]
    assert dlq(capsys, redis_url, "requeue", job_id)[0] == 1
    assert json.loads(dlq(capsys, redis_url, "list", "--json")[1])["letters"] == []

    async def work() -> None:
        async with queue_at(redis_url) as queue:
            await queue.register("w", WorkerCard())
            taken = await started(queue)
            assert taken.job.job_id == again != job_id
            assert (taken.job.prompts, taken.job.tenant) == (["CANARY-577"], "acme")
            assert taken.trial is None and await queue.read("w", 4) == []
            assert await finish(queue, taken, [delta(again, 0)])
            assert (await queue.status("acme", again)).state == "succeeded"
            assert (await queue.status("acme", job_id)).state == "dead"

    asyncio.run(work())


def test_a_dropped_letter_is_gone_with_its_request(redis_url, capsys):
    job_id = bury(redis_url)
    with redis.Redis.from_url(redis_url) as store:
        assert store.keys(f"*{job_id}:request")
        assert dlq(capsys, redis_url, "drop", job_id)[0] == 0
        assert not store.keys(f"*{job_id}:request")
    for command in ("show", "requeue", "drop"):
        status, _, err = dlq(capsys, redis_url, command, job_id)
        assert status == 1 and job_id in err and "Traceback" not in err
    assert dlq(capsys, redis_url, "show", "nonsense")[0] == 1
    assert dlq(capsys, redis_url, "mourn")[0] == 2
