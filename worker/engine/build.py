"""Build an engine from a checkpoint's folder, with sizes that fit the memory."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.numbers.huge_pages import keep_freed, take
from penstock.schemas.errors import PenstockError
from penstock.worker.engine.cache.block_pool import BlockPool
from penstock.worker.engine.cache.state_pool import StatePool
from penstock.worker.engine.engine import Engine
from penstock.worker.engine.grammar.constraints import Grammars
from penstock.worker.engine.io.config import EngineConfig
from penstock.worker.engine.io.limits import EngineLimits
from penstock.worker.engine.running.batch import PersistentBatch
from penstock.worker.engine.running.graphs import CudaCapture, GraphedNetwork
from penstock.worker.engine.running.runner import ModelRunner
from penstock.worker.engine.sampling.sampler import Sampler
from penstock.worker.engine.scheduling.scheduler import Scheduler
from penstock.worker.engine.scheduling.step_tokens import max_step_tokens, step_time, try_step
from penstock.worker.layers.arithmetic import Arithmetic, backends, told
from penstock.worker.layers.eight_bit_cache import KV_DTYPES, cannot_keep
from penstock.worker.models.contract.served import Model, ModelFacts, Network
from penstock.worker.models.contract.spec import ModelSpec
from penstock.worker.models.folder.errors import CannotKeep, NoBackend, NoDevice
from penstock.worker.models.impl import load_model

CPU_KV_CACHE_BYTES = 2**30
_log = logging.getLogger("penstock.worker.engine")


class DoesNotFit(PenstockError):
    code = "does_not_fit"


def build_engine(config: EngineConfig) -> Engine:
    device = take_device(config)
    cache_dtype(config, device, torch.bfloat16)  # what is known before a model is loaded
    _refuse_backend(config, device, torch.bfloat16)
    model = load_model(spec_of(config, device))
    _refuse_backend(config, device, model.dtype)
    facts, dtype = model.config, cache_dtype(config, device, model.dtype)
    step_tokens = max_step_tokens(config, device)
    sizes = _sizes(config, step_tokens, model, dtype, device)
    num_blocks = sizes.num_blocks
    limits = EngineLimits(
        max_model_len=length_that_fits(config, facts, num_blocks),
        vocab_size=facts.vocab_size,
        num_blocks=num_blocks,
        block_size=config.block_size,
        # Each has at least one token of a step.
        max_num_seqs=min(sizes.num_seqs, step_tokens),
        eos_token_ids=facts.eos_token_ids,
    )
    model.prepare(limits.max_model_len)
    kv_caches = [
        kv.zeros(num_blocks, config.block_size, dtype, device)
        if device.type != "cpu"
        else _zeros(
            kv.of_blocks(num_blocks, config.block_size, dtype),
            dtype,
            config.kv_cache_memory_bytes is not None,
        )
        for kv in facts.kv_shapes
    ]
    states = None
    if model.states is not None:
        rows = range(limits.max_num_seqs, limits.max_num_seqs + sizes.num_kept_states)
        model.states.allocate(rows.stop)
        if device.type == "cpu":
            keep_freed()  # torch makes tensors as large as all states of a layer, in every step
        states = StatePool(rows, model.states.copy) if rows else None
    remembers = config.enable_prefix_caching and (model.states is None or states is not None)
    pool = BlockPool(num_blocks, config.block_size, remembers, states)
    scheduler = Scheduler(
        pool,
        limits.max_num_seqs,
        step_tokens,
        config.priority_preemption_threshold,
        step_time(config, model, device),
    )
    batch = PersistentBatch(scheduler.columns, limits.max_model_len, config.block_size, device)
    sampler = Sampler(facts.vocab_size, facts.eos_token_ids, device)
    network: Network = model
    if _captures(config, model, device):
        network = GraphedNetwork(
            model,
            kv_caches,
            limits.max_num_seqs,
            limits.max_model_len,
            config.block_size,
            CudaCapture(),
        )
    copy_state = None if model.states is None else model.states.copy
    runner = ModelRunner(network, kv_caches, batch, sampler, copy_state)
    # On a CPU host and device are one, and nothing is gained.
    setting = config.async_scheduling
    goes_ahead = device.type == "cuda" if setting is None else setting
    return Engine(
        limits,
        scheduler,
        runner,
        Grammars(config.tokenizer or config.model, facts.vocab_size, facts.eos_token_ids),
        runner if goes_ahead else None,
    )


def _captures(config: EngineConfig, model: Model, device: torch.device) -> bool:
    return device.type == "cuda" and model.is_capturable and not config.enforce_eager


def spec_of(config: EngineConfig, device: torch.device) -> ModelSpec:
    """Return the model of an engine, on a device."""
    assert config.load_format != "fake"
    return ModelSpec(
        config.model,
        config.model_impl,
        config.dtype,
        device,
        Arithmetic(
            config.deterministic,
            config.quantization,
            config.attention_backend,
            config.kv_cache_dtype,
        ),
        config.load_format,
        config.hf_overrides,
        config.trust_remote_code,
    )


def take_device(config: EngineConfig) -> torch.device:
    """Return the device that computes, as this process's current one. Raises NoDevice."""
    device = torch.device(device_of(config, torch.cuda.device_count()))
    if device.index is not None:
        torch.cuda.set_device(device)
    return device


