"""The disk of the files is full: callers are told by name, and all goes on once there is room."""

import asyncio
import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from faults.processes import Process, System
from penstock.gateway.files.disk_texts import DiskTexts
from penstock.gateway.files.storage import FolderStorage
from worker_process import until

MOST_BYTES = 60_000  # that a file may have while the disk is full
NUM_LINES = 300


@contextmanager
def full(process: Process) -> Iterator[None]:
    """Let no file of a process grow past MOST_BYTES; what goes beyond is refused as by a disk."""
    pid = process.process.pid
    hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (MOST_BYTES, hard))
    yield
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))


def test_uploads_are_507_by_name_and_go_on_once_there_is_room(tmp_path: Path) -> None:
    with System() as system:
        gateway = system.gateway("--files-folder", str(tmp_path)).ready()
        until(lambda: gateway.url is not None, "the gateway")
        with httpx.Client(base_url=f"{gateway.url}/v1", timeout=60) as client:
            asked = {"filename": "x", "purpose": "user_data", "mime_type": "text/plain"}
            upload = client.post("/uploads", json=asked | {"bytes": 80_000}).json()["id"]

            def whole() -> httpx.Response:
                form = {"purpose": "user_data"}
                return client.post("/files", files={"file": ("x", b"x" * 80_000)}, data=form)

            def part(num_bytes: int = 40_000) -> httpx.Response:
                path = f"/uploads/{upload}/parts"
                return client.post(path, files={"data": ("x", b"x" * num_bytes)})

            parts = {"part_ids": [part().json()["id"] for _ in range(2)]}

            def join() -> httpx.Response:
                return client.post(f"/uploads/{upload}/complete", json=parts)

            held = len(list(tmp_path.iterdir()))
            asks: list[Callable[[], httpx.Response]] = [whole, lambda: part(80_000), join]
            with full(gateway):
                for ask in asks:
                    answer = ask()
                    assert answer.status_code == 507, answer.text
                    assert answer.json()["error"]["code"] == "storage_full"
                    assert answer.headers["x-should-retry"] == "true"
            assert len(list(tmp_path.iterdir())) == held
            assert join().json()["file"]["bytes"] == whole().json()["bytes"] == 80_000
        assert "Traceback" not in gateway.logged() and "OSError" not in gateway.logged()


def test_a_folder_that_is_gone_is_503_by_name(tmp_path: Path) -> None:
    with System() as system:
        gateway = system.gateway("--files-folder", str(tmp_path / "files")).ready()
        until(lambda: gateway.url is not None, "the gateway")
        (tmp_path / "files").rmdir()
        form = {"purpose": "user_data"}
        answer = httpx.post(f"{gateway.url}/v1/files", files={"file": ("x", b"x")}, data=form)
    assert answer.status_code == 503, answer.text
    assert answer.json()["error"]["code"] == "storage_unavailable"


@pytest.mark.slow
def test_a_batch_stands_still_and_each_line_is_answered_once(tmp_path: Path) -> None:
    def line(number: int) -> str:
        body = {"model": "fake", "prompt": "x", "seed": number, "max_tokens": 200}
        asked = {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions"}
        return json.dumps(asked | {"body": body | {"ignore_eos": True}})

    with System() as system:
        system.worker("--fake-step-ms", "5", "--max-num-seqs", "64")
        gateway = system.gateway("--files-folder", str(tmp_path))
        house = system.housekeeping("--files-folder", str(tmp_path))
        system.ready()
        with httpx.Client(base_url=f"{gateway.url}/v1", timeout=60) as client:
            lines = "\n".join(line(number) for number in range(NUM_LINES))
            files, form = {"file": ("in.jsonl", lines.encode())}, {"purpose": "batch"}
            given = client.post("/files", files=files, data=form).json()["id"]
            asked = {"endpoint": "/v1/completions", "completion_window": "1h"}
            made = client.post("/batches", json=asked | {"input_file_id": given}).json()["id"]
            with full(house):
                until(lambda: "waits: the folder" in house.logged(), "the disk to be full")
                told = client.get(f"/batches/{made}").json()
                assert told["status"] == "in_progress", told
                assert told["request_counts"]["completed"] < NUM_LINES
            until(
                lambda: client.get(f"/batches/{made}").json()["status"] == "completed",
                "the batch to go on",
            )
            output = client.get(f"/batches/{made}").json()["output_file_id"]
            answers = client.get(f"/files/{output}/content").text.splitlines()
        ids = sorted(int(json.loads(each)["custom_id"]) for each in answers)
        assert ids == list(range(NUM_LINES))
        assert "OSError" not in house.logged()


def test_a_text_that_finds_no_room_leaves_nothing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_BYTES, hard))
    try:
        with pytest.raises(OSError):
            texts = DiskTexts(FolderStorage(tmp_path), tmp_path)
            asyncio.run(texts.put("a" * 26, b"x" * 80_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())
