"""`penstock bench`: the measurements, each loaded only when it is asked for."""

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec

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
    "report": ("loadtest.commands.report", "a page of results, with plots, in one HTML file"),
    "diff": ("loadtest.commands.diff", "two files of results beside each other"),
}
# Run in the source tree alone: the laboratory is no part of what is installed.
LAB = {
    "compare": ("loadtest.lab.compare", "beside transformers, other servers and the limit"),
    "files": ("loadtest.lab.files", "the comparison's model and workloads, for other engines"),
    "memory": ("loadtest.lab.memory", "KV memory that is taken and holds nothing"),
    "quantization": ("loadtest.lab.quantization", "perplexity, size and speed with 8 and 4 bits"),
    "formats": ("loadtest.lab.formats", "size and speed of packed checkpoints, by their formats"),
    "models": (
        "loadtest.lab.models",
        "our decoder beside transformers' modules, experts beside a dense layer",
    ),
    "embed": ("loadtest.lab.embed", "an embedder beside sentence-transformers"),
    "host": ("loadtest.lab.host", "what a step costs beside the model"),
    "queue": ("loadtest.lab.queue", "the queue's path, with an engine that costs nothing"),
    "link": ("loadtest.lab.link", "the CPU of a command in our client of Redis, and in redis-py"),
    "beside": ("loadtest.lab.beside", "what interactive callers see of a batch beside them"),
    "flood": ("loadtest.lab.flood", "what one tenant sees of another that floods"),
    "scale": (
        "loadtest.lab.scale",
        "a thousand streams at once, and calls with 100,000 jobs waiting",
    ),
}
if find_spec("penstock.loadtest.lab") is not None:
    COMMANDS |= LAB


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if argv[0] not in COMMANDS:
        problem = f"there is no command {argv[0]!r}\n\n{_usage()}"
        if argv[0] in LAB:
            problem = f"{argv[0]!r} is run in Penstock's source tree, and is not installed"
        print(f"penstock bench: {problem}", file=sys.stderr)
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
    lines = [f"  {name:<12} {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(["usage: penstock bench COMMAND [--flag VALUE ...]", "", *lines])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
