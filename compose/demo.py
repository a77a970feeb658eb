"""`penstock demo`: streams three jobs to the terminal, one of them through its worker's death."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from pydantic import JsonValue
from rich.console import Console

from penstock.compose.local import LocalSettings, NotReady, Stack, running
from penstock.compose.server import ServerFailed
from penstock.gateway.process.listening import CannotListen
from penstock.schemas.event import EVENT, Delta, Usage
from penstock.schemas.process.start import load_settings
from penstock.schemas.wire.wire import Report

Json = dict[str, JsonValue]

LEASE_TTL_MS = 2000  # shorter than the default 5000, so that the pause is short to watch
KILL_AFTER_TOKENS = 60

CHAT = "Explain quantum computing in simple terms."
STORY = "Tell me a story about a fox."
FIELDS: list[JsonValue] = ["name", "age", "city"]
SCHEMA: Json = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "city": {"type": "string"},
    },
    "required": FIELDS,
}
EXTRACTION = f"""Extract the person from the text as JSON.
Schema: {json.dumps(SCHEMA)}
Text: Mira Holt is 34 years old and lives in Oslo."""


class ShownText(Report):
    content: str | None = None


class ChunkChoice(Report):
    delta: ShownText


class Chunk(Report):
    """The fields of a chat's chunk that this program reads."""

    choices: list[ChunkChoice]
    usage: Usage | None = None


class DemoJob(Report):
    id: str
    worker: str | None = None


@dataclass(slots=True)
class Stopwatch:
    """The times at which a stream began and each of its pieces came."""

    began: float = field(default_factory=time.perf_counter)
    ticks: list[float] = field(default_factory=list)

    def tick(self) -> None:
        self.ticks.append(time.perf_counter())

    def line(self, num_tokens: int) -> str:
        first_ms = (self.ticks[0] - self.began) * 1e3
        rate = (num_tokens - 1) / max(self.ticks[-1] - self.ticks[0], 1e-9)
        return f"first token after {first_ms:.0f} ms, {num_tokens} tokens, {rate:.0f} tokens/s"

    def longest_pause_s(self) -> float:
        return max(
            after - before for before, after in zip(self.ticks, self.ticks[1:], strict=False)
        )


