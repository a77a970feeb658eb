"""The commands that README.md and docs/*.md show are typed, section by section, and work."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import httpx
import pytest

from paths import ROOT
from penstock.compose.server import binary, free_port
from scripted import bury
from worker_process import until

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r" *```(\w*)")
COMMAND = re.compile(r"""(?:'[^']*'|"[^"]*"|[^'"#]|(?<=\S)#)*""")  # what comes before a comment
BEGINS = ("penstock ", "curl ", "make ", "export ", "redis-server ")  # of an indented command

INSTALLS = "tests/service/operator/test_packaging.py builds what is installed, and uses it"
NO_CONTAINERS = "no container engine here; tests/service/operator/test_compose.py runs the file's"
IN_A_CLUSTER = "no cluster here; tests/service/operator/test_chart.py renders and runs the chart's"
WANTS_VLLM = "it wants vLLM, and takes minutes"
OF_ENGINES = "tests/service/operator/test_engines_page.py types it, with a server behind it"
NEVER = {  # command: why it is not typed
    "make demo": "tests/service/operator/test_stack.py runs the demo",
    "make test": "this goes with it",
    "penstock completion bash > ~/.local/share/bash-completion/completions/penstock": (
        "tests/service/operator/test_completion.py types TAB"
    ),
    "penstock models remove old-model": "tests/service/operator/test_models_end.py removes one",
    "pip install '.[worker]'": INSTALLS,
    "pip install .": INSTALLS,
    "pip install openai": "the tests have it",
    "python docs/examples/in_process.py": "tests/service/operator/test_examples.py runs it",
    "vllm serve /models/qwen3 --max-model-len 8192": "another project's",
    "vllm serve /models/qwen3 --port 8001": "another project's",
    "pip install vllm": INSTALLS,
    "penstock workers drain WORKER": "tests/service/gateway/test_fleet.py drains one",
    "penstock workers sleep WORKER": "tests/service/worker/test_sleep.py lets some sleep",
    "penstock workers wake WORKER": "the same",
    "penstock replay JOB": "tests/service/gateway/test_replay.py replays some",
    "penstock worker --model /models/qwen3 --engine vllm "
    """--engine-args '{"tensor_parallel_size": 2}'""": "it wants vLLM and two GPUs",
    "penstock serve /models/qwen3 --engine openai --engine-url http://127.0.0.1:8001": OF_ENGINES,
    "curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' -d "
    """'{"model": "qwen3", "messages": [{"role": "user", "content": "Tell me of the river."}], """
    """"stream": true}'""": OF_ENGINES,
    "VLLM_CPU_OMP_THREADS_BIND=0-1 python -m vllm.entrypoints.openai.api_server --model m/135m "
    "--dtype bfloat16 --max-model-len 6000 --max-num-seqs 64 --kv-cache-memory-bytes 2G "
    "--port 8011": "another project's",
    "VLLM_CPU_OMP_THREADS_BIND=0-1 python -m vllm.entrypoints.openai.api_server --model m/135m "
    "--dtype bfloat16 --max-model-len 6000 --max-num-seqs 64 --kv-cache-memory-bytes 2G "
    "--no-enable-prefix-caching --disable-uvicorn-access-log --port 8011": "another project's",
    "penstock worker --model m/135m --served-model-name behind --engine openai "
    "--engine-url http://127.0.0.1:8011 --max-num-seqs 64": WANTS_VLLM,
    "VLLM_CPU_OMP_THREADS_BIND=0-1 penstock worker --model m/135m --served-model-name inside "
    "--engine vllm --dtype bfloat16 --max-model-len 6000 --max-num-seqs 64 "
    "--kv-cache-memory-bytes 2147483648 --no-enable-prefix-caching": WANTS_VLLM,
    **{
        f"penstock bench serve --base-url http://127.0.0.1:{at} --dataset-name penstock-W "
        "--max-concurrency 64": WANTS_VLLM
        for at in ("8011", "8000 --served-model-name behind", "8000 --served-model-name inside")
    },
    "penstock bench beside --model m/135m --num-prompts 800 --request-rate 2 --rounds 4": (
        "takes minutes; tests/service/bench/test_bench_beside.py runs a small one"
    ),
    **dict.fromkeys(
        (
            "penstock bench flood --load-format fake --model fake --fake-step-ms 20 "
            "--num-prompts 240 --request-rate 4 --rounds 2",
            "penstock bench flood --model m/135m --num-prompts 120 --request-rate 2 --rounds 2",
        ),
        "takes minutes; tests/service/bench/test_bench_flood.py runs a small one",
    ),
    'penstock bench compare --model m/135m --rounds 3 --only "W 8" --engines "Penstock LLM,'
    'Penstock HTTP,vLLM" --url "vLLM=http://127.0.0.1:8011/v1" --vllm vllm/bin/python': (
        "needs vLLM; tests/service/bench/test_bench_compare.py runs a small one"
    ),
    "penstock bench link": "takes a minute; tests/service/bench/test_bench_link.py runs one",
    "penstock bench sweep --to-knee --request-rates 4 --num-prompts 48 "
    '--goodput "ttft:300 tpot:20"': "takes minutes; tests/service/bench runs a small one",
    "docker compose -f compose/compose.yaml up --build --scale worker=3": NO_CONTAINERS,
    "docker compose -f compose/compose.yaml run --rm operator keys create --tenant acme": (
        NO_CONTAINERS
    ),
    **{
        f"docker build -f compose/Dockerfile --target {part} -t REGISTRY/penstock-{part}:0.1.0 .": (
            NO_CONTAINERS
        )
        for part in ("gateway", "worker")
    },
    **dict.fromkeys(
        [
            "helm install penstock compose/chart --set redis.bundled=true "
            "--set image.gateway=REGISTRY/penstock-gateway "
            "--set image.worker=REGISTRY/penstock-worker",
            "kubectl exec deploy/penstock-operator -- penstock keys create --tenant acme",
            "kubectl create secret generic penstock --from-file=files",
            "helm install penstock compose/chart --set secrets.existing=penstock",
        ],
        IN_A_CLUSTER,
    ),
}
STAYS = {  # what runs until it is ended, and what it says when it serves
    "penstock up": "Penstock serves",
    "penstock serve": "Penstock serves",
    "penstock worker ": "started serving",
    "penstock gateway": "gateway listens on",
    "penstock housekeeping": "housekeeping started its chores",
    "redis-server": "Ready to accept connections",
}
AT_ONCE = ("penstock up", "redis-server")  # whose service the next commands need
PROGRAMS = {  # nothing is at a fixed port, or reached from elsewhere; an error of HTTP is one
    "curl": f'exec {shutil.which("curl")} --fail-with-body "$@"',
    "python": f'exec {sys.executable} "$@"',
    "penstock": f'exec {sys.executable} -m penstock.compose.cli "$@"',
    "redis-server": f'exec {binary()} "$@" --port $SERVER_PORT --bind 127.0.0.1',
}


