"""The whole of it, as its user starts it: `penstock up`, `penstock demo`."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import redis
from rich.console import Console

from paths import ROOT
from penstock.compose.local import LocalSettings, Stack, gpus
from penstock.compose.server import Server, ServerFailed
from penstock.schemas.process.nearby import nearby, noted
from stage import eventually

FAKE = {"PENSTOCK_LOAD_FORMAT": "fake"}
PATHS = {"PYTHONPATH": str(ROOT)}  # wherever it is started


def penstock(*words: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """A command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "penstock.compose.cli", *words],
        env=os.environ | PATHS | FAKE | env,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=240,
    )


class Up:
    """A running `penstock up` with the fake engine, and what it printed so far."""

    def __init__(
        self,
        *words: str,
        command: tuple[str, ...] = ("up", "--model", "fake"),
        cwd: Path | None = None,
        **env: str,
    ) -> None:
        up = [*command, "--port", "0", *words]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock.compose.cli", *up],
            env=os.environ | PATHS | FAKE | env,
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # Whoever runs the tests in a shell's background has them ignore Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.printed: list[str] = []

    @property
    def url(self) -> str:
        return self.said(r"Penstock serves fake at (http://\S+)/v1")

    @property
    def redis_url(self) -> str:
        return self.said(r"server +ready after .* (redis://\S+)")

    def said(self, pattern: str) -> str:
        found = re.search(pattern, "".join(self.printed))
        assert found is not None, self.printed
        return found[1]

    def read_until(self, pattern: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed.append(line)
            if re.search(pattern, line):
                return
        raise AssertionError(f"ended without {pattern!r}:\n{''.join(self.printed)}")

    def children(self) -> dict[str, int]:
        """The process of each component, by its command."""
        lines = [line.split() for line in children_of(self.process.pid)]
        return {
            words[words.index("penstock.compose.cli") + 1]: int(words[0])
            for words in lines
            if "penstock.compose.cli" in words
        }


def children_of(pid: int) -> list[str]:
    """A line for each: its process id and its command line."""
    found = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(pid)], capture_output=True, text=True, check=True
    )
    return found.stdout.splitlines()


@contextmanager
def up(
    *words: str,
    command: tuple[str, ...] = ("up", "--model", "fake"),
    cwd: Path | None = None,
    **env: str,
) -> Iterator[Up]:
    running = Up(*words, command=command, cwd=cwd, **env)
    try:
        running.read_until("Penstock serves")
        yield running
    finally:
        if running.process.poll() is None:
            running.process.send_signal(signal.SIGINT)
        running.process.wait(120)


def test_each_worker_has_the_next_gpu(tmp_path: Path) -> None:
    gpus_there = {"CUDA_VISIBLE_DEVICES": "3, GPU-5a"}
    with up("--num-workers", "3", HOME=str(tmp_path), **gpus_there) as running:
        has = []
        for line in children_of(running.process.pid):
            if "penstock.compose.cli worker" in line:
                told = Path(f"/proc/{line.split()[0]}/environ").read_bytes().split(b"\0")
                has += [each for each in told if each.startswith(b"CUDA_VISIBLE_DEVICES=")]
        assert sorted(has) == [
            b"CUDA_VISIBLE_DEVICES=3",
            b"CUDA_VISIBLE_DEVICES=3",
            b"CUDA_VISIBLE_DEVICES=GPU-5a",
        ]
        running.said(r"worker-2 +(has GPU GPU-5a of 2, which it shares)")


