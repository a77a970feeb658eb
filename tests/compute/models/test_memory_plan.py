"""`penstock plan` says beforehand what a worker then takes."""

import json
from pathlib import Path

import pytest

import families
import judges
from penstock.compose import plan
from penstock.loadtest.lab.quantization import weight_bytes
from penstock.worker.bundled.paths import BUNDLED_MODEL
from penstock.worker.engine.build import build_engine
from penstock.worker.engine.io.config import EngineConfig
from penstock.worker.layers.choices import Quantization

CACHE = 3 * 2**20


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, int]:
    assert plan.main([*words, "--json"]) == 0
    made: dict[str, int] = json.loads(capsys.readouterr().out)
    return made


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        ("bundled", None),
        ("bundled", "int8"),
        ("bundled", "int4_g64"),
        ("qwen2", None),
        ("qwen3", None),
        ("gemma2", None),
        ("qwen2_moe", None),
        ("qwen2_moe", "int8"),
    ],
)
def test_a_worker_takes_what_was_planned(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    family: str,
    quantization: Quantization | None,
) -> None:
    folder = BUNDLED_MODEL
    if family in judges.JUDGES:
        judges.build(family).bfloat16().save_pretrained(folder := tmp_path)
    elif family != "bundled":
        shape = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
        wide = {"shared_expert_intermediate_size": 128, "moe_intermediate_size": 64}
        shape |= {"hidden_size": 128, "intermediate_size": 128}
        families.save(family, folder := tmp_path, **shape | wide)
    config = EngineConfig(
        model=folder,
        dtype="bfloat16",
        block_size=32,
        kv_cache_memory_bytes=CACHE,
        quantization=quantization,
        device="cpu",
    )
    engine = build_engine(config)
    flags = ["--dtype", "bfloat16", "--block-size", "32", "--kv-cache-memory-bytes", str(CACHE)]
    flags += ["--quantization", quantization] if quantization else []
    made = planned(capsys, "--model", str(folder), *flags)
    assert made["num_blocks"] == engine.limits.num_blocks
    assert made["max_model_len"] == engine.limits.max_model_len
    assert made["weight_bytes"] == pytest.approx(weight_bytes(engine), rel=0.05)


def test_what_does_not_fit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    bundled = ["--model", "penstock-5m"]
    assert plan.main([*bundled, "--memory", "100MiB"]) == 1
    assert "are lacking" in capsys.readouterr().out
    assert plan.main([*bundled, "--kv-cache-memory-bytes", "1000"]) == 1
    assert "kv_cache_memory_bytes: 1000 bytes hold 0 blocks" in capsys.readouterr().err
    assert plan.main([*bundled, "--max-model-len", "100000"]) == 1
    assert "max_model_len: 100000" in capsys.readouterr().err
    assert plan.main(["--model", "no/where/to"]) == 1
    assert plan.main([*bundled, "--kv-cache-dtype", "int8", "--dtype", "float32"]) == 1
    assert "give dtype bfloat16" in capsys.readouterr().err
    assert plan.main([*bundled, "--quantization", "int8", "--dtype", "float32"]) == 1
    assert "leave" in capsys.readouterr().err
    on_a_gpu = ["--device", "cuda", "--memory", "1GiB"]
    assert plan.main([*bundled, "--kv-cache-dtype", "int8", *on_a_gpu]) == 1
    assert "give fp8" in capsys.readouterr().err
    assert plan.main([*bundled, "--quantization", "int8", *on_a_gpu]) == 0
    assert "the GPU's" in capsys.readouterr().out
    assert plan.main([*bundled, "--device", "cuda"]) == 2
    assert "--memory 80GiB" in capsys.readouterr().err


def test_products_of_eight_bits_take_half_the_room(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "penstock-5m", "--device", "cuda", "--memory", "1GiB"]
    usual, fp8 = (planned(capsys, *flags, *more) for more in ([], ["--quantization", "fp8"]))
    config = json.loads((BUNDLED_MODEL / "config.json").read_text())
    head = 2 * config["vocab_size"] * config["hidden_size"]
    assert fp8["weight_bytes"] - head == pytest.approx((usual["weight_bytes"] - head) / 2, rel=0.03)
    assert plan.main(["--model", "penstock-5m", "--quantization", "fp8"]) == 1
    assert "NVIDIA GPUs of capability 9.0" in capsys.readouterr().err


def test_keys_and_values_of_eight_bits_take_half_the_room(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--model", "penstock-5m", "--device", "cuda", "--memory", "1GiB"]
    usual, halved = (planned(capsys, *flags, *more) for more in ([], ["--kv-cache-dtype", "fp8"]))
    assert usual["kv_bytes_per_token"] == 2 * halved["kv_bytes_per_token"]
    assert halved["num_blocks"] // 2 == usual["num_blocks"]
    on_a_cpu = [*flags[:2], "--dtype", "bfloat16"]
    plain, fp8, int8 = (
        planned(capsys, *on_a_cpu, "--kv-cache-dtype", kind)["kv_bytes_per_token"]
        for kind in ("auto", "fp8", "int8")
    )
    config = json.loads((BUNDLED_MODEL / "config.json").read_text())
    rows = 2 * config["num_hidden_layers"] * config["num_key_value_heads"]
    assert plain == 2 * fp8 and int8 == fp8 + 4 * rows, "each row has a scale"
