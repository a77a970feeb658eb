"""The queue from a service that has redis-py and the Lua files of this project, nothing more."""

import asyncio
import json
import threading

import pytest

from penstock.schemas.model import WorkerCard
from penstock.schemas.redis.script import script_text
from plain_redis import Plain
from scripted import MODEL, ScriptedWorker, delta, queue_at


@pytest.fixture
def plain(redis_url: str) -> Plain:
    return Plain(redis_url, MODEL)


@pytest.fixture
def worker(redis_url: str) -> object:
    """A scripted worker in a thread, for as long as the test runs."""
    ready, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        async with queue_at(redis_url) as queue, asyncio.TaskGroup() as parts:
            await queue.register("w", WorkerCard())
            running = parts.create_task(ScriptedWorker(queue).run())
            ready.set()
            await asyncio.to_thread(stop.wait)
            running.cancel()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    ready.wait(10)
    yield thread
    stop.set()
    thread.join()


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("own_channel", [True, False])
def test_a_job_goes_in_and_its_events_come_out(plain: Plain, own_channel: bool) -> None:
    job_id = plain.new_id()
    channel = f"{plain.prefix}job:{job_id}:events" if own_channel else "replies-of-my-service"
    with plain.redis.pubsub() as pubsub:
        pubsub.subscribe(channel)
        pubsub.get_message(timeout=60)
        assert plain.enqueue(job_id, channel, prompts=["Hello"])[0] == "accepted"
        events = plain.events(pubsub, job_id)
    whole = delta(job_id, 0, 12)
    assert "".join(str(event.get("text", "")) for event in events[:-1]) == whole.text
    assert [event["position"] for event in events] == list(range(13))
    assert events[-1]["type"] == "done"
    log = plain.redis.xrange(f"{plain.prefix}job:{job_id}:log")
    assert [json.loads(fields["e"]) for _, fields in log] == events
    result = json.loads(plain.redis.get(f"{plain.prefix}job:{job_id}:result") or "")
    assert result["choices"][0]["text"] == whole.text
    assert plain.redis.hget(f"{plain.prefix}job:{job_id}", "state") == "succeeded"


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize(
    ("fields", "named"), [({"params": {"temperature": 9}}, "params.temperature"), ({"a": 1}, "a:")]
)
def test_a_job_that_is_not_one_comes_back_as_an_error_that_names_the_field(
    plain: Plain, fields: dict[str, object], named: str
) -> None:
    job_id = plain.new_id()
    with plain.redis.pubsub() as pubsub:
        pubsub.subscribe("mine")
        pubsub.get_message(timeout=60)
        plain.enqueue(job_id, "mine", prompts=["Hello"], **fields)
        (event,) = plain.events(pubsub, job_id)
    assert event["type"] == "failed"
    assert named in json.dumps(event["error"])


def test_of_what_the_job_repeats_the_options_count(plain: Plain) -> None:
    job_id = plain.new_id()
    fields = {"priority_class": "high", "background": True, "timeout_ms": 1, "delay_ms": 10**6}
    job = json.dumps({"job_id": job_id, "model": MODEL, "prompts": ["Hello"], **fields})
    options = json.dumps({"class": "batch", "background": True, "timeout_ms": 60_000})
    outcome, *_ = plain.script(keys=[plain.prefix], args=[job_id, "d", job, "mine", options])
    assert outcome == "accepted"
    assert plain.redis.zcard(f"{plain.prefix}delayed") == 0
    assert plain.redis.zcard(f"{plain.prefix}waiting:batch") == 1


@pytest.mark.usefixtures("worker")
def test_wrong_arguments_are_answered_with_a_sentence(plain: Plain) -> None:
    job_id = plain.new_id()
    for place, wrong in (
        (0, "17"),
        (0, "job_" + "a" * 80 + "0_a"),
        (1, ""),
        (2, ""),
        (3, ""),
        (3, "a\nb"),
        (4, ""),
        (4, "[1"),
        (4, "7"),
        (4, "[" * 2000),
    ):
        arguments = [job_id, "d", "{}", "mine", "{}"]
        arguments[place] = wrong
        outcome, _, _, sentence, _ = plain.script(keys=[plain.prefix], args=arguments)
        assert outcome == "invalid" and len(sentence) > 10
    assert plain.script(keys=[plain.prefix], args=[job_id, "d"])[0] == "invalid"
    assert plain.redis.keys("*:job:*") == []


@pytest.mark.parametrize(
    "field, values",
    {
        "class": ["urgent", 1, None],
        "tenant": ["", "a\0b", "x" * 257, 3, None, {}],
        "background": [0, "false"],
        "timeout_ms": [0, -1, 1.5, 1e300, "5", True],
        "queue_timeout_ms": [0],
        "not_before_ms": [-1, 1e15],
        "delay_ms": [-1],
        "prompt_tokens": [-5, 1e99],
        "completion_tokens": [-1],
        "over_limit": ["maybe"],
        "max_queued": [-1],
        "max_queued_tokens": [0],
        "ttl_s": [0],
        "unknown": [1],
        "x" * 500: [1],
        "account": [
            "me",
            {},
            {"name": ""},
            {"name": "a", "more": 1},
            {"name": "a", "limits": 3},
            {"name": "a", "limits": {"max_running": 0}},
            {"name": "a", "limits": {"weight": 0}},
            {"name": "a", "limits": {"weight": 1e9}},
            {"name": "a", "limits": {"tokens": 5}},
            {"limits": {}},
        ],
    }.items(),
)
def test_a_wrong_option_is_named(plain: Plain, field: str, values: list[object]) -> None:
    for value in values:
        arguments = [plain.new_id(), "d", "{}", "mine", json.dumps({field: value})]
        outcome, _, _, sentence, _ = plain.script(keys=[plain.prefix], args=arguments)
        assert outcome == "invalid" and field[:60] in sentence and len(sentence) < 200
    assert plain.redis.keys("*:job:*") == []


def test_cancel_and_a_late_join_by_script(plain: Plain) -> None:
    scripts = {
        name: plain.redis.register_script(script_text(name)[0])
        for name in ("workers/register", "jobs/attach", "jobs/cancel")
    }
    scripts["workers/register"](keys=[plain.prefix], args=["w", 5000, "{}"])
    job_id = plain.new_id()
    assert plain.enqueue(job_id, "mine", prompts=["Hello"])[0] == "accepted"
    assert scripts["jobs/attach"](keys=[plain.prefix], args=["default", job_id, "too", 0, 100]) == [
        "ready",
        "log",
    ]
    assert scripts["jobs/cancel"](keys=[plain.prefix], args=["default", job_id, 0]) == ["ready"]
    state, kind, event = scripts["jobs/attach"](
        keys=[plain.prefix], args=["default", job_id, "too", 0, 100]
    )
    assert (state, kind, json.loads(event)["type"]) == ("cancelled", "log", "failed")
