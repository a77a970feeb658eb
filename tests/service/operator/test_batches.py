"""Files and batches by OpenAI's client, and batches through the deaths of those who run them."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
import redis
from openai import OpenAI
from openai.types import Batch

from penstock.gateway.batches.lines import line_errors
from penstock.gateway.files.files import FileNotFound, Files, FilesSettings
from penstock.schemas.api.json_size import MAX_GROUPS
from penstock.schemas.job import Job
from penstock.schemas.keys import CHORES
from penstock.schemas.redis.connection import connect
from stage import (
    MODEL,
    Actor,
    GatewayProcess,
    HousekeepingProcess,
    Line,
    Wait,
    eventually,
    failed,
    spoken,
)

ENDED = {"completed", "failed", "expired", "cancelled"}
HELD = Wait()


def play(job: Job) -> Sequence[Line]:
    """As the job's metadata asks."""
    if job.metadata.get("play") == "fail":
        return [failed()]
    if job.metadata.get("play") == "wait":
        return [HELD]
    return spoken("a", "b")


@dataclass
class House:
    """A gateway over a scripted worker; housekeeping is the tests' to start."""

    redis_url: str
    folder: Path
    gateway_url: str
    actor: Actor
    client: OpenAI

    def housekeeping(self, *flags: str, **env: str) -> HousekeepingProcess:
        return HousekeepingProcess(
            self.redis_url, "--files-folder", str(self.folder), *flags, **env
        )

    def upload(self, *lines: dict[str, object] | str) -> str:
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        content = "\n".join(texts).encode()
        return self.client.files.create(file=("in.jsonl", content), purpose="batch").id

    def batch(self, *lines: dict[str, object] | str, window: str = "24h") -> str:
        return self.client.batches.create(
            input_file_id=self.upload(*lines),
            endpoint="/v1/chat/completions",
            completion_window=window,  # type: ignore[arg-type]
            metadata={"name": "mine"},
        ).id

    def ended(self, batch_id: str) -> Batch:
        eventually(lambda: self.client.batches.retrieve(batch_id).status in ENDED)
        return self.client.batches.retrieve(batch_id)

    def lines_of(self, file_id: str | None) -> dict[str, dict[str, object]]:
        """By custom id; each is there once."""
        if file_id is None:
            return {}
        texts = self.client.files.content(file_id).text.splitlines()
        lines = [json.loads(text) for text in texts]
        assert len({line["custom_id"] for line in lines}) == len(lines)
        return {line["custom_id"]: line for line in lines}


def line(number: int, **body: object) -> dict[str, object]:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": f"{number}?"}]}
    return {
        "custom_id": f"line-{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": asked | body,
    }


