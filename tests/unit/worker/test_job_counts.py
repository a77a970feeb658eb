"""What a worker counts of the jobs that end in it."""

from dataclasses import replace

import pytest

from penstock.schemas.delivery import Started
from penstock.schemas.event import Delta
from penstock.schemas.job import Job
from penstock.schemas.metrics.tally import Tally, read_dump, read_example
from penstock.schemas.params.sampling import SamplingParams
from penstock.worker.engine.fake import EOS
from penstock.worker.engine.io.messages import Output
from penstock.worker.jobs.active_job import ActiveJob, Times
from penstock.worker.jobs.job_counts import JobCounts, ModelCounts
from penstock.worker.text.byte_tokenizer import ByteTokenizer
from penstock.worker.text.completion import Completion
from penstock.worker.text.model_tokenizer import ModelTokenizer

TEXT = ModelTokenizer(ByteTokenizer())
S = 1_000_000_000


def ended(log: list[Delta], n: int = 1, tenant: str = "default", **more: object) -> ActiveJob:
    """A job of 3 tokens in; waited 2 s, admission 0.5 s, prefill 1 s, then 4 tokens in 3 s."""
    params = SamplingParams(n=n, max_tokens=50, seed=1)
    given = {"model": "fake", "prompts": ["xyz"], "params": params, "tenant": tenant, **more}
    job = Job.model_validate({"job_id": "job_aaaaaa0_" + "b" * 26, **given})
    completions = [Completion(TEXT, params, frozenset([EOS])) for _ in range(n)]
    active = ActiveJob(Started(job, 1, log, None, 2000), [[1, 2, 3]], completions)
    for index in range(n):
        active.take(index, Output("", [97, 98, 99, 100], None, "length"))
    active.times = Times(10 * S, 10 * S + S // 2, 11 * S + S // 2, 0, 14 * S + S // 2)
    return active


def sums(counts: ModelCounts) -> dict[str, float]:
    """Of each histogram in which something was observed, without those that run until now."""
    told = counts.dump()["histograms"]
    assert isinstance(told, dict)
    dumps = {stat: dump for stat, dump in told.items() if isinstance(dump, list) and len(dump) > 1}
    kept = dumps.keys() - {"ttft_seconds", "e2e_seconds", "inter_token_seconds"}
    return {stat: float(str(dump[0])) for stat, dump in dumps.items() if stat in kept}


def test_the_phases_of_a_job_lead_from_its_submission_to_its_last_token() -> None:
    counts = ModelCounts()
    counts.ended(ended([], n=2))
    assert sums(counts) == {
        "queue_seconds": 2.5,
        "prefill_seconds": 1,
        "decode_seconds": 3,
        "inference_seconds": 4,
        "output_token_seconds": 1,
        "request_prompt_tokens": 3,
        "request_generation_tokens": 8,
        "max_generation_tokens": 4,
        "params_n": 2,
        "params_max_tokens": 50,
    }


def test_of_a_job_that_was_gone_on_with_the_times_are_this_attempts() -> None:
    log = [Delta(position=0, index=0, token_ids=[97] * 6, text="a" * 6)]
    counts, of_model = JobCounts(), ModelCounts()
    counts.began(ended(log))
    of_model.ended(ended(log))
    assert counts.dump()["resumed_tokens"] == 6
    told = sums(of_model)
    assert "queue_seconds" not in told
    assert (told["output_token_seconds"], told["request_generation_tokens"]) == (1, 10)


@pytest.mark.parametrize("delay", [{"delay_ms": 9}, {"not_before_ms": 9}])
def test_a_wait_that_was_asked_for_is_no_time_in_the_queue(delay: dict[str, int]) -> None:
    counts, active = ModelCounts(), ended([], background=True, **delay)
    counts.logged(active, active.ending().deltas)
    counts.ended(active)
    assert "queue_seconds" not in sums(counts) and sums(counts)["prefill_seconds"] == 1
    assert (seen(counts, "ttft_seconds"), seen(counts, "e2e_seconds")) == (0, 0)


def seen(counts: ModelCounts, stat: str) -> int:
    """How many observations a histogram has."""
    told = counts.dump()["histograms"]
    assert isinstance(told, dict)
    dump = told[stat]
    assert isinstance(dump, list)
    return sum(int(str(count)) for count in dump[1:])


def pieces(active: ActiveJob, first: int) -> list[Delta]:
    """The job's events of one token each, from a position on, choice by choice."""
    n = len(active.completions)
    return [
        Delta(position=at, index=at % n, token_ids=[97], text="a") for at in range(first, first + 6)
    ]


def test_tokens_and_gaps_count_as_they_are_logged_and_a_prompt_once() -> None:
    counts, active = ModelCounts(), ended([], n=2)
    for delta in pieces(active, 0):
        counts.logged(active, [delta])
    told = counts.dump()
    assert (told["generation_tokens"], told["prompt_tokens"], told["cached_tokens"]) == (6, 3, 0)
    assert (seen(counts, "ttft_seconds"), seen(counts, "inter_token_seconds")) == (1, 4)
    assert seen(counts, "e2e_seconds") == 0
    counts.ended(active)
    assert seen(counts, "e2e_seconds") == 1


def test_of_a_job_that_was_gone_on_with_only_this_attempts_events_count() -> None:
    log = [Delta(position=0, index=0, token_ids=[97] * 6, text="a" * 6)]
    counts, active = ModelCounts(), ended(log)
    for delta in pieces(active, 6):
        counts.logged(active, [delta])
    told = counts.dump()
    assert (told["generation_tokens"], told["prompt_tokens"]) == (6, 0)
    assert (seen(counts, "ttft_seconds"), seen(counts, "inter_token_seconds")) == (0, 5)


def test_a_text_counts_in_no_figure() -> None:
    counts, active = ModelCounts(), ended([])
    before = counts.dump()
    job = active.job.model_copy(update={"text": "tokenize"})
    active.attempt = replace(active.attempt, job=job)
    counts.logged(active, pieces(active, 0))
    counts.ended(active)
    assert counts.dump() == before


@pytest.mark.parametrize("flags, shown", [("01", ["1" * 32]), ("00", [])])
def test_the_latest_latency_names_its_trace_where_one_is_recorded(
    flags: str, shown: list[str]
) -> None:
    counts = ModelCounts()
    active = ended([], traceparent=f"00-{'1' * 32}-{'2' * 16}-{flags}")
    counts.logged(active, pieces(active, 0))
    counts.ended(active)
    told = counts.dump()["examples"]
    assert isinstance(told, dict)
    examples = {stat: read_example(dump) for stat, dump in told.items()}
    latencies = ["e2e_seconds", "inter_token_seconds", "ttft_seconds"] if shown else []
    assert sorted(examples) == latencies
    assert {each.trace_id for each in examples.values() if each} == set(shown)


@pytest.mark.parametrize(
    "dump", [None, [], [1, "1" * 32], ["1", "1" * 32, 2], [1, "x" * 32, 2], [1, 'a"}', 2]]
)
def test_what_is_no_example_is_left_out(dump: object) -> None:
    assert read_example(dump) is None  # type: ignore[arg-type]


def test_ten_thousand_tenants_are_told_by_few_names_and_none_is_lost() -> None:
    counts = JobCounts(max_tenants=5)
    active = ended([])
    for number in range(10_000):
        tenant = f"t{number}" if number else "long" * 99
        active.attempt = replace(
            active.attempt, job=active.job.model_copy(update={"tenant": tenant})
        )
        counts.ended(active)
    told = counts.dump()["tenant_tokens"]
    assert told == dict.fromkeys([f"t{number}" for number in range(1, 6)], 7) | {
        "other": 7 * (10_000 - 5)
    }


@pytest.mark.parametrize("values", [[], [0.5], [1, 2, 2.5, 3, 4], [9, 9]])
def test_a_dump_is_read_as_what_was_observed_up_to_each_bound(values: list[float]) -> None:
    bounds = (1, 2, 3)
    tally = Tally(bounds)
    for value in values:
        tally.observe(value)
    counted = [sum(value <= bound for value in values) for bound in bounds]
    assert read_dump(bounds, [*tally.dump()]) == (sum(values), [*counted, len(values)])


@pytest.mark.parametrize("dump", [None, {}, "1", [], [1, 2, 3, 4, 5, 6], [0, -1], [0, "a"], ["a"]])
def test_what_is_no_dump_is_left_out(dump: object) -> None:
    assert read_dump((1, 2, 3), dump) is None  # type: ignore[arg-type]
