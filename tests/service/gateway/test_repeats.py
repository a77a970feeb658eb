"""A request that is repeated under its idempotency key makes one thing, whatever it makes."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import redis
from openai import OpenAI
from openai.types import Batch, FileObject, Upload
from openai.types.conversations import Conversation
from openai.types.responses import ResponseInputItemParam

from api_keys import issue
from penstock.compose.server import Server
from penstock.schemas.keys import CHORES
from stage import GatewayProcess

AT_ONCE = 12
Headers = dict[str, str]


@pytest.fixture(scope="module")
def keyed_gateway(server: Server, files: tuple[str, str]) -> Iterator[GatewayProcess]:
    with GatewayProcess(server.url, *files, "--require-api-keys") as gateway:
        yield gateway


@pytest.fixture
def api(keyed_gateway: GatewayProcess, server: Server, request: pytest.FixtureRequest) -> OpenAI:
    """OpenAI's client, of a tenant of its own."""
    tenant = f"t{abs(hash(request.node.name))}"
    return of(keyed_gateway, issue(server.url, tenant=tenant, scopes=["admin"]))


def of(gateway: GatewayProcess, key: str) -> OpenAI:
    client = OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0)
    while True:
        try:
            client.models.list()
            return client
        except openai.AuthenticationError:
            continue  # the gateway looks for new keys once a second


def under(key: str) -> Headers:
    return {"Idempotency-Key": key}


def said(word: str) -> list[ResponseInputItemParam]:
    return [{"type": "message", "role": "user", "content": each} for each in (word, "more")]


def conversation(client: OpenAI, headers: Headers, word: str) -> Conversation:
    made = client.conversations.create(items=said(word), extra_headers=headers)
    assert len(client.conversations.items.list(made.id).data) == 2
    return made


def file(client: OpenAI, headers: Headers, word: str) -> FileObject:
    content = (word * 1000).encode()
    return client.files.create(file=("f", content), purpose="batch", extra_headers=headers)


def upload(client: OpenAI, headers: Headers, word: str) -> Upload:
    return client.uploads.create(
        bytes=1000, filename=word, mime_type="x", purpose="batch", extra_headers=headers
    )


def batch(client: OpenAI, headers: Headers, word: str) -> Batch:
    return client.batches.create(
        input_file_id=file(client, under("of the batch"), "{}").id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"a": word},
        extra_headers=headers,
    )


def items(client: OpenAI, headers: Headers, word: str) -> list[str]:
    made = client.conversations.create(extra_headers=under("of the items"))
    given = {"items": said(word), "extra_headers": headers}
    added = client.conversations.items.create(made.id, **given)  # type: ignore[arg-type]
    ids = [each.id or "" for each in added.data]
    assert [each.id for each in client.conversations.items.list(made.id, order="asc")] == ids
    return ids


def part(client: OpenAI, headers: Headers, word: str) -> str:
    made, data = upload(client, under("of the part"), "f"), word.encode() * 1000
    return client.uploads.parts.create(made.id, data=data, extra_headers=headers).id


MAKERS: dict[str, Callable[[OpenAI, Headers, str], object]] = {
    "conversation": conversation,
    "file": file,
    "upload": upload,
    "batch": batch,
    "items": items,
    "part": part,
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_repeat_makes_nothing_more_and_another_body_is_refused(api: OpenAI, name: str) -> None:
    ask, headers = MAKERS[name], under("k")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        made = [*pool.map(lambda _: ask(api, headers, "x"), range(AT_ONCE))]
    assert made == [made[0]] * AT_ONCE
    with pytest.raises(openai.UnprocessableEntityError, match="another body") as refused:
        ask(api, headers, "y")
    assert refused.value.code == "idempotency_mismatch"
    assert ask(api, headers, "x") == made[0]


@pytest.mark.parametrize("make", [conversation, file, upload, batch])
def test_another_key_and_none_make_more(
    api: OpenAI, make: Callable[[OpenAI, Headers, str], Conversation | FileObject]
) -> None:
    made = [make(api, headers, "x").id for headers in (under("a"), under("b"), {}, {})]
    assert len({*made}) == len(made)


def test_what_is_listed_is_there_once(api: OpenAI) -> None:
    for _ in range(3):
        batch(api, under("one"), "x")
        made = upload(api, under("one"), "x")
        part_id = api.uploads.parts.create(made.id, data=b"x" * 1000, extra_headers=under("one")).id
    assert len(api.batches.list().data) == 1 and len(api.files.list().data) == 1
    done = [
        api.uploads.complete(made.id, part_ids=[part_id], extra_headers=under("one"))
        for _ in range(2)
    ]
    assert done[0] == done[1] and len(api.files.list().data) == 2
    assert upload(api, under("one"), "x").status == "completed"
    with pytest.raises(openai.UnprocessableEntityError):
        api.uploads.complete(made.id, part_ids=[], extra_headers=under("one"))


def test_a_repeat_shows_how_what_was_made_is_now(api: OpenAI, server: Server) -> None:
    made = batch(api, under("now"), "x")
    with redis.Redis.from_url(server.url) as store:
        store.hset(f"{CHORES}batch:{made.id}", "status", "in_progress")
    assert batch(api, under("now"), "x").status == "in_progress"


def test_a_key_is_of_one_tenant_and_one_path(
    api: OpenAI, keyed_gateway: GatewayProcess, server: Server
) -> None:
    other = of(keyed_gateway, issue(server.url, tenant="other"))
    one = conversation(api, under("mine"), "x")
    assert upload(api, under("mine"), "x").status == "pending"
    assert conversation(other, under("mine"), "y").id != one.id


def test_a_key_is_remembered_for_a_day(api: OpenAI, server: Server) -> None:
    one = conversation(api, under("day"), "x")
    with redis.Redis.from_url(server.url) as store:
        keys = store.keys(f"{CHORES}idempotency:*")
        assert keys and all(80_000 < store.ttl(key) <= 86_400 for key in keys)
        store.delete(*keys)  # as a day later
    assert conversation(api, under("day"), "y").id != one.id


@pytest.mark.parametrize("make", [conversation, file, upload])
def test_what_is_no_key_is_refused(
    api: OpenAI, make: Callable[[OpenAI, Headers, str], object]
) -> None:
    with pytest.raises(openai.BadRequestError, match="1 to 255 printable"):
        make(api, under("k" * 256), "x")
