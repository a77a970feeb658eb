"""What the machine can do at most, as measured, and what follows for a workload.

The ideal engine computes in each step the next token of all that run, and the whole prompt of those
that begin, less what it shares with the first prompt of all. A step takes the longer of two times:

    bytes / B, bytes = weights + KV of all running contexts, what they share once
    flops / F, flops = 2 * parameters of the layers * tokens + 2 * parameters of the head * draws
                       + 4 * heads * head size * layers * contexts attended to

B is the speed at which all cores together read memory, F that of the fastest product found; for
weights of 8 or 4 bits their own bytes count, and the fastest product of int8. Nothing else takes
time, so an engine reaches a part of it.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from loadtest.workload import Request

_BYTES = 2**29  # far more than caches hold
_TRIES = 7


@dataclass(frozen=True, slots=True)
class Speeds:
    read_bytes_per_s: float
    flops_per_s: float
    int8_flops_per_s: float

    def at_least(self, other: "Speeds") -> "Speeds":
        """The better of each: what a neighbour took away is no limit of the machine."""
        return Speeds(
            max(self.read_bytes_per_s, other.read_bytes_per_s),
            max(self.flops_per_s, other.flops_per_s),
            max(self.int8_flops_per_s, other.int8_flops_per_s),
        )


# With bf16 scales, one of them for each group.
_WEIGHT_BYTES = {None: 2.0, "int8": 1.0, "int4_g64": 0.5 + 2 / 64, "int4_g128": 0.5 + 2 / 128}


def measure_speeds() -> Speeds:
    """The best of several ways and tries."""
    import torch

    from kernels.panel_linear import PACKINGS, PanelLinear, panel_ops

    memory = torch.ones(_BYTES // 8, dtype=torch.int64)
    read = _BYTES / _least_s(memory.sum)
    rows, inner, columns = 512, 1024, 4096
    x, weight = torch.randn(rows, inner), torch.randn(columns, inner)
    products: list[Callable[[], object]] = [lambda: x @ weight.T]
    wide, narrow = weight.bfloat16(), x.bfloat16()
    narrows: list[Callable[[], object]] = []
    ops = panel_ops(wide, PACKINGS["bf16"])
    if ops is not None:
        few = narrow[:64].contiguous()
        for packing, found in (("bf16", products), ("int8", narrows)):
            panels = PanelLinear(ops, wide, None, PACKINGS[packing])
            found += [partial(panels, narrow), partial(_repeat, partial(panels, few), rows // 64)]
    if torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        products.append(lambda: narrow @ wide.T)
    flops = 2 * rows * inner * columns
    fastest = flops / min(_least_s(product) for product in products)
    narrowest = max([fastest, *(flops / _least_s(product) for product in narrows)])
    return Speeds(read, fastest, narrowest)


def _repeat(product: Callable[[], object], count: int) -> None:
    for _ in range(count):
        product()


def _least_s(work: Callable[[], object]) -> float:
    took = []
    for _ in range(_TRIES):
        begin_s = time.perf_counter()
        work()
        took.append(time.perf_counter() - begin_s)
    return min(took)


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a Llama-like decoder in bfloat16, or with weights of fewer bits."""

    layer_parameters: int  # of all layers
    head_parameters: int
    attention_width: int  # heads * head size * layers
    kv_bytes: int  # of one token
    quantization: str | None = None


def shape_of(folder: Path, quantization: str | None = None) -> Shape:
    config = json.loads((folder / "config.json").read_text())
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    mlp = 3 * hidden * config["intermediate_size"]
    return Shape(
        layers * (attention + mlp),
        hidden * config["vocab_size"],
        heads * head_dim * layers,
        2 * kv_heads * head_dim * layers * 2,
        quantization,
    )


def limit_tokens_per_s(
    speeds: Speeds, shape: Shape, requests: Sequence[Request], concurrency: int
) -> float:
    """Output tokens a second of the ideal engine. The prompts are ids."""
    waiting = list(reversed(requests))
    running: list[_Running] = []
    took_s, first = 0.0, requests[0].ids
    flops_per_s = speeds.int8_flops_per_s if shape.quantization else speeds.flops_per_s
    weights = shape.layer_parameters + shape.head_parameters
    while waiting or running:
        tokens, attended = len(running), sum(one.context for one in running)
        while waiting and len(running) < concurrency:
            request = waiting.pop()
            shared = _num_shared(first, request.ids)
            known = shared if request.ids is not first else 0
            num_prompt = len(request.ids)
            tokens += num_prompt - known
            attended += (num_prompt**2 - known**2) // 2
            running.append(_Running(num_prompt, shared, request.max_tokens))
        distinct = sum(one.context - one.shared for one in running)
        distinct += max(one.shared for one in running)
        num_bytes = weights * _WEIGHT_BYTES[shape.quantization] + shape.kv_bytes * distinct
        flops = 2 * shape.layer_parameters * tokens + 2 * shape.head_parameters * len(running)
        flops += 4 * shape.attention_width * attended
        took_s += max(num_bytes / speeds.read_bytes_per_s, flops / flops_per_s)
        for one in running:
            one.context += 1
            one.left -= 1
        running = [one for one in running if one.left]
    return sum(request.max_tokens for request in requests) / took_s


@dataclass(slots=True)
class _Running:
    context: int
    shared: int  # of it, with the first prompt of all
    left: int  # tokens to make


def _num_shared(first: list[int], other: list[int]) -> int:
    pairs = zip(first, other, strict=False)
    return next(
        (place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(other))
    )
