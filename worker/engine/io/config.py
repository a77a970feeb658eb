"""The configuration of an engine. Names and defaults are vLLM's."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import JsonValue

from penstock.worker.models.folder.sentence_folder import AS_IT_SAYS, PoolerConfig


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The settings of an engine. `None` means that the engine chooses a value itself.

    On a CPU the KV cache takes `kv_cache_memory_bytes`, or 1 GiB.
    """

    model: Path
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"  # or cpu, cuda, cuda:1 ..
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    model_impl: Literal["auto", "native", "transformers"] = "auto"
    trust_remote_code: bool = False
    hf_overrides: Mapping[str, JsonValue] = field(default_factory=dict)
    max_model_len: int | None = None
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    max_step_ms: int | None = None  # 0 is no bound
    enable_prefix_caching: bool = True
    deterministic: bool = False
    enforce_eager: bool = False
    async_scheduling: bool | None = None
    quantization: Literal["int8", "int4_g64", "int4_g128", "fp8"] | None = None
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = "auto"
    attention_backend: Literal["auto", "triton", "compiled", "torch"] = "auto"
    priority_preemption_threshold: int | None = None
    pooler: PoolerConfig = AS_IT_SAYS
    tokenizer: Path | None = None  # the model's folder
