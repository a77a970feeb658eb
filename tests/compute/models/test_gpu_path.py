"""The engine's way on a GPU, tried on a CPU: Triton's interpreter, static inputs, replays."""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import families
import judges
from paths import ROOT
from penstock.kernels.numbers.device import TRITON_DEVICES
from penstock.schemas.params.sampling import SamplingParams, StructuredOutputs
from penstock.worker.bundled.paths import BUNDLED_MODEL
from penstock.worker.engine.build import DoesNotFit, build_engine, left_of_gpu
from penstock.worker.engine.engine import Engine
from penstock.worker.engine.io.config import EngineConfig
from penstock.worker.engine.io.messages import AddSequence, WordIds
from penstock.worker.engine.running.graphs import GraphedNetwork, graph_sizes
from penstock.worker.engine.running.runner import ModelRunner
from penstock.worker.engine.sampling.sampler import Sampler
from penstock.worker.engine.sampling.sampler_row import SamplerRow
from penstock.worker.layers import latent_attention
from penstock.worker.models.folder.errors import CannotKeep, CannotQuantise, NoBackend
from penstock.worker.text.model_tokenizer import ModelTokenizer

PARAMS = [
    SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=1, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=20, max_tokens=12, ignore_eos=True),
    SamplingParams(
        temperature=1, presence_penalty=1, repetition_penalty=1.2, max_tokens=9, ignore_eos=True
    ),
    SamplingParams(temperature=0, logprobs=3, min_tokens=5, max_tokens=11),
]


@pytest.fixture
def interpret() -> Iterator[Callable[[], None]]:
    """From the call on, Triton's kernels compute what is on the CPU."""
    yield lambda: TRITON_DEVICES.add("cpu")
    TRITON_DEVICES.discard("cpu")


def make_engine(folder: Path, **options: object) -> Engine:
    """Short of blocks and of room in a step, so that slices and preemption happen."""
    return build_engine(
        EngineConfig(
            model=folder,
            device="cpu",
            num_gpu_blocks_override=9,
            max_num_seqs=5,
            max_num_batched_tokens=24,
            **{"dtype": "float32", **options},  # type: ignore[arg-type]
        )
    )


def texts(engine: Engine) -> list[list[int]]:
    """The tokens of six sequences of unequal lengths, which begin in two groups."""
    found: list[list[int]] = [[] for _ in range(6)]

    def add(seqs: range) -> None:
        for seq in seqs:
            prompt = [5 + (3 * seq + 7 * at) % 90 for at in range(3 + 9 * seq)]
            engine.add(AddSequence(str(seq), prompt, PARAMS[seq % 5], seed=seq))

    add(range(4))
    num_steps = 0
    while engine.busy:
        num_steps += 1
        if num_steps == 4:
            add(range(4, 6))
        for output in engine.step():
            assert output.error is None, output.error
            found[int(output.seq_id)] += output.token_ids
    return found


class Replays:
    """In the place of CUDA graphs: the computation runs again, into the same tensor."""

    def __init__(self) -> None:
        self.num_replays = 0

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        out = compute()

        def replay() -> None:
            self.num_replays += 1
            out.copy_(compute())

        return replay, out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral_window", "qwen3", "mixtral", "gpt_oss", "deepseek_v3"])
