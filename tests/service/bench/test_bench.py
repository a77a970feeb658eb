"""The benches by vLLM's names: what they ask, and the keys and counts of what they find."""

import json
import re
from pathlib import Path

import pytest

from penstock.loadtest import bench
from penstock.loadtest.lab import models
from penstock.loadtest.requests.dataset import read, write
from penstock.loadtest.requests.workload import Request, workloads

SHORT = ["--kv-cache-memory-bytes", "20000000"]


def test_offline_has_vllms_keys_and_counts_every_token(tmp_path: Path) -> None:
    asked, found = tmp_path / "asked.jsonl", tmp_path / "found.json"
    schema = {"enum": ["yes", "no"]}
    write(asked, [Request([50, 51, 52], 5), Request("Hello", 4), Request("Well?", 9, schema)])
    words = ["--dataset-name", "custom", "--dataset-path", str(asked), "--output-json", str(found)]
    assert bench.main(["offline", *words, *SHORT]) == 0
    result = json.loads(found.read_text())
    assert set(result) == {
        "elapsed_time",
        "num_requests",
        "total_num_tokens",
        "requests_per_second",
        "tokens_per_second",
        "output_tokens_per_second",
    }
    made = result["output_tokens_per_second"] * result["elapsed_time"]
    assert result["num_requests"] == 3
    assert 5 + 4 < round(made) <= 5 + 4 + 9
    assert result["total_num_tokens"] > round(made) + 3


def test_a_workers_settings_are_the_engines() -> None:
    words = ["--num-prompts", "1", "--input-len", "400", "--output-len", "2"]
    assert bench.main(["offline", *words, *SHORT, "--max-model-len", "402"]) == 0
    assert bench.main(["offline", *words, *SHORT, "--max-model-len", "399"]) == 2


def test_latency_has_vllms_keys_and_counts_its_turns(tmp_path: Path) -> None:
    path = tmp_path / "latency.json"
    words = ["--batch-size", "2", "--input-len", "5", "--output-len", "3", "--num-iters", "4"]
    words += ["--num-iters-warmup", "1", "--output-json", str(path), *SHORT]
    assert bench.main(["latency", *words]) == 0
    result = json.loads(path.read_text())
    assert set(result) == {"avg_latency", "std_latency", "latencies", "percentiles"}
    assert len(result["latencies"]) == 4
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    low, high = min(result["latencies"]), max(result["latencies"])
    assert low <= result["percentiles"]["50"] <= high


def test_a_workload_written_out_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    for name, requests in workloads().items():
        write(path, requests)
        assert read(path, 1) == requests, name


def test_a_line_may_leave_the_length_to_the_option_or_say_it_as_vllm_does(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": [7], "output_tokens": 3, "other": 1}\n')
    assert read(path, 9) == [Request("a", 9), Request([7], 3)]


@pytest.mark.parametrize(
    "line, field",
    [
        ('{"prompt": 3}', "$.prompt"),
        ('{"prompt": [1, -2]}', "$.prompt[1]"),
        ('{"prompt": []}', "$.prompt"),
        ('{"prompt": "a", "max_tokens": 0}', "$.max_tokens"),
        ('{"prompt": "a", "json_schema": "x"}', "$.json_schema"),
        ('{"text": "a"}', "prompt"),
        ("prompt: a", "malformed"),
    ],
)
def test_a_bad_line_is_named_with_its_number_and_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, field: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "good"}\n' + line + "\n")
    assert bench.main(["offline", "--dataset-name", "custom", "--dataset-path", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"{path}: line 2: " in said and field in said


@pytest.mark.parametrize(
    "words, said",
    [
        (["offline", "--dataset-name", "custom"], "--dataset-path"),
        (["offline", "--dataset-path", "x"], "--dataset-name custom"),
        (["offline", "--dataset-name", "custom", "--dataset-path", "/no/such"], "No such file"),
        (["offline", "--dataset-name", "penstock-one", "--num-prompts", "17"], "there are 16"),
        (["offline", "--model", "nowhere"], "nowhere"),
        (["offline", "--load-format", "fake", "--max-num-seqs", "0"], "--max-num-seqs"),
        (["latency", "--batch-size", "0"], "--batch-size"),
        (["nothing"], "'nothing'"),
    ],
    ids=str,
)
def test_a_bad_option_is_named(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    try:
        status = bench.main(words)
    except SystemExit as ended:
        assert isinstance(ended.code, int)
        status = ended.code
    assert status == 2
    assert said in capsys.readouterr().err.splitlines()[0]


def test_host_times_every_part_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["host", "--num-seqs", "3", "--steps", "10"]) == 0
    table = capsys.readouterr().out
    for part in ("inbox", "schedule", "batch", "runner", "sampler", "update", "step", "goal"):
        assert f" {part} " in table


@pytest.mark.slow
def test_models_stand_beside_transformers_modules(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"hidden_size": 72, "num_hidden_layers": 2, "vocab_size": 2000}
    family, shape = models.SHAPES["135m"]
    monkeypatch.setattr(models, "SHAPES", {"135m": (family, shape | small)})
    monkeypatch.setattr(models, "MODELS", ("135m",))
    monkeypatch.setattr(models, "EXPERTS", ((64, 32),))
    assert models.main(["--experts", "8", "--chosen", "2"]) == 0
    told = capsys.readouterr().out
    assert "transformers / native" in told and "8 experts of which 2 are chosen" in told
    assert len(re.findall(r"64 x 32", told)) == len(models.AT_ONCE)
