"""A model that makes a vector of each text, computed by transformers' module without a KV cache.

A vector is an embedding, or a classifier's numbers. Texts of a batch that are about as long are
padded to one length and computed together.
"""

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import JsonValue
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForSequenceClassification

from penstock.worker.models.contract.served import ModelPlan
from penstock.worker.models.contract.spec import ModelSpec
from penstock.worker.models.folder.errors import (
    NotDeterministic,
    UnsupportedFamily,
    UnsupportedField,
    UnsupportedModel,
)
from penstock.worker.models.folder.files import read_object
from penstock.worker.models.folder.gguf.files import refuse_gguf
from penstock.worker.models.folder.sentence_folder import (
    AS_IT_SAYS,
    DenseFolder,
    PoolerConfig,
    PoolingType,
    SentenceFolder,
    classifies,
    read_sentence_folder,
)
from penstock.worker.models.folder.weights import SafetensorsWeights
from penstock.worker.models.native.config import max_model_len
from penstock.worker.models.transformers.swapped import products_of, swap_inner
from penstock.worker.models.transformers.transformers_model import (
    TransformersFacts,
    known_config,
    load_module,
    refuse_widths,
    type_in_files,
    type_to_compute,
)

_LIKE_LENGTH = 0.8  # share of the group's longest text; a shorter text begins another group
_FEW_TOKENS = 256  # a group with fewer costs more by itself than padding does
_log = logging.getLogger("penstock.worker.models")


class TextIds(NamedTuple):
    """The ids of one text, or of a pair of texts, the second from `split` on."""

    ids: Sequence[int]
    split: int = 0


class PoolingModel:
    """A module, and what is made of its answer.

    folder         what its folder says of vectors
    labels         a classifier's, in the order of its numbers
    size           how many numbers a vector has
    max_model_len  tokens of a text
    activates      whether vectors are scaled to length 1, or probabilities, unless a job says
    """

    def __init__(
        self,
        module: Any,
        hf: Any,
        folder: SentenceFolder,
        labels: tuple[str, ...],
        dense: Sequence[nn.Module],
        limit: int,
        has_types: bool,
        activates: bool,
    ) -> None:
        self.folder = folder
        self.labels = labels
        self.family: str = hf.model_type
        self.vocab_size: int = hf.get_text_config().vocab_size
        self.max_model_len = limit
        self.activates = activates
        self.activate = _activation_of(hf, len(labels))
        self._module = module
        self._dense = dense
        self._has_types = has_types
        self._pad_id: int | None = getattr(hf, "pad_token_id", None)
        # Without this id a classifier does not know where a text ends.
        self._may_pad = not labels or self._pad_id is not None
        self._may_pad = self._may_pad and self._pads_exactly()
        self.size = self([TextIds([0])]).shape[1]

    @property
    def device(self) -> torch.device:
        device: torch.device = self._module.device
        return device

    def follow(self, on_progress: Callable[[], None]) -> None:
        """Let `on_progress` be called after each layer of each group: a long text takes long."""
        for module in self._module.modules():
            if isinstance(module, nn.ModuleList):
                for layer in module:
                    layer.register_forward_hook(lambda *_: on_progress())

    @torch.inference_mode()
    def __call__(self, texts: Sequence[TextIds]) -> Tensor:
        """Return the vectors [texts, size] as the model makes them, float32 on the CPU."""
        lengths = [len(text.ids) for text in texts]
        groups = like_lengths(lengths) if self._may_pad else [[at] for at in range(len(texts))]
        rows = torch.cat([self._group([texts[at] for at in group]) for group in groups]).cpu()
        order = torch.tensor([at for group in groups for at in group])
        return torch.empty_like(rows).index_copy_(0, order, rows)

    def _group(self, texts: Sequence[TextIds]) -> Tensor:
        lengths = torch.tensor([len(text.ids) for text in texts])
        longest = int(lengths.max())
        ids = torch.full((len(texts), longest), self._pad_id or 0)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text.ids)] = torch.tensor(text.ids)
        places, device = torch.arange(longest), self.device
        mask = places < lengths[:, None]
        inputs: dict[str, Tensor] = {"input_ids": ids.to(device)}
        if not bool(mask.all()):
            inputs["attention_mask"] = mask.to(device, torch.int64)
        if self._has_types and any(text.split for text in texts):
            splits = torch.tensor([text.split or len(text.ids) for text in texts])
            kinds = (places >= splits[:, None]) & mask
            inputs["token_type_ids"] = kinds.to(device, torch.int64)
        answer = self._module(**inputs)
        if self.labels:
            logits: Tensor = answer.logits
            return logits.float()
        vectors = pooled(answer.last_hidden_state, mask.to(device), self.folder.pooling)
        for layer in self._dense:
            vectors = layer(vectors)
        return vectors

    def _pads_exactly(self) -> bool:
        """Return whether a text's vector is the same beside a longer one as alone."""
        short, long = TextIds([1, 2, 3]), TextIds([1, 2, 3, 4, 3, 2, 1])
        if self.vocab_size < 5 or self.max_model_len < 7:
            return False
        with torch.inference_mode():
            alone, beside = self._group([short])[0], self._group([long, short])[1]
        is_wide = next(self._module.parameters()).dtype == torch.float32
        is_same = bool((alone - beside).norm() <= (1e-4 if is_wide else 0.05) * alone.norm())
        if not is_same:
            _log.warning("texts are computed one by one: beside others their numbers differ")
        return is_same


