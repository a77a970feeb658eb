"""The text of models that see or hear: our decoder of it against transformers' whole module."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import families
from families import Played, renamed
from penstock.worker.engine.build import build_engine
from penstock.worker.engine.io.config import EngineConfig
from penstock.worker.models.contract.spec import ModelSpec
from penstock.worker.models.families.seeing import SEEING
from penstock.worker.models.folder.errors import BrokenModel, ModelError
from penstock.worker.models.impl import chosen_impl
from penstock.worker.models.native.loading import load_decoder

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
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    fields["text_config"] = {"model_type": "opt", "hidden_size": 64}
    path.write_text(json.dumps(fields))
    with pytest.raises(ModelError, match="llava"):
        build_engine(EngineConfig(model=tmp_path))
