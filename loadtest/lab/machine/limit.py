"""The most tokens a second that the machine allows for a workload.

It is the speed of an ideal engine. In each step that engine computes the next token of all running
requests, and the whole prompts of those that begin, less what they share with the first prompt of
all. A step takes the longer of two times:

    bytes / B, bytes = weights + KV of all running contexts, shared parts counted once
    flops / F, flops = 2 * parameters of the layers * tokens + 2 * parameters of the head * draws
                       + 4 * heads * head size * layers * contexts attended to

B is the speed at which all cores together read so many bytes over and over, F the most that they
multiply, both as `loadtest.lab.machine.speeds` measures them. For weights of 8 or 4 bits their own
bytes count, and products of int8. Nothing else takes time, so a real engine reaches only a part of
the limit.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.loadtest.lab.machine.speeds import Speeds
from penstock.loadtest.requests.workload import Request

# Bytes of one number of a weight; with 4 bits the groups have bf16 scales.
_WEIGHT_BYTES = {
    None: 2.0,
    "int8": 1.0,
    "fp8": 1.0,
    "int4_g64": 0.5 + 2 / 64,
    "int4_g128": 0.5 + 2 / 128,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Llama-like decoder in bfloat16, or with weights of fewer bits."""

    layer_parameters: int  # parameters of all layers
    head_parameters: int
    attention_width: int  # heads * head size * layers
    kv_bytes: int  # bytes of one token
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
    """Return the ideal engine's output tokens a second. The prompts must be ids."""
    waiting = list(reversed(requests))
    running: list[_Running] = []
    took_s, first = 0.0, requests[0].ids
    flops_per_s = speeds.int8_flops_per_s if shape.quantization else speeds.flops_per_s
    weights = shape.layer_parameters + shape.head_parameters
    weight_bytes = weights * _WEIGHT_BYTES[shape.quantization]
    read_bytes_per_s = speeds.read_bytes_per_s(weight_bytes)
    while waiting or running:
        tokens, pairs = len(running), sum(seq.context for seq in running)
        while waiting and len(running) < concurrency:
            request = waiting.pop()
            num_shared = _num_shared(first, request.ids)
            num_cached = num_shared if request.ids is not first else 0
            num_prompt = len(request.ids)
            tokens += num_prompt - num_cached
            pairs += (num_prompt**2 - num_cached**2) // 2
            running.append(_Running(num_prompt, num_shared, request.max_tokens))
        distinct = sum(seq.context - seq.num_shared for seq in running)
        distinct += max(seq.num_shared for seq in running)
        num_bytes = weight_bytes + shape.kv_bytes * distinct
        flops = 2 * shape.layer_parameters * tokens + 2 * shape.head_parameters * len(running)
        flops += 4 * shape.attention_width * pairs
        took_s += max(num_bytes / read_bytes_per_s, flops / flops_per_s)
        for seq in running:
            seq.context += 1
            seq.num_left -= 1
        running = [seq for seq in running if seq.num_left]
    return sum(request.max_tokens for request in requests) / took_s


@dataclass(slots=True)
class _Running:
    context: int
    num_shared: int  # tokens of the context that are shared with the first prompt of all
    num_left: int  # tokens to make


def _num_shared(first: list[int], second: list[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next(
        (place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second))
    )
