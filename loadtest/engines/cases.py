"""The cases of the comparison: workloads, numbers of requests at once, and engines."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.loadtest.engines.subjects import (
    Subject,
    generate,
    generate_batch,
    llm,
    server,
    through_queue,
)
from penstock.loadtest.errors import BadOption
from penstock.loadtest.requests.http_stream import Target, target
from penstock.loadtest.requests.workload import Name

LLM = Subject("Penstock LLM", llm)
QUEUE = Subject("Penstock HTTP", through_queue)
CACHELESS = Subject("LLM, no prefix cache", llm, {"enable_prefix_caching": False})
INT8 = Subject("LLM, int8 weights", llm, {"quantization": "int8"})
DETERMINISTIC = Subject("Penstock deterministic", llm, {"deterministic": True})
BESIDE = Subject("LLM, busy neighbour", llm, is_beside=True)
BATCH = Subject("generate_batch", generate_batch)
ONE_BY_ONE = Subject("generate", generate, sampled=True)
_POOL_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    workload: Name | None  # None for a file's
    concurrency: int
    subjects: Sequence[Subject]
    pool_bytes: int = _POOL_BYTES  # KV memory of an engine of ours

    def of(self, subjects: Sequence[Subject]) -> "Case":
        return replace(self, subjects=subjects)


CASES = (
    Case("W 64", "W", 64, (LLM, DETERMINISTIC, QUEUE, BATCH)),
    Case("W 8", "W", 8, (LLM, INT8, QUEUE, BATCH)),
    Case("one 1", "one", 1, (LLM, INT8, DETERMINISTIC, QUEUE, ONE_BY_ONE)),
    Case("P 64", "P", 64, (LLM, CACHELESS, QUEUE)),
    Case("U 64", "U", 64, (LLM, CACHELESS, QUEUE)),
    Case("long 8", "long", 8, (LLM, DETERMINISTIC, QUEUE), 2 * _POOL_BYTES),
    Case("json 64", "json", 64, (LLM, QUEUE)),
)


def servers(words: Sequence[str]) -> list[Subject]:
    """Return the servers that words `name=http://host:port/v1` name. Raises BadOption."""
    return [
        Subject(name, server(http_server), url=http_server.base_url, port=http_server.local_port)
        for name, http_server in named_targets(words).items()
    ]


def named_targets(words: Sequence[str]) -> dict[str, Target]:
    """Return each word's target by its name. Raises BadOption."""
    targets = {}
    for word in words:
        name, equals, url = word.partition("=")
        if not (name and equals):
            raise BadOption(f"--url: {word!r} is not name=http://host:port/v1")
        targets[name] = target(url, "--url")
    return targets
