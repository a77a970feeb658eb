"""The command `penstock worker`: one worker on this machine, until SIGTERM."""

import sys
from collections.abc import Sequence

import uvloop

from penstock.schemas.errors import InvalidJob, PenstockError
from penstock.schemas.process.exit_status import NEVER_STARTS
from penstock.schemas.process.start import load_settings, write_log_to_stderr
from penstock.worker.process.log import log
from penstock.worker.process.settings import WorkerSettings
from penstock.worker.supervisor.supervisor import Supervisor


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker with these words of the command line, and return the exit status."""
    settings = load_settings(
        WorkerSettings, "penstock worker", sys.argv[1:] if argv is None else argv
    )
    try:
        if not settings.is_fake:
            settings.checkpoint()  # fetched once, before the processes need it
    except InvalidJob as error:
        print(f"penstock worker: {error.message}", file=sys.stderr)
        return NEVER_STARTS
    write_log_to_stderr("worker", settings, log)
    try:
        status = uvloop.run(Supervisor(settings).run())
    except PenstockError as error:  # a model that this process itself was to load
        log.error("worker cannot start: %s", error.message)
        status = NEVER_STARTS
    log.info("worker ended with status %d", status)
    return status


if __name__ == "__main__":
    sys.exit(main())