def device_of(config: EngineConfig, num_gpus: int) -> str:
    """Return the name of the device that computes, of so many GPUs. Raises NoDevice."""
    name = config.device
    if name == "auto":
        return "cuda" if num_gpus else "cpu"
    kind, _, number = name.partition(":")
    if kind == "cuda" and not num_gpus:
        hint = "" if torch.version.cuda else ", and this torch was built without CUDA"
        raise NoDevice(f"no GPU is there for {name}{hint}; give cpu, or auto, which takes what is")
    if int(number or 0) >= max(num_gpus, 1):
        raise NoDevice(f"{name}: GPUs are numbered from 0, and {num_gpus} are there")
    return name


def _refuse_backend(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Raise NoBackend where the backend that was asked for does not compute such a dtype there."""
    reasons, backend = backends(device, dtype), config.attention_backend
    if backend != "auto" and reasons[backend] is not None:
        raise NoBackend(f"{backend} cannot compute here: {told(reasons)}")


def cache_dtype(
    config: EngineConfig, device: torch.device, model_dtype: torch.dtype
) -> torch.dtype:
    """Return the type of keys and values, of a model that is computed so. Raises CannotKeep."""
    if config.kv_cache_dtype == "auto":
        return model_dtype
    dtype = KV_DTYPES[config.kv_cache_dtype]
    why = cannot_keep(dtype, device, model_dtype)
    if why is not None:
        raise CannotKeep(f"{config.kv_cache_dtype}: {why}")
    return dtype


def block_bytes(config: EngineConfig, facts: ModelFacts, dtype: torch.dtype) -> int:
    """Return the bytes of one block in all layers: keys and values of `block_size` tokens."""
    return sum(kv.token_bytes(dtype) for kv in facts.kv_shapes) * config.block_size


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """The sizes of a cache.

    num_seqs         sequences that may run at once
    num_kept_states  states of prefixes, beside one of each sequence
    """

    num_blocks: int
    num_seqs: int
    num_kept_states: int


def _sizes(
    config: EngineConfig, step_tokens: int, model: Model, dtype: torch.dtype, device: torch.device
) -> CacheSizes:
    """Return the sizes of a cache whose numbers are of `dtype`."""
    if config.num_gpu_blocks_override is not None:
        num_kept_states = config.max_num_seqs if config.enable_prefix_caching else 0
        return CacheSizes(config.num_gpu_blocks_override, config.max_num_seqs, num_kept_states)
    budget = config.kv_cache_memory_bytes
    if budget is None:
        budget = (
            _free_gpu_bytes(config, step_tokens, model, dtype, device)
            if device.type == "cuda"
            else CPU_KV_CACHE_BYTES
        )
    sizes = sizes_in(budget, config, model.config, dtype)
    if sizes.num_seqs < config.max_num_seqs:
        _log.info(
            "%d sequences run at once: each has a state of %d bytes beside its blocks",
            sizes.num_seqs,
            model.config.state_bytes,
        )
    return sizes


def sizes_in(
    budget: int, config: EngineConfig, facts: ModelFacts, dtype: torch.dtype
) -> CacheSizes:
    """Return the sizes of a cache of so many bytes. Raises DoesNotFit where they are too few.

    States take at most half of them, and a quarter of the states is of prefixes.
    """
    num_seqs, num_kept = config.max_num_seqs, 0
    if facts.state_bytes:
        num_states = budget // 2 // facts.state_bytes
        if num_states < 2:
            raise DoesNotFit(
                f"kv_cache_memory_bytes: {budget} bytes; each sequence has a state of "
                f"{facts.state_bytes} beside its blocks; give at least {4 * facts.state_bytes}",
                "kv_cache_memory_bytes",
            )
        if config.enable_prefix_caching:
            num_kept = max(1, num_states // 4)
        num_seqs = min(num_seqs, num_states - num_kept)
        num_kept = min(num_kept, num_seqs)
        budget -= (num_seqs + num_kept) * facts.state_bytes
    num_blocks = _blocks_in(budget, config, facts, dtype)
    return CacheSizes(num_blocks, num_seqs, num_kept)


def _blocks_in(budget: int, config: EngineConfig, facts: ModelFacts, dtype: torch.dtype) -> int:
    num_blocks = budget // block_bytes(config, facts, dtype)
    if num_blocks < 2:
        least_bytes = 2 * block_bytes(config, facts, dtype)
        raise DoesNotFit(
            f"kv_cache_memory_bytes: {budget} bytes hold {num_blocks} blocks of "
            f"{config.block_size} tokens; give at least {least_bytes}",
            "kv_cache_memory_bytes",
        )
    return num_blocks


def _free_gpu_bytes(
    config: EngineConfig, step_tokens: int, model: Model, dtype: torch.dtype, device: torch.device
) -> int:
    """Return the bytes that `gpu_memory_utilization` leaves for the KV cache.

    The weights, the largest step and other processes' memory are taken off. Graphs, if there are
    any, get as much as that step takes, which has more rows than they have.
    """
    torch.cuda.empty_cache()  # what loading left over is no weight
    weights = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    try_step(model, step_tokens, config.max_num_seqs, config.block_size, dtype, device)
    peak = torch.cuda.max_memory_reserved(device)
    torch.cuda.empty_cache()
    graphs = peak - weights if _captures(config, model, device) else 0
    free, total = torch.cuda.mem_get_info(device)
    elsewhere = total - free - torch.cuda.memory_reserved(device)
    return left_of_gpu(
        config.gpu_memory_utilization,
        total,
        {
            "weights": weights,
            "the largest step": peak - weights,
            "graphs": graphs,
            "other processes": elsewhere,
        },
    )


def left_of_gpu(share: float, total: int, sizes: Mapping[str, int]) -> int:
    """Return the bytes of a share of a GPU that are not taken.

    Raises DoesNotFit where there are none, which says what takes how much.
    """
    budget = int(total * share) - sum(sizes.values())
    if budget <= 0:
        uses = ", ".join(f"{name} {count / 2**30:.1f}" for name, count in sizes.items())
        raise DoesNotFit(
            f"gpu_memory_utilization: {share:g} of {total / 2**30:.1f} GiB leaves nothing for the "
            f"KV cache; taken are, in GiB, {uses}; raise it, take a smaller max_num_batched_tokens "
            "or model, or end what else uses the GPU",
            "gpu_memory_utilization",
        )
    return budget


def length_that_fits(config: EngineConfig, facts: ModelFacts, num_blocks: int) -> int:
    """Return the length that was asked for, or else as much of the model's own as the cache holds.

    Raises DoesNotFit when the model or the cache cannot hold the length that was asked for.
    """
    holds = num_blocks * config.block_size
    if config.max_model_len is None:
        return min(facts.max_model_len, holds)
    refuse_longer(config.max_model_len, facts.max_model_len)
    if config.max_model_len > holds:
        raise DoesNotFit(
            f"max_model_len: {config.max_model_len} tokens; {num_blocks} KV blocks hold {holds}; "
            "ask for no more, or give more kv_cache_memory_bytes",
            "max_model_len",
        )
    return config.max_model_len


def refuse_longer(length: int, made_for: int) -> None:
    """Raise DoesNotFit where a length is asked for that the model's positions do not have."""
    if length > made_for:
        raise DoesNotFit(
            f"max_model_len: {length} tokens; the model's positions are made for {made_for}; ask"
            " for no more, or stretch them by hf_overrides (rope_scaling, max_position_embeddings)"
            " if the model can bear it",
            "max_model_len",
        )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, at_once: bool) -> Tensor:
    """Return a tensor of zeros on a CPU, so that no stray NaN meets a masked weight.

    at_once  take all memory pages now, because somebody asked for so many bytes; else they are
             taken when they are written, since few models need them all
    """
    size = int(np.prod(shape)) * dtype.itemsize
    if at_once:
        return take(size).zero_().view(dtype).view(shape)
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)
