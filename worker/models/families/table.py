"""The families of our own decoder: functions that read a configuration and name the parts."""

from collections.abc import Callable

from penstock.worker.models.families import (
    cohere,
    deepseek,
    experts,
    gemma,
    glm,
    layer_norm,
    llama,
    olmo,
)
from penstock.worker.models.families.architecture import DecoderConfig
from penstock.worker.models.folder.fields import Fields

# By transformers' `model_type`, which is the function's name.
FAMILIES: dict[str, Callable[[Fields], DecoderConfig]] = {
    family.__name__: family
    for family in (
        llama.llama,
        llama.mistral,
        llama.qwen2,
        llama.qwen3,
        llama.arcee,
        llama.ernie4_5,
        llama.granite,
        llama.ministral,
        llama.phi3,
        llama.seed_oss,
        llama.smollm3,
        cohere.cohere,
        cohere.cohere2,
        deepseek.deepseek_v2,
        deepseek.deepseek_v3,
        experts.glm4_moe,
        experts.gpt_oss,
        experts.mixtral,
        experts.olmoe,
        experts.qwen2_moe,
        experts.qwen3_moe,
        gemma.gemma,
        gemma.gemma2,
        gemma.gemma3_text,
        glm.glm,
        glm.glm4,
        layer_norm.nemotron,
        layer_norm.starcoder2,
        olmo.exaone4,
        olmo.olmo2,
        olmo.olmo3,
    )
}
