"""Loads a decoder from a Hugging Face folder, tensor by tensor, so that memory holds it once."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from pydantic import JsonValue

from penstock.worker.layers.arithmetic import AS_IT_IS, Arithmetic
from penstock.worker.layers.choices import Dtype
from penstock.worker.layers.linear import unsupported
from penstock.worker.models.contract.served import ModelPlan
from penstock.worker.models.contract.spec import LoadFormat, ModelSpec
from penstock.worker.models.families.architecture import (
    AttentionConfig,
    ExpertsConfig,
    LatentConfig,
    MLPConfig,
)
from penstock.worker.models.folder.errors import CannotQuantise, UnsupportedField
from penstock.worker.models.folder.gguf.files import gguf_files
from penstock.worker.models.folder.gguf.weights import GgufWeights
from penstock.worker.models.folder.packed import PackedForm
from penstock.worker.models.folder.weights import (
    DummyWeights,
    SafetensorsWeights,
    ShapesOfWeights,
    Weights,
)
from penstock.worker.models.native.config import NO_OVERRIDES, ModelConfig, read_config
from penstock.worker.models.native.decoder import Decoder
from penstock.worker.models.native.loader import Loader

_log = logging.getLogger("penstock.worker.models")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_decoder(
    path: Path,
    dtype: Dtype = "auto",
    device: torch.device | str = "cpu",
    arithmetic: Arithmetic = AS_IT_IS,
    load_format: LoadFormat = "auto",
    overrides: Mapping[str, JsonValue] = NO_OVERRIDES,
) -> Decoder:
    """Load the decoder of a Hugging Face folder. Raises a ModelError that says what is wrong.

    Quantised weights are made of bfloat16, and everything else is then computed in bfloat16.

    overrides  fields of config.json that replace the file's
    """
    config, place = read_config(path, overrides), torch.device(device)
    dtype = fitting_dtype(dtype, config, place, arithmetic)
    weights: Weights
    if load_format == "dummy":
        weights, file_dtype = DummyWeights(config.initializer_range), torch.float32
    else:
        weights = _weights_of(path, config, load_format)
        file_dtype = weights.dtype()
        if arithmetic.quantization and isinstance(weights, GgufWeights):
            weights.refuse_other_bits()
    torch_dtype = computed_dtype(dtype, config.dtype, file_dtype)
    decoder = Loader(config, weights, torch_dtype, place, arithmetic).decoder()
    if config.packed_form and isinstance(weights, SafetensorsWeights):
        of_type = str(torch_dtype).removeprefix("torch.")
        decoder.numerics = _packed_message(
            config.packed_form, weights.widened_modules, of_type, place
        )
        _log.info("%s", decoder.numerics)
    return decoder


def _packed_message(
    form: PackedForm, widened_modules: Sequence[str], of_type: str, place: torch.device
) -> str:
    """Return what became of packed weights, so that no number is another one unsaid."""
    if form.integers is None or of_type != "bfloat16":
        return (
            f"weights of few bits ({form.method}) are widened to {of_type}; rows stay as they are"
        )
    message = f"integers ({form.method}) are multiplied as they are"
    if place.type == "cpu":
        message += ", by rows rounded to 8 bits"
    if widened_modules:
        message += f"; {len(widened_modules)} modules are widened, {widened_modules[0]} the first"
    return message


def _weights_of(
    path: Path, config: ModelConfig, load_format: LoadFormat
) -> GgufWeights | SafetensorsWeights:
    if files := gguf_files(path):
        return GgufWeights(files)
    return SafetensorsWeights(path, config.sees, config.packed_form, load_format)


def computed_dtype(
    dtype: Dtype, config_dtype: torch.dtype | None, file_dtype: torch.dtype
) -> torch.dtype:
    """Return the type of weights and cache: the one asked for, the configuration's, or the files'.

    Raises UnsupportedField.
    """
    torch_dtype = _DTYPES.get(dtype) or config_dtype or file_dtype
    if torch_dtype not in _DTYPES.values():
        raise UnsupportedField("dtype", torch_dtype, f"{', '.join(_DTYPES)}; ask for one of them")
    return torch_dtype


def plan_decoder(spec: ModelSpec) -> ModelPlan:
    """Return what `load_decoder` would load; nothing is read but the configuration."""
    config, weights = read_config(spec.path, spec.overrides), ShapesOfWeights()
    dtype = fitting_dtype(spec.dtype, config, spec.device, spec.arithmetic)
    known_dtype = _DTYPES.get(dtype) or config.dtype
    torch_dtype = computed_dtype(
        dtype,
        known_dtype,
        known_dtype or _weights_of(spec.path, config, spec.load_format).dtype(),
    )
    Loader(config, weights, torch.bfloat16, torch.device("meta"), AS_IT_IS).decoder()
    matrices = {name for name, shape in weights.shapes.items() if len(shape) > 1}
    integers, products = _integers(config, torch_dtype), matrices - _whole(config)
    if integers:
        products = _packed_products(products, config)
    return ModelPlan(config, torch_dtype, weights.shapes, frozenset(products), integers)


def _whole(config: ModelConfig) -> set[str]:
    """Return the names of matrices that keep all their bits."""
    whole = set() if config.tie_word_embeddings else {f"{config.decoder.embedding}.weight"}
    for index, layer in enumerate(config.decoder.layers):
        if isinstance(layer.attention, LatentConfig):
            whole.add(f"{config.decoder.layer}.{index}.self_attn.kv_b_proj.weight")
        if isinstance(layer.mlp, ExpertsConfig):
            gates = (layer.mlp.router, layer.mlp.shared_gate)
            whole |= {f"{config.decoder.layer}.{index}.{gate}.weight" for gate in gates}
    return whole


def _integers(config: ModelConfig, dtype: torch.dtype) -> tuple[int, int | None] | None:
    """Return the bits and the group of integers that stay as they are; None where none do."""
    if dtype != torch.bfloat16 or not config.packed_form or not config.packed_form.integers:
        return None
    return config.packed_form.integers.bits, config.packed_form.integers.group


def _packed_products(products: set[str], config: ModelConfig) -> set[str]:
    """Return the names of those that a checkpoint of integers has packed."""
    ends = {f"{name}.weight" for name in (config.decoder.embedding, config.decoder.head)}
    part = config.packed_form.packed_part if config.packed_form else ""
    return {name for name in products - ends if part in name}


def fitting_dtype(
    dtype: Dtype, config: ModelConfig, device: torch.device, arithmetic: Arithmetic
) -> Dtype:
    """Return the type that was asked for, or the one that quantised weights are computed in.

    Raises CannotQuantise where the model, the device or the type asked for is not for them.
    """
    if arithmetic.quantization is None:
        return "bfloat16" if dtype == "auto" and _has_integers(config) else dtype
    if dtype not in ("auto", "bfloat16"):
        raise CannotQuantise(
            f"{arithmetic.quantization} computes in bfloat16, and dtype is {dtype}; "
            "leave one of the two out"
        )
    widths = {config.hidden_size}
    for layer in config.decoder.layers:
        mlp = layer.mlp
        widths |= _widths(layer.attention)
        parts = (mlp,) if isinstance(mlp, MLPConfig) else (mlp.expert, mlp.shared_mlp)
        widths |= {part.intermediate_size for part in parts if part}
    for width in sorted(widths):
        reason = unsupported(width, device, arithmetic)
        if reason is not None:
            raise CannotQuantise(reason)
    return "bfloat16"


def _has_integers(config: ModelConfig) -> bool:
    return config.packed_form is not None and config.packed_form.integers is not None


def _widths(attention: AttentionConfig | LatentConfig) -> set[int]:
    """Return the widths of attention's products beside the hidden size."""
    if isinstance(attention, AttentionConfig):
        return {attention.shape.num_heads * attention.shape.head_dim}
    widths = {attention.num_heads * attention.value_dim}
    return widths | ({attention.query_rank} if attention.query_rank else set())