def like_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Return groups of indices of texts that are about as long, the longest first."""
    groups: list[list[int]] = []
    num_tokens = 0
    for at in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        is_full = num_tokens >= _FEW_TOKENS
        if not groups or (is_full and lengths[at] < _LIKE_LENGTH * lengths[groups[-1][0]]):
            groups.append([])
            num_tokens = 0
        groups[-1].append(at)
        num_tokens += lengths[at]
    return groups


def pooled(hidden: Tensor, mask: Tensor, kinds: Sequence[PoolingType]) -> Tensor:
    """Return the vectors, float32 [texts, len(kinds) * hidden_size].

    hidden  states of tokens, [texts, tokens, hidden_size]
    mask    [texts, tokens], whether a token is the text's; the first ones are
    """
    hidden, lengths = hidden.float(), mask.sum(1, keepdim=True)
    weights = mask[..., None].float()
    parts = []
    for kind in kinds:
        if kind == "cls":
            vectors = hidden[:, 0]
        elif kind == "lasttoken":
            vectors = hidden[torch.arange(len(hidden), device=hidden.device), lengths[:, 0] - 1]
        elif kind == "max":
            vectors = hidden.masked_fill(weights == 0, -torch.inf).amax(1)
        elif kind == "weightedmean":
            ranks = weights * torch.arange(1, hidden.shape[1] + 1, device=hidden.device)[:, None]
            vectors = (hidden * ranks).sum(1) / ranks.sum(1)
        else:
            divisor = lengths if kind == "mean" else lengths.sqrt()
            vectors = (hidden * weights).sum(1) / divisor
        parts.append(vectors)
    return torch.cat(parts, 1)


def load_pooling_model(spec: ModelSpec, config: PoolerConfig = AS_IT_SAYS) -> PoolingModel:
    """Load a folder's model. Raises a ModelError that says what is wrong."""
    if spec.arithmetic.deterministic:
        raise NotDeterministic("vectors have other bits where others are computed beside them")
    refuse_gguf(spec.path, "name the folder that it was converted from")
    hf, loader, folder = _read(spec, config)
    is_classifier = loader is AutoModelForSequenceClassification
    is_dummy = spec.load_format == "dummy"
    file_dtype = torch.float32 if is_dummy else type_in_files(spec)
    hf.use_cache = False
    dtype = type_to_compute(hf, spec, file_dtype)
    # What a model makes of its first token's state for a classifier is no part of an embedding.
    unread = () if is_classifier else ("pooler.",)
    module = load_module(loader, hf, dtype, spec, None, unread)
    labels = tuple(str(hf.id2label[at]) for at in range(hf.num_labels)) if is_classifier else ()
    limit, has_types = _limit(spec.path, hf, folder, module), _has_types(spec.path, hf)
    refuse_widths(products_of(module).values(), spec)
    swap_inner(module, spec.arithmetic)
    dense = [_dense(layer).to(spec.device) for layer in folder.dense]
    activates = config.use_activation is not False if labels else folder.is_normalised
    return PoolingModel(module, hf, folder, labels, dense, limit, has_types, activates)


def plan_pooling_model(spec: ModelSpec) -> ModelPlan:
    """Return what a folder's model takes, from its configuration alone. Raises a ModelError."""
    hf, loader, folder = _read(spec, AS_IT_SAYS)
    dtype = type_to_compute(hf, spec, torch.float32)
    with torch.device("meta"):
        module = loader.from_config(hf)
    products = products_of(module)
    refuse_widths(products.values(), spec)
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    shapes |= {str(layer.path): (layer.out_features, layer.in_features) for layer in folder.dense}
    limit = _limit(spec.path, hf, folder, module)
    vocab_size = hf.get_text_config().vocab_size
    facts = TransformersFacts(hf.model_type, vocab_size, limit, frozenset(), ())
    return ModelPlan(facts, dtype, shapes, frozenset(products))


