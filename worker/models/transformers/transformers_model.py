"""A model that transformers' module computes, over our paged attention.

The module is used as it is, but for its attention (`penstock.worker.layers.paged_pass`) and its
plain products, norms and gates, which are swapped for ours. What is handed to attention decides
what is served, and what it cannot do is refused at the start.
"""

import copy
import inspect
import logging
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from pydantic import JsonValue
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.worker.layers.arithmetic import Backend
from penstock.worker.layers.batch import Batch
from penstock.worker.layers.linear import unsupported
from penstock.worker.layers.paged_pass import PagedPass
from penstock.worker.models.contract.served import KvShape, ModelPlan
from penstock.worker.models.contract.spec import ModelSpec
from penstock.worker.models.families.rope import stretched_lengths
from penstock.worker.models.folder.errors import (
    BrokenModel,
    CannotQuantise,
    ModelError,
    NotDeterministic,
    UnknownOverride,
    UnsupportedFamily,
    UnsupportedField,
    reason,
)
from penstock.worker.models.folder.files import read_object, weight_files
from penstock.worker.models.folder.weights import DummyWeights, SafetensorsWeights
from penstock.worker.models.native.config import (
    FOREIGN_FIELDS,
    OLD_ROPE,
    dtype_of,
    eos_token_ids,
    max_model_len,
    overridden,
    refuse_counts,
)
from penstock.worker.models.native.loading import computed_dtype
from penstock.worker.models.transformers.look import NAME, attending
from penstock.worker.models.transformers.seen import LAYERS, Findings, look_at
from penstock.worker.models.transformers.swapped import products_of, swap_modules
from penstock.worker.models.transformers.unmapped import unmap

_LOADER: Any = AutoModelForCausalLM
_GROUPED_BYTES = 16  # rows of torch's grouped product are multiples of this
_LOGGING: Any = transformers.logging
_log = logging.getLogger("penstock.worker.models")


@dataclass(frozen=True, slots=True)
class TransformersFacts:
    """The facts of a model that transformers computes."""

    family: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    kv_shapes: tuple[KvShape, ...]
    state_bytes: int = 0


class TransformersModel:
    """A `penstock.worker.models.contract.served.Model` of transformers' module."""

    numerics = ""  # packed weights are refused

    def __init__(
        self, causal: Any, facts: TransformersFacts, findings: Findings, attention: Backend
    ) -> None:
        self.config = facts
        self.states = findings.states
        self.dtype: torch.dtype = causal.dtype
        self._base = causal.base_model
        self._head = _Head(causal)
        self._layers = findings.layers
        self._attention = attention

    def __call__(self, batch: Batch, kv_caches: list[Tensor]) -> Tensor:
        states, slices = self.states, batch.slices
        parts = None if states is None or slices is None else states.split(slices)
        with attending(PagedPass(batch, self._layers, kv_caches, self._attention, parts)):
            return _hidden(self._base, batch.token_ids, batch.positions)

    @property
    def is_capturable(self) -> bool:
        return False  # a module may read the batch on the host

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)

    @torch.inference_mode()
    def prepare(self, max_model_len: int) -> None:
        """Fix the positions of stretched models, whose modules would choose them anew each pass.

        Raises UnsupportedFamily where a module still goes by the longest of a batch.
        """
        for module in self._base.modules():
            kind = getattr(module, "rope_type", None)
            if kind in ("longrope", "dynamic"):
                _fix_rotations(module, max_model_len)
                module.rope_type = "default"
            if not _turns_alike(module, max_model_len):
                why = "whose rotations depend on the longest sequence of a batch"
                raise UnsupportedFamily(self.config.family, why)


def load_transformers_model(spec: ModelSpec) -> TransformersModel:
    """Load a folder's model into transformers' module. Raises a ModelError."""
    if spec.arithmetic.deterministic:
        raise NotDeterministic(
            "transformers' modules compute a token in other bits where others are computed beside "
            "it; leave it out, or take a model of a native family"
        )
    hf, is_dummy = served_config(spec), spec.load_format == "dummy"
    file_dtype = torch.float32 if is_dummy else type_in_files(spec)
    causal = load_module(_LOADER, hf, type_to_compute(hf, spec, file_dtype), spec, attention=NAME)
    _refuse_class(hf, type(causal))  # one that the folder brings is known only now
    findings = look_at(causal, hf, spec.device, causal.dtype)
    refuse_widths(products_of(causal, findings.stay).values(), spec)
    swap_modules(causal, spec.arithmetic, findings.stay)
    facts = _facts(spec.path, hf, findings)
    return TransformersModel(causal, facts, findings, spec.arithmetic.attention)


