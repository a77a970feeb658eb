"""Workers go on with each other's jobs where their fingerprints are equal: what a fine-tune changes
must be seen in it, wherever in the files it is."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import save_file

from gguf_files import write_gguf
from penstock.worker.models.folder.gguf.header import read_part
from penstock.worker.process.fingerprint import fingerprint
from penstock.worker.process.settings import WorkerSettings

MIB = 1 << 20


def of(folder: Path, **settings: object) -> str:
    return fingerprint(WorkerSettings.model_validate({"model": str(folder)} | settings))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """16 MiB in large tensors, with a small one behind each."""
    whole = tmp_path / "whole"
    whole.mkdir()
    tensors = {}
    for layer in range(4):
        tensors[f"layers.{layer}.weight"] = torch.full((MIB,), float(layer))
        tensors[f"layers.{layer}.z.bias"] = torch.zeros(300)
    save_file(tensors, whole / "model.safetensors")
    (whole / "config.json").write_text(json.dumps({"hidden_size": 4}))
    (whole / "notes.txt").write_text("of no weight")
    return whole


def header_bytes(folder: Path) -> int:
    with (folder / "model.safetensors").open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        [byte] = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def test_a_tensor_in_gguf_is_noticed_wherever_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def add(writer: GGUFWriter) -> None:
        for layer in range(4):
            writer.add_tensor(f"{layer}.weight", np.zeros(MIB, np.float32))
            writer.add_tensor(f"{layer}.z", np.zeros(300, np.float32))

    file = write_gguf(tmp_path / "m.gguf", add)
    first = of(file)
    assert of(file) == first
    place = read_part(file).tensors["0.z"]
    flip(file, place.start + place.num_bytes // 2)
    assert of(file) != first


def test_equal_files_are_one_model_wherever_they_lie(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy/notes.txt").write_text("others")
    assert of(folder) == of(tmp_path / "copy")


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float32"},
        {"load_format": "dummy"},
        {"quantization": "int8"},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "int8"},
        {"attention_backend": "torch"},
        {"hf_overrides": {"rope_theta": 5e5}},
        {"chat_template": "{{ messages }}"},
        {"chat_template_content_format": "openai"},
    ],
)
def test_another_way_to_compute_is_another_model(folder, settings):
    assert of(folder) != of(folder, **settings)


def test_the_template_and_the_tokenizer_that_are_given_are_a_part(folder, tmp_path):
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/tokenizer.json").write_text("{}")
    by_file = of(folder, chat_template=str(tmp_path / "own.jinja"))
    assert by_file == of(folder, chat_template="{{ messages }}")
    other = of(folder, tokenizer=str(tmp_path / "other"))
    assert len({of(folder), by_file, other}) == 3
    (tmp_path / "other/chat_template.jinja").write_text("{{ messages }}")
    templated = of(folder, tokenizer=str(tmp_path / "other"))
    (tmp_path / "other/tokenizer.json").write_text("[]")
    assert len({of(folder, tokenizer=str(tmp_path / "other")), other, templated}) == 3


def test_code_of_the_folder_is_a_part_where_it_is_run(folder):
    plain, trusted = of(folder), of(folder, trust_remote_code=True)
    (folder / "modeling.py").write_text("x = 1")
    assert of(folder) == plain and of(folder, trust_remote_code=True) != trusted


def test_what_servers_are_asked_for_is_a_part(folder):
    servers = {"engine": "openai", "engine_url": ["http://here"]}
    assert of(folder, **servers) == of(folder, **servers | {"engine_url": ["http://there"]})
    assert of(folder, **servers) != of(folder, **servers, engine_model="another")
    vllm = {"engine": "vllm"}
    assert of(folder, **vllm) != of(folder, **vllm, engine_args={"quantization": "fp8"})


def test_of_bits_that_are_promised_the_block_size_is_a_part(folder):
    """It groups the sums of attention."""
    assert of(folder, deterministic=True) != of(folder, deterministic=True, block_size=32)
    assert of(folder) == of(folder, block_size=32)


def test_a_tensor_that_was_trained_on_is_seen(folder):
    """A small one too, between the places that are spread over the file."""
    from safetensors import safe_open

    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        names = list(file.keys())
    for name in names:
        before = of(folder)
        with safe_open(path, "pt") as file:
            tensors = {each: file.get_tensor(each) for each in names}
        tensors[name] += 0.5
        save_file(tensors, path)
        assert of(folder) != before, name


@pytest.mark.parametrize("number", [0, 31, 63])
def test_a_byte_inside_a_place_is_seen(folder, number):
    path, before = folder / "model.safetensors", of(folder)
    flip(path, number * (path.stat().st_size - 64 * 1024) // 63 + 40_000)
    assert of(folder) != before


def test_a_tensor_under_another_name_is_seen_however_long_the_header(tmp_path):
    def named(folder: Path, last: str) -> str:
        folder.mkdir()
        names = [f"layers.{number:04}.{'x' * 200}" for number in range(1000)]
        names[350] += last
        save_file({name: torch.zeros(2000) for name in names}, folder / "model.safetensors")
        assert header_bytes(folder) > 200_000
        return of(folder)

    assert named(tmp_path / "one", "a") != named(tmp_path / "two", "b")


def test_of_a_small_file_every_byte_counts(folder):
    path = folder / "config.json"
    path.write_text(json.dumps({"pad": "x" * 3 * MIB}))
    before = of(folder)
    flip(path, 2 * MIB)
    assert of(folder) != before


def test_a_damaged_header_is_for_the_loader_to_name(folder):
    (folder / "model.safetensors").write_bytes(b"\xff" * 5 * MIB)
    damaged = of(folder)
    (folder / "model.safetensors").write_bytes(
        (20).to_bytes(8, "little") + b'{"a": {"b": [1, 2]}}' + bytes(5 * MIB)
    )
    assert of(folder) != damaged


@pytest.mark.parametrize("legacy", [False, True])
def test_weights_that_torch_wrote_are_a_part_where_they_are_read(folder, legacy):
    from safetensors.torch import load_file

    state, alone = load_file(folder / "model.safetensors"), of(folder)
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    torch.save(1, folder / "training_args.bin")
    assert of(folder) == alone
    (folder / "model.safetensors").unlink()
    before = of(folder)
    torch.save(2, folder / "training_args.bin")
    assert of(folder) == before
    for name in [] if legacy else state:
        state[name] += 0.5
        torch.save(state, folder / "pytorch_model.bin")
        assert of(folder) != before, name
        before = of(folder)
    (folder / "pytorch_model.bin").write_bytes(b"x" * 5 * MIB)
    assert of(folder) != before
    (folder / "1_Dense").mkdir()
    before = of(folder)
    torch.save(state, folder / "1_Dense/pytorch_model.bin")
    assert of(folder) != before
