"""`penstock bench compare`: what it asks of whom, and the limit beside the figures."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import load_file
from test_bench_serve import ANSWERS, answering
from torch import Tensor

from penstock.loadtest import bench
from penstock.loadtest.engines.cases import LLM, ONE_BY_ONE, QUEUE, servers
from penstock.loadtest.engines.subjects import Subject, Task, begin_in_turn, vllm_in_process
from penstock.loadtest.errors import CannotMeasure
from penstock.loadtest.lab.compare import like_with_like
from penstock.loadtest.lab.machine.limit import Shape, limit_tokens_per_s, shape_of
from penstock.loadtest.lab.machine.neighbour import busy
from penstock.loadtest.lab.machine.speeds import Speeds, measure_speeds
from penstock.loadtest.lab.report.tables import Round, Row
from penstock.loadtest.machine.usage import (
    Neighbours,
    description,
    family,
    listener,
    module_of,
    stopped,
)
from penstock.loadtest.requests.dataset import read, write
from penstock.loadtest.requests.measurement import Measurement, Timeline
from penstock.loadtest.requests.workload import Request, varied, workloads
from penstock.worker.bundled.paths import BUNDLED_MODEL
from worker_process import until


@pytest.mark.slow
def test_each_engine_answers_the_same_file_in_each_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, found = tmp_path / "asked.jsonl", tmp_path / "found.json"
    write(asked, [Request(list(range(50 + n, 60 + n)), 3 + n) for n in range(3)])
    words = ["compare", "--model", str(BUNDLED_MODEL), "--dataset-path", str(asked)]
    words += ["--only", "file 8", "--rounds", "1", "--output-json", str(found)]
    with answering(ANSWERS["whole"][0], 1000) as server:
        # It names no model, so nothing can be asked of it: that costs the others nothing.
        assert bench.main([*words, "--url", f"dumb=http://127.0.0.1:{server.port}/v1"]) == 1
    said = capsys.readouterr().out
    (case,) = json.loads(found.read_text())["cases"]
    engines = {each["name"]: each for each in case["engines"]}
    assert list(engines) == ["Penstock LLM", "Penstock HTTP", "generate_batch", "dumb"]
    for name, engine in engines.items():
        assert name in said
        assert len(engine["output_throughput_of_rounds"]) == 1
        if name != "dumb":
            assert (engine["completed"], engine["total_output_tokens"]) == (3, 3 + 4 + 5)
            assert engine["fraction_of_limit"] == pytest.approx(
                engine["output_throughput"] / engine["limit_tokens_per_s"]
            )
            assert engine["start_s"] > 0 and engine["peak_resident_bytes"] > 50e6
    assert "names no model" in engines["dumb"]["failures"][0]
    assert "% of it through the queue" in said and "times generate_batch" in said


READS, MULTIPLIES = Speeds({1: 1.0}, 1e9, 1e9), Speeds({1: 1e9}, 1.0, 4.0)


def test_weights_of_fewer_bits_are_read_and_multiplied_faster() -> None:
    shape = Shape(100, 20, 0, 3, "int8")
    requests = [Request([1, 2], 1)]
    assert limit_tokens_per_s(READS, shape, requests, 1) == pytest.approx(1 / (120 + 6))
    assert limit_tokens_per_s(MULTIPLIES, shape, requests, 1) == pytest.approx(4 / (2 * 220))


def test_the_limit_is_the_longer_of_reading_and_multiplying() -> None:
    shape = Shape(layer_parameters=100, head_parameters=20, attention_width=0, kv_bytes=3)
    requests = [Request([1, 2, 3, 4], 2), Request([5, 6], 1)]
    # Both prompts and the first tokens in one step, the last token in another.
    read = [2 * 120 + 3 * (4 + 2), 2 * 120 + 3 * 5]
    multiplied = [2 * 100 * 6 + 2 * 20 * 2, 2 * 100 * 1 + 2 * 20]
    by_reading = limit_tokens_per_s(READS, shape, requests, 2)
    by_products = limit_tokens_per_s(MULTIPLIES, shape, requests, 2)
    assert by_reading == pytest.approx(3 / sum(read))
    assert by_products == pytest.approx(3 / sum(multiplied))
    alone = [2 * 120 + 3 * 4, 2 * 120 + 3 * 5, 2 * 120 + 3 * 2]
    assert limit_tokens_per_s(READS, shape, requests, 1) == pytest.approx(3 / sum(alone))


def test_a_step_is_held_against_the_reading_of_as_much_memory_as_its_weights_take() -> None:
    """Of a little the caches keep some, and what they keep is read faster."""
    speeds = Speeds({8: 100.0, 200: 10.0}, 1e9, 1e9)
    requests = [Request([1], 1)]
    for parameters, bytes_per_s in ((4, 100.0), (99, 100.0), (100, 10.0), (4000, 10.0)):
        shape = Shape(parameters, head_parameters=0, attention_width=0, kv_bytes=0)
        expected = bytes_per_s / (2 * parameters)
        assert limit_tokens_per_s(speeds, shape, requests, 1) == pytest.approx(expected)
    better = speeds.at_least(Speeds({8: 50.0, 200: 20.0}, 2e9, 1.0))
    assert better == Speeds({8: 100.0, 200: 20.0}, 2e9, 1e9)


def test_no_sum_and_no_product_passes_the_measured_speeds() -> None:
    """Loops in C read more than torch's sum does, which once passed for a limit.

    The speeds are the best of several measurements: others may use the machine during one.
    """
    size = 2**23
    memory, left, right = torch.ones(size // 4), torch.randn(512, 1024), torch.randn(1024, 2048)
    speeds = measure_speeds([size])
    for _ in range(10):
        bytes_per_s = memory.nbytes / least_s(memory.sum)
        flops_per_s = 2 * 512 * 1024 * 2048 / least_s(lambda: left @ right)
        reads, computes = 1.1 * speeds.memory_bytes_per_s, 1.1 * speeds.flops_per_s
        if bytes_per_s < reads and flops_per_s < computes:
            break
        speeds = speeds.at_least(measure_speeds([size]))
    assert bytes_per_s < reads
    assert flops_per_s < computes <= 1.1 * speeds.int8_flops_per_s


def least_s(work: Callable[[], object]) -> float:
    def took_s() -> float:
        begin_s = time.perf_counter()
        work()
        return time.perf_counter() - begin_s

    return min(took_s() for _ in range(5))


def test_what_prompts_share_is_computed_and_read_once() -> None:
    shape = Shape(layer_parameters=100, head_parameters=0, attention_width=0, kv_bytes=3)
    requests = [Request([1, 2, 3, 4], 1), Request([1, 2, 3, 9, 9], 1)]
    assert limit_tokens_per_s(MULTIPLIES, shape, requests, 2) == pytest.approx(2 / (200 * 6))
    assert limit_tokens_per_s(READS, shape, requests, 2) == pytest.approx(2 / (200 + 18))


def test_the_shape_counts_the_bundled_models_parameters() -> None:
    shape = shape_of(BUNDLED_MODEL)
    num_bytes = (BUNDLED_MODEL / "model.safetensors").stat().st_size
    counted = 2 * (shape.layer_parameters + shape.head_parameters)
    assert counted == pytest.approx(num_bytes, rel=0.02)


def test_another_turn_shares_no_prefix_with_the_first_but_as_much_in_itself() -> None:
    first, later = workloads()["P"], varied(workloads()["P"], 3)
    assert varied(first, 0) == first
    assert [len(one.prompt) for one in later] == [len(one.prompt) for one in first]
    assert len({tuple(one.ids[:512]) for one in later}) == 1
    assert first[0].ids[0] != later[0].ids[0]
    texts = varied(workloads()["json"], 3)
    assert not any(one.prompt in {other.prompt for other in texts} for one in workloads()["json"])
    small = varied([Request([4095, 10], 1)], 1, vocab_size=4096)
    assert small[0].prompt == [10, 11]


def test_the_first_token_counts_from_a_requests_turn() -> None:
    ends_s = [3.0, 1.0, 4.0, 6.0]
    timelines = [Timeline(0.0, 1, [end_s - 0.5, end_s]) for end_s in ends_s]
    begin_in_turn(timelines, 2)
    assert [timeline.begin_s for timeline in timelines] == [0.0, 0.0, 1.0, 3.0]


def test_the_middle_round_counts() -> None:
    def one(seconds: float) -> Round:
        return Round(Measurement([Timeline(0.0, 1, [1.0])], seconds), 0.0, 0)

    row = Row("x", "", [one(1.0), one(4.0), one(2.0)])
    assert row.middle.tokens_per_s == 0.5
    assert Row("x", "", [one(1.0), Round(None, 0.0, 0, "it broke")]).middle.failure == "it broke"


def test_ratios_are_of_the_same_rounds() -> None:
    def row(name: str, *seconds: float) -> Row:
        measured = [Measurement([Timeline(0.0, 1, [1.0])], each) for each in seconds]
        return Row(name, "", [Round(each, 0.0, 0) for each in measured])

    ours, other = row("ours", 1.0, 2.0, 4.0), row("other", 3.0, 4.0, 16.0)
    assert ours.times(other) == "3.00 (2.00 to 4.00) times"
    broken = Row("other", "", [Round(None, 0.0, 0, "it broke"), *other.rounds[1:]])
    assert ours.times(broken) == "3.00 (2.00 to 4.00) times"
    assert row("ours", 1.0).times(row("other", 1.5)) == "1.50 times"


def test_like_is_compared_with_like() -> None:
    """What is asked over HTTP with what is asked over HTTP, in process with in process."""
    [there, elsewhere] = servers(["there=http://127.0.0.1:9/v1", "elsewhere=http://x:9/v1"])
    inside = Subject("inside", vllm_in_process(Path(sys.executable)))
    subjects, seconds = [LLM, QUEUE, there, elsewhere, inside], [1.0, 2.0, 4.0, 6.0, 8.0]
    rows = {
        subject.name: Row(
            subject.name, "", [Round(Measurement([Timeline(0.0, 1, [1.0])], took_s), 0.0, 0)]
        )
        for subject, took_s in zip(subjects, seconds, strict=True)
    }
    assert list(like_with_like([*subjects, ONE_BY_ONE], rows)) == [
        "2.00 times there, served",
        "3.00 times elsewhere, served",
        "8.00 times inside, in process",
    ]
    assert (there.port, elsewhere.port) == (9, None)


def test_vllm_in_process_says_what_it_cannot_be_asked() -> None:
    task = Task(BUNDLED_MODEL, [Request([1], 1, {"type": "object"})], 1)
    with pytest.raises(CannotMeasure, match="by a schema"):
        vllm_in_process(Path(sys.executable))(task)


def test_a_server_stands_still_with_its_children_while_another_is_measured() -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as server:
        while len(family(server.pid)) < 2:
            time.sleep(0.05)

        def states() -> set[str]:
            stats = [Path(f"/proc/{pid}/stat").read_text() for pid in family(server.pid)]
            return {stat.rpartition(")")[2].split()[0] for stat in stats}

        with stopped([server.pid, os.getpid()]):
            until(lambda: states() == {"T"}, "both stand still")
        until(lambda: "T" not in states(), "both go on")
        assert server.stdin is not None
        server.stdin.write(b"\n")
        server.stdin.close()
    assert server.returncode == 0


def test_the_machine_knows_who_listens_and_how_much_memory_there_was() -> None:
    with answering(b"", 1) as server, Neighbours() as neighbours:
        assert listener(server.port) == os.getpid()
        with socket.create_connection((server.host, server.port)) as client:
            assert listener(client.getsockname()[1]) is None
    assert 0 <= neighbours.share <= 1.1
    assert int(str(description()["cores"])) >= 1


def test_a_neighbour_is_there_while_it_is_asked_for_and_no_longer() -> None:
    def count() -> int:
        return [module_of(pid) for pid in family(os.getpid())].count(
            "penstock.loadtest.lab.machine.neighbour"
        )

    with busy(0.0):
        assert count() == 0
    with busy(1.0) as neighbour:
        assert count() == (os.cpu_count() or 1)
        time.sleep(1)
    assert count() == 0
    assert 0 < neighbour.share <= 1.1


@pytest.mark.slow
def test_the_files_are_for_any_engine(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    assert (
        bench.main(["files", "--folder", str(tmp_path), "--gguf", "--shapes", "135m,64-experts"])
        == 0
    )
    for name, requests in workloads().items():
        assert read(tmp_path / f"{name}.jsonl", 1) == requests
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "135m")
    assert tokenizer.decode(tokenizer.encode("Hé, you")) == "Hé, you"
    assert len(tokenizer) == AutoConfig.from_pretrained(tmp_path / "135m").vocab_size
    assert AutoConfig.from_pretrained(tmp_path / "64-experts").num_experts == 64
    assert len({tokenizer.decode([number]) for number in range(1000, 1100)}) == 100
    weights = load_file(tmp_path / "135m" / "model.safetensors")
    for name, error in ("135m.gguf", 0.0), ("135m-q8_0.gguf", 0.02):
        _is_the_same_model(GGUFReader(tmp_path / name), weights, error)


def _is_the_same_model(file: GGUFReader, weights: dict[str, Tensor], error: float) -> None:
    """Of a query's head, llama.cpp pairs numbers 2i and 2i + 1, a checkpoint i and i + 32."""
    tensors = {each.name: each for each in file.tensors}
    assert len(tensors) == len(weights)
    assert len(file.fields["tokenizer.ggml.tokens"].data) == 49_152
    names = {
        "attn_k": "self_attn.k_proj",
        "ffn_down": "mlp.down_proj",
        "ffn_norm": "post_attention_layernorm",
    }
    for known, name in names.items():
        weight = weights[f"model.layers.7.{name}.weight"].float().numpy()
        found = tensors[f"blk.7.{known}.weight"]
        rows = dequantize(found.data, found.tensor_type)
        if known == "attn_k":
            heads = np.split(rows, 3)
            rows = np.concatenate([half for head in heads for half in (head[::2], head[1::2])])
        assert abs(rows - weight).max() <= error * abs(weight).max()


BAD_OPTIONS = [
    (["--only", "nothing"], "cases are W 64, W 8"),
    (["--url", "http://x"], "name=http"),
    (["--url", "x=ftp://x"], "--url"),
    (["--vllm", "/no/python"], "--vllm: /no/python is no Python"),
    (["--rounds", "0"], "--rounds"),
    (["--neighbour", "1.5"], "--neighbour"),
    (["--dataset-path", "/no/such", "--only", "file 1"], "No such file"),
]


def test_a_bad_option_is_one_line() -> None:
    """In a process of their own: here another test's leavings may be told while this one runs."""
    code = """
import json, sys
from penstock.compose.cli import main
for words in json.loads(sys.argv[1]):
    try:
        status = main(["bench", "compare", *words])
    except SystemExit as ended:
        status = ended.code
    print(status, file=sys.stderr)
"""
    given = json.dumps([words for words, _ in BAD_OPTIONS])
    argv = [sys.executable, "-c", code, given]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=240)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    told = ended.stderr.splitlines()
    assert told[1::2] == ["2"] * len(BAD_OPTIONS), told
    for line, (_, said) in zip(told[::2], BAD_OPTIONS, strict=True):
        assert line.startswith("penstock bench compare: ") and said in line