class Demo:
    def __init__(self, stack: Stack, client: httpx.AsyncClient, console: Console) -> None:
        self.stack = stack
        self.client = client
        self.console = console

    async def run(self) -> bool:
        """Run all three jobs, and return whether they did what they promise."""
        model = Path(self.stack.settings.model).name
        answer = await self.chat(model, "1. A chat, streamed", CHAT)
        form = await self.chat(
            model,
            "2. The same path, held to a JSON schema",
            EXTRACTION,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "person", "schema": SCHEMA},
            },
        )
        is_same_text = await self.killed_and_resumed(model)
        return bool(answer) and list(json.loads(form)) == FIELDS and is_same_text

    async def chat(self, model: str, title: str, prompt: str, **more: JsonValue) -> str:
        self._announce(title, prompt)
        body: Json = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": 300,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        watch, pieces, num_tokens = Stopwatch(), list[str](), 0
        async for line in self._lines("POST", "/v1/chat/completions", body | more):
            chunk = Chunk.model_validate_json(line)
            for piece in [choice.delta.content for choice in chunk.choices]:
                if piece:
                    watch.tick()
                    pieces.append(piece)
                    self._show(piece)
            num_tokens = chunk.usage.completion_tokens if chunk.usage else num_tokens
        self.console.print(f"\n[dim]{watch.line(num_tokens)}[/dim]\n")
        return "".join(pieces)

    async def killed_and_resumed(self, model: str) -> bool:
        """Run a durable job whose worker is killed in mid-stream, so that another goes on.

        Return whether its text is that of a run that nobody killed.
        """
        self._announce("3. A durable job, whose worker is killed in mid-stream", STORY)
        body: Json = {
            "model": model,
            "messages": [{"role": "user", "content": STORY}],
            "temperature": 0.8,
            "seed": 7,
            "max_tokens": 400,
        }
        whole_text = await self._whole_text(body)
        second = self.stack.start("worker-2", "--model", self.stack.settings.model)
        await second.ready.wait()
        watch, pieces, num_tokens, victim = Stopwatch(), list[str](), 0, ""
        job_id = await self._submit(body)
        async for delta in self._deltas(job_id):
            watch.tick()
            pieces.append(delta.text)
            self._show(delta.text)
            num_tokens = delta.end
            if num_tokens >= KILL_AFTER_TOKENS and not victim:
                victim = await self._kill_the_owner(job_id)
                self.console.print(f" [bold red]| {victim} killed (-9) |[/bold red] ", end="")
        self.console.print(f"\n[dim]{watch.line(num_tokens)}[/dim]")
        text, pause_s = "".join(pieces), watch.longest_pause_s()
        same = bool(victim) and text == whole_text
        self.console.print(
            f"[dim]{victim} died after token {KILL_AFTER_TOKENS}; another went on after "
            f"{pause_s:.1f} s "
            f"(lease {LEASE_TTL_MS / 1000:g} s) with the next token; the text is "
            f"{'equal to' if same else 'NOT'} that of a run that nobody killed[/dim]\n"
        )
        return same

    async def _whole_text(self, body: Json) -> str:
        job_id = await self._submit(body)
        return "".join([delta.text async for delta in self._deltas(job_id)])

    async def _submit(self, body: Json) -> str:
        response = await self.client.post("/v1/jobs", json=body)
        return DemoJob.model_validate_json(response.raise_for_status().content).id

    async def _kill_the_owner(self, job_id: str) -> str:
        """Send SIGKILL to every process of the worker that runs the job.

        Return the name of the worker's component.
        """
        response = await self.client.get(f"/v1/jobs/{job_id}")
        owner = DemoJob.model_validate_json(response.content).worker
        name = (await self.stack.workers())[owner or ""]
        self.stack.components[name].kill()
        return name

    async def _deltas(self, job_id: str) -> AsyncIterator[Delta]:
        async for line in self._lines("GET", f"/v1/jobs/{job_id}/events"):
            event = EVENT.validate_json(line)
            if isinstance(event, Delta):
                yield event

    async def _lines(self, method: str, path: str, body: Json | None = None) -> AsyncIterator[str]:
        """Yield what follows each `data:`, without the last, `[DONE]`. Raises NotReady."""
        async with self.client.stream(method, path, json=body) as response:
            if response.is_error:
                await response.aread()
                raise NotReady(f"{path} answered {response.status_code}: {response.text}")
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield line.removeprefix("data: ")

    def _announce(self, title: str, prompt: str) -> None:
        self.console.rule(title, align="left")
        self.console.print(f"[bold cyan]> {prompt}[/bold cyan]")

    def _show(self, piece: str) -> None:
        self.console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)


async def _demo(settings: LocalSettings) -> bool:
    console = Console(highlight=False)
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with running(settings, console, quiet=True) as stack:
        console.print()
        async with httpx.AsyncClient(base_url=stack.url, timeout=120) as client:
            return await Demo(stack, client, console).run()


def main(argv: list[str]) -> int:
    os.environ.setdefault("PENSTOCK_LEASE_TTL_MS", str(LEASE_TTL_MS))
    os.environ.setdefault(
        "PENSTOCK_DETERMINISTIC", "true"
    )  # so that resumed text is equal, bit for bit
    os.environ.setdefault("PENSTOCK_PORT", "0")
    settings = load_settings(LocalSettings, "penstock demo", argv)
    try:
        return 0 if asyncio.run(_demo(settings)) else 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    except (NotReady, ServerFailed, CannotListen) as error:
        print(f"penstock demo: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
