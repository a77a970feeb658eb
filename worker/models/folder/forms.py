"""One look at what a folder holds, before anything of it is read as a model's."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import JsonValue

from penstock.worker.models.folder.errors import BrokenModel
from penstock.worker.models.folder.files import OLD_WEIGHTS, TEXTS, read_object, weight_files

_POINTER = b"version https://git-lfs.github.com/spec/"
# Ends of names beside those of files that are read, and what the hub's client leaves.
_UNFINISHED = (".incomplete", ".part", ".partial", ".crdownload", ".aria2", ".download")
_OF_HUB = ".cache/huggingface/download/*.incomplete"
_ORIGINAL = "fetch the original, whose weights are *.safetensors beside a config.json"
# Words in `architectures` and `model_type` of what only proposes tokens to a larger model, and
# fields that nothing else has.
_PROPOSERS = re.compile(r"eagle(?!.*(vl|chat))|medusa|speculator")
_OF_PROPOSERS = ("speculators_config", "draft_vocab_size", "medusa_num_heads")
# Weights of other programs, where there are none that are read here.
_OTHER_WEIGHTS = {
    "*.onnx": "ONNX, for another runtime;",
    "onnx/*.onnx": "ONNX, for another runtime;",
    "openvino_model.xml": "OpenVINO, for another runtime;",
    "*.engine": "an engine that TensorRT-LLM built for one GPU;",
    "tf_model.h5": "TensorFlow's;",
    "flax_model.msgpack": "Flax's;",
    "*.mlpackage": "Core ML's;",
    "params_shard_*.bin": "MLC's, built for one device;",
    "*.pth": "another program's (*.pth);",
}


def other_form(folder: Path, has_weights: bool = True) -> str | None:
    """Return in one sentence what the folder is and the way on; None where it may be a model's.

    A damaged file is left to who reads it.

    has_weights  the weights are to be read, not the tokenizer alone
    """
    return (
        _pointer(folder, has_weights)
        or _unfinished(folder, has_weights)
        or _adapter(folder)
        or _pipeline(folder)
        or _mistral(folder)
        or _elsewhere(folder)
        or (_of_weights(folder) if has_weights else None)
        or _of_config(folder)
    )


def _pointer(folder: Path, has_weights: bool) -> str | None:
    for file in (*_files(folder, *TEXTS), *(weight_files(folder) if has_weights else ())):
        try:
            with file.open("rb") as opened:
                is_pointer = opened.read(len(_POINTER)) == _POINTER
        except OSError:  # told by who reads it
            continue
        if is_pointer:
            return f"{file}: a pointer of Git LFS, not the file; run `git lfs pull` in {folder}"
    return None


def _unfinished(folder: Path, has_weights: bool) -> str | None:
    names = (*TEXTS, "*.safetensors", OLD_WEIGHTS) if has_weights else TEXTS
    patterns = [f"{name}{end}" for name in names for end in _UNFINISHED]
    weights = weight_files(folder)
    if has_weights and not (weights and all(file.is_file() for file in weights)):
        patterns.append(_OF_HUB)
    file = next(_files(folder, *patterns), None)
    if file is None:
        return None
    return f"{file}: a download that did not end; end it, or fetch the model again"


def _elsewhere(folder: Path) -> str | None:
    """Say where the model is in a folder that only holds its folder, as the hub's cache does."""
    weights = ("*.safetensors", *_OTHER_WEIGHTS)
    if (folder / "config.json").is_file() or any(_files(folder, *weights)):
        return None
    inner = [path.parent for path in _files(folder, "*/config.json", "snapshots/*/config.json")]
    return f"{folder}: the model is in {inner[0]}; name that folder" if inner else None


def _adapter(folder: Path) -> str | None:
    if not (folder / "adapter_config.json").is_file():
        return None
    if (folder / "config.json").is_file() and not _has_only(folder, "adapter_"):
        return None
    base = _fields(folder / "adapter_config.json").get("base_model_name_or_path")
    merge = "peft's merge_and_unload() makes a model of both"
    return f"{folder}: an adapter of {base}, which is not served beside its base; {merge}"


def _pipeline(folder: Path) -> str | None:
    if (folder / "model_index.json").is_file():
        return f"{folder}: a pipeline of diffusers, which makes images; it is no language model"
    return None


def _mistral(folder: Path) -> str | None:
    if not (folder / "params.json").is_file():
        return None
    if (folder / "config.json").is_file() and not _has_only(folder, "consolidated"):
        return None
    return f"{folder}: its maker's own form (params.json); {_ORIGINAL}"


def _of_weights(folder: Path) -> str | None:
    """Look whether the weights are all there, and in a form that is read."""
    shards = weight_files(folder)
    missing_files = [file for file in shards if not file.is_file()]
    if missing_files:
        count = f"missing, as {len(missing_files)} of its {len(shards)} files are"
        return f"{missing_files[0]}: {count}: a download that did not end; fetch the model again"
    if any(_files(folder, "*.safetensors", OLD_WEIGHTS)):
        return None
    for pattern, form in _OTHER_WEIGHTS.items():
        if any(folder.glob(pattern)):
            return f"{folder}: its weights are {form} {_ORIGINAL}"
    return None


def _of_config(folder: Path) -> str | None:
    """Look at what `config.json` says of the form, if there is one."""
    fields = _fields(folder / "config.json")
    words = json.dumps([fields.get("architectures"), fields.get("model_type")]).lower()
    if _PROPOSERS.search(words) or any(fields.get(field) is not None for field in _OF_PROPOSERS):
        return f"{folder}: it only proposes tokens to a larger model (speculation); name that one"
    form = fields.get("quantization")
    if isinstance(form, dict) and {"bits", "group_size"} <= form.keys():
        return f"{folder}: weights that MLX quantised for Apple's chips; {_ORIGINAL}"
    return None


def _has_only(folder: Path, prefix: str) -> bool:
    """Return whether there are weights, and the names of all begin with `prefix`."""
    patterns = ("*.safetensors", OLD_WEIGHTS, "adapter_model.bin")
    names = [file.name for file in _files(folder, *patterns)]
    return bool(names) and all(name.startswith(prefix) for name in names)


def _fields(path: Path) -> Mapping[str, JsonValue]:
    try:
        return read_object(path)
    except BrokenModel:  # told by who reads it
        return {}


def _files(folder: Path, *patterns: str) -> Iterator[Path]:
    return (path for pattern in patterns for path in sorted(folder.glob(pattern)))
