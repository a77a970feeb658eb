"""What a worker counts of the jobs that end in it."""

from dataclasses import replace

import pytest

from penstock.schemas.delivery import Started
from penstock.schemas.event import Delta
from penstock.schemas.job import Job
from penstock.schemas.sampling import SamplingParams
from penstock.schemas.tally import Tally, read_dump
from penstock.worker.engine.fake import EOS
from penstock.worker.engine.messages import Output
from penstock.worker.jobs.active_job import ActiveJob, Times
from penstock.worker.jobs.job_counts import JobCounts
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


def sums(counts: JobCounts) -> dict[str, float]:
    """Of each histogram in which something was observed."""
    return {stat: dump[0] for stat, dump in counts.histograms().items() if len(dump) > 1}


def test_the_phases_of_a_job_lead_from_its_submission_to_its_last_token() -> None:
    counts = JobCounts()
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
    counts = JobCounts()
    counts.began(ended(log))
    counts.ended(ended(log))
    assert counts.dump()["resumed_tokens"] == 6
    told = sums(counts)
    assert "queue_seconds" not in told
    assert (told["output_token_seconds"], told["request_generation_tokens"]) == (1, 10)


@pytest.mark.parametrize("delay", [{"delay_ms": 9}, {"not_before_ms": 9}])
def test_a_wait_that_was_asked_for_is_no_time_in_the_queue(delay: dict[str, int]) -> None:
    counts = JobCounts()
    counts.ended(ended([], background=True, **delay))
    assert "queue_seconds" not in sums(counts) and sums(counts)["prefill_seconds"] == 1


def test_ten_thousand_tenants_are_told_by_few_names_and_none_is_lost() -> None:
    counts = JobCounts(max_tenants=5)
    active = ended([])
    for number in range(10_000):
        tenant = f"t{number}" if number else "long" * 99
        active.started = replace(
            active.started, job=active.job.model_copy(update={"tenant": tenant})
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
