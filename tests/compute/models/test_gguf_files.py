"""Files in GGUF: their headers against the package gguf's own reader, and all that can be wrong."""

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from gguf_files import GGUF_SHAPES, GGUF_TOKENS, write_gguf
from penstock.schemas.errors import InvalidJob
from penstock.worker.models.folder.errors import ModelError
from penstock.worker.models.folder.gguf.files import gguf_files
from penstock.worker.models.folder.gguf.folder import folder_of
from penstock.worker.models.folder.gguf.header import read_part
from penstock.worker.models.folder.gguf.model import read_gguf
from penstock.worker.process.model_folder import model_folder


def test_a_header_is_what_the_formats_own_reader_reads(tmp_path: Path) -> None:
    part, reader = read_part(write_gguf(tmp_path / "m.gguf")), gguf.GGUFReader(tmp_path / "m.gguf")
    wanted = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    assert part.fields == wanted
    places = {
        tensor.name: (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)
        for tensor in reader.tensors
    }
    ours = {name: (t.kind, t.start, t.num_bytes) for name, t in part.tensors.items()}
    assert ours == places
    assert part.tensors["blk.0.attn_k.weight"].shape == (16, 32)


def test_the_folder_made_of_a_file_is_made_once_for_each_state_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write_gguf(tmp_path / "m.gguf")
    folder = model_folder(str(file))
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja", "m.gguf",
    }  # fmt: skip
    assert (folder / "m.gguf").resolve() == file
    fields = json.loads((folder / "config.json").read_text())
    assert fields["vocab_size"] == len(GGUF_TOKENS) and fields["tie_word_embeddings"]
    ends = json.loads((folder / "generation_config.json").read_text())
    assert ends == {"eos_token_id": [2, GGUF_TOKENS.index("<|im_end|>")]}
    stamp = (folder / "config.json").stat().st_mtime_ns
    assert model_folder(str(tmp_path)) == folder
    assert (folder / "config.json").stat().st_mtime_ns == stamp
    write_gguf(file, lambda writer: writer.add_name("another"))
    assert model_folder(str(file)) != folder
    assert not list((tmp_path / "cache").rglob("draft-*"))


