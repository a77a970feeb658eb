"""Weights that torch wrote (`.bin`): read as safetensors are, and nothing of them is run."""

import json
import logging
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import families
import judges
from families import prompts
from passes import Passes
from penstock.schemas.errors import InvalidJob
from penstock.worker.llm import LLM
from penstock.worker.models.contract.spec import ModelSpec
from penstock.worker.models.folder.errors import BrokenModel
from penstock.worker.models.impl import load_model
from penstock.worker.process.model_folder import model_folder

BIN, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
State = dict[str, Tensor]


def state_of(folder: Path) -> State:
    return load_file(folder / "model.safetensors")


def zipped(folder: Path, state: State) -> None:
    torch.save(state, folder / BIN)


def before_zip(folder: Path, state: State) -> None:
    torch.save(state, folder / BIN, _use_new_zipfile_serialization=False)


def parameters(folder: Path, state: State) -> None:
    torch.save({name: nn.Parameter(tensor) for name, tensor in state.items()}, folder / BIN)


def shards(folder: Path, state: State) -> None:
    names = sorted(state)
    weight_map = {name: f"pytorch_model-0000{place % 3}.bin" for place, name in enumerate(names)}
    for file in set(weight_map.values()):
        part = {name: state[name] for name in names if weight_map[name] == file}
        torch.save(part, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def logits(folder: Path, impl: str) -> dict[tuple[int, int], Tensor]:
    spec = ModelSpec(folder, impl, "float32")  # type: ignore[arg-type]
    return Passes(load_model(spec), prompts()).whole().logits


@pytest.mark.parametrize("write", [zipped, before_zip, parameters, shards])
@pytest.mark.parametrize(
    "name, impl", [("llama", "native"), ("qwen3_moe", "native"), ("gpt2", "transformers")]
)
def test_they_are_the_same_model(
    write: Callable[[Path, State], None], name: str, impl: str, tmp_path: Path
) -> None:
    families.save(name, tmp_path)
    state, wanted = state_of(tmp_path), logits(tmp_path, impl)
    (tmp_path / "model.safetensors").unlink()
    write(tmp_path, state)
    rows = logits(model_folder(str(tmp_path)), impl)
    assert rows.keys() == wanted.keys()
    assert all(torch.equal(rows[place], wanted[place]) for place in wanted)


def test_both_names_of_a_tied_head_may_be_there(tmp_path: Path) -> None:
    judges.save("llama_tied", tmp_path)
    state = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    wanted = logits(tmp_path, "native")
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    (tmp_path / "model.safetensors").unlink()
    zipped(tmp_path, state | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(32)})
    rows = logits(tmp_path, "native")
    assert all(torch.equal(rows[place], wanted[place]) for place in wanted)


def test_safetensors_beside_them_win(tmp_path: Path) -> None:
    families.save("llama", tmp_path)
    (tmp_path / BIN).write_bytes(b"x")
    wanted = logits(tmp_path, "native")
    shards(tmp_path, {name: tensor + 1 for name, tensor in state_of(tmp_path).items()})
    assert all(torch.equal(row, wanted[place]) for place, row in logits(tmp_path, "native").items())
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / BIN).unlink()
    for impl in ("native", "transformers"):
        with pytest.raises(BrokenModel, match=r"there is no model\.safetensors or model\.safe"):
            load_model(ModelSpec(tmp_path, impl, load_format="safetensors"))  # type: ignore[arg-type]


