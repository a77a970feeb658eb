"""What a folder is, by the files that others publish, and the way on in one sentence."""

import json
from pathlib import Path

import pytest

from penstock.schemas.errors import InvalidJob
from penstock.worker.bundled.paths import BUNDLED_MODEL
from penstock.worker.models.folder.forms import other_form
from penstock.worker.process.model_folder import model_folder

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"
INDEX = {
    "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
}
MLX = {"group_size": 64, "bits": 4}
MODEL = {"config.json": CONFIG, "tokenizer.json": {}, "model.safetensors": ""}

# Name -> files, and words of the sentence.
OTHERS: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "an adapter": (
        {
            "adapter_config.json": {"peft_type": "LORA", "base_model_name_or_path": "meta/l-3"},
            "adapter_model.safetensors": "",
        },
        ("adapter of meta/l-3", "merge_and_unload"),
    ),
    "an adapter beside its base's configuration": (
        {
            "config.json": CONFIG,
            "tokenizer.json": {},
            "adapter_config.json": {"base_model_name_or_path": "meta/l-3"},
            "adapter_model.safetensors": "",
            "training_args.bin": "",
        },
        ("adapter of meta/l-3",),
    ),
    "an old adapter beside a configuration": (
        {"config.json": CONFIG, "adapter_config.json": {}, "adapter_model.bin": ""},
        ("adapter of",),
    ),
    "a pointer of a GGUF file": ({"q4_k_m.gguf": POINTER}, ("q4_k_m.gguf", "git lfs pull")),
    "Mistral's form": (
        {"params.json": {"dim": 1}, "consolidated.safetensors": "", "tekken.json": {}},
        ("params.json", "config.json"),
    ),
    "Mistral's form with a configuration": (
        {"config.json": CONFIG, "params.json": {"dim": 1}, "consolidated.safetensors": ""},
        ("params.json",),
    ),
    "Llama's first form": (
        {"params.json": {"dim": 1}, "consolidated.00.pth": "", "tokenizer.model": ""},
        ("params.json",),
    ),
    "of MLX": (
        MODEL | {"config.json": CONFIG | {"quantization": MLX}},
        ("MLX", "Apple"),
    ),
    "of a newer MLX": (
        MODEL | {"config.json": CONFIG | {"quantization": MLX, "quantization_config": MLX}},
        ("MLX",),
    ),
    "an EAGLE head": (
        MODEL | {"config.json": CONFIG | {"architectures": ["LlamaForCausalLMEagle"]}},
        ("proposes tokens", "name that one"),
    ),
    "an EAGLE-3 head": (
        MODEL | {"config.json": CONFIG | {"draft_vocab_size": 32000}},
        ("proposes tokens",),
    ),
    "of the Speculators library": (
        MODEL | {"config.json": {"speculators_config": {"algorithm": "eagle3"}}},
        ("proposes tokens",),
    ),
    "Medusa's heads": (
        {"config.json": {"medusa_num_heads": 5}, "medusa_lm_head.safetensors": ""},
        ("proposes tokens",),
    ),
    "ONNX": ({"config.json": CONFIG, "tokenizer.json": {}, "onnx/model.onnx": ""}, ("ONNX",)),
    "OpenVINO": ({"config.json": CONFIG, "openvino_model.xml": ""}, ("OpenVINO",)),
    "TensorFlow": ({"config.json": CONFIG, "tf_model.h5": ""}, ("TensorFlow",)),
    "Flax": ({"config.json": CONFIG, "flax_model.msgpack": ""}, ("Flax",)),
    "a pipeline of images": (
        {"model_index.json": {"_class_name": "FluxPipeline"}, "unet/config.json": {}},
        ("diffusers",),
    ),
    "a pointer of a weight": (MODEL | {"model.safetensors": POINTER}, ("git lfs pull",)),
    "a pointer of a tokenizer": (MODEL | {"tokenizer.json": POINTER}, ("tokenizer.json", "lfs")),
    "a pointer of old files": (
        {"config.json": CONFIG, "pytorch_model.bin": POINTER},
        ("pytorch_model.bin", "git lfs pull"),
    ),
    "MLC's form": ({"mlc-chat-config.json": {}, "params_shard_0.bin": ""}, ("MLC",)),
    "a download that goes on": (MODEL | {"model.safetensors.incomplete": ""}, ("did not end",)),
    "a download of the hub that goes on": (
        {"config.json": CONFIG, ".cache/huggingface/download/xyz.incomplete": ""},
        ("xyz.incomplete", "did not end"),
    ),
    "a shard too few": (
        {
            "config.json": CONFIG,
            "tokenizer.json": {},
            "model.safetensors.index.json": INDEX,
            "model-00001-of-00002.safetensors": "",
        },
        ("1 of its 2 files", "model-00002-of-00002.safetensors"),
    ),
    "a training's folder": (
        {"trainer_state.json": {}, "checkpoint-500/config.json": CONFIG},
        ("checkpoint-500", "name that folder"),
    ),
    "the hub's cache": (
        {"snapshots/0ab1/config.json": CONFIG, "refs/main": "0ab1"},
        ("snapshots/0ab1", "name that folder"),
    ),
}
# Folders that others take for one of the above.
OURS: dict[str, dict[str, object]] = {
    "a model": MODEL,
    "a model beside an adapter": MODEL | {"adapter_config.json": {}},
    "a model in every form": MODEL
    | {"params.json": {}, "consolidated.safetensors": "", "x.gguf": "", "onnx/model.onnx": ""},
    "a model that sees": MODEL
    | {"config.json": {"architectures": ["Eagle2_5_VLForConditionalGeneration"]}},
    "an older one": MODEL
    | {"config.json": {"architectures": ["Eagle2ChatModel"], "model_type": "eagle_chat"}},
    "a model with a download of something else": MODEL
    | {"x.gguf.part": "", ".cache/huggingface/download/xyz.incomplete": ""},
    "a model with pointers of another form": MODEL
    | {"params.json": {}, "consolidated.safetensors": POINTER},
    "a model whose shards are one file now": MODEL | {"model.safetensors.index.json": INDEX},
    "a model of no draft": MODEL | {"config.json": CONFIG | {"draft_vocab_size": None}},
    "old files": {"config.json": CONFIG, "tokenizer.json": {}, "pytorch_model.bin": ""},
    "a broken configuration": MODEL | {"config.json": "{"},
    "a quantised one": MODEL
    | {"config.json": CONFIG | {"quantization_config": {"quant_method": "awq", "bits": 4}}},
}


