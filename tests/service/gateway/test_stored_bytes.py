"""What a tenant stores has one account: it is bound, it is given back, and it heals."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import redis

from api_keys import bearer, issue
from penstock.gateway.auth.api_key import DEFAULT_SCOPES
from penstock.gateway.files.storage_accounts import StorageAccounts, StorageUse
from penstock.schemas.job import Job
from penstock.schemas.keys import CHORES
from penstock.schemas.redis.connection import connect
from receiver import Receiver
from stage import (
    MODEL,
    Actor,
    GatewayProcess,
    HousekeepingProcess,
    Line,
    Wait,
    eventually,
    spoken,
)

MOST = 300_000
HEAD = b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
THING = 512  # what each takes besides


@dataclass(frozen=True)
class House:
    actor: Actor
    gateway: GatewayProcess
    folder: Path
    redis: "redis.Redis[bytes]"
    receiver: Receiver

    @contextmanager
    def tenant(
        self, name: str, scopes: Sequence[str] = DEFAULT_SCOPES, **limits: object
    ) -> Iterator[httpx.Client]:
        """A caller whose key has these limits, once the gateway knows it."""
        key = issue(self.actor.redis_url, tenant=name, scopes=scopes, limits=limits)
        headers = bearer(key)
        with httpx.Client(base_url=self.gateway.url, headers=headers, timeout=60) as http:
            eventually(lambda: http.get("/version").is_success)
            yield http

    def used(self, tenant: str) -> int:
        """The tenant's account, which is the sum of its entries."""
        with self.redis.pipeline() as pipe:
            pipe.hgetall(f"{CHORES}storage_bytes:{tenant}")
            pipe.zrange(f"{CHORES}storage:{tenant}", 0, -1)
            pipe.hget(f"{CHORES}storage_used", tenant)
            entries, ends, total = pipe.execute()
        assert set(entries) == set(ends)
        used = int(total or 0)
        assert used == sum(map(int, entries.values()))
        return used