def test_how_the_maker_would_draw_is_in_the_folder(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", 20)
        writer.add_eot_token_id(13)

    folder = folder_of([write_gguf(tmp_path / "m.gguf", change)], tmp_path / "cache")
    fields = json.loads((folder / "generation_config.json").read_text())
    ends = [2, GGUF_TOKENS.index("<|im_end|>"), 13]
    assert fields == {"temperature": 0.5, "top_k": 20, "eos_token_id": ends}


def test_parts_are_one_model(tmp_path: Path) -> None:
    """As llama.cpp's gguf-split writes them."""
    write_gguf(tmp_path / "m.gguf", split_max_tensors=8)
    (tmp_path / "mmproj-m.gguf").touch()
    names = sorted(path.name for path in tmp_path.glob("m-*"))
    assert names == [f"m-{part:05}-of-00003.gguf" for part in (1, 2, 3)]
    for path in tmp_path, tmp_path / names[1]:
        files = gguf_files(path)
        assert [file.name for file in files] == names
        assert read_gguf(files).tensors.keys() == GGUF_SHAPES.keys()
    (tmp_path / names[1]).unlink()
    with pytest.raises(InvalidJob, match=rf"{re.escape(names[1])}: missing, as 1 of 3 parts are"):
        model_folder(str(tmp_path))


def test_parts_of_two_models_are_not_mixed(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", split_max_tensors=8)
    first, second, third = gguf_files(tmp_path)
    first.write_bytes(second.read_bytes())
    with pytest.raises(ModelError, match=r"tensor .* is in another part, too|split"):
        read_gguf([first, second, third])
    second.write_bytes(third.read_bytes())
    with pytest.raises(ModelError, match=r"split\.no is 2"):
        read_gguf([first, second, third])


@pytest.mark.parametrize("stem", ["b", "b-00001-of-00001"])
def test_a_folder_with_several_models_asks_for_one(stem: str, tmp_path: Path) -> None:
    for name in "a.gguf", f"{stem}.gguf":
        (tmp_path / name).touch()
    with pytest.raises(InvalidJob, match=rf"2 models in GGUF; name one of them: a\.gguf, {stem}"):
        model_folder(str(tmp_path))


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidJob, match=r"x\.gguf' is not there"):
        model_folder(str(tmp_path / "x.gguf"))


@pytest.mark.parametrize(
    "start, words",
    [
        (b"", "an empty file; fetch it again"),
        (b"GG", "does not begin with GGUF"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"PK\x03\x04" * 99, "does not begin with GGUF"),
        (b"GGUF", "ends within its header, at byte 4"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(99), "version 1 of GGUF; versions 2 and 3"),
        (b"GGUF" + struct.pack("<I", 99) + bytes(99), "version 99 of GGUF"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(99), "big-endian.*gguf-convert-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 1), "1152921504606846976 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 2**60), "1152921504606846976 fields"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**40), "1099511627776 bytes of a text"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**20), "ends within its header"),
        (b"GGUF" + struct.pack("<IQQQ2sI", 3, 0, 1, 2, b"\xff\xfe", 4), "not UTF-8"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"a", 77), "field a is of type 77"),
        (
            b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 0, 2**62),
            "4611686018427387904 items of a",
        ),
        (
            b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 0, 2**24),
            "ends within its header",
        ),
        (
            b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 9, 1),
            "array of type 9, which is not read",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * struct.pack("<Q1sII", 1, b"a", 4, 7),
            "field a stands there twice",
        ),
    ],
)
def test_a_file_that_is_none_is_refused_in_one_line(
    start: bytes, words: str, tmp_path: Path
) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(start)
    with pytest.raises(InvalidJob, match=words) as refusal:
        model_folder(str(file))
    assert str(file) in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf").read_bytes()
    header = min(place.start for place in read_part(tmp_path / "m.gguf").tensors.values())
    for length in [*range(0, header, 97), header, len(whole) // 2, len(whole) - 40]:
        (tmp_path / "m.gguf").write_bytes(whole[:length])
        with pytest.raises(ModelError, match="fetch it again"):
            read_part(tmp_path / "m.gguf")


def of_tensor(file: Path, name: str, place: int, form: str, *numbers: int) -> None:
    """Write numbers into a tensor's entry: its dimensions lie at 4, its type and offset after."""
    data = file.read_bytes()
    at = data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
    new = struct.pack(form, *numbers)
    file.write_bytes(data[: at + place] + new + data[at + place + len(new) :])


@pytest.mark.parametrize(
    "place, form, number, words",
    [
        (0, "<I", 77, "has 77 dimensions"),
        (4, "<Q", 2**61, "ends at byte"),
        (4, "<Q", 0, "has shape"),
        (4, "<Q", 33, "has shape"),
        (12, "<Q", 2**40, "ends at byte"),
        (20, "<I", 999, "is of type 999"),
        (20, "<I", 0, "lies over tensor|ends at byte"),
        (24, "<Q", 2**63, "ends at byte"),
        (24, "<Q", 0, "lies over tensor"),
        (24, "<Q", 8, "lies over tensor|multiple"),
    ],
)
def test_a_tensors_entry_that_lies_is_refused(
    place: int, form: str, number: int, words: str, tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "m.gguf")
    of_tensor(file, "blk.1.ffn_down.weight", place, form, number)
    with pytest.raises(ModelError, match=words) as refusal:
        read_part(file)
    assert str(file) in str(refusal.value) and "ffn_" in str(refusal.value)


def field(name: str, value: object) -> Callable[[gguf.GGUFWriter], None]:
    """Let a field have another value; none: let it be missing."""

    def change(writer: gguf.GGUFWriter) -> None:
        old = writer.kv_data[0].pop(name, None)
        if value is not None:
            kind = gguf.GGUFValueType.get_type(value) if old is None else old.type
            kind = kind if type(value) is int else gguf.GGUFValueType.get_type(value)
            sub_type = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
            writer.kv_data[0][name] = gguf.gguf_writer.GGUFValue(value, kind, sub_type)

    return change


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("general.architecture", None, "general.architecture is missing"),
        ("general.architecture", "qwen35", "general.architecture is 'qwen35'; read are llama"),
        ("general.alignment", 33, "general.alignment is 33"),
        ("llama.embedding_length", None, "llama.embedding_length is missing"),
        ("llama.attention.head_count", 0, "llama.attention.head_count is 0"),
        ("llama.attention.head_count", [2, 4], "differs from layer to layer"),
        ("llama.attention.head_count", "two", "llama.attention.head_count is 'two'"),
        ("llama.attention.value_length", 99, "values of another size"),
        ("llama.attention.layer_norm_rms_epsilon", None, "layer_norm_rms_epsilon is missing"),
        ("tokenizer.ggml.model", None, "tokenizer.ggml.model is missing"),
        ("tokenizer.ggml.model", "rwkv", "tokenizer.ggml.model is 'rwkv'"),
        ("tokenizer.ggml.pre", "new", "tokenizer.ggml.pre is 'new'"),
        ("tokenizer.ggml.tokens", None, "tokenizer.ggml.tokens is missing"),
        ("tokenizer.ggml.tokens", [*GGUF_TOKENS[:-1], "a"], "tokenizer.ggml.tokens is 'a'"),
        ("tokenizer.ggml.token_type", [1, 2], "tokenizer.ggml.token_type"),
        ("tokenizer.ggml.merges", None, "tokenizer.ggml.merges is missing"),
    ],
)
def test_a_field_that_is_missing_or_wrong_is_named(
    name: str, value: object, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write_gguf(tmp_path / "m.gguf", field(name, value))
    with pytest.raises(InvalidJob, match=words) as refusal:
        model_folder(str(file))
    assert str(file) in str(refusal.value) and "\n" not in str(refusal.value)
    assert not list((tmp_path / "cache" / "penstock" / "gguf").glob("*"))


def test_a_model_without_a_template_has_none(tmp_path: Path) -> None:
    change = field("tokenizer.chat_template", None)
    folder = folder_of([write_gguf(tmp_path / "m.gguf", change)], tmp_path / "cache")
    assert not (folder / "chat_template.jinja").exists()


def test_a_templates_name_is_no_path(tmp_path: Path) -> None:
    change = field("tokenizer.chat_template.../../../x", "{{ 1 }}")
    folder = folder_of([write_gguf(tmp_path / "m.gguf", change)], tmp_path / "cache")
    assert [path.name for path in folder.rglob("x.jinja")] == ["x.jinja"]
    assert not list(tmp_path.glob("x*")) and not list((tmp_path / "cache").glob("x*"))
