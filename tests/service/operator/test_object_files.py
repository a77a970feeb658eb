"""Files in a store of objects that speaks as S3, with folders that nobody shares."""

import asyncio
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest
from moto.server import ThreadedMotoServer
from openai import OpenAI

from penstock.compose.server import Server
from penstock.gateway.files import files as files_module
from penstock.gateway.files.files import Files, FilesSettings
from penstock.schemas.process.exit_status import NEVER_STARTS
from penstock.schemas.redis.connection import connect
from stage import MODEL, Actor, GatewayProcess, HousekeepingProcess, eventually, spoken

URL = "s3://penstock/files"
KEYS = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_REGION": "us-east-1"}


@dataclass(frozen=True, slots=True)
class Stores:
    """Two gateways and a store of objects."""

    redis_url: str
    endpoint: str
    folders: list[Path]
    clients: list[OpenAI]

    @property
    def names(self) -> set[str]:
        """What is in the store."""
        s3: Any = boto3.client("s3", endpoint_url=self.endpoint, region_name="us-east-1")
        found = s3.list_objects_v2(Bucket="penstock").get("Contents", [])
        return {each["Key"].removeprefix("files/") for each in found}

    def held(self) -> list[Path]:
        """What is in the gateways' and the housekeeper's folders."""
        return [path for folder in self.folders for path in folder.iterdir()]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stores]:
    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    folders = [tmp_path_factory.mktemp(f"files{number}") for number in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in KEYS.items():
            patch.setenv(name, value)
        patch.setenv("AWS_ENDPOINT", endpoint)
        patch.setenv("AWS_ALLOW_HTTP", "true")
        s3: Any = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
        s3.create_bucket(Bucket="penstock")

        def flags(number: int) -> list[str]:
            return ["--files-url", URL, "--files-folder", str(folders[number])]

        with (
            Server() as server,
            Actor(server.url) as actor,
            GatewayProcess(server.url, *flags(0)) as one,
            GatewayProcess(server.url, *flags(1)) as two,
            HousekeepingProcess(server.url, *flags(2)),
        ):
            actor.script = lambda job: spoken("fine")
            clients = [
                OpenAI(base_url=f"{each.url}/v1", api_key="EMPTY", max_retries=0)
                for each in (one, two)
            ]
            yield Stores(server.url, endpoint, folders, clients)
    moto.stop()


def test_a_file_is_an_object_and_leaves_nothing_in_a_folder(stores: Stores) -> None:
    content = os.urandom(12 * 2**20 + 5)
    made = stores.clients[0].files.create(file=("x.bin", content), purpose="user_data")
    assert made.id in stores.names
    got = stores.clients[1].files.content(made.id)
    assert got.response.headers["content-length"] == f"{len(content)}"
    assert got.read() == content
    stores.clients[1].files.delete(made.id)
    assert made.id not in stores.names and not stores.held()


def test_parts_that_came_over_several_gateways_are_one_file(stores: Stores) -> None:
    pieces = [os.urandom(2**20) for _ in range(4)]
    whole = b"".join(pieces)
    upload = stores.clients[0].uploads.create(
        bytes=len(whole), filename="x", mime_type="text/plain", purpose="user_data"
    )
    ids = [
        stores.clients[number % 2].uploads.parts.create(upload.id, data=piece).id
        for number, piece in enumerate(pieces)
    ]
    for client in stores.clients:  # the second asks again for what was done
        done = client.uploads.complete(
            upload.id, part_ids=ids, md5=hashlib.md5(whole, usedforsecurity=False).hexdigest()
        )
        assert done.file is not None
    assert stores.clients[0].files.content(done.file.id).read() == whole
    assert not [name for name in stores.names if "part_" in name] and not stores.held()


def test_a_batch_reads_and_writes_objects(stores: Stores) -> None:
    lines = [
        {
            "custom_id": f"{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": MODEL, "messages": [{"role": "user", "content": f"{number}"}]},
        }
        for number in range(20)
    ]
    client = stores.clients[0]
    text = "\n".join(map(json.dumps, lines)).encode()
    asked = client.files.create(file=("in.jsonl", text), purpose="batch")
    batch = client.batches.create(
        input_file_id=asked.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    eventually(lambda: client.batches.retrieve(batch.id).status == "completed")
    output = client.batches.retrieve(batch.id).output_file_id
    assert output in stores.names
    answers = [json.loads(each) for each in client.files.content(str(output)).text.splitlines()]
    assert {each["custom_id"] for each in answers} == {each["custom_id"] for each in lines}
    eventually(lambda: not stores.held())


def test_a_large_request_is_an_object(stores: Stores) -> None:
    one, two = stores.clients
    made = one.responses.create(model=MODEL, input="x" * 70_000)
    job_id = made.id.removeprefix("resp_")
    eventually(lambda: job_id in stores.names)
    (item,) = two.responses.input_items.list(made.id)
    assert item.content[0].text == "x" * 70_000  # type: ignore[union-attr]
    two.responses.delete(made.id)
    assert job_id not in stores.names
    eventually(lambda: not stores.held())


def test_what_nobody_knows_is_swept(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = stores.clients[0].files.create(file=("x", b"kept"), purpose="user_data")
    s3: Any = boto3.client("s3", endpoint_url=stores.endpoint, region_name="us-east-1")
    s3.put_object(Bucket="penstock", Key="files/file-" + "b" * 26, Body=b"left over")
    monkeypatch.setattr(files_module, "UNKNOWN_KEPT_S", -10)

    async def sweep() -> int:
        redis = connect(stores.redis_url)
        try:
            settings = FilesSettings(files_folder=stores.folders[2], files_url=URL)
            return await Files(redis, settings).sweep()
        finally:
            await redis.aclose()

    assert asyncio.run(sweep()) == 1
    assert kept.id in stores.names and "file-" + "b" * 26 not in stores.names


def test_a_store_that_is_away_is_told_and_tried_again(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:1")
    flags = ("--files-url", URL, "--files-folder", str(tmp_path))
    with GatewayProcess(stores.redis_url, *flags) as gateway:
        refused = httpx.post(
            f"{gateway.url}/v1/files",
            files={"file": ("x", b"x")},
            data={"purpose": "user_data"},
            timeout=60,
        )
        assert refused.json()["error"]["code"] == "storage_unavailable"
        assert (refused.status_code, refused.headers["x-should-retry"]) == (503, "true")
        assert not [*tmp_path.iterdir()]
        assert "store of files failed" in gateway.log.read_text()
        assert httpx.get(f"{gateway.url}/health").status_code == 200


ASKS_AND_ENDS = """
import asyncio
from penstock.gateway.files.storage import NoSuchStore, ObjectStorage
try:
    asyncio.run(ObjectStorage("s3://nowhere/files").check())
except NoSuchStore:
    raise SystemExit(3)
"""


def test_a_process_that_has_just_asked_a_store_ends_with_its_own_status(stores: Stores) -> None:
    processes = [subprocess.Popen([sys.executable, "-c", ASKS_AND_ENDS]) for _ in range(16)]
    assert [process.wait(60) for process in processes] == [NEVER_STARTS] * len(processes)


def test_a_bucket_that_is_not_there_ends_each_process_at_its_start(
    stores: Stores, tmp_path: Path
) -> None:
    flags = ("--files-url", "s3://nowhere/files", "--files-folder", str(tmp_path))
    with HousekeepingProcess(stores.redis_url, *flags) as housekeeping:
        assert housekeeping.process.wait(60) == NEVER_STARTS
        assert "there is no such bucket" in housekeeping.log.read_text()
    with GatewayProcess(stores.redis_url, *flags) as gateway:
        assert gateway.process.wait(60) == NEVER_STARTS
        assert "there is no such bucket" in gateway.log.read_text()


def test_a_bucket_that_goes_is_told_to_callers(stores: Stores, tmp_path: Path) -> None:
    s3: Any = boto3.client("s3", endpoint_url=stores.endpoint, region_name="us-east-1")
    s3.create_bucket(Bucket="short")
    flags = ("--files-url", "s3://short/files", "--files-folder", str(tmp_path))
    with GatewayProcess(stores.redis_url, *flags) as gateway:
        assert put_into(gateway).status_code == 200
        s3.delete_object(
            Bucket="short", Key=s3.list_objects_v2(Bucket="short")["Contents"][0]["Key"]
        )
        s3.delete_bucket(Bucket="short")
        refused = put_into(gateway)
        assert "there is no such bucket; make it, or name another" in gateway.logged()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "storage_unavailable")


def test_a_store_that_takes_requests_and_does_not_answer_is_told_after_15_s(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        flags = ("--files-url", URL, "--files-folder", str(tmp_path))
        with GatewayProcess(stores.redis_url, *flags) as gateway:
            began_s = time.monotonic()
            refused = put_into(gateway)
            assert 10 < time.monotonic() - began_s < 24
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "storage_unavailable")


def put_into(gateway: GatewayProcess) -> httpx.Response:
    files, fields = {"file": ("x", b"x")}, {"purpose": "user_data"}
    return httpx.post(f"{gateway.url}/v1/files", files=files, data=fields, timeout=60)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"files_url": URL}, "files-folder"),
        ({"files_url": "ftp://x", "files_folder": "/tmp"}, "pattern"),
        ({"files_url": "s3://key:secret@x", "files_folder": "/tmp"}, "pattern"),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(given: dict[str, str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        FilesSettings(**given)  # type: ignore[arg-type]