def plan_transformers_model(spec: ModelSpec) -> ModelPlan:
    """Return what a folder's model takes, from its configuration alone. Raises a ModelError."""
    hf = served_config(spec)
    dtype = type_to_compute(hf, spec, torch.float32)
    with torch.device("meta"):
        causal = _empty(_LOADER, hf, torch.bfloat16, spec, NAME)
    findings = look_at(causal, hf, spec.device, dtype)
    shapes = {name: tuple(parameter.shape) for name, parameter in causal.named_parameters()}
    products = products_of(causal, findings.stay)
    refuse_widths(products.values(), spec)
    return ModelPlan(_facts(spec.path, hf, findings), dtype, shapes, frozenset(products))


def served_config(spec: ModelSpec) -> Any:
    """Return the configuration of a decoder, of transformers' class or the folder's.

    Raises a ModelError that names the family or the field for what is known not to be served.
    """
    hf, fields = known_config(spec)
    _refuse_config(hf)
    if fields["model_type"] in transformers.CONFIG_MAPPING:
        _refuse_ignored(fields, hf)
    return hf


def known_config(spec: ModelSpec) -> tuple[Any, dict[str, JsonValue]]:
    """Return the configuration of any model, and its fields as they are written.

    Raises a ModelError where it is of no class that may be loaded, or is broken.
    """
    file_fields = read_object(spec.path / "config.json")
    model_type, trusts = file_fields.get("model_type"), spec.trust_remote_code
    is_known = model_type in transformers.CONFIG_MAPPING
    if not is_known and "auto_map" not in file_fields:
        why = f"which transformers {transformers.__version__} does not know"
        raise UnsupportedFamily(model_type, why)
    if not is_known and not trusts:
        code = "which is Python code in the model's folder: --trust-remote-code runs it, with all "
        raise UnsupportedFamily(model_type, f"{code}rights of the worker")
    fields = overridden(file_fields, spec.overrides)
    refuse_counts(fields)
    try:
        hf = AutoConfig.from_pretrained(spec.path, trust_remote_code=trusts, local_files_only=True)
        for name in spec.overrides:
            if not (name in file_fields or name in OLD_ROPE or hasattr(hf, name)):
                raise UnknownOverride(name, str(model_type))
        hf = type(hf).from_dict(fields) if spec.overrides else hf
    except ModelError:
        raise
    except Exception as error:  # many types; its message names the field
        raise BrokenModel(f"{spec.path / 'config.json'}: {reason(error)}") from error
    return hf, fields


def _refuse_config(hf: Any) -> None:
    """Refuse what a paged cache of keys and values does not hold."""
    text, kind = hf.get_text_config(), transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(hf), None)
    if kind is None and "auto_map" not in hf.to_dict():
        why = "which is no causal language model; --runner pooling may serve its vectors"
        raise UnsupportedFamily(hf.model_type, why)
    if getattr(hf, "quantization_config", None) is not None:
        raise UnsupportedField("quantization_config", hf.quantization_config, "models without it")
    for layers in getattr(text, "layer_types", None) or ():
        if layers not in LAYERS:
            raise UnsupportedFamily(hf.model_type, f"which has layers of the kind {layers}")
    if getattr(hf, "is_encoder_decoder", False):
        raise UnsupportedFamily(hf.model_type, "which has an encoder")
    if any(getattr(text, field, None) for field in ("index_topk", "index_topk_blocks")):
        raise UnsupportedFamily(hf.model_type, "whose queries see the keys that an index picks")
    if kind is not None:
        _refuse_class(hf, kind)


def _refuse_class(hf: Any, kind: Any) -> None:
    if not (kind._supports_attention_backend or kind._is_stateful):  # these are looked at closely
        raise UnsupportedFamily(hf.model_type, "whose module computes attention by itself")


