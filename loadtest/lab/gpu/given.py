"""The machine and the numbers that the parts compute with, and how they are timed."""

import os
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.kernels.attention.spans import HeadShape, Spans

TOY = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if TOY else "cuda")
BLOCK_SIZE = 16
POOL_BYTES = 2**20 if TOY else 2**31  # keys and values that repeated calls go through
_CALLS, _REPLAYS = (1, 1) if TOY else (16, 7)
LLAMA_8B = HeadShape(32, 8, 128)

SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": {
        "hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "vocab_size": 128_256, "tie_word_embeddings": True,
    },
    "Llama-3-8B": {
        "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14_336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 128_256, "tie_word_embeddings": False,
    },
}  # fmt: skip
TOY_SHAPES: dict[str, dict[str, Any]] = {
    "toy": {
        "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": 512, "tie_word_embeddings": True,
    }
}  # fmt: skip


# Experts, of which so many are chosen; hidden, and an expert's width.
EXPERTS = {
    "Mixtral 8x7B": (8, 2, 4096, 14_336),
    "Qwen3-30B-A3B": (128, 8, 2048, 768),
}
if TOY:
    EXPERTS = {"toy": (4, 2, 64, 48)}


WAYS: dict[str, dict[str, Any]] = {
    "graphs, ahead": {"async_scheduling": True},
    "graphs": {"async_scheduling": False},
    "eager": {"enforce_eager": True, "async_scheduling": False},
}
GREEDY: dict[str, Any] = {"temperature": 0.0, "kind": ""}
SAMPLING: dict[str, Any] = {"temperature": 1.0, "kind": ", sampled"}
TOP_P: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "kind": ", top_p 0.95"}


class Qkv(NamedTuple):
    """Numbers for one call."""

    qkv: Tensor
    cos: Tensor
    sin: Tensor
    cache: Tensor
    slots: Tensor


def random_qkv(tokens: int, shape: HeadShape, dtype: torch.dtype) -> Qkv:
    blocks = -(-tokens // BLOCK_SIZE) + 2
    slots = torch.randperm(blocks * BLOCK_SIZE, device=DEVICE)[:tokens]
    cache = randn(blocks, shape.num_kv_heads, 2, BLOCK_SIZE, shape.head_dim, dtype=dtype)
    turns = randn(2, tokens, shape.head_dim, dtype=dtype)
    return Qkv(randn(tokens, sum(shape.rows), dtype=dtype), turns[0], turns[1], cache, slots)


class ExpertRows(NamedTuple):
    """Numbers for one call of a mixture of experts."""

    x: Tensor
    up: Tensor
    down: Tensor
    expert_ids: Tensor
    shares: Tensor


def random_experts(
    tokens: int, num_experts: int, num_chosen: int, hidden: int, width: int, dtype: torch.dtype
) -> ExpertRows:
    """Return rows of which each has experts of its own."""
    expert_ids = randn(tokens, num_experts, dtype=torch.float32).topk(num_chosen, -1).indices
    return ExpertRows(
        randn(tokens, hidden, dtype=dtype),
        randn(num_experts, 2 * width, hidden, dtype=dtype) / hidden**0.5,
        randn(num_experts, hidden, width, dtype=dtype) / width**0.5,
        expert_ids.to(torch.int32),
        randn(tokens, num_chosen, dtype=torch.float32).softmax(-1),
    )


def empty() -> None:
    if not TOY:
        torch.cuda.empty_cache()


def batch(
    lengths: Sequence[tuple[int, int]], shape: HeadShape, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Spans]:
    """Return queries, a cache with blocks dealt at random, and spans of (query, context) tokens."""
    block_counts = [-(-context // BLOCK_SIZE) for _, context in lengths]
    order = (torch.randperm(sum(block_counts), device=DEVICE) + 1).to(torch.int32)
    tables = torch.zeros((len(lengths), max(block_counts)), dtype=torch.int32, device=DEVICE)
    for row, part in enumerate(torch.split(order, block_counts)):
        tables[row, : len(part)] = part
    cache = randn(
        sum(block_counts) + 1, shape.num_kv_heads, 2, BLOCK_SIZE, shape.head_dim, dtype=dtype
    )
    starts = torch.tensor([0] + [query for query, _ in lengths]).cumsum(0)
    spans = Spans(
        starts.to(DEVICE, torch.int32),
        torch.tensor([context for _, context in lengths], dtype=torch.int32, device=DEVICE),
        tables,
        max(query for query, _ in lengths),
        max(context for _, context in lengths),
    )
    return randn(int(starts[-1]), shape.num_heads, shape.head_dim, dtype=dtype), cache, spans


def latent_batch(
    lengths: Sequence[tuple[int, int]], heads: int, latent: int, rope_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Spans]:
    """Return the same with a cache of latents, each with the turned part of its key behind it."""
    query, cache, spans = batch(lengths, HeadShape(heads, 1, latent + rope_dim), dtype)
    return query, cache[:, :, :1].contiguous(), spans


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=DEVICE)


def timed(calls: Sequence[Callable[[], Any]]) -> float:
    """Return the seconds of one call: on a GPU within a graph that goes through all of them."""
    for call in calls:
        call()
    count = max(_CALLS, len(calls))
    if TOY:
        begin_s = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - begin_s) / len(calls)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in islice(cycle(calls), count):
            call()
    times_s = []
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times_s.append(begin.elapsed_time(end) / 1e3 / count)
    return median(times_s)
