"""The whole engine against transformers: float32, eager attention, every family."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import judges
from penstock.schemas.params.sampling import SamplingParams
from penstock.worker.engine.build import build_engine, device_of
from penstock.worker.engine.cache.block_pool import BlockPool
from penstock.worker.engine.engine import Engine
from penstock.worker.engine.io.config import EngineConfig
from penstock.worker.engine.io.messages import AddSequence, Logprob
from penstock.worker.engine.running.batch import PersistentBatch
from penstock.worker.engine.running.runner import ModelRunner
from penstock.worker.engine.scheduling.step_tokens import most_in_time
from penstock.worker.layers.batch import Batch
from penstock.worker.models.folder.errors import NoDevice
from short_engine import make_engine

TOLERANCE = 1e-4
NEAR_TIE = 1e-3  # below this gap of the two likeliest, either is right
NUM_TOP = 5


@pytest.fixture(scope="module", params=["llama_llama3", "mistral_window", "qwen2", "qwen3"])
def judge(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, judges.save(request.param, folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("llama")
    return folder, judges.save("llama", folder)


@pytest.mark.parametrize("asked, taken", [(200_000_000, True), (None, False)])
def test_a_cpu_gives_the_kv_cache_its_memory_at_once_where_a_size_was_asked_for(
    llama: tuple[Path, PreTrainedModel], asked: int | None, taken: bool
) -> None:
    engine = build_engine(EngineConfig(model=llama[0], kv_cache_memory_bytes=asked))
    assert isinstance(engine.runner, ModelRunner)
    caches = engine.runner.kv_caches
    assert sum(each.nbytes for each in caches) > 190_000_000
    assert (sum(map(_num_pages_taken, caches)) * PAGE > 190_000_000) == taken


PAGE = os.sysconf("SC_PAGE_SIZE")


def _num_pages_taken(tensor: torch.Tensor) -> int:
    """Of its pages, those that the system has given memory to."""
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(tensor.data_ptr() // PAGE * 8)
        entries = np.frombuffer(file.read(tensor.nbytes // PAGE * 8), np.uint64)
    return int((entries >> np.uint64(63)).sum())


def test_a_step_is_short_on_a_cpu_unless_many_sequences_run(
    llama: tuple[Path, PreTrainedModel],
) -> None:
    """Who waits for a step of 2048 tokens waits for seconds there."""
    for changes, tokens, most_s in (
        ({}, 512, 0.2),
        ({"max_num_seqs": 700}, 700, 0.2),
        ({"max_num_batched_tokens": 48}, 48, None),
        ({"max_num_batched_tokens": 2048}, 2048, None),
        ({"max_num_batched_tokens": 2048, "max_step_ms": 50}, 2048, 0.05),
        ({"max_step_ms": 50}, 512, 0.05),
        ({"max_step_ms": 0}, 512, None),
    ):
        asked = {"max_num_batched_tokens": None} | changes
        engine = make_engine(llama[0], **asked)
        assert engine.scheduler.max_num_batched_tokens == tokens
        assert engine.stats().max_num_batched_tokens == tokens
        assert engine.scheduler.step_time.most_s == most_s


def test_as_many_run_at_once_as_were_asked_for_however_long_a_step_takes(
    llama: tuple[Path, PreTrainedModel], caplog: pytest.LogCaptureFixture
) -> None:
    """A million in a fifth of a second are too many for any processor, and any model."""
    with caplog.at_level("INFO", "penstock.worker"):
        engine = make_engine(llama[0], max_num_batched_tokens=None, max_num_seqs=1_000_000)
    assert engine.limits.max_num_seqs == engine.scheduler.max_num_batched_tokens == 1_000_000
    assert "a step takes 200 ms at most where it reads prompts" in caplog.text


@pytest.mark.parametrize(
    "asked, num_gpus, device",
    [
        ("auto", 0, "cpu"),
        ("auto", 2, "cuda"),
        ("cpu", 2, "cpu"),
        ("cuda", 1, "cuda"),
        ("cuda:0", 1, "cuda:0"),
        ("cuda:1", 2, "cuda:1"),
    ],
)
def test_a_gpu_is_named_by_its_number(asked: str, num_gpus: int, device: str) -> None:
    assert device_of(EngineConfig(model=Path(), device=asked), num_gpus) == device


@pytest.mark.parametrize(
    "asked, num_gpus, told",
    [
        ("cuda:0", 0, "no GPU is there for cuda:0"),
        ("cuda:2", 2, "cuda:2: GPUs are numbered from 0, and 2 are there"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused(asked: str, num_gpus: int, told: str) -> None:
    with pytest.raises(NoDevice, match=told):
        device_of(EngineConfig(model=Path(), device=asked), num_gpus)


def test_no_more_run_at_once_than_a_step_has_tokens_for(
    llama: tuple[Path, PreTrainedModel],
) -> None:
    engine = make_engine(llama[0], max_num_batched_tokens=12)
    assert engine.limits.max_num_seqs == 12


def test_a_step_of_the_start_tells_what_tokens_and_pairs_take(
    llama: tuple[Path, PreTrainedModel],
) -> None:
    engine = make_engine(llama[0], max_num_batched_tokens=None)
    fixed_s, token_s, pair_s = engine.scheduler.step_time.terms
    assert 0 <= fixed_s < 0.2 and 0 <= token_s < 0.01 and 0 <= pair_s < 0.001
    assert token_s + pair_s > 0


def test_a_long_prompt_is_read_in_steps_of_the_time_that_was_asked_for(
    llama: tuple[Path, PreTrainedModel],
) -> None:
    """The time is so short that only slices of some tokens fit into it."""
    engine = make_engine(
        llama[0], max_num_batched_tokens=None, max_step_ms=1, num_gpu_blocks_override=60
    )
    counts: list[int] = []
    engine.note_plan = lambda plan: counts.extend(row[1] for row in plan)
    params = SamplingParams(temperature=0, max_tokens=1)
    engine.add(AddSequence("long", judges.prompt(400, seed=1), params))
    while engine.busy:
        for output in engine.step():
            assert output.error is None
    assert sum(counts) == 400 and len(counts) > 4


@pytest.mark.parametrize(
    "single_s, each_s, most, tokens",
    [
        (0.0001, 0.00001, 512, 512),  # small
        (0.009, 0.00058, 512, 320),  # 135M, AVX-512
        (0.06, 0.005, 512, 64),  # 1.1B, AVX-512
        (0.06, 0.005, 4096, 64),
        (0.095, 0.0008, 512, 128),  # 1.1B, AMX: most of a step goes into reading the weights
        (0.6, 0.005, 512, 128),  # 7B, AMX: as long as two of a token each
    ],
)
def test_a_step_takes_a_fifth_of_a_second_or_as_long_as_two_of_a_token_each(
    single_s: float, each_s: float, most: int, tokens: int
) -> None:
    assert most_in_time(most, lambda count: max(single_s, each_s * count)) == tokens


def test_one_try_that_a_neighbour_disturbs_shortens_no_step() -> None:
    tries = iter([0.001, 0.001, 0.04, 0.02])
    assert most_in_time(512, lambda count: next(tries)) == 512


def mixed_trace() -> list[AddSequence]:
    """64 sequences of mixed lengths, around block borders; every third shares a stem."""
    stems = [judges.prompt(48, seed) for seed in (1, 2)]
    trace = []
    for number in range(64):
        prompt = judges.prompt(judges.PROMPT_LENGTHS[number % 7], seed=number)
        if number % 3 == 0:
            prompt = stems[number % 2] + prompt[:20]
        params = SamplingParams(
            temperature=0, max_tokens=5 + 3 * (number % 16), logprobs=NUM_TOP, ignore_eos=True
        )
        trace.append(AddSequence(str(number), prompt, params))
    return trace


def run(engine: Engine, trace: list[AddSequence]) -> dict[str, list[Logprob]]:
    for addition in trace:
        engine.add(addition)
    drawn: dict[str, list[Logprob]] = {addition.seq_id: [] for addition in trace}
    while engine.busy:
        for output in engine.step():
            assert output.error is None and output.logprobs is not None
            drawn[output.seq_id] += output.logprobs
    return drawn


@torch.inference_mode()
def assert_as_transformers_says(
    model: PreTrainedModel, prompt: list[int], drawn: list[Logprob]
) -> None:
    """One pass over prompt and completion tells what each token and its alternatives should be."""
    token_ids = prompt + [logprob.token_id for logprob in drawn]
    logits = model(torch.tensor([token_ids])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)
    for step, logprob in enumerate(drawn):
        best = expected[step].topk(NUM_TOP + 1)
        gap = float(best.values[0] - expected[step, logprob.token_id])
        assert gap < NEAR_TIE, f"token {step} is {logprob.token_id}, not {int(best.indices[0])}"
        assert logprob.logprob == pytest.approx(
            float(expected[step, logprob.token_id]), abs=TOLERANCE
        )
        assert logprob.top_logprobs == pytest.approx(best.values[:NUM_TOP].tolist(), abs=TOLERANCE)
        assert len(logprob.top_ids) == NUM_TOP


def assert_equal(
    model: PreTrainedModel, trace: list[AddSequence], drawn: dict[str, list[Logprob]]
) -> None:
    for addition in trace:
        assert len(drawn[addition.seq_id]) == addition.params.max_tokens
        assert_as_transformers_says(model, addition.prompt, drawn[addition.seq_id])


def test_greedy_tokens_and_logprobs_equal_transformers(judge: tuple[Path, PreTrainedModel]) -> None:
    folder, model = judge
    engine, trace = make_engine(folder), mixed_trace()
    assert_equal(model, trace, run(engine, trace))
    stats = engine.stats()
    assert stats.num_preemptions > 0 and stats.cached_tokens > 0  # else it proved less than it says


def test_64_at_once_with_room_for_all_equal_transformers(
    llama: tuple[Path, PreTrainedModel],
) -> None:
    folder, model = llama
    engine = make_engine(
        folder, num_gpu_blocks_override=600, max_num_seqs=64, max_num_batched_tokens=8192
    )
    trace = mixed_trace()
    assert_equal(model, trace, run(engine, trace))
    assert engine.stats().num_preemptions == 0


@pytest.mark.parametrize("block_size", [1, 8, 32])
def test_any_block_size_gives_the_same(
    llama: tuple[Path, PreTrainedModel], block_size: int
) -> None:
    folder, model = llama
    engine = make_engine(folder, block_size=block_size, num_gpu_blocks_override=480 // block_size)
    trace = mixed_trace()[:12]
    assert_equal(model, trace, run(engine, trace))


def _change(build: Callable[[Batch], Batch]) -> Callable[[pytest.MonkeyPatch], None]:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        original = PersistentBatch.build
        patch.setattr(PersistentBatch, "build", lambda self, plan: build(original(self, plan)))

    return mutate


def _swap_two_entries(batch: Batch) -> Batch:
    slots = batch.slot_mapping.clone()
    if len(slots) > 3 and batch.positions[0] == 0:
        slots[[2, 3]] = slots[[3, 2]]
    return replace(batch, slot_mapping=slots)


def _shift_positions(batch: Batch) -> Batch:
    return replace(batch, positions=batch.positions + (batch.positions >= 16))


def _lose_a_block(batch: Batch) -> Batch:
    tables = batch.block_tables.clone()
    tables[:, 0] = tables[-1, -1]
    return replace(batch, block_tables=tables)


def _write_to_the_next_slot(batch: Batch) -> Batch:
    slots = batch.slot_mapping.clone()
    slots[-1] ^= 1
    return replace(batch, slot_mapping=slots)


def _keep_stale_prefixes(patch: pytest.MonkeyPatch) -> None:
    def forget(pool: BlockPool, block: int) -> None:
        pool._digest[block] = None

    patch.setattr(BlockPool, "_forget", forget)


MUTANTS = {
    "two KV entries swapped": _change(_swap_two_entries),
    "positions shifted": _change(_shift_positions),
    "a block lost": _change(_lose_a_block),
    "a stale prefix block": _keep_stale_prefixes,
    "a wrong slot": _change(_write_to_the_next_slot),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_judge_sees(
    llama: tuple[Path, PreTrainedModel], mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = llama
    MUTANTS[mutant](monkeypatch)
    trace = mixed_trace()[:24]
    again = [replace(addition, seq_id=f"{addition.seq_id} again") for addition in trace[::3]]
    drawn = run(make_engine(folder), trace + again)
    with pytest.raises(AssertionError):
        assert_equal(model, trace + again, drawn)
