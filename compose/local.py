"""`penstock up`: starts all of Penstock on one machine, watches it, and ends it in order."""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import httpx
from pydantic import Field, SecretStr
from rich.console import Console

from penstock.compose.component import Component
from penstock.compose.server import Server, ServerFailed
from penstock.gateway.process.listening import CannotListen, ListenSettings, close, listen, url_of
from penstock.gateway.queue_client import QueueClient
from penstock.gateway.webhooks.outbound import OutboundSettings
from penstock.schemas.errors import QueueUnreachable
from penstock.schemas.process.nearby import noted
from penstock.schemas.process.secret import BadSecret
from penstock.schemas.process.start import SecretSettings, load_settings
from penstock.schemas.redis.url import PORT as REDIS_PORT
from penstock.schemas.redis.url import RedisUrlSetting, shown
from penstock.worker.bundled.paths import BUNDLED_MODEL

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


class LocalSettings(ListenSettings, SecretSettings, OutboundSettings):
    """Run server, gateway, worker and housekeeping on this machine.

    Each part takes its other settings from the environment or the --config file:
    PENSTOCK_MAX_MODEL_LEN=4096, or a line max_model_len: 4096, is the worker's --max-model-len.
    """

    model: str = Field(str(BUNDLED_MODEL), description="a checkpoint's folder; the bundled model")
    redis_url: RedisUrlSetting | None = Field(None, description="none: an embedded server")
    folder: Path | None = Field(
        None, description="where the embedded server keeps its jobs; none: gone at the end"
    )
    num_workers: int = Field(
        1, ge=0, description="of this model, on this machine; each has the next of its GPUs"
    )
    ready_s: float = Field(600.0, gt=0, description="give up when not ready by then")


class NotReady(RuntimeError):
    """Raised when the stack cannot serve, as when a component ended for good or took too long."""


