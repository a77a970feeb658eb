"""`penstock plan`: tells what memory a model needs and what fits, before any weight is loaded."""

import json
import os
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from math import prod
from typing import Literal

from pydantic import ByteSize, Field, JsonValue
from rich.console import Console
from rich.table import Table

from penstock.schemas.counted import counted
from penstock.schemas.errors import InvalidJob, PenstockError
from penstock.schemas.process.start import FromJson, Settings, load_settings
from penstock.worker.layers.choices import (
    Dtype,
    KvCacheDtype,
    ModelImpl,
    QuantizationSetting,
)

PROGRAM = "penstock plan"
GIB = 2**30
EMBEDDING = "model.embed_tokens.weight"


class PlanSettings(Settings):
    """Tell what memory a model needs and what fits beside it. Nothing of it is loaded.

    The exit status is 1 where it does not fit.
    """

    model: str = Field(description="as a worker's --model")
    device: Literal["cpu", "cuda"] = Field("cpu", description="what the worker is to run on")
    memory: ByteSize | None = Field(
        None, description="of it, as 80GiB; none: this machine's, and a GPU's must be given"
    )
    dtype: Dtype = Field("auto", description="of weights and cache; auto: the checkpoint's own")
    quantization: QuantizationSetting | None = Field(
        None, description="bits that weights get, or vLLM's name of what they are"
    )
    kv_cache_dtype: KvCacheDtype = Field("auto", description="as the worker's")
    model_impl: ModelImpl = Field("auto", description="as the worker's")
    trust_remote_code: bool = Field(False, description="as the worker's")
    hf_overrides: FromJson[dict[str, JsonValue]] = Field(
        default_factory=dict, description="JSON: fields of config.json that are to be others"
    )
    max_model_len: int | None = Field(None, ge=1, description="as the worker's")
    block_size: int = Field(16, ge=1, description="as the worker's")
    kv_cache_memory_bytes: ByteSize | None = Field(None, ge=1, description="as the worker's")
    gpu_memory_utilization: float = Field(0.92, gt=0, le=1, description="as the worker's")
    max_num_seqs: int = Field(256, ge=1, description="as the worker's")
    typical_len: int = Field(
        1024, ge=1, description="tokens of a usual request with its answer, to count how many fit"
    )
    as_json: bool = Field(False, alias="json", description="JSON instead of a table")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The sizes of a worker. Its weights may take a few per cent more where they are packed.

    state_bytes  bytes that layers without keys and values keep of a sequence
    num_states   states of sequences that run at once, and of prefixes
    """

    model: str
    family: str
    num_parameters: int
    dtype: str
    weight_bytes: int
    kv_bytes_per_token: int
    state_bytes: int
    num_states: int
    kv_cache_bytes: int
    num_blocks: int
    num_kv_tokens: int
    max_model_len: int
    num_longest_seqs: int
    num_typical_seqs: int
    memory_bytes: int
    is_enough: bool


def main(argv: Sequence[str]) -> int:
    settings = load_settings(PlanSettings, PROGRAM, argv)
    if settings.device == "cuda" and settings.memory is None:
        print(f"{PROGRAM}: --memory: give the GPU's, as in --memory 80GiB", file=sys.stderr)
        return 2
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # no word of missing kernels
    from penstock.worker.models.folder.errors import ModelError

    try:
        plan = plan_of(settings)
    except (InvalidJob, PenstockError, ModelError, OSError, ValueError) as error:
        print(f"{PROGRAM}: {getattr(error, 'message', error)}", file=sys.stderr)
        return 1
    if settings.as_json:
        print(json.dumps(asdict(plan)))
    else:
        Console().print(_table(plan, settings))
    return 0 if plan.is_enough else 1


def plan_of(settings: PlanSettings) -> MemoryPlan:
    """Return the plan, by the rules by which a worker sizes itself.

    Raises InvalidJob, a ModelError also where it cannot be quantised so, and DoesNotFit where not
    even two blocks do.
    """
    import torch

    from penstock.worker.engine.build import (
        CPU_KV_CACHE_BYTES,
        CacheSizes,
        block_bytes,
        cache_dtype,
        length_that_fits,
        refuse_longer,
        sizes_in,
    )
    from penstock.worker.engine.io.config import EngineConfig
    from penstock.worker.layers.arithmetic import Arithmetic
    from penstock.worker.models.contract.spec import ModelSpec
    from penstock.worker.models.folder.sentence_folder import pools
    from penstock.worker.models.impl import plan_model
    from penstock.worker.models.quantization import quantization_to_make
    from penstock.worker.process.model_folder import model_folder

    folder = model_folder(settings.model, with_weights=False, with_code=settings.trust_remote_code)
    spec = ModelSpec(
        folder,
        settings.model_impl,
        settings.dtype,
        torch.device(settings.device),
        Arithmetic(quantization=quantization_to_make(folder, settings.quantization)),
        overrides=settings.hf_overrides,
        trust_remote_code=settings.trust_remote_code,
    )
    if pools(folder):
        from penstock.worker.models.pooling_model import plan_pooling_model

        model = plan_pooling_model(spec)
    else:
        model = plan_model(spec)
    facts, dtype = model.facts, model.dtype
    weight_bytes = _weight_bytes(
        model.shapes,
        dtype.itemsize,
        model.products,
        spec.arithmetic.quantization,
        model.integers,
    )
    memory = settings.memory or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    budget: int = settings.kv_cache_memory_bytes or CPU_KV_CACHE_BYTES
    if settings.device == "cuda" and settings.kv_cache_memory_bytes is None:
        budget = max(0, int(memory * settings.gpu_memory_utilization) - weight_bytes)
    config = EngineConfig(
        model=folder,
        max_model_len=settings.max_model_len,
        block_size=settings.block_size,
        kv_cache_memory_bytes=budget,
        max_num_seqs=settings.max_num_seqs,
        kv_cache_dtype=settings.kv_cache_dtype,
    )
    kv_dtype = cache_dtype(config, spec.device, dtype)
    if facts.kv_shapes:
        sizes = sizes_in(budget, config, facts, kv_dtype)
        length = length_that_fits(config, facts, sizes.num_blocks)
    else:
        sizes = CacheSizes(0, settings.max_num_seqs, 0)
        length = settings.max_model_len or facts.max_model_len
        refuse_longer(length, facts.max_model_len)

    def num_seqs(tokens: int) -> int:
        fit = sizes.num_blocks // -(-tokens // settings.block_size)
        return min(sizes.num_seqs, fit) if facts.kv_shapes else sizes.num_seqs

    num_blocks = sizes.num_blocks
    num_states = sizes.num_seqs + sizes.num_kept_states if facts.state_bytes else 0
    cache_bytes = num_blocks * block_bytes(config, facts, kv_dtype) + num_states * facts.state_bytes
    return MemoryPlan(
        model=settings.model,
        family=facts.family,
        num_parameters=sum(prod(shape) for shape in model.shapes.values()),
        dtype=spec.arithmetic.quantization or str(dtype).removeprefix("torch."),
        weight_bytes=weight_bytes,
        kv_bytes_per_token=block_bytes(config, facts, kv_dtype) // settings.block_size,
        state_bytes=facts.state_bytes,
        num_states=num_states,
        kv_cache_bytes=cache_bytes,
        num_blocks=num_blocks,
        num_kv_tokens=num_blocks * settings.block_size,
        max_model_len=length,
        num_longest_seqs=num_seqs(length),
        num_typical_seqs=num_seqs(min(settings.typical_len, length)),
        memory_bytes=memory,
        is_enough=weight_bytes + cache_bytes <= memory,
    )


def _weight_bytes(
    shapes: Mapping[str, tuple[int, ...]],
    itemsize: int,
    products: Set[str],
    quantization: str | None,
    integers: tuple[int, int | None] | None,
) -> int:
    few = dict.fromkeys(products, (quantization, integers))
    return sum(
        _num_bytes(name, shape, itemsize, *few.get(name, (None, None)))
        for name, shape in shapes.items()
    )


def _num_bytes(
    name: str,
    shape: tuple[int, ...],
    itemsize: int,
    quantization: str | None,
    integers: tuple[int, int | None] | None,
) -> int:
    """Return what a tensor takes.

    integers  the bits and the group of a tensor that is of such already

    Of 4-bit models the head has 8 bits, of fp8 it is whole; norms are not quantised.
    """
    from penstock.kernels.linear.panel_weight import PACKINGS

    count = prod(shape)
    if quantization is None and integers is None:
        return count * itemsize
    is_head = name in (EMBEDDING, "lm_head.weight")
    if quantization == "fp8":
        return count * itemsize if is_head else count + 4 * shape[0]
    packing = PACKINGS["int8" if is_head else quantization or "bf16"]
    bits, group = integers or (packing.bits, packing.group)
    scales = shape[0] * -(-shape[1] // (group or shape[1]))
    return count * bits // 8 + scales * 4


def _table(plan: MemoryPlan, settings: PlanSettings) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    where = "GPU's" if settings.device == "cuda" else "machine's"
    usual = min(settings.typical_len, plan.max_model_len)
    rest = plan.memory_bytes - plan.weight_bytes - plan.kv_cache_bytes
    rows = [
        ("model", f"{plan.model} ({plan.family}), {plan.num_parameters / 1e6:,.1f} M parameters"),
        ("weights", f"{_size(plan.weight_bytes)} in {plan.dtype}"),
        *(
            _cache_rows(plan, usual)
            if plan.num_blocks
            else [("KV cache", "none: it makes vectors")]
        ),
        ("context", f"{plan.max_model_len:,} tokens"),
        ("memory", f"{_size(plan.memory_bytes)}, the {where}; {_size(max(0, rest))} are left"),
    ]
    if settings.device == "cuda":
        rows.append(("", "a worker takes off what its largest step needs, and fits fewer blocks"))
    if not plan.is_enough:
        lacks = f"{_size(-rest)} are lacking: try --quantization, a smaller --dtype or less for"
        rows.append(("[bold red]does not fit", f"[bold red]{lacks} --kv-cache-memory-bytes"))
    for row in rows:
        table.add_row(*row)
    return table


def _cache_rows(plan: MemoryPlan, usual: int) -> list[tuple[str, str]]:
    cache_size = f"{plan.num_blocks:,} blocks, {plan.num_kv_tokens:,} tokens"
    states = f"{plan.num_states:,} of {_size(plan.state_bytes)}: sequences and prefixes"
    longest = counted(plan.num_longest_seqs, "sequence", ",")
    typical = counted(plan.num_typical_seqs, "sequence", ",")
    return [
        ("KV of a token", f"{plan.kv_bytes_per_token:,} bytes"),
        *([("states", states)] if plan.num_states else []),
        ("KV cache", f"{_size(plan.kv_cache_bytes)}: {cache_size}"),
        ("at once, longest", f"{longest} of {plan.max_model_len:,}"),
        ("at once, usual", f"{typical} of {usual:,}"),
    ]


def _size(count: int) -> str:
    return f"{count / GIB:,.2f} GiB" if count >= GIB / 10 else f"{count / 2**20:,.1f} MiB"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