@pytest.mark.parametrize(("num_workers", "device"), [(1, "auto"), (3, "cpu"), (3, "cuda:1")])
def test_a_worker_alone_has_all_gpus_and_one_of_a_named_device_too(
    monkeypatch: pytest.MonkeyPatch, num_workers: int, device: str
) -> None:
    """Else `cuda:1` would be looked for among one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("PENSTOCK_DEVICE", device)
    stack = Stack(LocalSettings(port=0, num_workers=num_workers), Console())
    try:
        assert stack.gpu_of(1) == {}
    finally:
        stack.close()


def test_gpus_are_those_of_the_machine_where_none_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus(tmp_path) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # no GPU is to be used
    assert gpus(tmp_path) == []


@pytest.mark.slow
def test_up_keeps_what_a_crash_left_in_the_home(tmp_path: Path) -> None:
    with up(HOME=str(tmp_path)) as running:
        supervisor = running.children()["worker"]
        [engine] = [
            line for line in children_of(supervisor) if "penstock.worker.engine_process" in line
        ]
        os.kill(int(engine.split()[0]), signal.SIGKILL)
        running.read_until("what the crash left is in")
        [dump] = (tmp_path / ".penstock" / "crashes").iterdir()
        assert '"exit": "SIGKILL"' in dump.read_text()


@pytest.mark.slow
def test_up_serves_restarts_what_dies_and_ends_in_order() -> None:
    with up() as running:
        assert httpx.get(f"{running.url}/health/ready").status_code == 200
        form = {"data": {"purpose": "batch"}, "files": {"file": ("a.jsonl", b"{}")}}
        assert httpx.post(f"{running.url}/v1/files", **form).status_code == 200
        os.kill(running.children()["gateway"], signal.SIGKILL)
        running.read_until(r"gateway +ended \(SIGKILL\); starts again")
        running.read_until(r"gateway +ready after")
        assert httpx.get(f"{running.url}/v1/models").status_code == 200
        components = running.children().values()
        running.process.send_signal(signal.SIGINT)
        running.read_until(r"gateway +stopped")
        running.read_until(r"worker-1 +stopped")
        running.read_until(r"housekeeping +stopped")
        assert running.process.wait(120) == 0
        assert not [pid for pid in components if _runs(pid)]


@pytest.mark.slow
def test_beside_a_running_up_commands_find_its_server_and_another_up_its_own(
    tmp_path: Path,
) -> None:
    """Started in a folder of the user's, by a relative path."""
    home = {"HOME": str(tmp_path)}
    (tmp_path / "settings.yaml").write_text("max_body_bytes: 3000\n")
    given = ("--folder", "kept", "--config", "settings.yaml", "--webhook-public")
    with up(*given, cwd=tmp_path, **home) as first:
        job = {"model": "fake", "prompt": "hi", "webhook": "https://example.invalid/"}
        assert httpx.post(f"{first.url}/v1/jobs", json=job).status_code == 202
        job["prompt"] = "hi" * 2000
        assert httpx.post(f"{first.url}/v1/jobs", json=job).status_code == 413
        key = json.loads(penstock("keys", "create", "--json", **home).stdout)
        with redis.Redis.from_url(first.redis_url) as server:
            assert server.hexists("penstock:api_keys", key["key_id"])
        eventually(lambda: httpx.get(f"{first.url}/v1/models").status_code == 401, 15)
        port = first.url.rpartition(":")[2]
        for words, why in (
            (("--port", port), f"cannot listen on 127.0.0.1 port {port}: another process does"),
            (("--port", "0", "--folder", "kept"), "another server runs in this folder"),
        ):
            ended = penstock("up", "--model", "fake", *words, cwd=tmp_path, **home)
            assert ended.returncode == 1 and why in ended.stderr
            assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert (tmp_path / "kept" / "appendonlydir").is_dir()
    assert not list((tmp_path / ".penstock" / "up").iterdir())


def test_of_several_running_ups_a_command_asks_which_and_dead_ones_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with noted("redis://:word@127.0.0.1:1/0"), noted("redis://127.0.0.1:2/0"):
        asked = penstock("keys", "list")
        assert asked.returncode == 2 and len(asked.stderr.splitlines()) == 1
        assert "redis://127.0.0.1:1/0" in asked.stderr and "redis://127.0.0.1:2/0" in asked.stderr
    note = "from penstock.schemas.process.nearby import noted\nimport os\n"
    note += "with noted('redis://x:3/0'): os._exit(9)"
    subprocess.run([sys.executable, "-c", note], env=os.environ | PATHS, timeout=60)
    assert len(list((tmp_path / ".penstock" / "up").iterdir())) == 1
    assert nearby() == []


