"""Folders of tiny models that pool: embedders as sentence-transformers saves them, classifiers."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, processors
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

import families
from tokenizers_made import wordpiece

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "fox",
    "Grüße aus Köln, naïve café; it isn't here; it's there!",
    "the dog is here and the fox is there, over and over and over, until the lazy quick dog jumps",
    "over the dog",
    "",
] + [f"a dog, {count} foxes and {'more ' * (count % 9)}tags" for count in range(40)]  # fmt: skip
LENGTH = 120


@dataclass(frozen=True)
class Kind:
    """A model to be made: its family, its fields, and what modules.json says (none: nothing)."""

    family: str
    fields: dict[str, Any] = field(default_factory=dict)
    pooling: dict[str, Any] | None = None
    dense: int = 0
    normalises: bool = False
    labels: int = 0


_SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": LENGTH + 2,
}
_ROBERTA = {"pad_token_id": 1, "type_vocab_size": 1}
_MODERN = {"global_attn_every_n_layers": 2, "local_attention": 8, "pad_token_id": 1}
_QWEN = {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 1}
_DISTIL = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "pad_token_id": 1}
MEAN, CLS, LAST = ({"pooling_mode": each} for each in ("mean", "cls", "lasttoken"))
_OLD = {f"pooling_mode_{each}": False for each in ("cls_token", "mean_tokens", "max_tokens")}
EMBEDDERS = {
    "bert": Kind("bert", pooling=MEAN, normalises=True),
    "bert_of_old": Kind("bert", pooling=_OLD | {"pooling_mode_cls_token": True}, dense=16),
    "bert_of_two": Kind("bert", pooling={"pooling_mode": ["max", "mean_sqrt_len_tokens"]}),
    "weighted": Kind("bert", pooling={"pooling_mode": "weightedmean"}, dense=8, normalises=True),
    "plain": Kind("bert"),
    "xlm-roberta": Kind("xlm-roberta", _ROBERTA, MEAN, normalises=True),
    "modernbert": Kind("modernbert", _MODERN, CLS, normalises=True),
    "mpnet": Kind("mpnet", {"pad_token_id": 1}, MEAN),
    "distilbert": Kind("distilbert", _DISTIL, MEAN),
    "qwen3": Kind("qwen3", _QWEN, LAST, normalises=True),
    "llama": Kind("llama", _QWEN, MEAN),
}
CLASSIFIERS = {
    "bert": Kind("bert", labels=3),
    "reranker": Kind("xlm-roberta", _ROBERTA, labels=1),
    "modernbert": Kind("modernbert", _MODERN, labels=2),
    "deberta-v2": Kind("deberta-v2", {"type_vocab_size": 2}, labels=1),
    "qwen3": Kind("qwen3", _QWEN, labels=1),
}


def save(kind: Kind, folder: Path) -> Path:
    """Write the folder and return it."""
    tokenizer = _tokenizer()
    fields = _SMALL | {"vocab_size": tokenizer.get_vocab_size()} | kind.fields
    if kind.labels:
        fields["num_labels"] = kind.labels
    config = CONFIG_MAPPING[kind.family](**fields)
    config.architectures = None
    torch.manual_seed(3)
    loader = AutoModelForSequenceClassification if kind.labels else AutoModel
    model = loader.from_config(config).float()
    families.draw(model)
    model.save_pretrained(folder)
    names = ["input_ids", "attention_mask"]
    if getattr(config, "type_vocab_size", 0) > 1:
        names.append("token_type_ids")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        cls_token="<s>",
        sep_token="</s>",
        model_max_length=LENGTH,
        model_input_names=names,
        padding_side="left" if kind.family == "qwen3" else "right",
    )
    fast.save_pretrained(folder)
    if kind.pooling is not None:
        _write_modules(kind, folder)
    return folder


def _tokenizer() -> Tokenizer:
    """Return a tokenizer that says where the second text of a pair begins."""
    tokenizer = wordpiece()
    ids = [(each, tokenizer.token_to_id(each)) for each in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=ids
    )
    return tokenizer


def _write_modules(kind: Kind, folder: Path) -> None:
    steps = [("", "sentence_transformers.models.Transformer", None)]
    pooling = {"word_embedding_dimension": 32, **(kind.pooling or {})}
    steps.append(("1_Pooling", "sentence_transformers.models.Pooling", pooling))
    modes = pooling.get("pooling_mode")
    width = 32 * (len(modes) if isinstance(modes, list) else 1)
    if kind.dense:
        activation = "torch.nn.modules.activation.Tanh"
        dense = {"in_features": width, "out_features": kind.dense, "bias": True}
        dense["activation_function"] = activation
        steps.append(("2_Dense", "sentence_transformers.models.Dense", dense))
    if kind.normalises:
        steps.append(("3_Normalize", "sentence_transformers.models.Normalize", None))
    modules = []
    for number, (path, name, fields) in enumerate(steps):
        modules.append({"idx": number, "name": str(number), "path": path, "type": name})
        if fields is not None:
            (folder / path).mkdir()
            (folder / path / "config.json").write_text(json.dumps(fields))
    if kind.dense:
        drawn = nn.Linear(width, kind.dense).state_dict(prefix="linear.")
        save_file(drawn, folder / "2_Dense" / "model.safetensors")
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": LENGTH - 20, "do_lower_case": False})
    )