def commands(page: str) -> Iterator[str]:
    """The commands of a page in their order, without comments, and each on one line."""
    block: str | None = None  # the language of the block that this is in
    for line in re.sub(r"\\\n *", "", page).split("\n"):
        if fence := FENCE.match(line):
            block = fence[1] if block is None else None
            continue
        command = COMMAND.match(line.strip().removeprefix("$ "))[0].strip()
        is_indented = block is None and line.startswith("    ") and command.startswith(BEGINS)
        is_typed = block in ("console", "") and line.lstrip().startswith("$ ")
        if command and (block in ("sh", "bash") or is_typed or is_indented):
            yield command


class Running:
    """A command that stays; what it says is in a file."""

    def __init__(self, command: str, log: Path, env: dict[str, str]) -> None:
        self.command, self.log = command, log
        with log.open("w") as stream:
            self.process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=log.parent,
                env=env,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )

    def ready(self) -> Self:
        said = next(said for begin, said in STAYS.items() if self.command.startswith(begin))

        def serves() -> bool:
            assert self.process.poll() is None, f"{self.command}\n{self.log.read_text()}"
            return said in self.log.read_text()

        until(serves, self.command)
        return self

    def found(self, pattern: str) -> str:
        match = re.search(pattern, self.log.read_text())
        assert match is not None, self.log.read_text()
        return match[1]

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0, f"{self.command}\n{self.log.read_text()}"