def _read(spec: ModelSpec, config: PoolerConfig) -> tuple[Any, Any, SentenceFolder]:
    """Return the configuration, the Auto class of its module, and what comes after the module."""
    hf, fields = known_config(spec)
    _refuse(hf)
    folder = read_sentence_folder(spec.path).changed(config)
    if classifies(fields):
        if folder.pooling:
            why = "a classifier of texts pools as its module does; leave pooling out"
            raise UnsupportedModel(why)
        return hf, AutoModelForSequenceClassification, folder
    if not folder.pooling:
        folder = replace(folder, pooling=(_usual_pooling(hf),))
    return hf, AutoModel, folder


def _refuse(hf: Any) -> None:
    if getattr(hf, "quantization_config", None) is not None:
        raise UnsupportedField("quantization_config", hf.quantization_config, "models without it")
    if getattr(hf, "is_encoder_decoder", False):
        raise UnsupportedFamily(hf.model_type, "which has an encoder and a decoder")


def _usual_pooling(hf: Any) -> PoolingType:
    """Return the pooling of a folder that does not say it: of a decoder the last token's state."""
    from transformers import MODEL_FOR_MASKED_LM_MAPPING

    kind: PoolingType = "mean" if type(hf) in MODEL_FOR_MASKED_LM_MAPPING else "lasttoken"
    _log.info("the folder does not say how vectors are pooled: by %s", kind)
    return kind


def _has_types(path: Path, hf: Any) -> bool:
    """Return whether the model is told which of a pair's texts a token is of."""
    names = _tokenizer_field(path, "model_input_names")
    is_given = not isinstance(names, list) or "token_type_ids" in names
    return is_given and (getattr(hf, "type_vocab_size", 0) or 0) > 1


def _tokenizer_field(path: Path, name: str) -> JsonValue:
    file = path / "tokenizer_config.json"
    return read_object(file).get(name) if file.is_file() else None


def _limit(path: Path, hf: Any, folder: SentenceFolder, module: nn.Module) -> int:
    """Return how many tokens a text may have, by all that says so."""
    text, limits = hf.get_text_config(), [folder.max_tokens]
    if getattr(text, "max_position_embeddings", None):
        limits.append(max_model_len(text))
    for name, part in module.named_modules():
        if name.endswith("position_embeddings") and isinstance(part, nn.Embedding):
            # Some number positions from the padding's id on.
            first = 0 if part.padding_idx is None else part.padding_idx + 1
            limits.append(part.num_embeddings - first)
    length = _tokenizer_field(path, "model_max_length")
    limits.append(length if isinstance(length, int) and length > 0 else None)
    known_limits = [limit for limit in limits if limit is not None]
    if not known_limits:
        raise UnsupportedFamily(hf.model_type, "which does not say how long a text may be")
    return min(known_limits)


def _dense(folder: DenseFolder) -> nn.Module:
    product = nn.Linear(folder.in_features, folder.out_features, folder.has_bias)
    weights = SafetensorsWeights(folder.path)
    with torch.no_grad():
        for name, parameter in product.named_parameters():
            weights.fill(parameter, f"linear.{name}")
    weights.finish()
    return nn.Sequential(product, _torch_module(folder.activation, "activation_function"))


def _activation_of(hf: Any, num_labels: int) -> Callable[[Tensor], Tensor]:
    """Return what makes a classifier's numbers [.., labels] what is asked for: probabilities."""
    section = getattr(hf, "sentence_transformers", None)
    name: JsonValue = section.get("activation_fn") if isinstance(section, dict) else None
    name = name or getattr(hf, "sbert_ce_default_activation_function", None)
    if name is not None:
        return _torch_module(str(name), "activation_fn")
    if hf.problem_type == "regression":
        return nn.Identity()
    if hf.problem_type == "multi_label_classification" or num_labels == 1:
        return nn.Sigmoid()
    return nn.Softmax(-1)


def _torch_module(path: str, field: str) -> nn.Module:
    """Return a module of torch without parameters, by the path of its class."""
    place, _, name = path.rpartition(".")
    kind = getattr(importlib.import_module(place), name, None) if _is_torch(place) else None
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise UnsupportedField(field, path, "classes of torch.nn.modules")
    try:
        return kind()
    except TypeError as error:
        raise UnsupportedField(field, path, "such as need no arguments") from error


def _is_torch(place: str) -> bool:
    return place in ("torch.nn.modules.activation", "torch.nn.modules.linear", "torch.nn")
