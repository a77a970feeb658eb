"""`penstock gateway`: one process that serves HTTP until a graceful shutdown."""

import asyncio
import logging
import signal
import socket
import ssl
import sys
from collections.abc import Sequence

import uvicorn
from starlette.datastructures import State

from penstock.gateway.process.listening import (
    CannotListen,
    close,
    listen,
    load_certificate,
    tls_of,
    url_of,
)
from penstock.gateway.process.settings import RELOADABLE, GatewaySettings
from penstock.gateway.server.app import build
from penstock.gateway.server.protocol import Timeouts, bounded
from penstock.gateway.server.socket import EndingSocket
from penstock.schemas.process.exit_status import BAD_USAGE, NEVER_STARTS
from penstock.schemas.process.reload import reload
from penstock.schemas.process.secret import BadSecret
from penstock.schemas.process.start import (
    keep_what_is_loaded,
    load_settings,
    read_settings,
    write_log_to_stderr,
)

LAST_CALL_S = 1.0  # for requests that were sent before their callers could know of the end
log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Run the gateway and return its exit status.

    On SIGTERM or SIGINT it accepts no more, gives open streams `drain_s` to end, and exits with 0.
    On SIGHUP it reads its settings again.
    """
    settings = load_settings(GatewaySettings, "penstock gateway", argv)
    write_log_to_stderr("gateway", settings)
    early = list[int]()  # signals that came before uvicorn listens for them
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn ends in order and then raises the signal once more, for these handlers.
        signal.signal(number, lambda number, frame: early.append(number))
    # SIGHUP does nothing until the gateway serves: the settings were read a moment ago.
    signal.signal(signal.SIGHUP, lambda number, frame: None)
    try:
        app = build(settings)
    except BadSecret as refusal:
        print(f"penstock gateway: {refusal}", file=sys.stderr)
        return BAD_USAGE
    except OSError as error:
        print(f"penstock gateway: {error.filename}: {error.strerror}", file=sys.stderr)
        return BAD_USAGE
    try:
        tls = tls_of(settings)
        listener = _listening(settings)
    except CannotListen as refusal:
        print(f"penstock gateway: {refusal}", file=sys.stderr)
        return NEVER_STARTS
    keep_what_is_loaded()
    log.info("gateway listens on %s", url_of(listener, tls is not None))
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=bounded(
            Timeouts(
                settings.head_timeout_s,
                settings.body_timeout_s,
                settings.stall_timeout_s,
                settings.max_connections,
                min(LAST_CALL_S, settings.drain_s / 2),
            )
        ),
        timeout_keep_alive=settings.keep_alive_s,
        ws=EndingSocket,
        ws_max_size=settings.max_body_bytes,
        ws_ping_interval=settings.ping_s,
        ws_ping_timeout=settings.stall_timeout_s,
        ws_per_message_deflate=False,
        access_log=False,  # paths hold job ids; metrics count the responses
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=settings.drain_s,
        ssl_certfile=settings.ssl_certfile,
        ssl_context_factory=(lambda config, default: tls) if tls else None,
    )
    server = uvicorn.Server(config)
    app.state.is_stopping = lambda: server.should_exit

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, _reload, app.state, argv, tls)
        loop.call_soon(pass_on)  # runs when uvicorn listens for signals itself
        await server.serve([listener])

    def pass_on() -> None:
        for number in early:
            signal.raise_signal(number)

    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(serve())
    if settings.fd is None:
        close(listener, settings)
    status: int = app.state.exit_status
    return status


def _reload(state: State, argv: Sequence[str], tls: ssl.SSLContext | None) -> None:
    """Read the settings again, and the certificate, which may have been renewed in its file."""
    old: GatewaySettings = state.gateway.settings

    def read() -> GatewaySettings:
        return read_settings(GatewaySettings, "penstock gateway", argv, old.redis_url)

    reload(old, read, RELOADABLE, state.apply, "gateway")
    if tls is None:
        return
    try:
        load_certificate(tls, old)
        log.info("the certificate was read again")
    except CannotListen as refusal:
        log.error("the certificate stays as it was: %s", refusal)


def _listening(settings: GatewaySettings) -> socket.socket:
    """Return the socket handed to this process, or else a new one. Raises CannotListen."""
    if settings.fd is None:
        return listen(settings)
    try:
        return socket.socket(fileno=settings.fd)
    except OSError as error:
        raise CannotListen(f"--fd: {settings.fd} is no socket: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