class Terminal:
    """A user's terminal in a home of its own, and what was said on it."""

    def __init__(self, home: Path, load_format: str = "fake") -> None:
        self.home, self.said = home, ""
        self.up: Running | None = None
        self.running: list[Running] = []
        self.env: dict[str, str] = {}
        (home / "docs").symlink_to(ROOT / "docs")
        programs = home / "bin"
        programs.mkdir()
        for name, line in PROGRAMS.items():
            (programs / name).write_text(f"#!/bin/sh\n{line}\n")
            (programs / name).chmod(0o755)
        self._own_env = {name: each for name, each in os.environ.items() if "PENSTOCK" not in name}
        self._own_env |= {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(home),
            "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"),
            "PENSTOCK_LOAD_FORMAT": load_format,
            "PENSTOCK_VOCAB_SIZE": "256",  # of the fake model
            "PENSTOCK_PORT": "0",
            "SERVER_PORT": str(free_port()),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in [*self.running, *([self.up] if self.up else [])]:
            if each.process.poll() is None:
                os.killpg(each.process.pid, signal.SIGKILL)
                each.process.wait()

    def type(self, command: str) -> None:
        """A command to its end, which must be a good one; or until it serves."""
        command, env = self.filled(command), self._own_env | self.env
        if command.startswith("export "):
            name, _, value = command.removeprefix("export ").partition("=")
            self.env[name] = value
        elif command.startswith(tuple(STAYS)):
            log = self.home / f"{len(self.running)}.log"
            running = Running(command, self.home / ("up.log" if self.up is None else log), env)
            if self.up is None:
                self.up = running.ready()
            else:
                self.running.append(running)
                if command.startswith(AT_ONCE):
                    running.ready()
        else:
            ran = subprocess.run(
                ["bash", "-c", command],
                cwd=self.home,
                env=env,
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert ran.returncode == 0, f"{command}\n{ran.stdout}{ran.stderr}"
            self.said += ran.stdout + ran.stderr

    def end_section(self) -> None:
        """All that it started serves, and ends in order; what it exported is gone."""
        for each in self.running:
            each.ready()
        for each in reversed(self.running):
            each.end()
        self.running, self.env = [], {}

    def filled(self, command: str) -> str:
        """With what a reader puts in place of a page's examples."""
        server = f"127.0.0.1:{self._own_env['SERVER_PORT']}"
        command = re.sub(
            r"redis://(\w+):PASSWORD@r:6379",
            lambda user: f"redis://{user[1]}:{self.last(rf'redis://{user[1]}:([^@]+)@')}@{server}",
            command,
        )
        for shown, mine in {
            "redis://r:6379/0": self.redis_url,
            "redis://127.0.0.1:6379/0": self.redis_url,
            "http://127.0.0.1:8000": self.url,
            "psk_...": lambda: self.last(r"psk_\w+"),
            "zq3v6b7mtk2c": lambda: self.last(r"psk_([a-z2-7]+)_"),
            " ID": lambda: f" {bury(self.redis_url())}",
            "wh_...": self.webhook,
            "we_...": lambda: self.last(r"(we_\w+)"),
        }.items():
            if shown in command:
                command = command.replace(shown, mine())
        return command

    def last(self, pattern: str) -> str:
        return re.findall(pattern, self.said)[-1]

    def redis_url(self) -> str:
        assert self.up is not None, "`penstock up` comes first"
        return self.up.found(r"(redis://\S+)")

    def url(self) -> str:
        assert self.up is not None, "`penstock up` comes first"
        return self.up.found(r"Penstock serves .* at (http\S+)/v1")

    def webhook(self) -> str:
        """Of a job that ends now, for the receiver that the page has added."""
        key = re.findall(r"psk_\w+", self.said)[0]  # of the tenant acme, by README.md
        job = {"model": "penstock-5m", "prompt": "Hello", "max_tokens": 4}
        with httpx.Client(headers={"Authorization": f"Bearer {key}"}) as http:
            http.post(f"{self.url()}/v1/jobs", json=job).raise_for_status()

        def is_sent() -> bool:
            self.type("penstock webhooks list --tenant acme")
            return "wh_" in self.said

        until(is_sent, "a webhook")
        return self.last(r"(wh_\w+)")


@pytest.mark.slow
def test_each_command_of_the_pages_works(tmp_path: Path) -> None:
    typed = set[str]()
    with Terminal(tmp_path) as terminal:
        for page in PAGES:
            for section in page.read_text().split("\n## "):
                for command in commands(section):
                    is_new = command not in typed or command.startswith("export ")
                    if command not in NEVER and is_new:
                        terminal.type(command)
                        typed.add(command)
                terminal.end_section()
        assert terminal.up is not None
        terminal.up.end()
    assert len(typed) > 20


def test_each_command_that_is_never_typed_is_on_a_page() -> None:
    shown = {command for page in PAGES for command in commands(page.read_text())}
    assert not NEVER.keys() - shown


def test_commands_are_found_where_pages_have_them() -> None:
    page = """
```sh
penstock a --b \\
    --c   # says
# nothing
```

1. In a list:

        penstock d 'x # y'
        what it prints

```python
penstock e
```

```console
$ curl f
what it prints
```

```
$ curl g
what it prints
```

penstock g
"""
    assert list(commands(page)) == ["penstock a --b --c", "penstock d 'x # y'", "curl f", "curl g"]