def test_a_server_is_not_taken_for_another_that_has_its_port(tmp_path: Path) -> None:
    with Server() as first:
        with pytest.raises(ServerFailed, match=f"port {first.port} is taken"):
            Server(port=first.port).start()
        with Server(prefers=first.port) as second, redis.Redis(port=second.port) as client:
            assert second.port != first.port
            assert client.info("server")["process_id"] == second.pid


def test_two_servers_never_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("penstock.compose.server.LOCK_S", 0.2)
    with Server(Path("kept")) as server:
        with pytest.raises(ServerFailed, match="another server runs in this folder"):
            Server(tmp_path / "kept").start()
        server.kill()
        server.start()
        assert (tmp_path / "kept" / "server.log").exists()


def test_a_folder_that_cannot_be_is_said_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ServerFailed, match="cannot be written: Not a directory"):
        Server(tmp_path / "file" / "folder").start()


@pytest.mark.slow
def test_nothing_stays_behind_when_up_itself_is_killed() -> None:
    with up() as running:
        components = running.children().values()
        running.process.kill()
        deadline = time.monotonic() + 120
        while any(_runs(pid) for pid in components):
            assert time.monotonic() < deadline, running.children()
            time.sleep(0.1)


def test_the_embedded_server_hears_this_machine_and_no_web_page() -> None:
    with Server() as server, redis.Redis(port=server.port) as client:
        client.set("kept", 1)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", server.port))
        for head in (b"POST / HTTP/1.1\r\n", b"OPTIONS / HTTP/1.1\r\nHost: localhost\r\n"):
            with socket.create_connection(("127.0.0.1", server.port), timeout=10) as page:
                page.sendall(head + b"\r\nFLUSHALL\r\n")
                while page.recv(4096):  # until it hangs up
                    pass
            assert client.get("kept") == b"1"


def test_what_the_embedded_server_writes_is_for_its_owners_eyes(tmp_path: Path) -> None:
    with Server(tmp_path / "jobs") as server, redis.Redis(port=server.port) as client:
        client.set("prompt", "secret")
        written = [path for path in server.folder.rglob("*") if path.is_file()]
        assert written and not [path for path in written if path.stat().st_mode & 0o077]


def test_a_model_that_cannot_be_served_is_said_once_and_ends_up() -> None:
    found = penstock("up", "--model", "/nowhere/at/all", "--port", "0", PENSTOCK_LOAD_FORMAT="auto")
    assert found.returncode == 1
    assert "/nowhere/at/all" in found.stdout and "Traceback" not in found.stdout + found.stderr


@pytest.mark.slow
def test_serve_takes_a_model_as_its_first_word_and_the_flags_of_every_part() -> None:
    flags = ("--max-model-len", "77", "--served-model-name", "small,alias", "--api-key", "k")
    with up(*flags, command=("serve", "fake")) as running:
        url = f"{running.url}/v1/models"
        assert httpx.get(url).status_code == 401
        models = httpx.get(url, headers={"Authorization": "Bearer k"}).json()["data"]
        assert {each["id"]: each["max_model_len"] for each in models} == {"small": 77, "alias": 77}
    wrong = {
        (): "name a model first",
        ("--port", "0"): "name a model first",
        ("fake", "--model", "other"): "--model is not taken here",
        ("fake", "--fd=5"): "--fd is not taken here",
    }
    for words, says in wrong.items():
        refused = penstock("serve", *words)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert says in refused.stderr
    assert "--max-num-seqs" in penstock("serve", "--help").stdout


@pytest.mark.slow
def test_the_demo_streams_three_jobs_one_through_its_workers_death() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "penstock.compose.cli", "demo"],
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    printed = " ".join(found.stdout.split())
    assert "killed (-9)" in printed
    assert "the text is equal to that of a run that nobody killed" in printed
    assert printed.count("tokens/s") == 3


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