@pytest.fixture(scope="module")
def house(actor: Actor, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("files")
    limits = ("--max-file-bytes", "100000", "--files-quota", "60")
    actor.script = play
    with (
        GatewayProcess(actor.redis_url, "--files-folder", str(folder), *limits) as gateway,
        OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield House(actor.redis_url, folder, gateway.url, actor, client)


def test_a_file_goes_up_comes_back_and_is_deleted(house: House) -> None:
    before = set(house.folder.iterdir())
    content = b'{"a": "\xc3\xa9"}\n' * 5000
    record = house.client.files.create(
        file=("my file.jsonl", content),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert (record.bytes, record.filename, record.purpose) == (
        len(content),
        "my file.jsonl",
        "batch",
    )
    assert record.expires_at == record.created_at + 3600
    assert house.client.files.content(record.id).content == content
    other = house.upload("{}")
    assert [file.id for file in house.client.files.list(limit=1)][:2] == [other, record.id]
    assert [file.id for file in house.client.files.list(order="asc")][-2:] == [record.id, other]
    assert house.client.files.retrieve(record.id) == record
    for file_id in (record.id, other):
        assert house.client.files.delete(file_id).deleted
        with pytest.raises(openai.NotFoundError):
            house.client.files.content(file_id)
    assert set(house.folder.iterdir()) == before


def test_a_file_that_is_no_good_is_refused_and_leaves_nothing(house: House) -> None:
    files, before = f"{house.gateway_url}/v1/files", set(house.folder.iterdir())
    with pytest.raises(openai.APIStatusError) as refusal:
        house.client.files.create(file=b"x" * 100_001, purpose="batch")
    assert refusal.value.status_code == 413
    with pytest.raises(openai.BadRequestError, match="purpose"):
        house.client.files.create(file=b"x", purpose="secret")  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError, match="seconds"):
        house.client.files.create(
            file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 1}
        )
    form = {"content-type": "multipart/form-data; boundary=b"}
    part = b'--b\r\ncontent-disposition: form-data; name="%s"%s\r\n\r\nx\r\n'
    for headers, body in [
        ({}, b"{}"),
        ({"content-type": "multipart/form-data"}, b"{}"),
        (form, b"no form"),
        (form, b""),
        (form, part % (b"purpose", b"") + b"--b--\r\n"),
        (form, part % (b"file", b'; filename="a"') * 2 + b"--b--\r\n"),
        (form, (part % (b"purpose", b"")).replace(b"x", b"batch" * 1000) + b"--b--\r\n"),
    ]:
        answer = httpx.post(files, headers=headers, content=body)
        assert answer.status_code == 400, (headers, body, answer.text)
        assert answer.json()["error"]["message"]
    packed = httpx.post(files, headers=form | {"content-encoding": "gzip"}, content=b"")
    assert packed.status_code == 415
    for file_id in ("file-1", "..%2f..%2fetc%2fpasswd", "file-" + "a" * 26):
        assert httpx.get(f"{files}/{file_id}/content").status_code == 404
    assert set(house.folder.iterdir()) == before


@pytest.mark.parametrize("file_id", ["", ".", "../x", "/etc/passwd", "file-" + "A" * 26])
def test_what_is_no_file_id_leads_nowhere(tmp_path: Path, file_id: str) -> None:
    files = Files(connect("redis://127.0.0.1:1"), FilesSettings(files_folder=tmp_path))
    with pytest.raises(FileNotFound):
        asyncio.run(files.get("default", file_id))
    own = asyncio.run(files.storage.local("file-" + "a" * 26, tmp_path / "copy"))
    assert own.parent == tmp_path
    with pytest.raises(FileNotFoundError):
        asyncio.run(files.storage.local(file_id, tmp_path / "copy"))


def test_a_batch_answers_every_line_where_it_belongs(house: House) -> None:
    lines = [
        line(0),
        line(1, metadata={"play": "fail"}),
        line(2, temperature="hot"),
        "",
        line(3, model="unknown"),
        line(4, stream=True),
        line(5, metadata={"a": "\u00e9 \u2028"}),
    ]
    with house.housekeeping():
        batch = house.ended(house.batch(*lines))
    assert (batch.status, batch.errors, batch.metadata) == ("completed", None, {"name": "mine"})
    counts = batch.request_counts
    assert counts is not None and (counts.total, counts.completed, counts.failed) == (6, 2, 4)
    assert batch.usage is not None and batch.usage.total_tokens == 14
    good, bad = house.lines_of(batch.output_file_id), house.lines_of(batch.error_file_id)
    assert set(good) == {"line-0", "line-5"}
    body = good["line-0"]["response"]["body"]  # type: ignore[index]
    answer = openai.types.chat.ChatCompletion.model_validate(body)
    assert answer.choices[0].message.content == "ab"
    statuses = {name: each["response"]["status_code"] for name, each in bad.items()}  # type: ignore[index]
    assert statuses == {"line-1": 500, "line-2": 400, "line-3": 404, "line-4": 400}
    listed = house.client.batches.list(limit=1).data
    assert [each.id for each in listed] == [batch.id]
    assert house.client.files.retrieve(batch.output_file_id or "").purpose == "batch_output"


@pytest.mark.parametrize(
    "endpoint, asked, of_answer",
    [
        ("/v1/responses", {"input": "x"}, lambda body: body["output"][0]["content"][0]["text"]),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
            lambda body: body["content"][0]["text"],
        ),
        ("/v1/completions", {"prompt": "x"}, lambda body: body["choices"][0]["text"]),
    ],
)
def test_lines_of_each_protocol_are_answered_in_its_form(
    house: House,
    endpoint: str,
    asked: dict[str, object],
    of_answer: Callable[[dict], str],
) -> None:
    wrong = {"previous_response_id": "resp_1"} if endpoint == "/v1/responses" else {"top_k": -5}
    lines = [
        {"custom_id": f"{at}", "method": "POST", "url": endpoint, "body": {"model": MODEL, **body}}
        for at, body in enumerate([asked, {**asked, **wrong}])
    ]
    made = house.client.batches.create(
        input_file_id=house.upload(*lines),
        endpoint=endpoint,  # type: ignore[arg-type]
        completion_window="24h",
    )
    with house.housekeeping():
        ended = house.ended(made.id)
    assert (ended.status, ended.request_counts and ended.request_counts.failed) == ("completed", 1)
    answered = house.lines_of(ended.output_file_id)["0"]["response"]
    assert isinstance(answered, dict) and of_answer(answered["body"])
    refused = house.lines_of(ended.error_file_id)["1"]["response"]
    assert isinstance(refused, dict) and next(iter(wrong)) in refused["body"]["error"]["message"]
    assert ("type" in refused["body"]) == (endpoint == "/v1/messages")


