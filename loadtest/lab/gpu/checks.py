"""The kernels against their references, on fresh random numbers."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.attention.latent_attention_triton import latent_attention_triton
from penstock.kernels.attention.paged_attention_ref import paged_attention_ref
from penstock.kernels.attention.paged_attention_triton import paged_attention_triton
from penstock.kernels.attention.spans import HeadShape, Scoring
from penstock.kernels.cache.rotate_and_store import (
    HeadNorms,
    Places,
    Rotation,
    plan_store,
    rotate_and_store_ref,
)
from penstock.kernels.cache.store_kv import key_rows
from penstock.kernels.cache.store_latents import plan_latent_store, store_latents_ref
from penstock.kernels.linear.experts import experts_ref
from penstock.kernels.linear.experts_triton import ExpertsOnGpu
from penstock.kernels.linear.panel_weight import PACKINGS
from penstock.kernels.linear.quantise import quantise, quantise_fp8
from penstock.kernels.linear.weight import Weight, stack
from penstock.kernels.numbers.fp8 import FP8, quantise_rows, quantise_rows_ref
from penstock.kernels.rows.activation import activate, activate_ref
from penstock.kernels.rows.norm import NormWeights, normalise, normalise_ref
from penstock.kernels.sampling.sample import WAY, SampleOnGpu, SampleRef
from penstock.loadtest.lab.gpu.figures import Figures
from penstock.loadtest.lab.gpu.given import (
    BLOCK_SIZE,
    DEVICE,
    TOY,
    Qkv,
    batch,
    latent_batch,
    randn,
    random_experts,
    random_qkv,
)
from penstock.worker.layers.products.fp8_linear import Fp8Linear
from penstock.worker.layers.products.product import Pass
from penstock.worker.layers.products.quantised_linear import QuantisedLinear


def checks(figures: Figures) -> None:
    """Compare the kernels with their references, on fresh random numbers."""
    torch.seed()
    for dtype, most in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        kind = str(dtype).removeprefix("torch.")
        comparisons = [*_attentions(dtype), *_latents(dtype), *_small_ops(dtype), *_experts(dtype)]
        if dtype == torch.bfloat16:
            comparisons += [*_quantised(), *_eight_bits(), *_eight_bit_experts()]
        if dtype == torch.float32:
            comparisons += _samples()
        for name, result, expected in comparisons:
            error = ((result.double() - expected.double()).norm() / expected.double().norm()).item()
            figures.add("check", f"{name}, {kind}", error, "relative")
            limit = most if result.is_floating_point() else 0  # a token is right or wrong
            if not error <= limit:
                figures.failures[f"check {name}, {kind}"] = f"error {error}, at most {limit}"
                print("  WRONG", flush=True)


def _attentions(dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    mix = [(1, 40), (15, 15), (33, 50), (1, 1), (100, 300), (7, 130)]
    decodes = [(1, 1), (1, 16), (1, 2500), (1, 333), (1, 1024)]
    if TOY:
        mix, decodes = [(1, 21), (5, 9)], [(1, 3), (1, 300)]
    shapes = [(32, 8, 128), (32, 8, 64), (15, 5, 96), (4, 2, 256), (12, 12, 80), (16, 1, 128)]
    for heads, kv_heads, head_dim in shapes[: 2 if TOY or dtype == torch.float32 else 4]:
        for lengths, label in ((mix, "mixed"), (decodes, "decode")):
            shape = HeadShape(heads, kv_heads, head_dim)
            sinks = torch.linspace(-4, 4, heads, device=DEVICE)
            for scoring in (Scoring(0.1), Scoring(0.1, 50, 3.0), Scoring(0.1, None, None, sinks)):
                query, cache, spans = batch(lengths, shape, dtype)
                expected = paged_attention_ref(query.float(), cache.float(), spans, scoring)
                kind = "" if scoring.window is None else " window cap"
                kind += "" if scoring.sinks is None else " sinks"
                name = f"attention {label} {heads}/{kv_heads}x{head_dim}{kind}"
                yield name, paged_attention_triton(query, cache, spans, scoring), expected
                if not kind:
                    result = paged_attention_triton(
                        query, cache, spans, scoring, deterministic=True
                    )
                    yield f"{name} deterministic", result, expected


def _latents(dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    mix, decodes = [(1, 40), (33, 50), (1, 1), (100, 300)], [(1, 1), (1, 16), (1, 2500), (1, 333)]
    if TOY:
        mix, decodes = [(1, 21), (5, 9)], [(1, 3), (1, 300)]
    latent, rope_dim = (48, 16) if TOY else (512, 64)
    for heads in (5,) if TOY else (16, 128):
        for lengths, label in ((mix, "mixed"), (decodes, "decode")):
            query, cache, spans = latent_batch(lengths, heads, latent, rope_dim, dtype)
            expected = paged_attention_ref(
                query.float(), cache.float(), spans, Scoring(0.1), latent=latent
            )
            for deterministic in (False, True):
                how = " deterministic" if deterministic else ""
                result = latent_attention_triton(
                    query, cache, spans, Scoring(0.1), latent, deterministic=deterministic
                )
                yield f"latents {label} {heads} heads{how}", result, expected
        tokens = 33
        queries, rows = randn(tokens, heads, rope_dim, dtype=dtype), randn(tokens, 600, dtype=dtype)
        rows = rows[:, -latent - rope_dim :]
        norm = NormWeights(1 + randn(latent, dtype=torch.float32), 1e-5)
        slots = torch.randperm(BLOCK_SIZE * len(cache), device=DEVICE)[:tokens]
        turn = Rotation(*randn(2, tokens, rope_dim, dtype=dtype))
        result, wide = cache.clone(), cache.float()
        turned_queries = plan_latent_store(turn, slots, result)(queries, rows, norm, result)
        wide_turn = Rotation(turn.cos.float(), turn.sin.float())
        numbers = queries.float(), rows.float(), norm, wide_turn, wide, key_rows(slots, wide)
        yield f"store latents {heads} queries", turned_queries, store_latents_ref(*numbers)
        yield f"store latents {heads} cache", result, wide


def _eight_bits() -> Iterator[tuple[str, Tensor, Tensor]]:
    """A cache of fp8: what is read from it, and what is stored, odd numbers among it."""
    lengths = [(1, 21), (5, 9)] if TOY else [(1, 40), (33, 50), (1, 1), (100, 300), (1, 2500)]
    for shape in (HeadShape(8, 2, 64), HeadShape(32, 8, 128)):
        query, cache, spans = batch(lengths, shape, torch.bfloat16)
        cache = cache.to(FP8)
        expected = paged_attention_ref(query.float(), cache.float(), spans, Scoring(0.1))
        result = paged_attention_triton(query, cache, spans, Scoring(0.1))
        yield f"attention over fp8 {shape.head_dim}", result, expected
    query, cache, spans = latent_batch(lengths, 16, 512, 64, torch.bfloat16)
    cache = cache.to(FP8)
    expected = paged_attention_ref(query.float(), cache.float(), spans, Scoring(0.1), latent=512)
    result = latent_attention_triton(query, cache, spans, Scoring(0.1), 512)
    yield "latents of fp8", result, expected
    if TOY:
        return  # the interpreter takes what is no number for one
    shape = HeadShape(32, 8, 128)
    qkv, _, _, cache, slots = random_qkv(33, shape, torch.bfloat16)
    qkv *= 100
    for at, odd in enumerate((torch.nan, torch.inf, -torch.inf, 465.0, 0.001)):
        qkv[at :: len(slots) // 3, 5001 + at] = odd
    places, cache = Places(None, slots), cache.to(FP8)
    expected_cache = cache.clone()
    rotate_and_store_ref(qkv, None, places, shape, expected_cache, key_rows(slots, expected_cache))
    plan_store(places, shape, cache)(qkv, None, cache)
    values, expected = (numbers.float().nan_to_num(nan=1e4) for numbers in (cache, expected_cache))
    yield "stored in fp8", values, expected


def _small_ops(dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    for hidden in (64, 123) if TOY else (4096, 2880, 123):
        x = randn(33, hidden, dtype=dtype)
        norm = NormWeights(1 + randn(hidden, dtype=torch.float32), 1e-5)
        yield f"norm {hidden}", normalise(x, norm), normalise_ref(x.float(), norm)
        x = randn(33, 2 * hidden, dtype=dtype)
        yield f"silu_mul {hidden}", activate(x, "silu_mul"), activate_ref(x.float(), "silu_mul")
    for shape in (HeadShape(32, 8, 128), HeadShape(9, 3, 64), HeadShape(4, 2, 80)):
        args = random_qkv(33, shape, dtype)
        wide = Qkv(
            args.qkv.float(),
            args.cos.float(),
            args.sin.float(),
            args.cache.float(),
            args.slots,
        )
        outputs, expected = _stored(args, shape), _stored(wide, shape, reference=True)
        for name, result, right in zip(("queries", "cache"), outputs, expected, strict=True):
            yield f"rotate and store {shape.num_heads}x{shape.head_dim} {name}", result, right


def _experts(dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    num_experts, num_chosen, hidden, width = (4, 2, 64, 48) if TOY else (32, 4, 1024, 704)
    for tokens in (3, 40) if TOY else (1, 7, 300, 5000):
        for deterministic in (False, True):
            args = random_experts(tokens, num_experts, num_chosen, hidden, width, dtype)
            up, down = args.up.float(), args.down.float()

            def expert(number: int, rows: Tensor, up: Tensor = up, down: Tensor = down) -> Tensor:
                return activate_ref(rows @ up[number].T, "silu_mul") @ down[number].T

            experts = [partial(expert, number) for number in range(num_experts)]
            expected = experts_ref(args.x.float(), experts, args.expert_ids, args.shares)
            mixture = ExpertsOnGpu(Weight.dense(args.up), Weight.dense(args.down), "silu_mul")
            start = torch.zeros_like(args.x)
            result = mixture.add(args.x, args.expert_ids, args.shares, start, deterministic)
            how = ", deterministic" if deterministic else ""
            yield f"experts, {tokens} tokens{how}", result, expected


def _eight_bit_experts() -> Iterator[tuple[str, Tensor, Tensor]]:
    """In float32 between the products, where no number goes to its neighbour in fp8."""
    num_experts, num_chosen, hidden, width = (4, 2, 64, 48) if TOY else (32, 4, 1024, 704)
    for tokens in (3, 40) if TOY else (1, 7, 300, 5000):
        args = random_experts(tokens, num_experts, num_chosen, hidden, width, torch.float32)
        wide_up = _widened(args.up.flatten(0, 1)).view(args.up.shape)
        wide_down = _widened(args.down.flatten(0, 1)).view(args.down.shape)

        def expert(
            number: int, rows: Tensor, up: Tensor = wide_up, down: Tensor = wide_down
        ) -> Tensor:
            inner = activate_ref(_widened(rows) @ up[number].T, "silu_mul")
            return _widened(inner) @ down[number].T

        experts = [partial(expert, number) for number in range(num_experts)]
        expected = experts_ref(args.x, experts, args.expert_ids, args.shares)
        packed_up, packed_down = (
            stack([*map(quantise_fp8, weights)]) for weights in (args.up, args.down)
        )
        mixture = ExpertsOnGpu(packed_up, packed_down, "silu_mul")
        result = mixture.add(args.x, args.expert_ids, args.shares, torch.zeros_like(args.x))
        yield f"experts in fp8, {tokens} tokens", result, expected


def _widened(rows: Tensor) -> Tensor:
    numbers, scales = quantise_rows_ref(rows)
    return numbers.float() * scales


def _quantised() -> Iterator[tuple[str, Tensor, Tensor]]:
    out, wide = (80, 192) if TOY else (4096, 2880)
    for name in ("int8", "int4_g64", "int4_g128"):
        weight, packing = randn(out, wide) / wide**0.5, PACKINGS[name]
        packed_weight = quantise(weight, packing)
        numbers, layer = (
            packed_weight.rows(slice(None)).float(),
            QuantisedLinear(packed_weight, None),
        )
        for rows in (1, 33, 150):
            x = randn(rows, wide)
            for deterministic in (False, True):
                how = ", deterministic" if deterministic else ""
                result = layer(x, Pass(deterministic))
                yield f"{name}, {rows} rows{how}", result, x.float() @ numbers.t()
    weight = randn(out, wide) / wide**0.5
    for rows in (1, 33, 150):
        x = 100 * randn(rows, wide)
        result, scales = quantise_rows(x)
        numbers, of_numbers = quantise_rows_ref(x)
        yield f"fp8 of {rows} rows", result.float() * scales, numbers.float() * of_numbers
        narrow, of_narrow = quantise_rows_ref(weight)
        expected = (numbers.float() * of_numbers) @ (narrow.float() * of_narrow).t()
        for deterministic in (False, True):
            how = ", deterministic" if deterministic else ""
            result = Fp8Linear(quantise_fp8(weight), None)(x, Pass(deterministic))
            yield f"fp8, {rows} rows{how}", result, expected


def _samples() -> Iterator[tuple[str, Tensor, Tensor]]:
    """Tokens drawn in every way from flat, usual and steep logits; each must be the reference's."""
    rows, vocab = (8, 300) if TOY else (256, 128_256)
    ways = np.zeros(rows, WAY)
    ways["temperature"] = np.resize([0, 0.3, 1, 2], rows)
    ways["top_p"], ways["top_k"] = np.resize([1, 0.9, 0.5], rows), np.resize([0, 7, 0, 0, 50], rows)
    ways["min_p"], ways["seed"] = np.resize([0, 0, 0, 0, 0, 0, 0.05], rows), np.arange(rows)
    for scale in (0.01, 3.0, 40.0):
        logits, positions = scale * randn(rows, vocab, dtype=torch.float32), np.arange(rows)
        expected = SampleRef(ways, vocab, DEVICE)(logits.clone(), positions, None)
        yield (
            f"sample, spread {scale:g}",
            SampleOnGpu(ways, vocab, DEVICE)(logits, positions, None),
            expected,
        )


def _stored(args: Qkv, shape: HeadShape, reference: bool = False) -> tuple[Tensor, Tensor]:
    qkv, cos, sin, cache, slots = args
    weight = torch.linspace(0.5, 1.5, shape.head_dim, device=DEVICE)
    norms = HeadNorms(NormWeights(weight, 1e-5), NormWeights(weight.flip(0), 1e-5))
    places, cache = Places(Rotation(cos, sin), slots), cache.clone()
    if reference:
        rows = key_rows(slots, cache)
        return rotate_and_store_ref(qkv, norms, places, shape, cache, rows), cache
    return plan_store(places, shape, cache)(qkv, norms, cache), cache
