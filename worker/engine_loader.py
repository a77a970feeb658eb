"""The engine that a worker runs, built from its settings."""

import os
from collections.abc import Callable, Mapping
from typing import Protocol

from penstock.schemas.errors import InvalidJob
from penstock.worker.engine.cache.block_changes import BlockChanges
from penstock.worker.engine.fake import fake_engine
from penstock.worker.engine.io.config import EngineConfig
from penstock.worker.engine.io.limits import EngineLimits
from penstock.worker.engine.io.messages import AddSequence, Load, Output, PlanRow, Stats
from penstock.worker.process.loading import loading
from penstock.worker.process.settings import WorkerSettings

# Settings that one kind of model does not obey, with the values that it has all the same.
OF_VECTORS: Mapping[str, tuple[object, ...]] = {"pooler_config": ()}
NOT_OF_VECTORS: Mapping[str, tuple[object, ...]] = {
    "model_impl": ("transformers",),
    "num_gpu_blocks_override": (),
    "gpu_memory_utilization": (),
    "kv_cache_dtype": (),
    "attention_backend": (),
    "kv_cache_memory_bytes": (),
    "kv_events_config": (),
    "async_scheduling": (False,),
    "max_step_ms": (0,),
    "override_generation_config": (),
}


NOT_OF_THE_FAKE: Mapping[str, tuple[object, ...]] = {
    **OF_VECTORS,
    **NOT_OF_VECTORS,
    "quantization": (),
    "enforce_eager": (True,),
}


class AnyEngine(Protocol):
    """The interface that `penstock.worker.engine.engine.Engine` and the fake engine share."""

    note_plan: Callable[[list[PlanRow]], None] | None
    """Told of each step's plan before it is computed."""

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def busy(self) -> bool: ...

    @property
    def num_steps(self) -> int:
        """Return the number of steps so far that computed something."""

    def add(self, addition: AddSequence) -> None: ...

    def cancel(self, seq_id: str) -> None: ...

    def reset_prefix_cache(self) -> None: ...

    def step(self) -> list[Output]: ...

    def wait(self, timeout_s: float | None = None) -> bool: ...

    def follow_blocks(self, with_token_ids: bool) -> BlockChanges: ...

    def load(self) -> Load: ...

    def stats(self) -> Stats: ...


def load_engine(settings: WorkerSettings) -> AnyEngine:
    if settings.load_format == "fake":
        _refuse_unheard(settings, NOT_OF_THE_FAKE, "the fake model")
        return fake_engine(
            settings.max_model_len,
            settings.max_num_seqs,
            settings.block_size,
            settings.fake_step_ms / 1000,
            settings.fake_poison,
            settings.fake_stamps,
            settings.max_num_batched_tokens or 2048,
        )
    if settings.engine == "openai":
        from penstock.worker.external.openai_engine import load_openai_engine

        return load_openai_engine(settings)
    if settings.engine == "vllm":
        from penstock.worker.external.vllm_engine import load_vllm_engine

        return load_vllm_engine(settings)
    # Before torch is loaded: libgomp's spinning makes a busy neighbour very expensive.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    with loading(settings.model):
        pools = settings.pools
        if pools:
            _refuse_unheard(settings, NOT_OF_VECTORS, "a model that makes vectors")
            from penstock.worker.engine.pooling import build_pooling_engine

            return build_pooling_engine(_config(settings))
        _refuse_unheard(settings, OF_VECTORS, "a model of text")
        from penstock.worker.engine.build import build_engine

        return build_engine(_config(settings))


def _refuse_unheard(
    settings: WorkerSettings, neutral: Mapping[str, tuple[object, ...]], kind: str
) -> None:
    """Raise InvalidJob for a setting that would have no effect on a model of this kind."""
    for name, values in neutral.items():
        usual = WorkerSettings.model_fields[name].get_default(call_default_factory=True)
        if getattr(settings, name) not in (usual, *values):
            raise InvalidJob(f"{name}: {kind} does not obey it; leave it out", name)


def _config(settings: WorkerSettings) -> EngineConfig:
    assert settings.load_format != "fake"
    return EngineConfig(
        model=settings.checkpoint(),
        dtype=settings.dtype,
        device=settings.device,
        load_format=settings.load_format,
        model_impl=settings.model_impl,
        trust_remote_code=settings.trust_remote_code,
        hf_overrides=settings.hf_overrides,
        max_model_len=settings.max_model_len,
        block_size=settings.block_size,
        num_gpu_blocks_override=settings.num_gpu_blocks_override,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        kv_cache_memory_bytes=settings.kv_cache_memory_bytes,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_step_ms=settings.max_step_ms,
        enable_prefix_caching=settings.enable_prefix_caching,
        deterministic=settings.deterministic,
        enforce_eager=settings.enforce_eager,
        async_scheduling=settings.async_scheduling,
        quantization=settings.quantization,
        kv_cache_dtype=settings.kv_cache_dtype,
        attention_backend=settings.attention_backend,
        priority_preemption_threshold=settings.priority_preemption_threshold,
        pooler=settings.pooler_config,
        tokenizer=settings.tokenizer_folder(),
    )
