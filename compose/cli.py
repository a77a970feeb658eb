"""The command `penstock`: runs one of its parts, which is loaded only when asked for."""

import importlib.metadata
import sys

from penstock.schemas.process.exit_status import NEVER_STARTS

COMMANDS = {
    "up": ("compose.local", "server, gateway, worker and housekeeping, on this machine"),
    "serve": ("compose.serve", "the same for one model: serve MODEL, as with vLLM"),
    "run-batch": ("compose.run_batch", "answer a file of requests; the same command goes on"),
    "demo": ("compose.demo", "the same, with three jobs streamed to the terminal"),
    "worker": ("worker.supervisor.cli", "run jobs of one model"),
    "gateway": ("gateway.server.cli", "HTTP in front of the queue"),
    "housekeeping": ("gateway.housekeeping.main", "chores: sweeps, webhooks, batches"),
    "workers": ("gateway.commands.workers", "list workers; drain, sleep and wake them"),
    "models": ("gateway.commands.models", "list models; remove those that nobody serves"),
    "queues": ("gateway.commands.queues", "list, pause and resume the queues of models"),
    "keys": ("gateway.commands.keys", "create, list, change and revoke API keys"),
    "doctor": ("compose.doctor", "whether Redis, keys, processor, GPU and a model are fit"),
    "plan": ("compose.plan", "what memory a model needs, and what fits beside it"),
    "quantize": ("compose.quantize", "write a model with weights of 8 or 4 bits"),
    "top": ("gateway.commands.top", "what runs now, live: models, queues, workers"),
    "webhooks": (
        "gateway.commands.webhooks",
        "receivers of events, and what they were sent",
    ),
    "acl": ("compose.acl", "users of Redis, one a role, as lines of an ACL file"),
    "bench": (
        "loadtest.bench",
        "offline, latency, serve: speed by vLLM's names; compare: beside others",
    ),
    "completion": ("compose.completion", "makes bash, zsh, fish .. complete all this"),
    "prebuild": ("compose.prebuild", "the CPU operations, for where no C compiler is"),
    "replay": ("gateway.commands.replay", "run a job again, and compare"),
    "dlq": (
        "gateway.commands.dlq",
        "list, show, requeue and drop jobs that were given up",
    ),
}

INTERRUPT_STATUS = 130  # the exit status that shells give after Ctrl-C


def main(argv: list[str] | None = None) -> int:
    """Run `penstock COMMAND ...`. Each command says with --help what it takes."""
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if words[0] in ("-V", "--version", "version"):
        print(f"penstock {importlib.metadata.version('penstock')}")
        return 0
    if words[0] not in COMMANDS:
        print(f"penstock: there is no command {words[0]!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    module, _ = COMMANDS[words[0]]
    try:
        code: int = importlib.import_module(f"penstock.{module}").main(words[1:])
    except KeyboardInterrupt:  # before the command handles it itself
        return INTERRUPT_STATUS
    except ModuleNotFoundError as error:
        if not error.name or error.name.split(".")[0] == "penstock":
            raise
        message = f"penstock {words[0]} needs {error.name}: pip install 'penstock[worker]'"
        print(message, file=sys.stderr)
        return NEVER_STARTS
    return code


def _usage() -> str:
    lines = [f"  {name:<13} {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(["usage: penstock COMMAND [--flag VALUE ...]", "", *lines])


if __name__ == "__main__":
    sys.exit(main())
