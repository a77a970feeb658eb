"""Checks and measures everything that runs on a GPU: `python -m penstock.loadtest.gpu`.

It needs a GPU, torch, triton, transformers and the engine's few packages; no network, no Redis, no
argument. Every part prints its rows as they come, and one that fails costs its own rows alone. The
figures go into a JSON file beside the table. With TRITON_INTERPRET=1 it tries itself on a CPU, in
toy sizes whose times mean nothing.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
import triton
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from penstock.kernels import device as kernels_device
from penstock.kernels.activation import activate, activate_ref
from penstock.kernels.norm import NormWeights, normalise, normalise_ref
from penstock.kernels.paged_attention_ref import paged_attention_ref
from penstock.kernels.paged_attention_triton import paged_attention_triton
from penstock.kernels.rotate_and_store import (
    HeadNorms,
    Places,
    Rotation,
    plan_store,
    rotate_and_store_ref,
)
from penstock.kernels.sample import WAY, SampleOnGpu, SampleRef
from penstock.kernels.spans import HeadShape, Scoring, Spans
from penstock.kernels.store_kv import key_rows
from penstock.schemas.sampling import SamplingParams
from penstock.worker.engine.build import build_engine
from penstock.worker.engine.config import EngineConfig
from penstock.worker.engine.engine import Engine
from penstock.worker.engine.messages import AddSequence

TOY = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if TOY else "cuda")
BLOCK_SIZE = 16
_POOL_BYTES = 2**20 if TOY else 2**31  # of keys and values that repeated calls go through
_CALLS, _REPLAYS = (1, 1) if TOY else (16, 7)
_LLAMA_8B = HeadShape(32, 8, 128)

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


WAYS: dict[str, dict[str, Any]] = {
    "graphs, ahead": {"async_scheduling": True},
    "graphs": {"async_scheduling": False},
    "eager": {"enforce_eager": True, "async_scheduling": False},
}
GREEDY: dict[str, Any] = {"temperature": 0.0, "kind": ""}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "kind": ", sampled"}
TOP_P: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "kind": ", top_p 0.95"}


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure. `share` is of a limit that was measured or counted, such as bytes over speed."""

    part: str
    name: str
    value: float
    unit: str
    share: float | None = None
    note: str = ""


@dataclass(slots=True)
class Figures:
    rows: list[Figure] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    copy_bytes_per_s: float = float("nan")
    flops: float = float("nan")

    def add(
        self,
        part: str,
        name: str,
        value: float,
        unit: str,
        share: float | None = None,
        note: str = "",
    ) -> None:
        row = Figure(part, name, value, unit, share, note)
        self.rows.append(row)
        shown = "" if share is None else f"{share:6.0%}"
        print(f"{part:9} {name:46} {value:10.4g} {unit:8} {shown:>6}  {note}", flush=True)


def limits(figures: Figures) -> None:
    """Measure the speed of copies and of products, which the other parts are shares of."""
    size = 2**18 if TOY else 2**30
    source, target = (randn(size, dtype=torch.float32) for _ in "ab")
    # As a kernel: a plain copy within a graph was slower on an H200, 2.7 against 4.3 TB/s.
    double = partial(torch.mul, source, 2.0, out=target)
    figures.copy_bytes_per_s = 8 * size / timed([double])
    figures.add("limits", "copy", figures.copy_bytes_per_s / 1e12, "TB/s")
    side = 64 if TOY else 8192
    a, b = (randn(side, side) for _ in "ab")
    figures.flops = 2 * side**3 / timed([lambda: a @ b])
    figures.add("limits", "bf16 product", figures.flops / 1e12, "TFLOP/s")


def checks(figures: Figures) -> None:
    """Compare the kernels with their references, on fresh random numbers."""
    torch.seed()
    for dtype, most in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        kind = str(dtype).removeprefix("torch.")
        sampled = _samples() if dtype == torch.float32 else ()
        for name, got, wanted in [*_attentions(dtype), *_small_ops(dtype), *sampled]:
            error = ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()
            figures.add("check", f"{name}, {kind}", error, "relative")
            allowed = most if got.is_floating_point() else 0  # a token is right or wrong
            if not error <= allowed:
                figures.failures[f"check {name}, {kind}"] = f"error {error}, at most {allowed}"
                print("  WRONG", flush=True)