def write(folder: Path, files: dict[str, object]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize("name", OTHERS)
def test_another_form_is_told_with_the_way_on(name: str, tmp_path: Path) -> None:
    files, words = OTHERS[name]
    write(tmp_path, files)
    sentence = other_form(tmp_path)
    assert sentence is not None and str(tmp_path) in sentence and "\n" not in sentence
    for word in words:
        assert word in sentence
    with pytest.raises(InvalidJob, match=r"^model: "):
        model_folder(str(tmp_path))


@pytest.mark.parametrize("name", OURS)
def test_a_models_folder_is_taken(name: str, tmp_path: Path) -> None:
    write(tmp_path, OURS[name])
    assert other_form(tmp_path) is None
    assert model_folder(str(tmp_path)) == tmp_path


def test_a_folder_for_its_tokenizer_alone_needs_no_weights(tmp_path: Path) -> None:
    write(tmp_path, {"config.json": CONFIG, "tokenizer.json": {}, "x.gguf": ""})
    assert model_folder(str(tmp_path), with_weights=False) == tmp_path
    write(tmp_path, {"model.safetensors": POINTER, "model.safetensors.part": ""})
    assert model_folder(str(tmp_path), with_weights=False) == tmp_path
    write(tmp_path, {"tokenizer.json": POINTER})
    assert model_folder(str(tmp_path), param="tokenizer") == tmp_path


def test_the_bundled_model_is_one() -> None:
    assert other_form(BUNDLED_MODEL) is None


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(InvalidJob, match="a file, not a folder"):
        model_folder(str(tmp_path / "model.safetensors"))
