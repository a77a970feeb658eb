"""penstock gateway: one process that serves HTTP until it is told to stop."""

import signal
import sys
from collections.abc import Sequence

import uvicorn

from gateway.app import build
from gateway.protocol import Patience, bounded
from gateway.settings import GatewaySettings
from schemas.exit_status import BAD_USAGE
from schemas.process import keep_what_is_loaded, load_settings, write_log_to_stderr
from schemas.secret import BadSecret


def main(argv: Sequence[str]) -> int:
    """SIGTERM and SIGINT: accept no more, let open streams end for `drain_s`, exit 0."""
    settings = load_settings(GatewaySettings, "penstock gateway", argv)
    write_log_to_stderr("gateway", settings.log_level)
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn ends in order and then raises the signal once more, for these handlers.
        signal.signal(number, lambda number, frame: None)
    try:
        app = build(settings)
    except BadSecret as refusal:
        print(f"penstock gateway: {refusal}", file=sys.stderr)
        return BAD_USAGE
    keep_what_is_loaded()
    uvicorn.run(
        app,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=bounded(
            Patience(
                settings.head_timeout_s,
                settings.body_timeout_s,
                settings.stall_timeout_s,
                settings.max_connections,
            )
        ),
        timeout_keep_alive=settings.keep_alive_s,
        ws="none",
        access_log=False,  # paths hold job ids; metrics count the responses
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=settings.drain_s,
    )
    status: int = app.state.exit_status
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
