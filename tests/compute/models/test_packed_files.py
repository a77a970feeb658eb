"""The packed checkpoints that `penstock bench formats` measures: the reader takes each."""

from pathlib import Path

import pytest

import families
from penstock.loadtest.lab.engines.packed_files import FORMS, save_packed
from penstock.worker.models.native.loading import load_decoder


@pytest.mark.parametrize("name", FORMS)
def test_a_layout_is_read_and_its_integers_stay(name: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    families.save("llama", tmp_path / "plain", dtype="bfloat16", **sizes)
    save_packed(tmp_path / "plain", tmp_path / "packed", name)
    decoder = load_decoder(tmp_path / "packed")
    stays = "multiplied as they are, by rows rounded to 8 bits"
    assert decoder.numerics.endswith("rows stay as they are" if "fp8" in name else stays)