def test_a_gpus_way_gives_the_same_text(
    name: str, tmp_path: Path, interpret: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step by step and launched ahead, with slices, preemption and ends that nobody foresaw."""
    save = judges.save if name in judges.JUDGES else families.save
    save(name, tmp_path)
    plain = make_engine(tmp_path)
    wanted = texts(plain)
    assert plain.stats().num_preemptions, "this tries a preempted sequence too"
    assert texts(make_engine(tmp_path, async_scheduling=True)) == wanted

    interpret()
    monkeypatch.setattr(latent_attention, "_LONG", 8)  # so that these slices count as long ones
    engine = make_engine(tmp_path, async_scheduling=True)
    runner, replays = engine.runner, Replays()
    assert isinstance(runner, ModelRunner)
    assert runner.model.is_capturable
    with torch.inference_mode():
        runner.model = GraphedNetwork(runner.model, runner.kv_caches, 5, 144, 16, replays)
    assert texts(engine) == wanted
    assert replays.num_replays > 10, "steps of single tokens are replayed"


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int4_g64", "fp8"])
def test_a_quantised_model_gives_the_same_text_replayed(
    quantization: str, tmp_path: Path, interpret: Callable[[], None]
) -> None:
    families.save("llama", tmp_path, intermediate_size=128, num_hidden_layers=2)
    interpret()
    options = {"dtype": "bfloat16", "quantization": quantization, "deterministic": True}
    wanted = texts(make_engine(tmp_path, **options))
    engine = make_engine(tmp_path, **options, async_scheduling=True)
    runner, replays = engine.runner, Replays()
    assert isinstance(runner, ModelRunner)
    with torch.inference_mode():
        runner.model = GraphedNetwork(runner.model, runner.kv_caches, 5, 144, 16, replays)
    assert texts(engine) == wanted
    assert replays.num_replays > 10


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_keys_and_values_of_eight_bits_give_the_same_text_replayed(
    name: str, tmp_path: Path, interpret: Callable[[], None]
) -> None:
    """With slices and preemption, whose keys are computed again."""
    families.save(name, tmp_path)
    interpret()
    options = {"kv_cache_dtype": "fp8", "deterministic": True}
    plain = make_engine(tmp_path, **options)
    wanted = texts(plain)
    assert plain.stats().num_preemptions
    engine = make_engine(tmp_path, **options, async_scheduling=True)
    runner, replays = engine.runner, Replays()
    assert isinstance(runner, ModelRunner)
    assert {kv_cache.dtype for kv_cache in runner.kv_caches} == {torch.float8_e4m3fn}
    with torch.inference_mode():
        runner.model = GraphedNetwork(runner.model, runner.kv_caches, 5, 144, 16, replays)
    assert texts(engine) == wanted
    assert replays.num_replays > 10
    assert texts(make_engine(tmp_path, deterministic=True)) != wanted, "the bits count"


def test_a_gpu_keeps_no_keys_and_values_of_int8(
    tmp_path: Path, interpret: Callable[[], None]
) -> None:
    families.save("llama", tmp_path)
    interpret()
    with pytest.raises(CannotKeep, match="give fp8") as raised:
        make_engine(tmp_path, kv_cache_dtype="int8")
    assert raised.value.setting == "kv_cache_dtype"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_computes_attention_where_it_is_asked_to(
    dtype: str, interpret: Callable[[], None]
) -> None:
    """On a CPU the cache lies otherwise for compiled code; on a GPU it is read on the host."""
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    told = []
    for backend, on_gpu in (("auto", False), ("torch", False), ("torch", True)):
        if on_gpu:
            interpret()
        engine = make_engine(BUNDLED_MODEL, dtype=dtype, attention_backend=backend)
        runner = engine.runner
        assert isinstance(runner, ModelRunner)
        assert runner.model.is_capturable == (backend == "auto")
        engine.add(AddSequence("it", [300 + 7 * at % 90 for at in range(22)], params))
        found: list[float] = []
        while engine.busy:
            for output in engine.step():
                assert output.error is None, output.error
                found += [each.logprob for each in output.prompt_logprobs or []]
        told.append(torch.tensor(found))
    assert len(told[0]) == 21
    for other in told[1:]:
        apart = (other - told[0]).abs().mean()
        assert apart < (1e-4 if dtype == "float32" else 0.1), (
            "where they misread it it is 1 and more"
        )


@pytest.mark.slow
def test_a_model_of_eight_bits_says_nearly_the_same(interpret: Callable[[], None]) -> None:
    interpret()
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    ids = ModelTokenizer(BUNDLED_MODEL).encode("Once upon a time there was a clever girl named")
    told = []
    for eight in ({}, {"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}):
        engine = make_engine(BUNDLED_MODEL, dtype="bfloat16", **eight)
        engine.add(AddSequence("it", ids, params))
        outputs = [output for _ in range(5) if engine.busy for output in engine.step()]
        told.append([each.logprob for output in outputs for each in output.prompt_logprobs or []])
    whole, *others = torch.tensor(told)
    assert len(whole) == len(ids) - 1 > 8
    for other in others:
        assert other.ne(whole).any() and (other - whole).abs().mean() < 0.04


@pytest.mark.slow
@pytest.mark.parametrize("bits", ["fp8", "int8"])
def test_experts_of_eight_bits_are_captured_and_say_nearly_the_same(
    bits: str, tmp_path: Path, interpret: Callable[[], None]
) -> None:
    families.save("mixtral", tmp_path, num_hidden_layers=2, intermediate_size=128)
    interpret()
    params, told = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), []
    for quantization in (None, bits):
        engine = make_engine(tmp_path, dtype="bfloat16", quantization=quantization)
        assert isinstance(engine.runner, ModelRunner) and engine.runner.model.is_capturable
        engine.add(AddSequence("it", [*range(5, 25)], params))
        outputs = [output for _ in range(5) if engine.busy for output in engine.step()]
        told.append([each.logprob for output in outputs for each in output.prompt_logprobs or []])
    whole, eight = torch.tensor(told)
    assert len(whole) == 19 and whole.ne(eight).any() and (whole - eight).abs().mean() < 0.25


def test_fp8_products_are_refused_where_nothing_computes_them(tmp_path: Path) -> None:
    families.save("llama", tmp_path)
    with pytest.raises(CannotQuantise, match=r"NVIDIA GPUs of capability 9.0.*this is a cpu"):
        make_engine(tmp_path, dtype="bfloat16", quantization="fp8")


def test_a_backend_that_is_not_there_ends_the_start_by_name(tmp_path: Path) -> None:
    families.save("llama", tmp_path)
    with pytest.raises(NoBackend, match="not triton: no GPU computes here") as raised:
        make_engine(tmp_path, attention_backend="triton")
    assert raised.value.setting == "attention_backend"
    with pytest.raises(NoBackend, match="in bfloat16, not in float32"):
        make_engine(tmp_path, attention_backend="compiled")
    make_engine(tmp_path, attention_backend="compiled", dtype="bfloat16")


class Waits(TorchDispatchMode):
    """Finds what makes the host wait for a GPU, had it drawn there.

    That is a tensor made of the host's numbers by anything but `send`, and a number that is read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        name = str(func)
        if name.startswith(("aten._local_scalar_dense", "aten.nonzero")):
            self._note(name)
        if name.startswith("aten.lift_fresh") and out.dim():  # one number is made on the device
            self._note(name)
        return out

    def _note(self, name: str) -> None:
        frames = [
            f"{Path(each.filename).name} {each.name} {each.lineno}"
            for each in traceback.extract_stack()
            if "/kernels/" in each.filename or "/worker/" in each.filename
        ]
        if not frames[-1].startswith(("transfers.py ", "sample_triton.py ")):
            self.found.add(f"{name} in {frames[-1]}")


def test_the_host_waits_for_nothing_when_tokens_are_drawn(interpret: Callable[[], None]) -> None:
    """Of new rows, and of the same again. The rules of `cuts.py` look again, and wait."""
    interpret()
    vocab, prompt = 70, [5, 6, 7]
    asked: list[dict[str, Any]] = [
        {"temperature": 0},
        {"top_p": 0.9, "top_k": 9, "min_p": 0.1},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1},
        {"logprobs": 3},
        {"logprobs": 0, "logprob_token_ids": [4, 9]},
        {"logit_bias": {3: 1.0}, "allowed_token_ids": [*range(2, 60)]},
        {"min_tokens": 5, "stop_token_ids": [8]},
        {"dry_multiplier": 1.0, "dry_allowed_length": 1},
        {"structured_outputs": StructuredOutputs(regex="a*")},
        {"bad_words": ["x"], "temperature": 0},
    ]
    words = WordIds(bad_words=[[7, 11]])
    rows = [
        SamplerRow(SamplingParams(**each), seed, 0, [*prompt, 6, 7], 3, words)
        for seed, each in enumerate(asked)
    ]
    rows.append(SamplerRow(SamplingParams(temperature=0), 0, 0, [*prompt], 3, num_candidates=4))
    sampler, waits = Sampler(vocab, frozenset({2})), Waits()
    logits = torch.randn(len(rows), vocab)
    logits[9, 11] = logits[6, 8] = 50
    masks = torch.full((len(rows), 3), -1, dtype=torch.int32)
    told = []
    for _ in "ab":
        given = logits.clone()
        with waits:
            drawn = sampler.draw(given, rows, masks)
        told.append(drawn.read())
        assert told[-1].token_ids[9] != 11 and told[-1].token_ids[6] != 8
    assert told[0] == told[1]
    assert not waits.found
    with waits:
        SamplerRow(SamplingParams(allowed_token_ids=[1, 2]), 0, 0, prompt, 3)
    assert waits.found, "such a tensor is found"


