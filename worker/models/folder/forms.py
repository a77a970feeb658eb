"""One look at what a folder holds, before anything of it is read as a model's."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from pydantic import JsonValue

from penstock.worker.models.folder.errors import BrokenModel
from penstock.worker.models.folder.files import read_object

_POINTER = b"version https://git-lfs.github.com/spec/"
_UNFINISHED = (
    "*.incomplete", "*.part", "*.partial", "*.crdownload", "*.aria2", "*.download",
    ".cache/huggingface/download/*.incomplete",
)  # fmt: skip
_INDEX = "model.safetensors.index.json"
_READ = ("*.json", "*.jinja", "*.model", "*.safetensors")
_ORIGINAL = "fetch the original, whose weights are *.safetensors beside a config.json"
# Words in `architectures` and `model_type` of what only proposes tokens to a larger model, and
# fields that nothing else has.
_PROPOSERS = re.compile(r"eagle(?!.*vl)|medusa|speculator")
_OF_PROPOSERS = ("speculators_config", "draft_vocab_size", "medusa_num_heads")
# Weights of other programs, where there are none that are read here.
_OTHER_WEIGHTS = {
    "*.gguf": "llama.cpp's form (GGUF); llama-server serves it behind --engine openai, or",
    "*.onnx": "ONNX, for another runtime;",
    "onnx/*.onnx": "ONNX, for another runtime;",
    "openvino_model.xml": "OpenVINO, for another runtime;",
    "*.engine": "an engine that TensorRT-LLM built for one GPU;",
    "tf_model.h5": "TensorFlow's;",
    "flax_model.msgpack": "Flax's;",
    "*.mlpackage": "Core ML's;",
    "*.pth": "another program's (*.pth);",
}


def other_form(folder: Path, has_weights: bool = True) -> str | None:
    """Return in one sentence what the folder is and the way on; None where it may be a model's.

    A damaged file is left to who reads it.

    has_weights  the weights are to be read, not the tokenizer alone
    """
    looks: tuple[Callable[[Path], str | None], ...] = (_pointer, _unfinished, _elsewhere)
    looks += (_adapter, _pipeline, _mistral)
    if has_weights:
        looks += (_missing_shards, _other_weights)
    sentences = (look(folder) for look in looks)
    return next((text for text in sentences if text), None) or _of_config(folder)


def _pointer(folder: Path) -> str | None:
    for file in _files(folder, *_READ):
        try:
            with file.open("rb") as opened:
                is_pointer = opened.read(len(_POINTER)) == _POINTER
        except OSError:  # told by who reads it
            continue
        if is_pointer:
            return f"{file}: a pointer of Git LFS, not the file; run `git lfs pull` in {folder}"
    return None


def _unfinished(folder: Path) -> str | None:
    file = next(_files(folder, *_UNFINISHED), None)
    if file is None:
        return None
    return f"{file}: a download that did not end; end it, or fetch the model again"


def _elsewhere(folder: Path) -> str | None:
    """Say where the model is in a folder that only holds its folder, as the hub's cache does."""
    if (folder / "config.json").is_file() or any(_files(folder, *_READ, *_OTHER_WEIGHTS)):
        return None
    inner = [
        path.parent
        for pattern in ("*", "snapshots/*")
        for path in folder.glob(f"{pattern}/config.json")
    ]
    return f"{folder}: the model is in {inner[0]}; name that folder" if inner else None


def _adapter(folder: Path) -> str | None:
    if not (folder / "adapter_config.json").is_file() or (folder / "config.json").is_file():
        return None
    base = _fields(folder / "adapter_config.json").get("base_model_name_or_path")
    merge = "peft's merge_and_unload() makes a model of both"
    return f"{folder}: an adapter of {base}, which is not served beside its base; {merge}"


def _pipeline(folder: Path) -> str | None:
    if (folder / "model_index.json").is_file():
        return f"{folder}: a pipeline of diffusers, which makes images; it is no language model"
    return None


def _mistral(folder: Path) -> str | None:
    if (folder / "config.json").is_file() or not (folder / "params.json").is_file():
        return None
    return f"{folder}: its maker's own form (params.json); {_ORIGINAL}"


def _missing_shards(folder: Path) -> str | None:
    try:
        names = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        shards = sorted({Path(str(name)).name for name in names})
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # told by who reads it
        return None
    missing = [name for name in shards if not (folder / name).is_file()]
    if not missing:
        return None
    count = f"{len(missing)} of its {len(shards)} files are missing, {missing[0]} first"
    return f"{folder}: {count}: a download that did not end; fetch the model again"


def _other_weights(folder: Path) -> str | None:
    if any(_files(folder, "*.safetensors", "*.bin")):
        return None
    for pattern, form in _OTHER_WEIGHTS.items():
        if any(folder.glob(pattern)):
            return f"{folder}: its weights are {form} {_ORIGINAL}"
    return None


def _of_config(folder: Path) -> str | None:
    """Look at what `config.json` says of the form, if there is one."""
    fields = _fields(folder / "config.json")
    words = json.dumps([fields.get("architectures"), fields.get("model_type")]).lower()
    if _PROPOSERS.search(words) or not fields.keys().isdisjoint(_OF_PROPOSERS):
        return f"{folder}: it only proposes tokens to a larger model (speculation); name that one"
    form = fields.get("quantization")
    if isinstance(form, dict) and {"bits", "group_size"} <= form.keys():
        return f"{folder}: weights that MLX quantised for Apple's chips; {_ORIGINAL}"
    return None


def _fields(path: Path) -> Mapping[str, JsonValue]:
    try:
        return read_object(path)
    except BrokenModel:  # told by who reads it
        return {}


def _files(folder: Path, *patterns: str) -> Iterator[Path]:
    return (path for pattern in patterns for path in sorted(folder.glob(pattern)))