def _refuse_ignored(fields: Mapping[str, JsonValue], hf: Any) -> None:
    """Refuse fields that change the numbers of other families, and that this one's module ignores.

    A configuration keeps whatever it is given, so one that is as usual says what the family has.
    """
    inner, kind = fields.get("text_config"), type(hf.get_text_config())
    all_fields = {**fields, **inner} if isinstance(inner, dict) else fields
    names = kind().to_dict().keys() | kind.attribute_map.keys()
    for field in (*FOREIGN_FIELDS, "layer_types"):
        if all_fields.get(field) is not None and field not in names:
            raise UnsupportedField(field, all_fields[field], f"{hf.model_type} without it")


def type_in_files(spec: ModelSpec) -> torch.dtype:
    """Return the type of the weights in their files, all of which are looked at.

    Raises BrokenModel.
    """
    return SafetensorsWeights(spec.path, load_format=spec.load_format).dtype()


def type_to_compute(hf: Any, spec: ModelSpec, file_dtype: torch.dtype) -> torch.dtype:
    """Return the type of weights and states. Raises a ModelError.

    file_dtype  the type of the weights in their files
    """
    quantization = spec.arithmetic.quantization
    if quantization is None:
        return computed_dtype(spec.dtype, dtype_of(hf.get_text_config()), file_dtype)
    if spec.dtype not in ("auto", "bfloat16"):
        raise CannotQuantise(f"{quantization} computes in bfloat16, not in {spec.dtype}")
    return torch.bfloat16


def refuse_widths(products: Iterable[nn.Linear], spec: ModelSpec) -> None:
    """Raise CannotQuantise where a product is of a width that has no such bits."""
    for width in {product.in_features for product in products}:
        if (why := unsupported(width, spec.device, spec.arithmetic)) is not None:
            raise CannotQuantise(why)


def _facts(path: Path, hf: Any, findings: Findings) -> TransformersFacts:
    text = hf.get_text_config()
    return TransformersFacts(
        hf.model_type,
        text.vocab_size,
        max_model_len(text),
        frozenset(token for token in eos_token_ids(path, hf) if 0 <= token < text.vocab_size),
        tuple(KvShape(layer.shape.num_kv_heads, layer.shape.head_dim) for layer in findings.layers),
        0 if findings.states is None else findings.states.num_bytes,
    )


def load_module(
    loader: Any,
    hf: Any,
    dtype: torch.dtype,
    spec: ModelSpec,
    attention: str | None,
    unread: tuple[str, ...] = (),
) -> Any:
    """Return transformers' module with the folder's weights, ready to compute. Raises a ModelError.

    loader     one of transformers' Auto classes
    attention  the name under which its attention is registered; None: transformers' choice
    unread     the beginnings of the names of tensors that nobody needs, and that may be missing
    """
    try:
        module = _module(loader, hf, dtype, spec, attention, unread)
    except ModelError:
        raise
    except Exception as error:  # many types; the module's code is theirs, or the folder's
        why = f"{spec.path}: transformers cannot load it: {reason(error)}"
        raise BrokenModel(why) from error
    if spec.device.type == "cpu":
        unmap(module, weight_files(spec.path))
    if any(_lies_oddly(parameter) for parameter in module.parameters()):
        module.set_experts_implementation("eager")
    return module.requires_grad_(False).train(False).to(spec.device)


def _lies_oddly(parameter: Tensor) -> bool:
    """Return whether these are experts that torch's grouped product cannot multiply."""
    widths = parameter.shape[1:] if parameter.ndim == 3 else ()
    return any(width * parameter.itemsize % _GROUPED_BYTES for width in widths)