def test_a_batch_whose_file_is_no_good_fails_and_says_which_lines(house: House) -> None:
    twice = line(0)
    lines = [
        twice,
        twice,
        "{no json",
        line(2) | {"method": "GET"},
        line(3) | {"url": "/v1/completions"},
        line(4) | {"body": "text"},
        "[]",
    ]
    with house.housekeeping():
        batch = house.ended(house.batch(*lines))
        gone = house.client.batches.create(
            input_file_id=(file_id := house.upload(line(0))),
            endpoint="/v1/chat/completions",
            completion_window="24h",
        )
        house.client.files.delete(file_id)
        assert house.ended(gone.id).status in ("failed", "completed")
    assert batch.status == "failed" and batch.errors is not None
    assert [error.line for error in batch.errors.data or []] == [2, 3, 4, 5, 6, 7]
    with pytest.raises(openai.NotFoundError):
        house.client.batches.create(
            input_file_id="file-" + "a" * 26,
            endpoint="/v1/chat/completions",
            completion_window="24h",
        )


@pytest.mark.parametrize(
    "field, value",
    [
        ("completion_window", "0h"),
        ("completion_window", "31d"),
        ("completion_window", "soon"),
        ("endpoint", "/v1/audio/speech"),
        ("metadata", {"a": "x" * 513}),
        ("webhook", "http://127.0.0.1/"),
    ],
)
def test_a_batch_that_cannot_be_is_refused(house: House, field: str, value: object) -> None:
    body = {
        "input_file_id": "file-" + "a" * 26,
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    answer = httpx.post(f"{house.gateway_url}/v1/batches", json=body | {field: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_a_cancelled_batch_keeps_what_was_done_and_never_crowds_the_queue(house: House) -> None:
    lines = [line(0), *(line(number, metadata={"play": "wait"}) for number in range(1, 30))]
    with house.housekeeping("--batch-window", "8"):
        before = len(house.actor.jobs)
        batch_id = house.batch(*lines)
        eventually(lambda: len(house.actor.jobs) - before >= 9)
        assert house.client.batches.cancel(batch_id).status == "cancelling"
        batch = house.ended(batch_id)
    assert batch.status == "cancelled"
    assert len(house.actor.jobs) - before == 9
    assert set(house.lines_of(batch.output_file_id)) == {"line-0"}
    cut = house.lines_of(batch.error_file_id)
    assert len(cut) == 8
    assert {each["error"]["code"] for each in cut.values()} == {"batch_cancelled"}  # type: ignore[index]


def test_an_expired_batch_says_so_of_every_line_that_was_not_done(house: House) -> None:
    lines = [line(0), *(line(number, metadata={"play": "wait"}) for number in range(1, 20))]
    with house.housekeeping("--batch-window", "8"):
        batch = house.ended(house.batch(*lines, window="3s"))
    assert batch.status == "expired"
    done, cut = house.lines_of(batch.output_file_id), house.lines_of(batch.error_file_id)
    assert set(done) | set(cut) == {f"line-{number}" for number in range(20)}
    assert {each["error"]["code"] for each in cut.values()} == {"batch_expired"}  # type: ignore[index]


@pytest.mark.slow
def test_lines_that_begin_alike_run_one_after_another(house: House) -> None:
    """Also where the file that says so is lost."""
    systems = ["You are a sailor. " * 20, "You are a baker. " * 20, "You are a pilot. " * 20]
    lines = [
        line(number) | {"body": {"model": MODEL, "messages": [
            {"role": "system", "content": systems[number % 3]},
            {"role": "user", "content": f"{number}?"},
        ]}}
        for number in range(12)
    ]  # fmt: skip
    before = len(house.actor.jobs)
    with house.housekeeping("--batch-window", "3"):
        batch_id = house.batch(*lines)
        eventually(lambda: len(house.actor.jobs) - before >= 4)
        house.folder.joinpath(f".{batch_id}.order").unlink()
        batch = house.ended(batch_id)
    assert set(house.lines_of(batch.output_file_id)) == {f"line-{number}" for number in range(12)}
    asked = [job.chat.messages[1]["content"] for job in house.actor.jobs[before:] if job.chat]
    assert asked == [f"{number}?" for first in range(3) for number in range(first, 12, 3)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_batch_outlives_the_deaths_of_housekeeping_and_repeats_no_line(
    house: House, tmp_path: Path
) -> None:
    before = len(house.actor.jobs)
    batch_id = house.batch(*(line(number) for number in range(200)))
    for point in ("batch.opened:2", "batch.line:70", "batch.written:2", "batch.filed"):
        with house.housekeeping("--batch-window", "32", PENSTOCK_CRASH_AT=point) as dying:
            assert dying.process.wait(100) == -9, point
        if point != "batch.filed":  # the last lease lapses by itself
            lapse(house, batch_id)
    with house.housekeeping():
        batch = house.ended(batch_id)
        eventually(lambda: not [*house.folder.glob(".*")])  # a moment after it has ended
    assert batch.status == "completed"
    good = house.lines_of(batch.output_file_id)
    assert set(good) == {f"line-{number}" for number in range(200)}
    ran = Counter(job.job_id for job in house.actor.jobs[before:])
    assert len(ran) == 200 and set(ran.values()) == {1}


def lapse(house: House, batch_id: str) -> None:
    """End the lease of a turn whose process has died, now."""
    with redis.Redis.from_url(house.redis_url) as store:
        now_ms = store.time()[0] * 1000
        assert store.zadd(f"{CHORES}due:batches", {batch_id: now_ms}, xx=True, ch=True) == 1
        assert store.hset(f"{CHORES}held:batches", batch_id, now_ms) == 0


def test_a_line_that_holds_too_much_is_told_unread(tmp_path: Path) -> None:
    text = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"x": [%s1]}}'
    (tmp_path / "lines").write_text(text % ("[]," * MAX_GROUPS))
    count, [wrong] = line_errors(tmp_path / "lines", "/v1/completions")
    assert count == 1 and str(MAX_GROUPS) in str(wrong["message"])