def _attentions(dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    mixed = [(1, 40), (15, 15), (33, 50), (1, 1), (100, 300), (7, 130)]
    decodes = [(1, 1), (1, 16), (1, 2500), (1, 333), (1, 1024)]
    if TOY:
        mixed, decodes = [(1, 21), (5, 9)], [(1, 3), (1, 300)]
    shapes = [(32, 8, 128), (32, 8, 64), (15, 5, 96), (4, 2, 256), (12, 12, 80), (16, 1, 128)]
    for heads, kv_heads, head_dim in shapes[: 2 if TOY or dtype == torch.float32 else 4]:
        for lengths, what in ((mixed, "mixed"), (decodes, "decode")):
            shape = HeadShape(heads, kv_heads, head_dim)
            sinks = torch.linspace(-4, 4, heads, device=DEVICE)
            for scoring in (Scoring(0.1), Scoring(0.1, 50, 3.0), Scoring(0.1, None, None, sinks)):
                query, cache, spans = batch(lengths, shape, dtype)
                wanted = paged_attention_ref(query.float(), cache.float(), spans, scoring)
                kind = "" if scoring.window is None else " window cap"
                kind += "" if scoring.sinks is None else " sinks"
                name = f"attention {what} {heads}/{kv_heads}x{head_dim}{kind}"
                yield name, paged_attention_triton(query, cache, spans, scoring), wanted
                if not kind:
                    got = paged_attention_triton(query, cache, spans, scoring, deterministic=True)
                    yield f"{name} deterministic", got, wanted


def _small_ops(dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    for hidden in (64, 123) if TOY else (4096, 2880, 123):
        x = randn(33, hidden, dtype=dtype)
        norm = NormWeights(1 + randn(hidden, dtype=torch.float32), 1e-5)
        yield f"norm {hidden}", normalise(x, norm), normalise_ref(x.float(), norm)
        x = randn(33, 2 * hidden, dtype=dtype)
        yield f"silu_mul {hidden}", activate(x, "silu_mul"), activate_ref(x.float(), "silu_mul")
    for shape in (HeadShape(32, 8, 128), HeadShape(9, 3, 64), HeadShape(4, 2, 80)):
        args = _qkv(33, shape, dtype)
        wide = _Qkv(
            args.qkv.float(), args.cos.float(), args.sin.float(), args.cache.float(), args.slots
        )
        query, wanted = _stored(args, shape), _stored(wide, shape, reference=True)
        for name, got, right in zip(("queries", "cache"), query, wanted, strict=True):
            yield f"rotate and store {shape.num_heads}x{shape.head_dim} {name}", got, right


def _samples() -> Iterator[tuple[str, Tensor, Tensor]]:
    """Tokens drawn in every way from flat, usual and steep logits; each must be the reference's."""
    rows, vocab = (8, 300) if TOY else (256, 128_256)
    ways = np.zeros(rows, WAY)
    ways["temperature"] = np.resize([0, 0.3, 1, 2], rows)
    ways["top_p"], ways["top_k"] = np.resize([1, 0.9, 0.5], rows), np.resize([0, 7, 0, 0, 50], rows)
    ways["min_p"], ways["seed"] = np.resize([0, 0, 0, 0, 0, 0, 0.05], rows), np.arange(rows)
    for spread in (0.01, 3.0, 40.0):
        logits, positions = spread * randn(rows, vocab, dtype=torch.float32), np.arange(rows)
        wanted = SampleRef(ways, vocab, DEVICE)(logits.clone(), positions, None)
        yield (
            f"sample, spread {spread:g}",
            SampleOnGpu(ways, vocab, DEVICE)(logits, positions, None),
            wanted,
        )


class _Qkv(NamedTuple):
    """Numbers for one call."""

    qkv: Tensor
    cos: Tensor
    sin: Tensor
    cache: Tensor
    slots: Tensor


def _qkv(tokens: int, shape: HeadShape, dtype: torch.dtype) -> _Qkv:
    blocks = -(-tokens // BLOCK_SIZE) + 2
    slots = torch.randperm(blocks * BLOCK_SIZE, device=DEVICE)[:tokens]
    cache = randn(blocks, shape.num_kv_heads, 2, BLOCK_SIZE, shape.head_dim, dtype=dtype)
    turns = randn(2, tokens, shape.head_dim, dtype=dtype)
    return _Qkv(randn(tokens, sum(shape.rows), dtype=dtype), turns[0], turns[1], cache, slots)


def _stored(args: _Qkv, shape: HeadShape, reference: bool = False) -> tuple[Tensor, Tensor]:
    qkv, cos, sin, cache, slots = args
    weight = torch.linspace(0.5, 1.5, shape.head_dim, device=DEVICE)
    norms = HeadNorms(NormWeights(weight, 1e-5), NormWeights(weight.flip(0), 1e-5))
    places, cache = Places(Rotation(cos, sin), slots), cache.clone()
    if reference:
        rows = key_rows(slots, cache)
        return rotate_and_store_ref(qkv, norms, places, shape, cache, rows), cache
    return plan_store(places, shape, cache)(qkv, norms, cache), cache


def attention_speed(figures: Figures) -> None:
    """Time decoding by the bytes of keys and values, and reading prompts by its products."""
    shape = _LLAMA_8B
    bytes_of_token = 2 * shape.num_kv_heads * shape.head_dim * 2
    for seqs in (1, 2) if TOY else (1, 8, 64, 256):
        for context in (64,) if TOY else (1024, 8192, 32_768):
            sets = max(1, min(8, _POOL_BYTES // (seqs * context * bytes_of_token)))
            calls = [_attention(shape, [(1, context)] * seqs) for _ in range(sets)]
            took = timed(calls)
            least = seqs * context * bytes_of_token / figures.copy_bytes_per_s
            name = f"decode, {seqs} sequences of {context} tokens"
            figures.add("attention", name, 1e6 * took, "us", least / took)
            del calls
    for length in (32,) if TOY else (2048, 8192):
        for before in (0, 3 * length):
            took = timed([_attention(shape, [(length, before + length)])])
            pairs = length * before + length * (length + 1) / 2
            flops = 4 * pairs * shape.num_heads * shape.head_dim
            name = f"prefill, {length} tokens after {before}"
            rate = flops / took
            figures.add("attention", name, rate / 1e12, "TFLOP/s", rate / figures.flops)


def _attention(shape: HeadShape, lengths: list[tuple[int, int]]) -> Callable[[], Tensor]:
    query, cache, spans = batch(lengths, shape, torch.bfloat16)
    scoring = Scoring(shape.head_dim**-0.5)
    return lambda: paged_attention_triton(query, cache, spans, scoring)


def small_ops_speed(figures: Figures) -> None:
    """Time the operations between products, by the bytes that they read and write."""
    tokens, hidden, wide = (4, 64, 128) if TOY else (8192, 4096, 14_336)
    shape, norm = _LLAMA_8B, NormWeights(torch.ones(hidden, device=DEVICE), 1e-5)
    rows = [randn(tokens, hidden) for _ in range(8)]
    products = [randn(tokens, 2 * wide) for _ in range(4)]
    stores = [_store(tokens, shape, with_norms) for with_norms in (False, True)]
    for name, count, calls in (
        ("norm", 2 * tokens * hidden, [partial(normalise, x, norm) for x in rows]),
        ("silu_mul", 3 * tokens * wide, [partial(activate, x, "silu_mul") for x in products]),
        ("rotate and store", *stores[0]),
        ("rotate and store, heads normalised", *stores[1]),
    ):
        took = timed(calls)
        least = 2 * count / figures.copy_bytes_per_s
        figures.add("small ops", f"{name}, {tokens} tokens", 1e6 * took, "us", least / took)


def _store(
    tokens: int, shape: HeadShape, with_norms: bool
) -> tuple[int, list[Callable[[], Tensor]]]:
    weight = NormWeights(torch.ones(shape.head_dim, device=DEVICE), 1e-5)
    norms = HeadNorms(weight, weight) if with_norms else None
    calls: list[Callable[[], Tensor]] = []
    for _ in range(4):
        qkv, cos, sin, cache, slots = _qkv(tokens, shape, torch.bfloat16)
        store = plan_store(Places(Rotation(cos, sin), slots), shape, cache)
        calls.append(partial(store, qkv, norms, cache))
    return 2 * tokens * (sum(shape.rows) + shape.head_dim), calls


def engines(figures: Figures) -> None:
    """Time whole steps of the engine at decoding, with random weights."""
    counts, context = ((2,), 40) if TOY else ((1, 32, 256), 1024)
    for name, config in (TOY_SHAPES if TOY else SHAPES).items():
        with tempfile.TemporaryDirectory() as folder:
            _save(config, folder)
            weights = sum(each.numel() for each in _weights(config)) * 2
            kv = 4 * config["num_hidden_layers"] * config["num_key_value_heads"]
            kv *= config["head_dim"]
            for how, options in WAYS.items():
                engine = _engine(folder, max(counts), context, **options)
                others = (SAMPLED, TOP_P) if options["async_scheduling"] else ()
                for count, params in [
                    *((count, GREEDY) for count in counts),
                    *((max(counts), params) for params in others),
                ]:
                    took = _decoding(engine, count, context, params)
                    least = (weights + count * context * kv) / figures.copy_bytes_per_s
                    least = max(least, weights * count / figures.flops)
                    note = f"{count / took:,.0f} tokens/s, bound {1e3 * least:.2f} ms"
                    label = f"{name}, {count} x {context}, {how}{params['kind']}"
                    figures.add("engine", label, 1e3 * took, "ms", least / took, note)
                    if params is GREEDY and not TOY:
                        busy = _busy(engine, count, context)
                        figures.add("engine", f"{label}, device idle", 1 - busy / took, "share")
                del engine
                _empty()


def _weights(config: dict[str, Any]) -> list[Tensor]:
    """The weights that a step reads, without memory."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    return [each for name, each in model.named_parameters() if "embed" not in name] + (
        [model.lm_head.weight] if config["tie_word_embeddings"] else []
    )


def _decoding(engine: Engine, count: int, context: int, params: dict[str, Any]) -> float:
    """Return the seconds of a step, the median, of `count` sequences of `context` tokens."""
    steps = _begin(engine, count, context, params)
    took = []
    for _ in range(steps):
        begin_s = time.perf_counter()
        outputs = engine.step()
        took.append(time.perf_counter() - begin_s)
        assert len(outputs) == count, outputs[:1]
    _end(engine, count)
    return median(took)


def _busy(engine: Engine, count: int, context: int) -> float:
    """Return the seconds of a step in which the device computes or copies."""
    steps = _begin(engine, count, context, GREEDY) // 4
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    _end(engine, count)
    times = [each.device_time for each in profiled.events() if each.device_type.name == "CUDA"]
    return sum(times) / 1e6 / steps


def _begin(engine: Engine, count: int, context: int, params: dict[str, Any]) -> int:
    """Read the prompts; return how many steps the sequences go on for at least."""
    steps = 2 if TOY else 40
    how = {name: value for name, value in params.items() if name != "kind"}
    sampling = SamplingParams(max_tokens=steps + 44, ignore_eos=True, **how)
    for seq in range(count):
        prompt = [10 + (31 * seq + 7 * at) % 400 for at in range(context - steps // 2)]
        engine.add(AddSequence(f"{seq}", prompt, sampling, seed=seq))
    while len(engine.step()) < count:
        pass
    engine.step()
    return steps


def _end(engine: Engine, count: int) -> None:
    for seq in range(count):
        engine.cancel(f"{seq}")
    engine.step()


def prompts(figures: Figures) -> None:
    """Time the reading of prompts by the whole engine."""
    for name, config in (TOY_SHAPES if TOY else SHAPES).items():
        with tempfile.TemporaryDirectory() as folder:
            _save(config, folder)
            length = 64 if TOY else 8192
            engine = _engine(folder, 8, length, enforce_eager=True)
            flops = 2 * length * sum(each.numel() for each in _weights(config))
            flops += (
                2
                * length**2
                * config["num_hidden_layers"]
                * (config["num_attention_heads"] * config["head_dim"])
            )
            took = []
            for turn in range(1 if TOY else 3):
                params = SamplingParams(temperature=0, max_tokens=1)
                ids = [10 + (13 * turn + 7 * at) % 400 for at in range(length - 8)]
                engine.add(AddSequence(f"{turn}", ids, params))
                begin_s = time.perf_counter()
                while not engine.step():
                    pass
                took.append(time.perf_counter() - begin_s)
            seconds = median(took)
            share = flops / seconds / figures.flops
            note = f"{length / seconds:,.0f} tokens/s"
            label = f"{name}, a prompt of {length} tokens"
            figures.add("engine", label, 1e3 * seconds, "ms", share, note)
            del engine
            _empty()


def beside_transformers(figures: Figures) -> None:
    """Time whole answers, beside transformers' continuous batching, with random weights."""
    name, config = next(iter((TOY_SHAPES if TOY else SHAPES).items()))
    prompt, tokens = (16, 4) if TOY else (128, 128)
    for count in (2,) if TOY else (32, 256):
        inputs = [[10 + (31 * seq + 7 * at) % 400 for at in range(prompt)] for seq in range(count)]
        rates = {}
        with tempfile.TemporaryDirectory() as folder:
            _save(config, folder)
            engine = _engine(folder, count, prompt + tokens)
            rates["penstock"] = _rate(partial(_answer, engine, inputs, tokens))
            del engine
            _empty()
            torch.manual_seed(0)
            with torch.inference_mode(False):
                model = _random_model(folder)
            ends = transformers.GenerationConfig(
                do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=tokens
            )
            rates["transformers"] = _rate(partial(_generate, model, inputs, ends))
            del model
            _empty()
        for who, rate in rates.items():
            label = f"{name}, {count} x {prompt} + {tokens} tokens, {who}"
            figures.add("beside", label, rate, "tokens/s", rate / rates["transformers"])


def _random_model(folder: str) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    return model.eval()


def _generate(model: Any, inputs: list[list[int]], ends: Any) -> int:
    with torch.inference_mode(False), torch.no_grad():  # its thread is in no such mode
        found = model.generate_batch(inputs=inputs, generation_config=ends)
    return sum(len(each.generated_tokens) for each in found.values())


def _answer(engine: Engine, inputs: list[list[int]], tokens: int) -> int:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    for seq, ids in enumerate(inputs):
        engine.add(AddSequence(f"{seq}", ids, params, cache_salt=os.urandom(8)))
    count = 0
    while engine.busy:
        count += sum(len(output.token_ids) for output in engine.step())
    return count


def _rate(answer: Callable[[], int]) -> float:
    """Return tokens a second, of the second time."""
    answer()
    begin_s = time.perf_counter()
    return answer() / (time.perf_counter() - begin_s)


def same_text(figures: Figures) -> None:
    """Compare an undisturbed deterministic run with others: beside others, resumed, eager."""
    config = next(iter((TOY_SHAPES if TOY else SHAPES).values()))
    with tempfile.TemporaryDirectory() as folder:
        _save(config, folder)
        tokens = 6 if TOY else 48
        ids = [10 + 7 * at % 300 for at in range(30 if TOY else 500)]
        texts = {}
        for eager in (False, True):
            engine = _engine(folder, 64, 1024, enforce_eager=eager, deterministic=True)
            for temperature in (0.0, 1.0):
                how = f"{'eager' if eager else 'graphs'} at temperature {temperature:.0f}"
                params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
                texts[f"alone, {how}"] = whole = _text(engine, ids, [], params, 0)
                texts[f"beside others, {how}"] = _text(engine, ids, [], params, 3 if TOY else 40)
                half = whole[: tokens // 2]
                texts[f"resumed, {how}"] = half + _text(engine, ids, half, params, 2)
            del engine
            _empty()
    for name, text in texts.items():
        alone = texts["alone, graphs at temperature " + name[-1]]
        same = sum(a == b for a, b in zip(text, alone, strict=True))
        figures.add("same text", name, same, "tokens", same / tokens)
        if text != alone:
            figures.failures[f"same text {name}"] = f"{same} of {tokens} tokens are the same"


def _text(
    engine: Engine, prompt: list[int], completion: list[int], params: SamplingParams, others: int
) -> list[int]:
    for seq in range(others):
        engine.add(AddSequence(f"other {seq}", prompt[seq + 1 :], params))
    engine.add(AddSequence("it", prompt, params, seed=7, completion=completion))
    tokens = []
    while engine.busy:
        for output in engine.step():
            assert output.error is None, output.error
            if output.seq_id == "it":
                tokens += output.token_ids
    return tokens


def _engine(folder: str, seqs: int, context: int, **options: Any) -> Engine:
    sizes: dict[str, Any] = {"kv_cache_memory_bytes": 2**24} if TOY else {}
    return build_engine(
        EngineConfig(
            Path(folder),
            dtype="float32" if TOY else "bfloat16",
            device=DEVICE.type,  # type: ignore[arg-type]
            load_format="dummy",
            max_num_seqs=seqs,
            max_model_len=context + 64,
            max_num_batched_tokens=128 if TOY else 8192,
            gpu_memory_utilization=0.85,
            **sizes,
            **options,
        )
    )


def _save(config: dict[str, Any], folder: str) -> None:
    positions: dict[str, Any] = {
        "max_position_embeddings": 131_072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }
    transformers.LlamaConfig(**config, **positions).save_pretrained(folder)


def _empty() -> None:
    if not TOY:
        torch.cuda.empty_cache()


def batch(
    lengths: Sequence[tuple[int, int]], shape: HeadShape, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Spans]:
    """Return queries, a cache with blocks dealt at random, and spans of (query, context) tokens."""
    needed = [-(-context // BLOCK_SIZE) for _, context in lengths]
    order = (torch.randperm(sum(needed), device=DEVICE) + 1).to(torch.int32)
    tables = torch.zeros((len(lengths), max(needed)), dtype=torch.int32, device=DEVICE)
    for row, part in enumerate(torch.split(order, needed)):
        tables[row, : len(part)] = part
    cache = randn(sum(needed) + 1, shape.num_kv_heads, 2, BLOCK_SIZE, shape.head_dim, dtype=dtype)
    starts = torch.tensor([0] + [query for query, _ in lengths]).cumsum(0)
    spans = Spans(
        starts.to(DEVICE, torch.int32),
        torch.tensor([context for _, context in lengths], dtype=torch.int32, device=DEVICE),
        tables,
        max(query for query, _ in lengths),
        max(context for _, context in lengths),
    )
    return randn(int(starts[-1]), shape.num_heads, shape.head_dim, dtype=dtype), cache, spans


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
    took = []
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        took.append(begin.elapsed_time(end) / 1e3 / count)
    return median(took)


PARTS = (
    limits,
    same_text,
    attention_speed,
    small_ops_speed,
    engines,
    prompts,
    beside_transformers,
    checks,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", default="gpu.json", help="the file of figures")
    names = [part.__name__ for part in PARTS]
    parser.add_argument("--parts", default=",".join(names), help="which, by commas; all as a rule")
    options = parser.parse_args()
    if not TOY and not torch.cuda.is_available():
        parser.error("there is no GPU; TRITON_INTERPRET=1 tries this script without one")
    if TOY:
        kernels_device.TRITON_DEVICES.add("cpu")
    chosen, figures, began_s = set(options.parts.split(",")), Figures(), time.monotonic()
    for part in PARTS:
        if part.__name__ not in chosen:
            continue
        try:
            with torch.inference_mode():
                part(figures)
        except Exception as error:
            figures.failures[part.__name__] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        print(f"-- {part.__name__}: after {time.monotonic() - began_s:.0f} s", flush=True)
        _empty()
    found = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": "interpreter" if TOY else torch.cuda.get_device_name(),
        "versions": {
            "python": platform.python_version(),
            **{each.__name__: each.__version__ for each in (torch, triton, transformers)},
        },
        "rows": [asdict(row) for row in figures.rows],
        "failures": figures.failures,
    }
    Path(options.out).write_text(json.dumps(found, indent=1) + "\n")
    for name, failure in figures.failures.items():
        print(f"FAILED {name}: {failure}"[:500])
    return 1 if figures.failures else 0


if __name__ == "__main__":
    sys.exit(main())
