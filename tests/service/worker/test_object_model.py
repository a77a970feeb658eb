"""A model whose folder is in a store of objects that speaks as S3."""

import logging
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest
from moto.server import ThreadedMotoServer

import judges
import tokenizers_made
from penstock.schemas.errors import InvalidJob
from penstock.schemas.params.sampling import SamplingParams
from penstock.worker.llm import LLM
from penstock.worker.process import object_folder as fetching
from penstock.worker.process.model_folder import model_folder
from penstock.worker.process.settings import WorkerSettings

URL = "s3://models/judges/llama"
FETCHES = """
import sys
from penstock.worker.process import object_folder
from penstock.worker.process.model_folder import model_folder
object_folder._PIECE_BYTES = 2**16
print(model_folder(sys.argv[1]))
"""


class Bucket:
    """A bucket of a server, and what was asked of it."""

    def __init__(self, endpoint: str, log: pytest.LogCaptureFixture) -> None:
        self.endpoint = endpoint
        self.s3: Any = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
        self._log = log

    def put(self, folder: Path, prefix: str = "judges/llama/") -> None:
        for path in folder.rglob("*"):
            if path.is_file():
                key = f"{prefix}{path.relative_to(folder)}"
                self.s3.put_object(Bucket="models", Key=key, Body=path.read_bytes())

    def reads(self) -> list[str]:
        """The names of the objects that were read since the last call, one for each piece."""
        paths = re.findall(r"GET /models/(\S+) HTTP", self._log.text)
        self._log.clear()
        return [path.rpartition("/")[2] for path in paths]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    yield f"http://{host}:{port}"
    moto.stop()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    judges.save("llama", folder, max_shard_size="2MB")
    return tokenizers_made.save(tokenizers_made.byte_level(), folder)


