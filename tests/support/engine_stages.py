"""Workers of one engine or another, under which each promise is tried in the same way."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Self

from other_server import OtherServer
from penstock.compose.server import Server
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.event import Delta, Done, Failed
from penstock.schemas.params.sampling import SamplingParams
from penstock.worker.bundled.paths import BUNDLED_MODEL
from stage import GatewayProcess
from worker_process import WorkerProcess, ask

PROMPTS = [f"Once upon a time there were {number} " for number in range(2, 8)]
LONG = SamplingParams(temperature=0, seed=1, max_tokens=150)
MUCH = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, seed=1, max_tokens=None, ignore_eos=True)
_BESIDE_OTHERS = ("--lease-ttl-ms", "3000")  # their first steps leave no processor to a pulse
LEASE = ("--orphan-grace-ms", "60000", "--step-timeout-s", "20")


@dataclass(slots=True)
class EngineStage:
    """A queue with up to two workers of one engine, started anew where a test ended them.

    crash    a prompt that ends the engine; None where there is none
    long     parameters of an answer that is not made before a test can disturb it
    endless  parameters of an answer that is as long as the engine can make it
    revive   starts again what the engine stands on, where it is gone
    running  the sequences that the server of others has; None where there is none
    is_ours  our own engine computes, with a prefix cache and structured output
    """

    server: Server
    model: str | Path
    flags: tuple[str, ...]
    crash: str | None = None
    endless: SamplingParams = ENDLESS
    long: SamplingParams = LONG
    revive: Callable[[], None] = lambda: None
    server_url: str = ""
    kill_server: Callable[[], None] | None = None
    running: Callable[[], int] | None = None
    resumes_text: bool = False
    is_ours: bool = False
    python: str = sys.executable
    _more: tuple[str, ...] = ()
    _workers: list[WorkerProcess] = field(default_factory=list)

    @property
    def name(self) -> str:
        return Path(self.model).name

    @property
    def url(self) -> str:
        return self.server.url

    def workers(self, count: int = 1, *more: str) -> list[WorkerProcess]:
        """So many workers that take jobs, with these flags."""
        if more != self._more:
            for each in self._workers:
                each.kill()
            self._more = more
        alive = [each for each in self._workers if each.process.poll() is None]
        for each in alive[count:]:
            each.stop()
        alive = alive[:count]
        while len(alive) < count:
            alive.append(
                WorkerProcess(self.url, self.model, *LEASE, *self.flags, *more, python=self.python)
            )
        self._workers = alive
        return [each.ready() for each in alive]

    def kill_one(self, number: int) -> None:
        """Kill a worker, and start another in its place without waiting for it."""
        self._workers[number].kill()
        flags = *LEASE, *self.flags
        another = WorkerProcess(self.url, self.model, *flags, python=self.python)
        self._workers[number] = another

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for each in self._workers:
            each.__exit__(kind, error, trace)


@dataclass
class Reader:
    """One reader of a job, who sees every token once and in order, and one end."""

    text: str = ""
    num_tokens: int = 0
    end: Done | Failed | None = None
    has_read: asyncio.Event = field(default_factory=asyncio.Event)

    async def follow(self, client: QueueClient, job_id: str) -> None:
        async with aclosing(client.stream(job_id)) as events:
            async for event in events:
                assert self.end is None
                if isinstance(event, Delta):
                    assert event.position == self.num_tokens and event.token_ids
                    self.num_tokens, self.text = event.end, self.text + event.text
                    if self.num_tokens >= 10:
                        self.has_read.set()
                else:
                    self.end = event
        self.has_read.set()
        assert self.end is not None and self.end.position == self.num_tokens


def answers(
    stage: EngineStage,
    disturb: Callable[[], None],
    prompts: Sequence[str] = PROMPTS,
    params: SamplingParams | None = None,
) -> list[str]:
    """What readers of the prompts get, where something happens once each has ten tokens."""
    readers = [Reader() for _ in prompts]

    async def asks(client: QueueClient) -> None:
        async with asyncio.TaskGroup() as parts:
            for reader, prompt in zip(readers, prompts, strict=True):
                job_id = await client.enqueue(prompt, params=params or stage.long)
                parts.create_task(reader.follow(client, job_id))
            for reader in readers[: len(PROMPTS)]:
                await reader.has_read.wait()
            await asyncio.to_thread(disturb)

    ask(stage.url, asks, within_s=600)
    for reader in readers:
        assert isinstance(reader.end, Done), reader.end
        assert reader.end.usage.completion_tokens == reader.num_tokens
    return [reader.text for reader in readers]


def _url(*urls: str) -> tuple[str, ...]:
    return "--engine", "openai", "--engine-url", ",".join(urls)


@contextmanager
def native() -> Iterator[EngineStage]:
    with (
        Server() as server,
        EngineStage(server, BUNDLED_MODEL, ("--deterministic",), is_ours=True) as stage,
    ):
        stage.long = MUCH  # it is fast
        yield stage


@contextmanager
def family(name: str) -> Iterator[EngineStage]:
    """A tiny model of a family, in the words of the bundled one.

    In 32 bits, since rounding in less depends on the batch. `qwen3_moe-gptq` has integers, and is
    computed in bf16, deterministically.
    """
    import families
    from packers import GPTQ, by_gptq, pack

    name, _, method = name.partition("-")
    with TemporaryDirectory() as temporary, Server() as server:
        folder = Path(temporary) / "dense"
        vocab = json.loads((BUNDLED_MODEL / "config.json").read_text())["vocab_size"]
        families.save(name, folder, vocab_size=vocab, max_position_embeddings=2048)
        flags: tuple[str, ...] = ("--dtype", "float32")
        if method:
            folder = pack(folder, Path(temporary) / method, GPTQ, by_gptq)
            flags = ("--deterministic", "--quantization", "gptq_marlin")
        for words in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(BUNDLED_MODEL / words, folder)
        flags += _BESIDE_OTHERS
        with EngineStage(server, folder, flags, is_ours=True) as stage:
            stage.long = MUCH
            yield stage


@contextmanager
def fake() -> Iterator[EngineStage]:
    flags = ("--fake-step-ms", "5", "--fake-poison", "fail")
    with Server() as server, EngineStage(server, "fake", flags, "fail:crash:0") as stage:
        yield stage


@contextmanager
def others(kind: str, *more: str) -> Iterator[EngineStage]:
    """A server that acts as one of others, and is killed and started as one of theirs would."""
    with Server() as server, OtherServer("--kind", kind, *more, step_ms=5) as other:

        def revive() -> None:
            if other.process.poll() is not None:
                other.start()
                other.ready()

        stage = EngineStage(server, BUNDLED_MODEL, _url(other.url), "fail crash 0")
        stage.revive, stage.kill_server, stage.running = revive, other.kill, other.running
        if kind == "unknown":
            stage.resumes_text = True
            stage.endless = stage.endless.model_copy(update={"ignore_eos": False})
        with stage:
            yield stage


@contextmanager
def penstock() -> Iterator[EngineStage]:
    """A gateway of ours, with its own worker and its own queue, as the engine of others."""
    with ExitStack() as stack:
        behind = stack.enter_context(Server())
        gateway = stack.enter_context(GatewayProcess(behind.url))
        stack.enter_context(WorkerProcess(behind.url, BUNDLED_MODEL, "--deterministic")).ready()
        server = stack.enter_context(Server())
        stage = stack.enter_context(EngineStage(server, BUNDLED_MODEL, _url(gateway.url)))
        stage.long = MUCH
        yield stage


@contextmanager
def vllm() -> Iterator[EngineStage]:
    """vLLM as the engine of the worker itself."""
    arguments = ("--engine-args", '{"enforce_eager": true}')
    flags = "--engine", "vllm", "--max-model-len", "1024", "--dtype", "float32", *arguments
    flags += _BESIDE_OTHERS
    with Server() as server, EngineStage(server, BUNDLED_MODEL, flags) as stage:
        stage.python = os.environ["PENSTOCK_TEST_VLLM"]
        yield stage


class Listener:
    """A server of others as a process, on a port of its own that it finds again.

    Nobody holds the port while it is down: vLLM's server does not share one.
    """

    def __init__(self, command: list[str], more: dict[str, str] | None = None) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._command = [*command, "--port", str(port)]
        self._environment = os.environ | (more or {})
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def revive(self) -> None:
        if self.process.poll() is not None:
            self.start()


@contextmanager
def _listening(listener: Listener) -> Iterator[EngineStage]:
    try:
        flags = *_url(listener.url), *_BESIDE_OTHERS
        with Server() as server, EngineStage(server, BUNDLED_MODEL, flags) as stage:
            stage.revive, stage.kill_server = listener.revive, listener.kill
            stage.server_url = listener.url
            yield stage
    finally:
        listener.kill()


@contextmanager
def vllm_server() -> Iterator[EngineStage]:
    python = os.environ["PENSTOCK_TEST_VLLM"]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(BUNDLED_MODEL)]
    flags = ["--max-model-len", "1024", "--dtype", "float32", "--enforce-eager"]
    with _listening(Listener([*command, *flags])) as stage:
        yield stage


@contextmanager
def llama_cpp() -> Iterator[EngineStage]:
    """In 32 bits, with room for 16 at once, since rounding in less depends on the batch."""
    from penstock.loadtest.lab.engines.gguf_file import save_gguf

    folder = os.environ["PENSTOCK_TEST_LLAMA"]
    flags = ["--ctx-size", "65536", "-np", "16", "-ctk", "f32", "-ctv", "f32", "-fa", "off"]
    with TemporaryDirectory() as temporary:
        file = Path(temporary) / "model.gguf"
        save_gguf(BUNDLED_MODEL, file, "F32")
        listener = Listener(
            [f"{folder}/llama-server", "-m", str(file), *flags], {"LD_LIBRARY_PATH": folder}
        )
        with _listening(listener) as stage:
            stage.long = MUCH
            yield stage


# By their names. Those of others are tried where the environment says where they are installed:
# `make engines`.
STAGES: dict[str, Callable[[], AbstractContextManager[EngineStage]]] = {
    "native": native,
    "fake": fake,
    "openai, with token ids": lambda: others("vllm"),
    "openai, with text alone": lambda: others("unknown", "--never-ends"),
    "openai, of a gateway of ours": penstock,
}
THEIRS: dict[str, Callable[[], AbstractContextManager[EngineStage]]] = {
    name: partial(family, name) for name in os.environ.get("PENSTOCK_TEST_FAMILIES", "").split()
}
if "PENSTOCK_TEST_VLLM" in os.environ:
    THEIRS |= {"vllm": vllm, "openai, of vLLM's server": vllm_server}
if "PENSTOCK_TEST_LLAMA" in os.environ:
    THEIRS |= {"openai, of llama.cpp's server": llama_cpp}