def _module(
    loader: Any,
    hf: Any,
    dtype: torch.dtype,
    spec: ModelSpec,
    attention: str | None,
    unread: tuple[str, ...],
) -> Any:
    path = spec.path
    if spec.load_format == "dummy":
        module = _empty(loader, hf, dtype, spec, attention)
        weights = DummyWeights(getattr(hf.get_text_config(), "initializer_range", 0.02))
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                weights.fill(parameter, name)
        return module
    if not sys.stderr.isatty():
        _LOGGING.disable_progress_bar()  # a log is no place for one
    module, report = loader.from_pretrained(
        path,
        config=hf,
        local_files_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are told below
        use_safetensors=True if spec.load_format == "safetensors" else None,
        **_arguments(dtype, spec, attention),
    )
    if absent := sorted(name for name in report["missing_keys"] if not name.startswith(unread)):
        raise BrokenModel(f"{path}: tensor {absent[0]} is missing, one of {len(absent)}")
    for name, shape, expected in sorted(report["mismatched_keys"]):
        raise BrokenModel(
            f"{path}: tensor {name} has shape {list(shape)}, and the configuration asks for "
            f"{list(expected)}"
        )
    if extra := sorted(report["unexpected_keys"]):
        _log.info("%d tensors are read by nothing, such as %s", len(extra), extra[0])
    return module


def _empty(loader: Any, hf: Any, dtype: torch.dtype, spec: ModelSpec, attention: str | None) -> Any:
    """Return a module with whatever numbers it begins with."""
    return loader.from_config(hf, **_arguments(dtype, spec, attention))


def _arguments(dtype: torch.dtype, spec: ModelSpec, attention: str | None) -> dict[str, object]:
    trusts = spec.trust_remote_code
    return {"attn_implementation": attention, "trust_remote_code": trusts, "dtype": dtype}


def _hidden(base: Any, token_ids: Tensor, positions: Tensor) -> Tensor:
    out = base(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
    hidden: Tensor = out.last_hidden_state
    return hidden[0]


class _GivenHidden(nn.Module):
    """Stands for a base model that has computed its hidden states, [1, rows, hidden_size]."""

    hidden: Tensor

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self._bases = (base,)  # no part of this module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bases[0], name)

    @property
    def decoder(self) -> "_GivenHidden":
        """Return what some models call instead of their base."""
        return self

    def forward(self, *_: object, **__: object) -> "_Answer":
        return _Answer(self.hidden)


class _Answer:
    """An output that has hidden states alone; all else is None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, place: int | slice) -> Any:
        return (self.last_hidden_state,)[place]

    def __getattr__(self, name: str) -> None:
        return None


class _Head:
    """The model from its hidden states on: hidden [rows, hidden_size] -> logits, float32.

    So what a family does to its logits (a scale, a soft cap) is what its module does.
    """

    def __init__(self, causal: Any) -> None:
        self._base = _GivenHidden(causal.base_model)
        self._causal = copy.copy(causal)
        self._causal._modules = {**causal._modules, causal.base_model_prefix: self._base}

    def __call__(self, hidden: Tensor) -> Tensor:
        self._base.hidden = hidden[None]
        unread = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        logits: Tensor = self._causal(input_ids=unread, use_cache=False).logits
        return logits[0].float()


def _turns_alike(module: Any, max_model_len: int) -> bool:
    """Return whether a position is turned in the same way beside the last one as alone.

    It is of modules that make no rotations, too.
    """
    buffers = module.named_buffers(recurse=False)
    x = next((buffer for name, buffer in buffers if name.endswith("inv_freq")), None)
    parameters = inspect.signature(module.forward).parameters
    if x is None or "position_ids" not in parameters:
        return True
    kinds = module.rope_type if "layer_type" in parameters else ()  # a mapping, with a key for each
    for more in [{"layer_type": kind} for kind in kinds] or [{}]:
        positions = torch.tensor([[1, max_model_len - 1]], device=x.device)
        alone, beside = (
            module(x, position_ids=ids, **more) for ids in (positions[:, :1], positions)
        )
        for first, second in zip(_tensors(alone), _tensors(beside), strict=True):
            if not torch.allclose(first, second[:, :1], atol=1e-4):
                return False
    return True


def _tensors(output: Any) -> tuple[Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)


def _fix_rotations(module: Any, max_model_len: int) -> None:
    hf, kind = module.config, module.rope_type
    original, longer = stretched_lengths(kind, hf.max_position_embeddings, hf.rope_parameters)
    init = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind]
    seq_len = longer if max_model_len > original else original
    frequencies, _ = init(hf, module.inv_freq.device, seq_len=seq_len)
    module.inv_freq.copy_(frequencies)