@pytest.fixture
def bucket(
    server: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> Iterator[Bucket]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT", server)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caplog.set_level(logging.INFO)
    bucket = Bucket(server, caplog)
    bucket.s3.create_bucket(Bucket="models")
    yield bucket
    httpx.post(f"{server}/moto-api/reset")
    fetching.object_folder.cache_clear()


def folder_anew(url: str = URL, **more: Any) -> Path:
    """As another process has it."""
    fetching.object_folder.cache_clear()
    return model_folder(url, **more)


def test_it_is_the_same_model_and_is_fetched_once(bucket: Bucket, llama: Path) -> None:
    bucket.put(llama)
    bucket.put(llama, "judges/llama/checkpoint-7/")
    bucket.put(llama, "judges/llama2/")
    bucket.s3.put_object(Bucket="models", Key="judges/llama/notes.txt", Body=b"x")
    bucket.s3.put_object(Bucket="models", Key="judges/llama/optimizer.pt", Body=b"x")
    wanted, answered = (
        LLM(name).generate(["once", "more"], SamplingParams(temperature=0))
        for name in (str(llama), URL)
    )
    assert answered == wanted
    reads = bucket.reads()
    assert set(reads) == {path.name for path in llama.iterdir()} and len(set(reads)) == len(reads)
    folder = folder_anew()
    assert not bucket.reads() and folder_anew(f"{URL}/") == folder
    for path in llama.iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes()
    assert WorkerSettings(model=URL).names == ["llama"]


def test_only_what_changed_is_fetched_again(bucket: Bucket, llama: Path) -> None:
    bucket.put(llama)
    before = folder_anew()
    bucket.reads()
    changed = b"{}" + (llama / "generation_config.json").read_bytes()[2:]
    key = "judges/llama/generation_config.json"
    bucket.s3.put_object(Bucket="models", Key=key, Body=changed)
    after = folder_anew()
    assert bucket.reads() == ["generation_config.json"] and after != before
    assert (after / "generation_config.json").read_bytes() == changed
    assert (before / "generation_config.json").read_bytes() != changed
    shard = next(after.glob("model-00002*"))
    shard.resolve().write_bytes(b"cut short")
    assert next(folder_anew().glob("model-00002*")).stat().st_size > 9
    assert bucket.reads() == [shard.name]


def test_the_weights_are_fetched_where_they_are_needed(bucket: Bucket, llama: Path) -> None:
    bucket.put(llama)
    bucket.s3.put_object(Bucket="models", Key="judges/llama/pytorch_model.bin", Body=b"x")
    bucket.s3.put_object(Bucket="models", Key="judges/llama/model.py", Body=b"x")
    assert not [*folder_anew(with_weights=False).glob("*.safetensors")]
    folder = folder_anew(with_code=True)
    assert {path.name for path in folder.iterdir()} == {
        *(path.name for path in llama.iterdir()),
        "model.py",
    }
    for path in llama.glob("*.safetensors*"):
        bucket.s3.delete_object(Bucket="models", Key=f"judges/llama/{path.name}")
    assert (folder_anew() / "pytorch_model.bin").read_bytes() == b"x"


def test_a_fetch_that_was_killed_is_no_model_and_goes_on(
    bucket: Bucket, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put(llama)
    process = subprocess.Popen([sys.executable, "-c", FETCHES, URL], stdout=subprocess.PIPE)
    [home] = wait_for(lambda: [*(tmp_path / "cache/penstock/models").glob("*")])
    wait_for(lambda: sum(part.stat().st_size for part in home.glob("*.part")) > 2**21)
    process.kill()
    process.wait()
    assert not [path for path in home.iterdir() if path.is_dir()]
    there = sum(part.stat().st_size for part in home.glob("*.part"))
    bucket.reads()
    monkeypatch.setattr(fetching, "_PIECE_BYTES", 2**16)
    folder = folder_anew()
    sizes = [path.stat().st_size for path in llama.iterdir()]
    most = (sum(sizes) - there) // 2**16 + len(sizes) + 8  # those that the killed one waited for
    assert len(bucket.reads()) <= most < sum(sizes) // 2**16
    for path in llama.iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes()
    assert not [*home.glob("*.part")]


def wait_for(condition: Callable[[], Any]) -> Any:
    until_s = time.monotonic() + 60
    while not (value := condition()):
        assert time.monotonic() < until_s
        time.sleep(0.001)
    return value


def test_of_several_processes_one_fetches(bucket: Bucket, llama: Path) -> None:
    bucket.put(llama)
    bucket.reads()

    def fetch(_: int) -> str:
        command = [sys.executable, "-c", FETCHES, URL]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    with ThreadPoolExecutor() as pool:
        [folder] = set(pool.map(fetch, range(3)))
    sizes = [(Path(folder.strip()) / path.name).stat().st_size for path in llama.iterdir()]
    assert len(bucket.reads()) == sum(-(-size // 2**16) for size in sizes)


def test_what_changes_meanwhile_is_no_mixture(bucket: Bucket, llama: Path) -> None:
    bucket.put(llama)
    store = fetching._Store(URL)
    [file] = [file for file in store.files() if file.path == "tokenizer.json"]
    key = "judges/llama/tokenizer.json"
    bucket.s3.put_object(Bucket="models", Key=key, Body=b"x" * file.size)
    with pytest.raises(fetching.StoreError, match="was changed while it was fetched"):
        store.piece(fetching._Range(file, 0))
    bucket.s3.delete_object(Bucket="models", Key=key)
    with pytest.raises(fetching.StoreError, match="was changed while it was fetched"):
        store.piece(fetching._Range(file, 0))


def test_while_the_store_is_away_the_last_copy_is_taken(
    bucket: Bucket, llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bucket.put(llama)
    folder = folder_anew()
    monkeypatch.setattr("penstock.schemas.network.object_store.RETRY_S", 1)
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:1")
    assert folder_anew() == folder
    assert "does not answer" in caplog.text and "as it was fetched before" in caplog.text
    with pytest.raises(InvalidJob, match=r"^model: s3://models/others: the store does not answer"):
        folder_anew("s3://models/others")


def refused(url: str = URL, **more: Any) -> str:
    with pytest.raises(InvalidJob) as refusal:
        folder_anew(url, **more)
    assert "\n" not in refusal.value.message and len(refusal.value.message) < 1000
    return refusal.value.message


def test_what_is_no_model_is_told_in_one_line(
    bucket: Bucket, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "model: s3://nowhere/x: there is no such bucket" in refused("s3://nowhere/x")
    assert "no config.json is there, nothing is; name" in refused()
    bucket.put(llama)
    assert "no config.json is there, 11 other objects are; name" in refused("s3://models/judges")
    assert "revision: 's3://models/judges/llama' is a folder" in refused(revision="v2")
    assert refused("s3://nowhere/x", param="tokenizer").startswith("tokenizer: ")
    assert "az://x/y: " in refused("az://x/y")
    bucket.s3.put_object(Bucket="models", Key="gguf/config.json", Body=b"{}")
    bucket.s3.put_object(Bucket="models", Key="gguf/adapter_config.json", Body=b"{}")
    bucket.s3.put_object(Bucket="models", Key="gguf/adapter_model.safetensors", Body=b"{}")
    assert "an adapter of" in refused("s3://models/gguf")
    usage = shutil.disk_usage(tmp_path)._replace(free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert "bytes are to be fetched, and" in refused()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "Not a directory" in refused()
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "pip install 'penstock[objects]'" in refused()


def test_whose_credentials_have_no_right_is_told(bucket: Bucket, llama: Path) -> None:
    bucket.put(llama)
    httpx.post(f"{bucket.endpoint}/moto-api/reset-auth", content=b"0")
    try:
        assert "no right to read it; give credentials" in refused()
    finally:
        httpx.post(f"{bucket.endpoint}/moto-api/reset-auth", content=b"inf")
