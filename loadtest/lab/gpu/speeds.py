"""The speed of the kernels, as a share of what the machine can do."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from penstock.kernels.attention.latent_attention_triton import latent_attention_triton
from penstock.kernels.attention.paged_attention_triton import paged_attention_triton
from penstock.kernels.attention.spans import HeadShape, Scoring
from penstock.kernels.cache.rotate_and_store import (
    HeadNorms,
    Places,
    Rotation,
    plan_store,
)
from penstock.kernels.linear.experts_triton import ExpertsOnGpu
from penstock.kernels.linear.panel_weight import PACKINGS
from penstock.kernels.linear.quantise import quantise, quantise_fp8
from penstock.kernels.linear.weight import Weight
from penstock.kernels.numbers.fp8 import FP8
from penstock.kernels.rows.activation import activate
from penstock.kernels.rows.norm import NormWeights, normalise
from penstock.loadtest.lab.gpu.figures import Figures
from penstock.loadtest.lab.gpu.given import (
    DEVICE,
    EXPERTS,
    LLAMA_8B,
    POOL_BYTES,
    TOY,
    batch,
    empty,
    latent_batch,
    randn,
    random_experts,
    random_qkv,
    timed,
)
from penstock.worker.layers.products.fp8_linear import Fp8Linear
from penstock.worker.layers.products.product import Pass
from penstock.worker.layers.products.quantised_linear import QuantisedLinear


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


def attention_speed(figures: Figures) -> None:
    """Time decoding by the bytes of keys and values, and reading prompts by its products."""
    shape = LLAMA_8B
    bytes_of_token = 2 * shape.num_kv_heads * shape.head_dim * 2
    for seqs, context in ((2, 64),) if TOY else ((64, 8192), (256, 1024)):
        time_s = timed([_attention(shape, [(1, context)] * seqs, FP8) for _ in range(4)])
        least_s = seqs * context * bytes_of_token / 2 / figures.copy_bytes_per_s
        name = f"decode over fp8, {seqs} sequences of {context} tokens"
        figures.add("attention", name, 1e6 * time_s, "us", least_s / time_s)
    for seqs in (1, 2) if TOY else (1, 8, 64, 256):
        for context in (64,) if TOY else (1024, 8192, 32_768):
            sets = max(1, min(8, POOL_BYTES // (seqs * context * bytes_of_token)))
            calls = [_attention(shape, [(1, context)] * seqs) for _ in range(sets)]
            time_s = timed(calls)
            least_s = seqs * context * bytes_of_token / figures.copy_bytes_per_s
            name = f"decode, {seqs} sequences of {context} tokens"
            figures.add("attention", name, 1e6 * time_s, "us", least_s / time_s)
            del calls
    for length in (32,) if TOY else (2048, 8192):
        for before in (0, 3 * length):
            time_s = timed([_attention(shape, [(length, before + length)])])
            pairs = length * before + length * (length + 1) / 2
            flops = 4 * pairs * shape.num_heads * shape.head_dim
            name = f"prefill, {length} tokens after {before}"
            rate = flops / time_s
            figures.add("attention", name, rate / 1e12, "TFLOP/s", rate / figures.flops)


def latents_speed(figures: Figures) -> None:
    """Time attention over latents: by their bytes, or by its products where these take longer."""
    latent, rope_dim = (48, 16) if TOY else (512, 64)
    scoring, bytes_of_token = Scoring(0.1), 2 * (latent + rope_dim)
    for heads in (4,) if TOY else (16, 128):
        for seqs, context in ((2, 64),) if TOY else ((1, 8192), (64, 8192), (256, 1024)):
            calls = []
            for _ in range(max(1, min(8, POOL_BYTES // (seqs * context * bytes_of_token)))):
                query, cache, spans = latent_batch(
                    [(1, context)] * seqs, heads, latent, rope_dim, torch.bfloat16
                )
                calls.append(partial(latent_attention_triton, query, cache, spans, scoring, latent))
            time_s = timed(calls)
            read_s = seqs * context * bytes_of_token / figures.copy_bytes_per_s
            compute_s = 2 * seqs * context * heads * (2 * latent + rope_dim) / figures.flops
            name = f"decode, {seqs} x {context} tokens, {heads} heads"
            figures.add("latents", name, 1e6 * time_s, "us", max(read_s, compute_s) / time_s)
            del calls
            empty()


def _attention(
    shape: HeadShape, lengths: list[tuple[int, int]], dtype: torch.dtype = torch.bfloat16
) -> Callable[[], Tensor]:
    query, cache, spans = batch(lengths, shape, torch.bfloat16)
    cache = cache.to(dtype)
    scoring = Scoring(shape.head_dim**-0.5)
    return lambda: paged_attention_triton(query, cache, spans, scoring)


def small_ops_speed(figures: Figures) -> None:
    """Time the operations between products, by the bytes that they read and write."""
    tokens, hidden, wide = (4, 64, 128) if TOY else (8192, 4096, 14_336)
    shape, norm = LLAMA_8B, NormWeights(torch.ones(hidden, device=DEVICE), 1e-5)
    rows = [randn(tokens, hidden) for _ in range(8)]
    products = [randn(tokens, 2 * wide) for _ in range(4)]
    stores = [_store(tokens, shape, with_norms) for with_norms in (False, True)]
    for name, count, calls in (
        ("norm", 2 * tokens * hidden, [partial(normalise, x, norm) for x in rows]),
        ("silu_mul", 3 * tokens * wide, [partial(activate, x, "silu_mul") for x in products]),
        ("rotate and store", *stores[0]),
        ("rotate and store, heads normalised", *stores[1]),
    ):
        time_s = timed(calls)
        least_s = 2 * count / figures.copy_bytes_per_s
        figures.add("small ops", f"{name}, {tokens} tokens", 1e6 * time_s, "us", least_s / time_s)


def experts_speed(figures: Figures) -> None:
    """Time a mixture of experts: few rows by the weights that are read, many by their products."""
    for name, (num_experts, num_chosen, hidden, width) in EXPERTS.items():
        for tokens in (2, 40) if TOY else (1, 16, 256, 4096):
            args = random_experts(tokens, num_experts, num_chosen, hidden, width, torch.bfloat16)
            mixture = ExpertsOnGpu(Weight.dense(args.up), Weight.dense(args.down), "silu_mul")
            residual = randn(tokens, hidden)
            time_s = timed([partial(mixture.add, args.x, args.expert_ids, args.shares, residual)])
            weight = 3 * hidden * width
            read_s = 2 * weight * len(args.expert_ids.unique()) / figures.copy_bytes_per_s
            compute_s = 2 * weight * args.expert_ids.numel() / figures.flops
            label = f"{name}, {tokens} tokens"
            figures.add("experts", label, 1e6 * time_s, "us", max(read_s, compute_s) / time_s)
            del args, mixture
            empty()


def quantised_speed(figures: Figures) -> None:
    """Time products with weights of fewer bits, beside bf16: by the bytes of the weight."""
    hidden, width = (64, 96) if TOY else (4096, 28_672)
    weights = [randn(width, hidden) / hidden**0.5 for _ in range(2 if TOY else 6)]
    for rows in (2,) if TOY else (1, 16, 64, 128, 1024):
        x = randn(rows, hidden)
        for name, bits in (("bf16", 16), ("int8", 8), ("int4_g128", 4), ("fp8", 8)):
            calls = [partial(_product(weight, name), x) for weight in weights]
            time_s = timed(calls)
            least_s = width * hidden * bits / 8 / figures.copy_bytes_per_s
            rate = figures.flops * (2 if name == "fp8" else 1)
            least_s = max(least_s, 2 * rows * width * hidden / rate)
            label = f"{width} x {hidden}, {rows} rows, {name}"
            figures.add("bits", label, 1e6 * time_s, "us", least_s / time_s)


def _product(weight: Tensor, name: str) -> Callable[[Tensor], Tensor]:
    if name == "bf16":
        return lambda x: x @ weight.t()
    if name == "fp8":
        return partial(Fp8Linear(quantise_fp8(weight), None), pass_=Pass(deterministic=False))
    product = QuantisedLinear(quantise(weight, PACKINGS[name]), None)
    return partial(product, pass_=Pass(deterministic=False))


def _store(
    tokens: int, shape: HeadShape, with_norms: bool
) -> tuple[int, list[Callable[[], Tensor]]]:
    weight = NormWeights(torch.ones(shape.head_dim, device=DEVICE), 1e-5)
    norms = HeadNorms(weight, weight) if with_norms else None
    calls: list[Callable[[], Tensor]] = []
    for _ in range(4):
        qkv, cos, sin, cache, slots = random_qkv(tokens, shape, torch.bfloat16)
        store = plan_store(Places(Rotation(cos, sin), slots), shape, cache)
        calls.append(partial(store, qkv, norms, cache))
    return 2 * tokens * (sum(shape.rows) + shape.head_dim), calls