class Stack:
    """The components, by name, and the console that they share."""

    def __init__(self, settings: LocalSettings, console: Console, quiet: bool = False) -> None:
        """Open the gateway's socket, so that nobody else can answer on it. Raises CannotListen."""
        self.settings = settings
        self.console = console
        self.quiet = quiet
        self._socket = listen(settings)
        self.url = url_of(self._socket, settings.is_encrypted)
        self.redis_url = settings.redis_url or ""
        self.components: dict[str, Component] = {}
        self._running: dict[str, asyncio.Task[None]] = {}

    def say(self, name: str, line: str) -> None:
        self.console.print(f"[bold]{name:<12}[/bold] ", end="")
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def relay(self, name: str, line: str) -> None:
        """Print a line that a process wrote itself, unless the stack is quiet."""
        if not self.quiet:
            self.say(name, line)

    async def start_server(self) -> Server | None:
        if self.settings.redis_url is not None:
            return None
        began = time.monotonic()
        server = Server(self.settings.folder, prefers=REDIS_PORT)
        await asyncio.to_thread(server.start)
        self.redis_url = server.url
        self.say("server", f"ready after {time.monotonic() - began:.1f} s, {server.url}")
        return server

    def start(self, name: str, *argv: str, **env: str) -> Component:
        """Start one of gateway, housekeeping, worker-1, worker-2 ..."""
        kind = name.split("-")[0]
        ready = {"gateway": self._gateway_lives, "worker": lambda: self._worker_lives(name)}
        component = Component(
            name,
            [kind, *argv, "--log-level", self.settings.log_level],
            ready.get(kind, _at_once),
            self.say,
            self.relay,
            self._told() | env,
            [self._socket.fileno()] if kind == "gateway" else [],
        )
        self.components[name] = component
        self._running[name] = asyncio.create_task(component.keep_alive(), name=name)
        return component

    def start_gateway(self, **env: str) -> Component:
        """Start the gateway on the socket that is open already.

        So a restart loses no connection that is being made.
        """
        argv = ["--fd", str(self._socket.fileno()), "--host", self.settings.host]
        if self.settings.allowed_hosts:
            argv += ["--allowed-hosts", ",".join(self.settings.allowed_hosts)]
        for name in ("uds", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
            if (path := getattr(self.settings, name)) is not None:
                argv += [f"--{name.replace('_', '-')}", str(path)]
        return self.start("gateway", *argv, **env)

    def _told(self) -> dict[str, str]:
        """Return the environment variables that every part gets.

        A URL may hold a password, so it does not go on a command line.
        """
        settings = self.settings
        variables = {
            "PENSTOCK_REDIS_URL": self.redis_url,
            "PENSTOCK_WEBHOOK_PUBLIC": str(settings.webhook_public),
            "PENSTOCK_WEBHOOK_PRIVATE": ",".join(settings.webhook_private),
            "PENSTOCK_WEBHOOK_TIMEOUT_S": str(settings.webhook_timeout_s),
        }
        return variables | ({"PENSTOCK_CONFIG": str(settings.config)} if settings.config else {})

    def close(self) -> None:
        """Close the socket, so that no connection is accepted that no gateway takes."""
        close(self._socket, self.settings)

    async def stop(self, name: str) -> None:
        task = self._running.pop(name, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self.say(name, "stopped")

    async def ready(self) -> None:
        """Return when every component is ready. Raises NotReady if one ended or is too slow."""
        for name, component in self.components.items():
            ready = asyncio.create_task(component.ready.wait())
            await asyncio.wait(
                {ready, self._running[name]},
                timeout=self.settings.ready_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not ready.done():
                ready.cancel()
                if self._running[name].done():
                    raise NotReady(f"{name} cannot start; its own words are above")
                raise NotReady(f"{name} did not get ready in {self.settings.ready_s:g} s")

    def gpu_of(self, number: int) -> dict[str, str]:
        """Return the variable that gives a worker a GPU of its own.

        Empty where there is one GPU or one worker, or where another device was named.
        """
        there, device = gpus(), os.environ.get("PENSTOCK_DEVICE", "auto")
        if min(len(there), self.settings.num_workers) < 2 or device not in ("auto", "cuda"):
            return {}
        gpu = there[(number - 1) % len(there)]
        shares = ", which it shares" if self.settings.num_workers > len(there) else ""
        self.say(f"worker-{number}", f"has GPU {gpu} of {len(there)}{shares}")
        return {VISIBLE_GPUS: gpu}

    async def _gateway_lives(self) -> bool:
        settings = self.settings
        uds = str(settings.uds) if settings.uds else None
        link = httpx.AsyncHTTPTransport(verify=False, uds=uds)  # it is our own child
        url = self.url
        if uds:
            url = "https://localhost" if settings.is_encrypted else "http://localhost"
        try:
            async with httpx.AsyncClient(timeout=1, trust_env=False, transport=link) as client:
                return (await client.get(f"{url}/health/live")).is_success
        except httpx.ReadError:  # it wants a certificate, so it answers
            return settings.ssl_ca_certs is not None
        except httpx.HTTPError:
            return False

    async def _worker_lives(self, name: str) -> bool:
        return name in (await self.workers()).values()

    async def workers(self) -> dict[str, str]:
        """Return the component's name for each worker that holds a lease.

        A worker's card names its process. Where the queue is unreachable, the result is empty.
        """
        host = socket.gethostname()
        names = {(host, component.pid): name for name, component in self.components.items()}
        try:
            async with QueueClient.from_url(self.redis_url) as client:
                workers = [
                    worker for queue in await client.queues() for worker in await queue.workers()
                ]
        except QueueUnreachable:  # each part says so itself
            return {}
        return {
            worker.worker: names[worker.card.host, worker.card.pid]
            for worker in workers
            if worker.lease_left_ms > 0 and (worker.card.host, worker.card.pid) in names
        }


async def _at_once() -> bool:
    return True


@asynccontextmanager
async def running(
    settings: LocalSettings, console: Console, quiet: bool = False
) -> AsyncIterator[Stack]:
    """Run the stack and yield it once ready. At the end intake stops first and the server last."""
    stack = Stack(settings, console, quiet)
    async with AsyncExitStack() as ending:
        ending.callback(stack.close)
        server = await stack.start_server()
        if server is not None:
            ending.push_async_callback(asyncio.to_thread, server.stop)
        ending.push_async_callback(_stop_all, stack)
        files = _files_folder(server.folder if server else settings.folder)
        stack.start("housekeeping", **files)
        secret = settings.server_secret
        env = {"PENSTOCK_SERVER_SECRET": secret.get_secret_value()} if secret else {}
        stack.start_gateway(**env, **files)
        for number in range(1, settings.num_workers + 1):
            gpu = stack.gpu_of(number)
            stack.start(
                f"worker-{number}", "--model", settings.model, **env, **gpu, **_crash_folder()
            )
        await stack.ready()
        yield stack


def gpus(devices: Path = Path("/dev")) -> list[str]:
    """Return the names of the GPUs that this process may use, as CUDA takes them."""
    if (visible := os.environ.get(VISIBLE_GPUS)) is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    return [str(at) for at, _ in enumerate(devices.glob("nvidia[0-9]*"))]


def _files_folder(folder: Path | None) -> dict[str, str]:
    """Return the variable for the files' folder that gateway and housekeeping share.

    Empty where the environment has it already, or where there is no folder.
    """
    name = "PENSTOCK_FILES_FOLDER"
    return {} if folder is None or name in os.environ else {name: str(folder / "files")}


def _crash_folder() -> dict[str, str]:
    """Return the variable for the folder where workers say why they crashed.

    Empty where the environment has it already.
    """
    name = "PENSTOCK_CRASH_DUMP_FOLDER"
    return {} if name in os.environ else {name: str(Path("~/.penstock/crashes").expanduser())}


async def _stop_all(stack: Stack) -> None:
    stack.close()
    workers = [name for name in stack.components if name.startswith("worker")]
    await stack.stop("gateway")
    await asyncio.gather(*(stack.stop(name) for name in workers))
    await stack.stop("housekeeping")


async def _up(settings: LocalSettings) -> None:
    task, console = asyncio.current_task(), Console()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        secret = SecretStr(settings.make_secret().decode())
    except OSError as error:
        raise NotReady(f"no server secret: {error}; name a file or give one") from None
    async with running(settings.model_copy(update={"server_secret": secret}), console) as stack:
        name = Path(settings.model).name
        with _noted(stack):
            url = stack.url if settings.uds else f"{stack.url}/v1"
            sentence = f"\nPenstock serves {name} at [bold]{url}[/bold], until Ctrl-C.\n"
            console.print(sentence)
            await asyncio.Event().wait()


@contextmanager
def _noted(stack: Stack) -> Iterator[None]:
    """Let this user's other commands find the server, unless the home takes no file."""
    with ExitStack() as notes:
        try:
            notes.enter_context(noted(stack.redis_url))
        except OSError as error:
            flag = f"--redis-url {shown(stack.redis_url)}: {error.strerror}"
            stack.say("server", f"other commands find it only by {flag}")
        yield


def main(argv: list[str]) -> int:
    return up(load_settings(LocalSettings, "penstock up", argv), "penstock up")


def up(settings: LocalSettings, command: str) -> int:
    """Run everything until a signal ends it. Return the exit status."""
    try:
        asyncio.run(_up(settings))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 0
    except (NotReady, ServerFailed, CannotListen, BadSecret) as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
