"""vLLM's names of packed weights, as `quantization` takes them and as a model tells of itself."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import families
from packers import AWQ, GPTQ, by_awq, by_gptq, pack, save
from penstock.worker.engine.build import build_engine, spec_of
from penstock.worker.engine.io.config import EngineConfig
from penstock.worker.models.folder.errors import CannotQuantise
from penstock.worker.process.fingerprint import fingerprint
from penstock.worker.process.settings import WorkerSettings

CPU = torch.device("cpu")
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def made(folder: Path, quantization: str | None) -> str | None:
    config = EngineConfig.model_validate({"model": folder, "quantization": quantization})
    return spec_of(config, CPU).arithmetic.quantization


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    families.save("llama", tmp_path / "dense", dtype="float32", intermediate_size=128)
    return tmp_path / "dense"


def float8(source: Path, target: Path) -> Path:
    target.mkdir()
    tensors = {}
    for name, weight in load_file(source / "model.safetensors").items():
        tensors[name] = weight
        if name.endswith("proj.weight"):
            scale = weight.abs().max() / 448
            tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale"] = scale.reshape(1)
    save(tensors, target)
    fields = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(fields | {"quantization_config": FP8}))
    return target


@pytest.mark.parametrize("name", ["gptq", "gptq_marlin"])
def test_the_name_of_what_weights_are_changes_nothing(
    name: str, dense: Path, tmp_path: Path
) -> None:
    packed = pack(dense, tmp_path / "packed", GPTQ, by_gptq)
    assert made(packed, name) is None
    digests = {
        fingerprint(WorkerSettings(model=str(packed), quantization=value)) for value in (None, name)
    }
    assert len(digests) == 1, "a rollout with the flag goes on with the jobs of one without"


def test_another_name_is_refused(dense: Path, tmp_path: Path) -> None:
    packed = pack(dense, tmp_path / "packed", AWQ, by_awq)
    assert made(packed, "awq_marlin") is None
    with pytest.raises(
        CannotQuantise, match=r"gptq: the weights of .*packed are awq; leave it out"
    ):
        made(packed, "gptq")
    with pytest.raises(CannotQuantise, match=r"awq: the weights of .*dense are as they are"):
        made(dense, "awq")


def test_integers_are_not_rounded_again(dense: Path, tmp_path: Path) -> None:
    packed = pack(dense, tmp_path / "packed", GPTQ, by_gptq)
    with pytest.raises(CannotQuantise, match="int8: the weights are gptq already; leave it out"):
        made(packed, "int8")
    assert made(dense, "int8") == "int8"


def test_fp8_of_float8_asks_for_nothing(dense: Path, tmp_path: Path) -> None:
    folder = float8(dense, tmp_path / "float8")
    assert made(folder, "fp8") is None
    assert made(folder, "int8") == "int8"
    assert made(dense, "fp8") == "fp8"


def test_a_model_tells_what_became_of_its_weights(dense: Path, tmp_path: Path) -> None:
    """As `/v1/models` has it: see tests/service/operator/test_models_end.py."""
    packed = pack(dense, tmp_path / "packed", GPTQ, by_gptq)

    def numerics(folder: Path, **settings: object) -> str:
        config = {"model": folder, "num_gpu_blocks_override": 8} | settings
        return build_engine(EngineConfig.model_validate(config)).limits.numerics

    rounded = "integers (gptq) are multiplied as they are, by rows rounded to 8 bits"
    assert numerics(packed) == rounded
    assert numerics(packed, dtype="float32").endswith("widened to float32; rows stay as they are")
    assert numerics(dense) == ""
    assert numerics(dense, quantization="int8") == "weights are rounded to int8 at the start"
    kept = "keys and values are kept in int8"
    assert numerics(packed, kv_cache_dtype="int8") == f"{rounded}; {kept}"