class Runs:
    """A pickle of it runs a command where nobody looks."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch ran",)


def repacked(compression: int, short: str = "") -> Callable[[Path, State], None]:
    """The archive written anew by another program, one of its records cut in half."""

    def write(folder: Path, state: State) -> None:
        zipped(folder, state)
        with zipfile.ZipFile(folder / BIN) as archive:
            records = {entry.filename: archive.read(entry) for entry in archive.infolist()}
        with zipfile.ZipFile(folder / BIN, "w", compression) as archive:
            for name, record in records.items():
                is_short = short and name.endswith(short)
                archive.writestr(name, record[: len(record) // 2] if is_short else record)

    return write


def cut(write: Callable[[Path, State], None]) -> Callable[[Path, State], None]:
    def write_half(folder: Path, state: State) -> None:
        write(folder, state)
        os.truncate(folder / BIN, (folder / BIN).stat().st_size // 2)

    return write_half


def saved(
    content: Callable[[State], object], legacy: bool = False
) -> Callable[[Path, State], None]:
    def write(folder: Path, state: State) -> None:
        torch.save(content(state), folder / BIN, _use_new_zipfile_serialization=not legacy)

    return write


def with_one(value: object) -> Callable[[State], object]:
    return lambda state: state | {"model.norm.weight": value}


OF_THE_DECODER = ("a tensor of another shape", "a tensor too few", "a tensor too many")
HOSTILE = {
    "code": (saved(with_one(Runs())), r"asks for posix\.system, and may run code"),
    "code of old": (saved(with_one(Runs()), legacy=True), r"asks for posix\.system, and may"),
    "a plain pickle": (
        lambda folder, state: (folder / BIN).write_bytes(pickle.dumps(Runs(), 2)),
        r"asks for posix\.system",
    ),
    "arrays": (saved(with_one(np.ones(3))), r"asks for numpy\S+, and may run code"),
    "a module": (saved(lambda state: nn.Linear(2, 2)), r"asks for torch\.nn\S+"),
    "a state in a state": (
        saved(lambda state: {"state_dict": state}),
        r"'state_dict' is a (Ordered)?[Dd]ict, not a plain tensor",
    ),
    "a list": (saved(lambda state: list(state.values())), r"holds a list, not tensors by name"),
    "a sparse tensor": (saved(with_one(torch.eye(3).to_sparse())), r"model\.norm\.weight' is a Te"),
    "a tensor without numbers": (
        saved(with_one(torch.ones(3, device="meta"))),
        r"'model\.norm\.weight' is a Tensor, not a plain tensor",
    ),
    "a text": (saved(with_one("x")), r"'model\.norm\.weight' is a str"),
    "records that are compressed": (repacked(zipfile.ZIP_DEFLATED), r"\S+ is compressed"),
    "a record cut short": (
        repacked(zipfile.ZIP_STORED, short="/data/0"),
        r"more numbers than it holds",
    ),
    "a file cut short": (cut(zipped), r"not a whole file of torch: File is not a zip file"),
    "an old file cut short": (cut(before_zip), r"not a whole file of torch"),
    "a web page": (
        lambda folder, state: (folder / BIN).write_text("<html>Not found</html>"),
        r"not a whole file of torch; fetch it again",
    ),
    "nothing": (lambda folder, state: (folder / BIN).touch(), r"not a whole file of torch"),
    "a tensor of another shape": (
        saved(with_one(torch.ones(3))),
        r"tensor model\.norm\.weight has shape \[3\]",
    ),
    "a tensor too few": (
        saved(lambda state: {name: state[name] for name in state if name != "model.norm.weight"}),
        r"tensor model\.norm\.weight is missing",
    ),
    "a tensor too many": (
        saved(lambda state: state | {"model.more": torch.ones(3)}),
        r"unexpected tensor model\.more",
    ),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    folder = tmp_path_factory.mktemp("llama")
    families.save("llama", folder)
    state = state_of(folder)
    (folder / "model.safetensors").unlink()
    return folder, state


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_state_of_plain_tensors_is_told_in_one_line(
    name: str, llama: tuple[Path, State], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, state = llama
    monkeypatch.chdir(folder)
    write, says = HOSTILE[name]
    write(folder, state)
    for impl in ("native", "transformers") if name not in OF_THE_DECODER else ("native",):
        with pytest.raises(BrokenModel, match=says) as refusal:
            load_model(ModelSpec(folder, impl))  # type: ignore[arg-type]
        message = str(refusal.value)
        assert BIN in message and "\n" not in message and len(message) < 500
    assert not (folder / "ran").exists()


def test_a_file_before_zip_is_read_once_and_told(
    llama: tuple[Path, State], caplog: pytest.LogCaptureFixture
) -> None:
    folder, state = llama
    before_zip(folder, state)
    with caplog.at_level(logging.INFO):
        load_model(ModelSpec(folder))
    assert caplog.text.count("takes its size in memory") == 1


def test_a_shard_that_lacks_a_tensor_is_named(tmp_path: Path) -> None:
    families.save("llama", tmp_path)
    state = state_of(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    shards(tmp_path, state)
    weight_map = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    torch.save({}, tmp_path / weight_map["model.norm.weight"])
    with pytest.raises(BrokenModel, match=r"pytorch_model-0000\d\.bin: tensor \S+ is missing; pyt"):
        load_model(ModelSpec(tmp_path))
    (tmp_path / weight_map["model.norm.weight"]).unlink()
    with pytest.raises(InvalidJob, match=r"pytorch_model-0000\d\.bin: missing, as 1 of its 3 "):
        LLM(str(tmp_path))
