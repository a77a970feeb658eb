"""The text of models that see or hear: our decoder of it against transformers' whole module."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import families
from families import Played, renamed
from penstock.worker.engine.build import build_engine
from penstock.worker.engine.io.config import EngineConfig
from penstock.worker.models.contract.spec import ModelSpec
from penstock.worker.models.families.seeing import SEEING
from penstock.worker.models.folder.errors import BrokenModel, ModelError, UnknownOverride
from penstock.worker.models.impl import chosen_impl
from penstock.worker.models.native.config import overridden, read_config
from penstock.worker.models.native.loading import load_decoder, plan_decoder

TOLERANCE = 1e-4


@pytest.mark.parametrize("name", sorted(SEEING))
def test_the_text_equals_transformers(name: str, tmp_path: Path) -> None:
    """Over slices, prefix hits and preemption."""
    families.save(name, tmp_path)
    assert chosen_impl(ModelSpec(tmp_path)) == "native"
    played = Played(tmp_path)
    assert played.stats.num_preemptions and played.stats.cached_tokens
    assert played.distance(tmp_path) < TOLERANCE


def test_a_configuration_without_a_text_config_has_its_fields_at_the_top(tmp_path: Path) -> None:
    """As Qwen2-VL and Qwen2.5-VL were published, with names of tensors like a text's own."""
    families.save("qwen2_5_vl", tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    text = fields.pop("text_config")
    rope = text.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    flat = text | {"rope_theta": rope["rope_theta"], "rope_scaling": scaling} | fields
    path.write_text(json.dumps(flat))
    renamed(tmp_path, "model.language_model.", "model.")
    renamed(tmp_path, "model.visual.", "visual.")
    assert any(name.startswith("visual.") for name in load_file(tmp_path / "model.safetensors"))
    assert Played(tmp_path, model_impl="native").distance(tmp_path) < TOLERANCE


def test_a_tensor_of_the_text_that_nobody_reads_is_an_error(tmp_path: Path) -> None:
    families.save("mistral3", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    (name,) = (name for name in tensors if name.endswith("layers.0.self_attn.q_proj.weight"))
    more = name.replace("q_proj.weight", "q_proj.bias")
    save_file(tensors | {more: tensors[name][:, 0].clone()}, file)
    with pytest.raises(BrokenModel, match=f"unexpected tensor {more}"):
        load_decoder(tmp_path)


def test_a_folder_without_the_texts_embedding_is_refused(tmp_path: Path) -> None:
    families.save("mistral3", tmp_path)
    renamed(tmp_path, "language_model.model.", "elsewhere.")
    with pytest.raises(BrokenModel, match="embed_tokens"):
        load_decoder(tmp_path)


def test_a_text_of_a_family_that_nobody_wrote_is_refused_by_name(tmp_path: Path) -> None:
    families.save("llava", tmp_path)
    _write(tmp_path, text_config={"model_type": "opt", "hidden_size": 64})
    with pytest.raises(ModelError, match=r"text_config.model_type is 'opt'"):
        build_engine(EngineConfig(model=tmp_path))


def test_the_ids_that_end_a_completion_are_the_whole_models(tmp_path: Path) -> None:
    """Gemma 3 was published with them there, and its text has others by itself."""
    families.save("gemma3", tmp_path)
    (tmp_path / "generation_config.json").unlink()
    _write(tmp_path, eos_token_id=[1, 106])
    assert read_config(tmp_path).eos_token_ids == {1, 106}


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"rope_theta": 5.0}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"text_config": {"rms_norm_epsilon": 0.5}}, "text_config.rms_norm_epsilon"),
    ],
)
def test_an_override_that_the_text_would_not_read_is_refused(
    overrides: dict[str, Any], field: str, tmp_path: Path
) -> None:
    families.save("mistral3", tmp_path)
    with pytest.raises(UnknownOverride, match=f"'{field}'"):
        read_config(tmp_path, overrides)


def test_an_override_of_the_text_is_read(tmp_path: Path) -> None:
    families.save("mistral3", tmp_path)
    scaling = {"rope_type": "linear", "factor": 2.0}
    text = {"rope_theta": 5.0, "rope_scaling": scaling, "max_position_embeddings": 99}
    assert read_config(tmp_path, {"text_config": text}).max_model_len == 198


def test_the_towers_type_is_not_the_texts(tmp_path: Path) -> None:
    """Of a configuration that says none."""
    families.save("qwen2_audio", tmp_path)
    _write(tmp_path, dtype=None, text_config={"dtype": None})
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    typed = {name: each if "tower" in name else each.half() for name, each in tensors.items()}
    assert next(iter(typed)).startswith("audio_tower.")
    save_file(typed, file)
    spec = ModelSpec(tmp_path)
    assert load_decoder(tmp_path).dtype == plan_decoder(spec).dtype == torch.float16


def _write(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(overridden(json.loads(path.read_text()), fields)))