def test_sizes_are_close_where_rows_are_few() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(5) == [1, 2, 4, 5]
    assert graph_sizes(256)[:6] == [1, 2, 4, 8, 16, 24]
    assert graph_sizes(256)[-1] == 256
    assert graph_sizes(4000)[-1] == 512
    assert all(after <= 2 * size for size, after in pairwise(graph_sizes(4000)))


@pytest.mark.slow
def test_the_script_of_figures_runs_without_a_gpu(tmp_path: Path) -> None:
    """In a process of its own, as a user starts it; the slow parts are left out."""
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "penstock.loadtest.lab.gpu", "--out", str(out)]
    parts = "limits,attention_speed,latents_speed,small_ops_speed,engines,prompts"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([*command, "--parts", parts], cwd=ROOT, env=environment, check=True)
    found = json.loads(out.read_text())
    assert found["failures"] == {}
    assert {row["part"] for row in found["rows"]} == {
        *["limits", "attention", "latents", "small ops", "engine"]
    }


GIB = 2**30


def test_a_gpu_that_others_use_says_what_is_short() -> None:
    taken = {"weights": 15 * GIB, "graphs": GIB // 2, "other processes": 6 * GIB}
    assert left_of_gpu(0.9, 24 * GIB, taken) == pytest.approx(0.1 * GIB, abs=2)
    with pytest.raises(DoesNotFit) as raised:
        left_of_gpu(0.85, 24 * GIB, taken)
    assert "weights 15.0, graphs 0.5, other processes 6.0" in str(raised.value)
    assert raised.value.param == "gpu_memory_utilization"
