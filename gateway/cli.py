"""penstock gateway: one process that serves HTTP until it is told to stop."""

import logging
import signal
import sys
import time
from collections.abc import Sequence

import uvicorn
from pydantic import ValidationError

from gateway.app import build
from gateway.settings import load_settings


def main(argv: Sequence[str]) -> int:
    """SIGTERM and SIGINT: accept no more, let open streams end for `drain_s`, exit 0."""
    try:
        settings = load_settings(argv)
    except ValidationError as refusal:
        for each in refusal.errors():
            flag = "--" + "-".join(map(str, each["loc"])).replace("_", "-")
            print(f"penstock gateway: {flag}: {each['msg']}", file=sys.stderr)
        return 2
    _write_log_to_stderr(settings.log_level)
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn ends in order and then raises the signal once more, for these handlers.
        signal.signal(number, lambda number, frame: None)
    uvicorn.run(
        build(settings),
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http="httptools",
        ws="none",
        access_log=False,  # paths hold job ids; metrics count the responses
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=settings.drain_s,
    )
    return 0


def _write_log_to_stderr(level: str) -> None:
    formatter = logging.Formatter("%(asctime)s gateway[%(process)d] %(levelname)s %(message)s")
    formatter.converter = time.gmtime
    formatter.default_msec_format = "%s.%03dZ"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler], level=level.upper())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
