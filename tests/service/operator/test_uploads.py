"""Files that come in parts, by OpenAI's client, which cuts them itself."""

import asyncio
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import redis
from openai import OpenAI
from openai.types import Upload

import api_keys
from penstock.compose.server import Server
from penstock.gateway.files.files import Files, FilesSettings
from penstock.gateway.files.uploads import UploadNotFound, UploadRequest, Uploads
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.keys import CHORES
from stage import GatewayProcess

CONTENT = os.urandom(2_500_000)
LIMITS = ("--max-file-bytes", "3000000", "--files-quota", "3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def gateway(folder: Path) -> Iterator[GatewayProcess]:
    with (
        Server() as server,
        GatewayProcess(server.url, "--files-folder", str(folder), *LIMITS) as gateway,
    ):
        yield gateway


@pytest.fixture
def client(gateway: GatewayProcess, folder: Path) -> Iterator[OpenAI]:
    with client_of(gateway) as client:
        yield client
        for each in client.files.list():
            client.files.delete(each.id)
    for left in folder.iterdir():  # parts of uploads that were not ended
        left.unlink()


def client_of(gateway: GatewayProcess, key: str = "none") -> OpenAI:
    url = f"{gateway.url}/v1"
    return OpenAI(base_url=url, api_key=key, max_retries=0, _strict_response_validation=True)


def begun(client: OpenAI, num_bytes: int) -> Upload:
    return client.uploads.create(
        bytes=num_bytes, filename="in.jsonl", mime_type="text/plain", purpose="batch"
    )


def test_a_file_comes_in_parts(client: OpenAI, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(CONTENT)
    made = client.uploads.upload_file_chunked(
        file=path,
        mime_type="application/jsonl",
        purpose="batch",
        part_size=700_000,
        md5=hashlib.md5(CONTENT).hexdigest(),
    )
    assert made.status == "completed"
    assert made.file is not None
    assert (made.file.bytes, made.file.filename) == (len(CONTENT), "in.jsonl")
    assert client.files.content(made.file.id).content == CONTENT
    assert [each.name for each in folder.iterdir()] == [made.file.id]


def test_parts_stand_in_the_order_that_is_given(client: OpenAI, folder: Path) -> None:
    upload = begun(client, 6)
    ids = [client.uploads.parts.create(upload.id, data=each).id for each in (b"aa", b"bb", b"cc")]
    done = client.uploads.complete(upload.id, part_ids=[ids[2], ids[0], ids[1]])
    again = client.uploads.complete(upload.id, part_ids=[ids[2], ids[0], ids[1]])
    assert done.file is not None
    assert done.file == again.file
    assert client.files.content(done.file.id).content == b"ccaabb"
    with pytest.raises(openai.BadRequestError, match="the upload is completed"):
        client.uploads.cancel(upload.id)
    with pytest.raises(openai.BadRequestError, match="the upload is completed"):
        client.uploads.parts.create(upload.id, data=b"d")


def test_what_does_not_fit_is_refused_and_can_be_mended(client: OpenAI, folder: Path) -> None:
    upload = begun(client, 4)
    with pytest.raises(openai.BadRequestError, match="more than 4 bytes"):
        client.uploads.parts.create(upload.id, data=b"12345")
    ids = [client.uploads.parts.create(upload.id, data=each).id for each in (b"aa", b"bb")]
    with pytest.raises(openai.BadRequestError, match="the parts have 2 bytes, the file 4"):
        client.uploads.complete(upload.id, part_ids=ids[:1])
    with pytest.raises(openai.BadRequestError, match="is no part of this upload"):
        client.uploads.complete(upload.id, part_ids=[*ids, "part_x"])
    with pytest.raises(openai.BadRequestError, match="md5: the file's is"):
        client.uploads.complete(upload.id, part_ids=ids, md5="0")
    assert client.uploads.complete(upload.id, part_ids=ids).status == "completed"


def test_a_tenant_without_room_may_complete_once_there_is_some_or_cancel(client: OpenAI) -> None:
    others = [client.files.create(file=b"x", purpose="user_data").id for _ in range(3)]
    uploads = [begun(client, 2) for _ in range(2)]
    parts = [client.uploads.parts.create(each.id, data=b"aa").id for each in uploads]
    for upload, part in zip(uploads, parts, strict=True):
        with pytest.raises(openai.BadRequestError, match="3 files"):
            client.uploads.complete(upload.id, part_ids=[part])
    assert client.uploads.cancel(uploads[0].id).status == "cancelled"
    client.files.delete(others[0])
    assert client.uploads.complete(uploads[1].id, part_ids=[parts[1]]).status == "completed"


def test_a_cancelled_upload_leaves_nothing(client: OpenAI, folder: Path) -> None:
    upload = begun(client, 4)
    part = client.uploads.parts.create(upload.id, data=b"aa").id
    assert client.uploads.cancel(upload.id).status == "cancelled"
    assert client.uploads.cancel(upload.id).status == "cancelled"
    assert not [*folder.iterdir()]
    with pytest.raises(openai.BadRequestError, match="the upload is cancelled"):
        client.uploads.complete(upload.id, part_ids=[part])


def test_what_is_no_upload_is_refused(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="at most 3000000"):
        begun(client, 3_000_001)
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.uploads.create(bytes=1, filename="a", mime_type="a", purpose="secret")  # type: ignore[arg-type]
    for upload_id in ("upload_none", "..%2f..%2fetc"):
        with pytest.raises(openai.NotFoundError):
            client.uploads.cancel(upload_id)


def test_uploads_are_their_tenants(tmp_path: Path) -> None:
    with (
        Server() as server,
        GatewayProcess(server.url, "--files-folder", str(tmp_path)) as gateway,
    ):
        mine, other = (
            client_of(gateway, api_keys.issue(server.url, tenant=name)) for name in ("a", "b")
        )
        upload = begun(mine, 2)
        with pytest.raises(openai.NotFoundError):
            other.uploads.parts.create(upload.id, data=b"aa")
        with pytest.raises(openai.NotFoundError):
            other.uploads.cancel(upload.id)
        part = mine.uploads.parts.create(upload.id, data=b"aa").id
        with pytest.raises(openai.NotFoundError):
            other.uploads.complete(upload.id, part_ids=[part])


def test_files_have_purposes_and_batches_read_theirs_alone(client: OpenAI) -> None:
    kept = client.files.create(file=("a.txt", b"text"), purpose="user_data")
    assert kept.purpose == "user_data"
    assert [each.id for each in client.files.list(purpose="user_data")] == [kept.id]
    assert client.files.content(kept.id).content == b"text"
    with pytest.raises(openai.BadRequestError, match="purpose is not batch"):
        client.batches.create(
            input_file_id=kept.id, endpoint="/v1/completions", completion_window="24h"
        )


def test_an_upload_that_is_forgotten_meanwhile_gets_no_key_without_an_end(
    redis_url: str, tmp_path: Path
) -> None:
    asked = UploadRequest(bytes=1, filename="f", mime_type="text/plain", purpose="batch")

    async def main() -> None:
        async with QueueClient.from_url(redis_url) as client:
            files = Files(client.redis, FilesSettings(files_folder=tmp_path))
            uploads = Uploads(client.redis, files, 10)
            record = await uploads.create("default", asked, 1000, "a" * 26)
            with redis.Redis.from_url(redis_url) as keys:
                keys.delete(key := f"{CHORES}upload:{record.id}")
                part = files.new_part()
                part.write_bytes(b"x")
                with pytest.raises(UploadNotFound):
                    await uploads.add(record, part, 1, "b" * 26)
                with pytest.raises(UploadNotFound):
                    await uploads.cancel(record)
                assert not keys.exists(key)

    asyncio.run(main())
    assert not [*tmp_path.iterdir()]
