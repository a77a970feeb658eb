"""`penstock bench`: the measurements, each loaded only when it is asked for."""

import importlib
import os
import sys
from collections.abc import Sequence

from penstock.loadtest.errors import BadOption, CannotMeasure
from penstock.schemas.errors import InvalidJob
from penstock.schemas.process.exit_status import BAD_USAGE

COMMANDS = {
    "offline": ("loadtest.commands.offline", "throughput through LLM, in this process"),
    "latency": ("loadtest.commands.latency", "how long a batch takes through LLM"),
    "serve": (
        "loadtest.commands.serve",
        "latencies and throughput of a server, seen by its clients",
    ),
    "sweep": ("loadtest.commands.sweep", "throughput against latency, as table and plot"),
    "compare": (
        "loadtest.commands.compare",
        "beside transformers, other servers and the limit",
    ),
    "report": ("loadtest.commands.report", "a page of results, with plots, in one HTML file"),
    "diff": ("loadtest.commands.diff", "two files of results beside each other"),
    "files": (
        "loadtest.commands.files",
        "the comparison's model and workloads, for other engines",
    ),
    "memory": ("loadtest.commands.memory", "KV memory that is taken and holds nothing"),
    "quantization": (
        "loadtest.commands.quantization",
        "perplexity, size and speed with 8 and 4 bits",
    ),
    "models": (
        "loadtest.commands.models",
        "our decoder beside transformers' modules, experts beside a dense layer",
    ),
    "embed": ("loadtest.commands.embed", "an embedder beside sentence-transformers"),
    "host": ("loadtest.commands.host", "what a step costs beside the model"),
    "queue": (
        "loadtest.commands.queue",
        "the queue's path, with an engine that costs nothing",
    ),
    "link": (
        "loadtest.commands.link",
        "the CPU of a command in our client of Redis, and in redis-py",
    ),
    "beside": (
        "loadtest.commands.beside",
        "what interactive callers see of a batch beside them",
    ),
    "flood": (
        "loadtest.commands.flood",
        "what one tenant sees of another that floods",
    ),
    "scale": (
        "loadtest.commands.scale",
        "a thousand streams at once, and calls with 100,000 jobs waiting",
    ),
}


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if argv[0] not in COMMANDS:
        print(f"penstock bench: there is no command {argv[0]!r}\n\n{_usage()}", file=sys.stderr)
        return BAD_USAGE
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # spinning threads starve neighbours
    module, _ = COMMANDS[argv[0]]
    try:
        code: int = importlib.import_module(f"penstock.{module}").main(argv[1:])
    except (BadOption, InvalidJob) as error:
        print(f"penstock bench {argv[0]}: {error}", file=sys.stderr)
        return BAD_USAGE
    except CannotMeasure as error:
        print(f"penstock bench {argv[0]}: {error}", file=sys.stderr)
        return 1
    return code


def _usage() -> str:
    lines = [f"  {name:<12} {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(["usage: penstock bench COMMAND [--flag VALUE ...]", "", *lines])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
