"""The settings of an engine, each with what obeys it. Names are vLLM's where it has them."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from penstock.schemas.process.start import FromJson
from penstock.worker.engine.io.setting_facts import ChangesTokens, Obeyed
from penstock.worker.layers.choices import (
    Dtype,
    KvCacheDtype,
    ModelImpl,
    QuantizationSetting,
)
from penstock.worker.models.folder.sentence_folder import PoolerConfig


class KvEventsConfig(BaseModel):
    """The way in which a worker tells which blocks its prefix cache holds. Names are vLLM's.

    buffer_steps  entries that the stream keeps for readers that fall behind
    token_ids     tell the blocks' tokens too, for whoever may read the stream
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    enable_kv_cache_events: bool = False
    publisher: Literal["redis"] = "redis"
    buffer_steps: int = Field(1000, ge=1)
    token_ids: bool = False


class ComputeSettings(BaseModel, frozen=True, defer_build=True):
    """The settings of how a model is loaded and computed."""

    dtype: Annotated[Dtype, Obeyed(vllm=True), ChangesTokens(1)] = Field(
        "auto", description="of weights and cache; auto: the checkpoint's own"
    )
    quantization: Annotated[QuantizationSetting | None, Obeyed(fake=False), ChangesTokens(3)] = (
        Field(
            None,
            description="bits that weights get; of 4 bits, 64 or 128 share a scale; fp8: of "
            "both sides of products, on a GPU. What a folder's weights are already needs no word; "
            "vLLM's names of forms are checked against it",
        )
    )
    kv_cache_dtype: Annotated[
        KvCacheDtype,
        Obeyed(vectors=False, vllm=True),
        ChangesTokens(9),
    ] = Field(
        "auto",
        description="of keys and values: fp8 (e4m3, with the checkpoint's scales) holds twice as "
        "many as bf16; int8, on a CPU, nearly so, each head's row with a scale; auto: as `dtype`",
    )
    attention_backend: Annotated[
        Literal["auto", "triton", "compiled", "torch"], Obeyed(vectors=False), ChangesTokens(10)
    ] = Field(
        "auto",
        description="triton: kernels for a GPU; compiled: C for a CPU; torch: slow, to compare "
        "with, without CUDA graphs; `penstock doctor` tells which there are",
    )
    device: Annotated[str, Obeyed()] = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$",
        description="auto: a GPU if there is one; cpu, cuda, or cuda:1 for the second GPU",
    )
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy", "fake"], Obeyed(vllm=True), ChangesTokens(0)
    ] = Field(
        "auto", description="dummy: random weights, to measure; fake: no model, to try the queue"
    )
    model_impl: Annotated[
        ModelImpl, Obeyed(vectors=False, vllm=True, neutral=("transformers",)), ChangesTokens(4)
    ] = Field(
        "auto",
        description="native: Penstock's own decoder; transformers: that library's module over "
        "Penstock's paged attention; auto: the first that can compute the model",
    )
    runner: Annotated[Literal["auto", "generate", "pooling"], Obeyed(), ChangesTokens(11)] = Field(
        "auto",
        description="generate: completions; pooling: embeddings, or classes and scores; auto: what "
        "the model's folder is made for",
    )
    pooler_config: Annotated[FromJson[PoolerConfig], Obeyed(text=False), ChangesTokens(12)] = Field(
        default_factory=PoolerConfig,
        description='JSON: {"pooling_type": "CLS", "LAST" or "MEAN", "use_activation": false} in '
        "place of what the model's folder says of embeddings",
    )
    trust_remote_code: Annotated[bool, Obeyed(vllm=True)] = Field(
        False, description="run Python code that the model's folder brings, with all its rights"
    )
    hf_overrides: Annotated[FromJson[dict[str, JsonValue]], Obeyed(vllm=True), ChangesTokens(8)] = (
        Field(default_factory=dict, description="JSON: fields of config.json that are to be others")
    )


class SchedulingSettings(BaseModel, frozen=True, defer_build=True):
    """The settings of an engine's lengths, cache and steps.

    On a CPU the KV cache takes `kv_cache_memory_bytes`, or 1 GiB.
    """

    max_model_len: Annotated[int | None, Obeyed(vllm=True, openai=True)] = Field(
        None, ge=1, description="of prompt and completion; none: what the model is made for"
    )
    block_size: Annotated[int, Obeyed(vllm=True), ChangesTokens(16)] = Field(
        16, ge=1, description="tokens of a block of the KV cache"
    )
    num_gpu_blocks_override: Annotated[int | None, Obeyed(vectors=False, vllm=True)] = Field(
        None, ge=2, description="blocks of the KV cache; none: as the memory allows"
    )
    gpu_memory_utilization: Annotated[float, Obeyed(vectors=False, vllm=True)] = Field(
        0.92, gt=0, le=1, description="share of a GPU's memory for weights and cache together"
    )
    kv_cache_memory_bytes: Annotated[int | None, Obeyed(vectors=False, vllm=True)] = Field(
        None,
        ge=1,
        description="taken at the start; none: on a CPU at most 1 GiB, taken as it is written",
    )
    max_num_seqs: Annotated[int, Obeyed(vllm=True, openai=True)] = Field(
        256, ge=1, description="sequences that run at once"
    )
    max_num_batched_tokens: Annotated[int | None, Obeyed(vllm=True)] = Field(
        None,
        ge=1,
        description="of a step, and at most as many run at once; none: 2048, on a CPU 512, or "
        "max_num_seqs if that is more",
    )
    max_step_ms: Annotated[int | None, Obeyed(vectors=False, neutral=(0,))] = Field(
        None,
        ge=0,
        description="prompts are read in slices that make no step longer, by what the last took; "
        "none: 200 on a CPU, or twice a token's time, where max_num_batched_tokens is none too; "
        "0: no bound",
    )
    enable_prefix_caching: Annotated[bool, Obeyed(vllm=True)] = Field(
        True, description="keep blocks to find prompts' beginnings"
    )
    kv_events_config: Annotated[FromJson[KvEventsConfig], Obeyed(vectors=False)] = Field(
        default_factory=KvEventsConfig,
        description='JSON: {"enable_kv_cache_events": true} tells routers which blocks are cached; '
        '"buffer_steps": entries kept, 1000; "token_ids": true tells their tokens too',
    )
    priority_preemption_threshold: Annotated[int | None, Obeyed()] = Field(
        None,
        ge=1,
        le=2,
        description="a job that has no room takes that of running ones so many classes lower; that "
        "of the class batch it takes in any case",
    )
    deterministic: Annotated[bool, Obeyed(), ChangesTokens(2)] = Field(
        False, description="the same tokens whatever runs beside them"
    )
    async_scheduling: Annotated[bool | None, Obeyed(vectors=False, vllm=True, neutral=(False,))] = (
        Field(
            None, description="launch a step before the tokens of the last are read; None: on a GPU"
        )
    )
    enforce_eager: Annotated[bool, Obeyed(fake=False, vllm=True, neutral=(True,))] = Field(
        False, description="make no CUDA graphs of decoding steps: a quicker start, slower tokens"
    )


class EngineConfig(SchedulingSettings, ComputeSettings, extra="forbid"):
    """The settings of an engine. `None` means that the engine chooses a value itself."""

    model: Path
    tokenizer: Path | None = None  # the model's folder