@pytest.fixture(scope="module")
def house(actor: Actor, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("files")
    receiver = Receiver()
    actor.script = lambda job: spoken("a")
    flags = ["--files-folder", str(folder), "--max-stored-bytes", str(MOST), "--require-api-keys"]
    with (
        GatewayProcess(actor.redis_url, *flags, "--webhook-private", receiver.url) as gateway,
        redis.Redis.from_url(actor.redis_url) as client,
    ):
        yield House(actor, gateway, folder, client, receiver)
    receiver.close()


def items(num_bytes: int) -> dict[str, object]:
    return {"items": [{"role": "user", "content": "x" * num_bytes}]}


def refused(answer: httpx.Response) -> str:
    assert answer.status_code == 429, answer.text
    error = answer.json()["error"]
    assert error["code"] == "storage_quota_exceeded"
    assert answer.headers["x-should-retry"] == "false"
    return str(error["message"])


def lines(http: httpx.Client, count: int) -> str:
    """A file of requests, each of which says its number."""

    def line(number: int) -> str:
        body = {"model": MODEL, "messages": [{"role": "user", "content": f"{number}"}]}
        asked = {"custom_id": f"{number}", "method": "POST", "url": "/v1/chat/completions"}
        return json.dumps(asked | {"body": body})

    content = "\n".join(map(line, range(count)))
    form = {"purpose": "batch"}
    return str(http.post("/v1/files", data=form, files={"file": ("f", content)}).json()["id"])


def up(http: httpx.Client, num_bytes: int) -> httpx.Response:
    form = {"purpose": "user_data"}
    return http.post("/v1/files", data=form, files={"file": ("f", b"x" * num_bytes)})


def test_conversations_are_bound_however_many_come_at_once(house: House) -> None:
    with house.tenant("many") as http, ThreadPoolExecutor(8) as pool:
        answers = [
            *pool.map(lambda _: http.post("/v1/conversations", json=items(50_000)), [0] * 20)
        ]
        said = [each for each in answers if not each.is_success]
        assert len(answers) - len(said) == 5
        assert f" of {MOST} bytes stored" in refused(said[0]) and "delete" in refused(said[0])
        assert 250_000 < house.used("many") <= MOST
        name = next(each.json()["id"] for each in answers if each.is_success)
        assert refused(http.post(f"/v1/conversations/{name}/items", json=items(100_000)))
        asked = {"model": MODEL, "input": "x" * 60_000, "conversation": name}
        assert refused(http.post("/v1/responses", json=asked))
        assert http.get(f"/v1/conversations/{name}/items").json()["data"]
        assert http.delete(f"/v1/conversations/{name}").is_success
        assert http.post("/v1/conversations", json=items(50_000)).is_success


def test_a_conversation_counts_what_it_holds_until_it_is_deleted(house: House) -> None:
    with house.tenant("talks") as http:
        name = http.post("/v1/conversations", json=items(10_000)).json()["id"]
        began = house.used("talks")
        assert 10_000 + THING < began < 11_000
        added = http.post(f"/v1/conversations/{name}/items", json=items(20_000)).json()["data"]
        assert 20_000 < house.used("talks") - began < 21_000
        http.post(f"/v1/conversations/{name}", json={"metadata": {"a": "b" * 500}})
        told = house.used("talks")
        http.post(f"/v1/conversations/{name}", json={"metadata": {}})
        assert house.used("talks") == told - len('"a": ""') - 500
        http.delete(f"/v1/conversations/{name}/items/{added[0]['id']}")
        assert house.used("talks") - began < 500
        http.delete(f"/v1/conversations/{name}")
        assert house.used("talks") == 0


def test_what_is_less_is_let_through_above_the_quota(house: House) -> None:
    """As where a quota was made smaller."""
    with house.tenant("less") as http, house.tenant("less", max_stored_bytes=100) as few:
        body = {"metadata": {"a": "b" * 100}}
        path = f"/v1/conversations/{http.post('/v1/conversations', json=body).json()['id']}"
        assert few.post(path, json={"metadata": {"a": "b" * 101}}).status_code == 429
        assert few.post(path, json={"metadata": {"a": "b" * 99}}).is_success


def test_what_moves_to_disk_counts_as_before(house: House) -> None:
    with house.tenant("large") as http:
        name = http.post("/v1/conversations", json=items(100_000)).json()["id"]
        before = house.used("large")
        entries = f"{CHORES}conversation:{name}:entries"
        flags = ["--files-folder", str(house.folder)]
        with HousekeepingProcess(house.actor.redis_url, *flags):
            eventually(lambda: len(house.redis.lrange(entries, 0, -1)[0]) < 1000)
        assert before <= house.used("large") < before + 500
        assert http.post("/v1/conversations", json=items(250_000)).status_code == 429


def test_stored_responses_and_chats_count_until_they_are_deleted(house: House) -> None:
    message = [{"role": "user", "content": "x" * 100_000}]
    chat = {"model": MODEL, "messages": message, "store": True}
    response = {"model": MODEL, "input": "x" * 100_000}
    with house.tenant("stores") as http:
        made = [http.post("/v1/responses", json=response).json()["id"] for _ in range(2)]
        assert 200_000 < house.used("stores") < 210_000
        assert refused(http.post("/v1/responses", json=response))
        assert refused(http.post("/v1/chat/completions", json=chat))
        assert http.post("/v1/responses", json=response | {"store": False}).is_success
        http.delete(f"/v1/responses/{made[0]}")
        again = http.post("/v1/chat/completions", json=chat).json()["id"]
        assert 200_000 < house.used("stores") < 210_000
        http.delete(f"/v1/chat/completions/{again}")
        http.delete(f"/v1/responses/{made[1]}")
        assert house.used("stores") == 0


def test_a_refused_response_counts_nothing_and_a_repeated_one_once(house: House) -> None:
    body = {"model": MODEL, "input": "x" * 10_000}
    with house.tenant("again", requests_per_minute=1) as http:
        headers = {"idempotency-key": "a"}
        first = http.post("/v1/responses", json=body, headers=headers)
        once = house.used("again")
        assert first.is_success and once > 10_000
        assert http.post("/v1/responses", json=body, headers=headers).is_success
        assert http.post("/v1/responses", json=body | {"input": "y"}, headers=headers).is_error
        assert http.post("/v1/responses", json=body).status_code == 429
        assert house.used("again") == once


def test_a_large_answer_counts_when_it_is_there(house: House) -> None:
    house.actor.script = lambda job: spoken("y" * 40_000)
    with house.tenant("long") as http, HousekeepingProcess(house.actor.redis_url):
        http.post("/v1/responses", json={"model": MODEL, "input": "x"})
        eventually(lambda: 40_000 < house.used("long") < 43_000)
    house.actor.script = lambda job: spoken("a")


def test_files_and_uploads_have_the_same_account(house: House) -> None:
    with house.tenant("files") as http:
        made = up(http, 200_000).json()["id"]
        assert house.used("files") == 200_000 + THING
        assert refused(up(http, 200_000))
        assert house.used("files") == 200_000 + THING
        asked = {"bytes": 90_000, "filename": "f", "mime_type": "x", "purpose": "user_data"}
        uploads = [http.post("/v1/uploads", json=asked) for _ in range(2)]
        assert uploads[0].is_success and refused(uploads[1])
        path = f"/v1/uploads/{uploads[0].json()['id']}"
        part = {"data": ("p", b"x" * 90_000)}
        with ThreadPoolExecutor(4) as pool:
            parts = [*pool.map(lambda _: http.post(f"{path}/parts", files=part), range(4))]
        [kept] = [each.json()["id"] for each in parts if each.is_success]
        assert house.used("files") == 290_000 + 2 * THING
        assert len([*house.folder.glob(f".{uploads[0].json()['id']}*")]) == 1
        done = http.post(f"{path}/complete", json={"part_ids": [kept]}).json()
        assert house.used("files") == 290_000 + 2 * THING
        for name in (made, done["file"]["id"]):
            http.delete(f"/v1/files/{name}")
        assert house.used("files") == 0
        cancelled = http.post("/v1/uploads", json=asked).json()["id"]
        http.post(f"/v1/uploads/{cancelled}/cancel")
        assert house.used("files") == 0


def test_a_file_as_large_as_the_quota_has_room(house: House) -> None:
    with house.tenant("fills") as http:
        assert up(http, MOST - 2 * THING).is_success
        assert house.used("fills") == MOST - THING


def test_a_file_that_says_no_length_needs_room_for_the_longest(house: House) -> None:
    with house.tenant("chunks") as http:
        body = HEAD + b"x\r\n--b--\r\n"
        kind = {"content-type": "multipart/form-data; boundary=b"}
        assert refused(http.post("/v1/files", content=iter([body]), headers=kind))
        assert house.used("chunks") == 0


def test_a_batch_counts_what_it_writes_and_then_its_files_do(house: House) -> None:
    gate, asked = Wait(), {"endpoint": "/v1/chat/completions", "completion_window": "24h"}

    def play(job: Job) -> Sequence[Line]:
        answer = spoken("y" * 10_000)
        return [gate, *answer] if job.chat and job.chat.messages[0]["content"] == "2" else answer

    house.actor.script = play
    with house.tenant("batches") as http:
        asked["input_file_id"] = lines(http, 3)
        before = house.used("batches")
        made = http.post("/v1/batches", json=asked).json()["id"]
        empty = house.used("batches") - before
        assert THING < empty < 2 * THING
        with HousekeepingProcess(house.actor.redis_url, "--files-folder", str(house.folder)):
            eventually(lambda: 20_000 < house.used("batches") - before - empty < 25_000)
            gate.set()
            path = f"/v1/batches/{made}"
            eventually(lambda: http.get(path).json()["status"] == "completed")
        output = http.get(path).json()["output_file_id"]
        size = http.get(f"/v1/files/{output}").json()["bytes"]
        assert size > 30_000 and house.used("batches") == before + empty + size + THING
        http.delete(f"/v1/files/{output}")
        assert house.used("batches") == before + empty
        rest = MOST - house.used("batches") - THING
        assert http.post("/v1/conversations", json=items(rest - 500)).is_success
        assert refused(http.post("/v1/batches", json=asked))
    house.actor.script = lambda job: spoken("a")


def test_a_webhook_counts_until_it_has_ended(house: House) -> None:
    gate, hears = Wait(), house.receiver
    hears.answers["/h"] = [gate]
    body = {"model": MODEL, "prompt": "x", "webhook": f"{hears.url}/h"}
    with house.tenant("hooks") as http:
        assert http.post("/v1/jobs", json=body).status_code == 202
        with HousekeepingProcess(house.actor.redis_url, "--webhook-private", hears.url):
            eventually(lambda: bool(hears.posts["/h"]))
            assert THING < house.used("hooks") < THING + 1000
            gate.set()
            eventually(lambda: house.used("hooks") == 0)
        assert http.post("/v1/conversations", json=items(MOST - THING - 300)).is_success
        house.redis.hincrby(f"{CHORES}storage_used", "hooks", 300)
        assert refused(http.post("/v1/jobs", json=body))
        assert http.post("/v1/jobs", json={"model": MODEL, "prompt": "x"}).is_success


def test_what_is_gone_by_itself_is_given_back(house: House) -> None:
    """As when a conversation was not used for its time, or a process died while it received."""
    with house.tenant("heals") as http:
        made = [http.post("/v1/conversations", json=items(100_000)).json()["id"] for _ in range(2)]
        assert refused(http.post("/v1/conversations", json=items(100_000)))
        house.redis.zadd(f"{CHORES}storage:heals", {made[0]: 1})
        http.get(f"/v1/conversations/{made[0]}")  # it is used: it is kept for longer
        assert refused(http.post("/v1/conversations", json=items(100_000)))
        house.redis.zadd(f"{CHORES}storage:heals", {made[0]: 1})
        assert http.post("/v1/conversations", json=items(100_000)).is_success
    assert 200_000 < house.used("heals") < 210_000


def test_a_key_may_have_another_quota(house: House) -> None:
    with house.tenant("keys", max_stored_bytes=1000) as few, house.tenant("keys") as usual:
        assert f"of {1000} bytes" in refused(few.post("/v1/conversations", json=items(10_000)))
        assert usual.post("/v1/conversations", json=items(10_000)).is_success
        assert few.post("/v1/completions", json={"model": MODEL, "prompt": "x"}).is_success


WRITES = {
    "/v1/conversations": {"json": items(10)},
    "/v1/files": {"data": {"purpose": "user_data"}, "files": {"file": ("f", b"x")}},
    "/v1/uploads": {"json": {"bytes": 9, "filename": "f", "mime_type": "x", "purpose": "evals"}},
    "/v1/batches": {"json": {}},
}


@pytest.mark.parametrize("path", WRITES)
def test_writes_count_as_requests(house: House, path: str) -> None:
    with house.tenant(f"rate{path.replace('/', '.')}", requests_per_minute=2) as http:
        answers = [http.post(path, **WRITES[path]) for _ in range(4)]  # type: ignore[arg-type]
        assert [each.status_code == 429 for each in answers] == [False, False, True, True]
        last = answers[-1]
        assert last.json()["error"]["code"] == "rate_limited"
        assert last.json()["error"]["message"].startswith("requests_per_minute: the 2 requests")
        assert 0 < int(last.headers["retry-after"]) <= 60
        assert answers[0].headers["x-ratelimit-remaining-requests"] == "1"
        [key] = house.redis.keys(f"{CHORES}writes:rate{path.replace('/', '.')}/*")
        house.redis.pexpire(key, 3_600_000)  # as after a clock that was set back
        assert http.post(path, **WRITES[path]).status_code == 429  # type: ignore[arg-type]
        assert house.redis.pttl(key) <= 60_000
        assert http.post("/v1/completions", json={"model": MODEL, "prompt": "x"}).is_success


def test_over_maxmemory_nothing_is_stored_and_what_is_there_can_go(house: House) -> None:
    asked = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    upload = {"bytes": 9, "filename": "f", "mime_type": "x", "purpose": "batch"}
    with house.tenant("full") as http:
        name = http.post("/v1/conversations", json=items(10_000)).json()["id"]
        added = http.post(f"/v1/conversations/{name}/items", json=items(10)).json()["data"][0]["id"]
        file = lines(http, 1)
        path = f"/v1/conversations/{name}"
        house.redis.config_set("maxmemory", 1)
        try:
            tried = [
                http.post("/v1/conversations", json=items(10)),
                http.post(f"{path}/items", json=items(10)),
                http.post(path, json={"metadata": {"a": "b"}}),
                http.post("/v1/batches", json=asked | {"input_file_id": file}),
                http.post("/v1/uploads", json=upload),
                up(http, 10),
            ]
            assert {each.json()["error"]["code"] for each in tried} == {"queue_full"}
            assert len(http.get(f"{path}/items").json()["data"]) == 2
            assert http.delete(f"{path}/items/{added}").is_success
            assert http.delete(path).is_success
            assert http.delete(f"/v1/files/{file}").is_success
        finally:
            house.redis.config_set("maxmemory", 0)
        assert house.used("full") == 0


def test_the_account_of_a_tenant_that_never_comes_back_goes(redis_url: str) -> None:
    async def look() -> list[StorageUse]:
        async with connect(redis_url) as client:
            accounts = StorageAccounts(client)
            await accounts.reserve("gone", "a", 100, 3600, MOST)
            seen = await accounts.all()
            await client.call("ZADD", f"{CHORES}storage:gone", 1, "a")
            assert await accounts.all() == [StorageUse("gone", 0, 0)]
            return seen

    assert asyncio.run(look()) == [StorageUse("gone", 100 + THING, 1)]
    with redis.Redis.from_url(redis_url) as client:
        assert client.keys() == []


def test_what_is_stored_is_shown(house: House) -> None:
    scopes = ("inference", "metrics")
    headers = bearer(issue(house.actor.redis_url, tenant="boss", scopes=["admin"]))
    with house.tenant("shown", scopes) as http, house.tenant("shows", scopes) as other:
        for each in (http, other):
            each.post("/v1/conversations", json=items(1000))
            each.post("/v1/completions", json={"model": MODEL, "prompt": "x"})
        own = {"tenant": "shown", "used_bytes": house.used("shown"), "num_things": 1}
        told = http.get("/v1/usage").json()
        assert (told["tenant"], told["storage"]) == ("shown", own | {"max_bytes": MOST})
        eventually(lambda: bool(http.get("/v1/usage").json()["accounts"]))
        [account] = http.get("/v1/usage").json()["accounts"]
        assert (account["tenant"], account["model"]) == ("shown", MODEL)
        eventually(lambda: http.get("/v1/status").json()["storage"] == [own])
        seen = http.get("/v1/status", headers=headers).json()["storage"]
        assert own in seen and "shows" in {each["tenant"] for each in seen}
    command = [sys.executable, "-m", "penstock.gateway.commands.top", "--redis-url"]
    ran = {
        flag: subprocess.check_output([*command, house.actor.redis_url, *flag.split()], text=True)
        for flag in ("--json", "")
    }
    assert own in json.loads(ran["--json"])["storage"]
    assert re.search(r"tenant +MB stored +things", ran[""])
