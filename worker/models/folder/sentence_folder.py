"""A sentence-transformers folder: how the states of a text's tokens become its one vector.

Its `modules.json` lists what is applied in turn. A folder without one is a plain model's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, JsonValue

from penstock.worker.models.folder.errors import BrokenModel, UnsupportedField, UnsupportedModel
from penstock.worker.models.folder.files import read_array, read_object

PoolingType = Literal["cls", "mean", "lasttoken", "max", "mean_sqrt_len_tokens", "weightedmean"]
_TYPES: tuple[PoolingType, ...] = get_args(PoolingType)
_MODULES, _TEXTS = "modules.json", "config_sentence_transformers.json"
_LENGTH = "sentence_bert_config.json"
_VECTOR = "sentence_embedding"
_OLD_FIELDS: tuple[tuple[str, PoolingType], ...] = (
    ("cls_token", "cls"),
    ("max_tokens", "max"),
    ("mean_tokens", "mean"),
    ("mean_sqrt_len_tokens", "mean_sqrt_len_tokens"),
    ("weightedmean_tokens", "weightedmean"),
    ("lasttoken", "lasttoken"),
)
_KINDS: dict[str, PoolingType] = {"CLS": "cls", "LAST": "lasttoken", "MEAN": "mean"}
CLASSIFIES = "ForSequenceClassification"


class PoolerConfig(BaseModel):
    """A choice of pooling in place of what the folder says. Names are vLLM's.

    use_activation  scale embeddings to length 1, make probabilities of a classifier's numbers
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    pooling_type: Literal["CLS", "LAST", "MEAN"] | None = None
    use_activation: bool | None = None


AS_IT_SAYS = PoolerConfig()


@dataclass(frozen=True, slots=True)
class DenseFolder:
    """A product after pooling, in a folder of its own; the activation is a class of torch."""

    path: Path
    in_features: int
    out_features: int
    has_bias: bool
    activation: str


@dataclass(frozen=True, slots=True)
class SentenceFolder:
    """The parts of a folder that come after the model.

    pooling         what is made of the tokens' states, one after the other; none: not said
    is_normalised   whether vectors have length 1
    max_tokens      the most in a text, where the folder takes fewer than the model
    prompts         texts by name, one of which may go before a text
    lowers          whether texts are lowered first
    """

    pooling: tuple[PoolingType, ...] = ()
    dense: tuple[DenseFolder, ...] = ()
    is_normalised: bool = True
    max_tokens: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    lowers: bool = False

    def changed(self, config: PoolerConfig) -> "SentenceFolder":
        """Return the folder as a configuration of the pooler wants it."""
        kinds, use_activation = self.pooling, config.use_activation
        if config.pooling_type is not None:
            kinds = (_KINDS[config.pooling_type],)
        is_normalised = self.is_normalised if use_activation is None else use_activation
        return replace(self, pooling=kinds, is_normalised=is_normalised)


def pools(folder: Path) -> bool:
    """Return whether a folder's model is one that makes vectors or classes of texts, not text."""
    if (folder / _MODULES).is_file():
        return True
    names = read_object(folder / "config.json").get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    return name.endswith((CLASSIFIES, "Model", "ForMaskedLM")) and "LMHead" not in name


def classifies(fields: Mapping[str, JsonValue]) -> bool:
    """Return whether a configuration is that of a classifier of texts."""
    names = fields.get("architectures")
    return isinstance(names, list) and any(str(name).endswith(CLASSIFIES) for name in names)


def read_sentence_folder(folder: Path) -> SentenceFolder:
    """Read what comes after the model. Raises a ModelError that names what is not computed."""
    if not (folder / _MODULES).is_file():
        return SentenceFolder()
    result = SentenceFolder(is_normalised=False)
    for number, module in enumerate(read_array(folder / _MODULES)):
        fields = module if isinstance(module, dict) else {}
        kind, path = str(fields.get("type")).rpartition(".")[2], folder / str(fields.get("path"))
        if (kind == "Transformer") != (number == 0) or (number == 0 and fields.get("path")):
            raise _unsupported(number, "a Transformer in the folder itself, once and first")
        if kind == "Pooling" and not result.pooling:
            result = replace(result, pooling=_pooling(path / "config.json"))
        elif kind == "Dense" and result.pooling:
            result = replace(result, dense=(*result.dense, _dense(path)))
        elif kind == "Normalize" and result.pooling:
            result = replace(result, is_normalised=True)
        elif kind not in ("Transformer", "Dropout"):
            raise _unsupported(number, "Transformer, Pooling, Dense and Normalize, in this order")
        elif result.is_normalised:
            raise _unsupported(number, "nothing after Normalize")
    return _with_length(_with_prompts(result, folder), folder)


def _pooling(path: Path) -> tuple[PoolingType, ...]:
    fields = read_object(path)
    if fields.get("include_prompt") is False:
        raise UnsupportedField("include_prompt", False, "the states of all of a text's tokens")
    mode = fields.get("pooling_mode")
    if mode is None:  # each had a field of its own, and their order was this
        mode = [kind for name, kind in _OLD_FIELDS if fields.get(f"pooling_mode_{name}")]
    modes = mode if isinstance(mode, list) else [mode]
    kinds = [kind for name in modes or ["mean"] for kind in _TYPES if kind == name]
    if not kinds or len(kinds) < len(modes):
        raise UnsupportedModel(f"{path}: pooling_mode is {mode!r}; known are {', '.join(_TYPES)}")
    return tuple(kinds)


def _dense(folder: Path) -> DenseFolder:
    fields = read_object(folder / "config.json")
    widths = fields.get("in_features"), fields.get("out_features")
    activation, has_bias = fields.get("activation_function"), fields.get("bias", True)
    if not (isinstance(widths[0], int) and isinstance(widths[1], int)):
        raise BrokenModel(f"{folder / 'config.json'}: in_features and out_features are not numbers")
    if fields.get("module_input_name", _VECTOR) != _VECTOR or has_bias not in (True, False):
        raise UnsupportedModel(f"{folder / 'config.json'}: it does not change the text's vector")
    name = "torch.nn.modules.activation.Tanh" if activation is None else str(activation)
    return DenseFolder(folder, widths[0], widths[1], bool(has_bias), name)


def _with_prompts(result: SentenceFolder, folder: Path) -> SentenceFolder:
    if not (folder / _TEXTS).is_file():
        return result
    fields = read_object(folder / _TEXTS)
    texts, default = fields.get("prompts") or {}, fields.get("default_prompt_name")
    names = texts.items() if isinstance(texts, dict) else ()
    prompts = {name: text for name, text in names if isinstance(text, str)}
    if prompts != texts:
        raise BrokenModel(f"{folder / _TEXTS}: prompts are not texts by name")
    if default is not None and default not in prompts:
        raise BrokenModel(f"{folder / _TEXTS}: default_prompt_name is none of its prompts")
    return replace(
        result, prompts=prompts, default_prompt=None if default is None else str(default)
    )


def _with_length(result: SentenceFolder, folder: Path) -> SentenceFolder:
    if not (folder / _LENGTH).is_file():
        return result
    fields = read_object(folder / _LENGTH)
    most = fields.get("max_seq_length")
    if most is not None and not (isinstance(most, int) and most > 0):
        raise BrokenModel(f"{folder / _LENGTH}: max_seq_length is {most!r}, not a number of tokens")
    return replace(result, max_tokens=most, lowers=bool(fields.get("do_lower_case")))


def _unsupported(number: int, expected: str) -> UnsupportedModel:
    return UnsupportedModel(f"{_MODULES}: module {number} is not served there; known is {expected}")
