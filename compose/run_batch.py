"""`penstock run-batch IN.jsonl OUT.jsonl`: answers a file of requests, and goes on after a kill.

With --model all that it needs runs in it, as in `vllm run-batch`; without, the jobs go to a queue
that is there already. The first two words are the files; -i and -o name them as well.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pydantic import Field, SecretStr
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from penstock.compose.local import NotReady, running
from penstock.compose.serve import ServeSettings, handed_on
from penstock.compose.server import ServerFailed
from penstock.gateway.batches.offline import BatchProgress, FileTaken, OfflineBatch, WrongLines
from penstock.gateway.process.listening import CannotListen
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.errors import PenstockError
from penstock.schemas.process.exit_status import BAD_USAGE
from penstock.schemas.process.nearby import ANYWHERE
from penstock.schemas.process.secret import BadSecret
from penstock.schemas.process.start import Settings, load_settings
from penstock.schemas.redis.url import RedisUrlSetting

PROGRAM = "penstock run-batch"
LOOK_S = 0.5
LINE_S = 10.0  # between two lines, where no terminal shows a bar
INTERRUPT_STATUS = 130
SHORT = {"-i": "--input-file", "-o": "--output-file"}


class FilesOfBatch(Settings):
    input_file: Path = Field(description="JSON Lines, one request a line, as of OpenAI's batches")
    output_file: Path = Field(description="gets an answer a line; what it has is not asked again")
    max_concurrency: int = Field(512, ge=1, description="jobs in the queue at once")
    retry_failed: bool = Field(False, description="ask lines again that failed in an earlier run")


class RunBatchSettings(FilesOfBatch):
    """Answer the requests in a file, into another. The same command goes on where one ended.

    The jobs go to the queue of --redis-url. With --model NAME everything runs in the command
    itself, which then takes all flags of `penstock serve`.
    """

    redis_url: RedisUrlSetting = Field(
        ANYWHERE, description="where the queue is; unset: of the `penstock up` that runs here"
    )


class RunModelSettings(FilesOfBatch, ServeSettings):
    """Answer the requests in a file, into another. The same command goes on where one ended.

    Server, gateway, worker and housekeeping run in the command, for one model.
    """

    port: int = Field(0, ge=0, le=65535, description="of the gateway; 0: any free one")


def main(argv: list[str]) -> int:
    words = [SHORT.get(word, word) for word in argv]
    files = words[:2] if words and not words[0].startswith("-") else []
    if files and (len(files) < 2 or files[1].startswith("-")):
        print(f"{PROGRAM}: name two files: {PROGRAM} IN.jsonl OUT.jsonl", file=sys.stderr)
        return BAD_USAGE
    if files:
        words = ["--input-file", files[0], "--output-file", files[1], *words[2:]]
    if any(word.split("=")[0] == "--fd" for word in words):
        print(f"{PROGRAM}: --fd is not taken here: give --host and --port", file=sys.stderr)
        return BAD_USAGE
    has_model = any(word.split("=")[0] == "--model" for word in words)
    settings: RunBatchSettings | RunModelSettings
    if has_model:
        settings = load_settings(RunModelSettings, PROGRAM, words)
    else:
        settings = load_settings(RunBatchSettings, PROGRAM, words)
    try:
        return asyncio.run(_run(settings))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(f"{PROGRAM}: stopped; the same command goes on from here", file=sys.stderr)
        return INTERRUPT_STATUS
    except (
        FileTaken, WrongLines, PenstockError, OSError,
        NotReady, ServerFailed, CannotListen, BadSecret,
    ) as refusal:  # fmt: skip
        print(f"{PROGRAM}: {refusal}", file=sys.stderr)
        return 1


async def _run(settings: RunBatchSettings | RunModelSettings) -> int:
    task, console = asyncio.current_task(), Console(stderr=True)
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with _queue(settings, console) as client:
        names = list(await client.models())
        batch = OfflineBatch(
            client,
            settings.input_file,
            settings.output_file,
            settings.max_concurrency,
            names[0] if len(names) == 1 else "",
        )
        display = asyncio.create_task(_show(batch.progress, console))
        try:
            await batch.run(settings.retry_failed)
        finally:
            display.cancel()
            await asyncio.gather(display, return_exceptions=True)
    progress = batch.progress
    console.print(_sentence(progress, settings.output_file), soft_wrap=True)
    return 1 if progress.num_failed else 0


@asynccontextmanager
async def _queue(
    settings: RunBatchSettings | RunModelSettings, console: Console
) -> AsyncIterator[QueueClient]:
    """Yield a client of the queue that is there, or of one that runs for this command alone."""
    if isinstance(settings, RunBatchSettings):
        async with QueueClient.from_url(settings.redis_url) as client:
            yield client
        return
    os.environ.update(handed_on(settings))
    secret = SecretStr(settings.make_secret().decode())
    settings = settings.model_copy(update={"server_secret": secret})
    async with running(settings, console) as stack, QueueClient.from_url(stack.redis_url) as client:
        stack.quiet = True  # the bar has the terminal
        yield client


async def _show(progress: BatchProgress, console: Console) -> None:
    """Show how far the run is until cancelled: as a bar, or a line now and then."""
    rate = _Rate()
    if not console.is_terminal:
        while True:
            await asyncio.sleep(LINE_S)
            console.print(f"{_counts(progress)}, {rate.now(progress)}", soft_wrap=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[told]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("", total=None, told="reading")
        while True:
            await asyncio.sleep(LOOK_S)
            done = progress.before + progress.done
            status = f"{progress.num_failed} failed, {rate.now(progress)}"
            bar.update(task, total=progress.total or None, completed=done, told=status)


class _Rate:
    """Tells how many tokens a second were made since it was asked before."""

    def __init__(self) -> None:
        self._last = time.monotonic(), 0

    def now(self, progress: BatchProgress) -> str:
        (then_s, before), now_s = self._last, time.monotonic()
        self._last = now_s, progress.completion_tokens
        return f"{(progress.completion_tokens - before) / (now_s - then_s):,.0f} tokens/s"


def _counts(progress: BatchProgress) -> str:
    done = progress.before + progress.done
    return f"{done:,} of {progress.total:,} lines, {progress.num_failed:,} failed"


def _sentence(progress: BatchProgress, path: Path) -> str:
    read = f"{progress.prompt_tokens:,} prompt tokens ({progress.cached_tokens:,} found computed)"
    counts = f"{_counts(progress)}; {read}, {progress.completion_tokens:,} made"
    before = f", {progress.before:,} of them before" if progress.before else ""
    return f"{path}: {counts}{before}"
