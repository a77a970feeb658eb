"""A job in work: what is logged of it, what waits, what is to be sent again."""

from penstock.schemas.cursor import Cursor
from penstock.schemas.delivery import Started
from penstock.schemas.event import Delta, Done
from penstock.schemas.job import Job
from penstock.schemas.params.sampling import SamplingParams
from penstock.schemas.result import fold
from penstock.worker.engine.fake import EOS
from penstock.worker.engine.io.messages import Output
from penstock.worker.jobs.active_job import ActiveJob
from penstock.worker.text.byte_tokenizer import ByteTokenizer
from penstock.worker.text.completion import Completion
from penstock.worker.text.model_tokenizer import ModelTokenizer

TEXT = ModelTokenizer(ByteTokenizer())


def active(log: list[Delta], n: int = 2) -> ActiveJob:
    params = SamplingParams(n=n, max_tokens=50, seed=1)
    job = Job(job_id="job_aaaaaa0_" + "b" * 26, model="fake", prompts=["x"], params=params)
    completions = [Completion(TEXT, params, frozenset([EOS])) for _ in range(n)]
    return ActiveJob(Started(job, 3, log, None, 0), [[120]], completions)


def made(text: str, finish: str | None = None) -> Output:
    return Output("", list(text.encode()), finish_reason=finish)


LOG = [
    Delta(position=0, index=0, token_ids=[97, 98], text="ab"),
    Delta(position=2, index=1, token_ids=[99], text="c", finish_reason="stop"),
]


def test_only_choices_that_are_open_run_again_with_the_ids_they_have():
    [addition] = active(LOG).additions(b"salt")
    assert (addition.choice, addition.completion, addition.prompt) == (0, [97, 98], [120])
    assert addition.seq_id.split(":")[1:] == ["3", "0"]


def test_a_commit_is_the_same_until_it_is_known_to_be_kept():
    """What comes meanwhile waits, and is one delta afterwards."""
    job = active(LOG)
    job.take(0, made("d"))
    first = job.commit()
    job.take(0, made("e"))
    job.take(0, made("f"))
    assert job.commit() == first
    assert [(each.position, each.text) for each in first.deltas] == [(3, "d")]
    assert job.num_behind == 3
    job.note_committed(first)
    assert job.num_behind == 2
    rest = job.commit()
    assert [(each.position, each.text) for each in rest.deltas] == [(4, "ef")]
    job.note_committed(rest)
    assert job.num_behind == 0


def test_the_end_carries_all_that_is_not_known_to_be_kept():
    job = active(LOG)
    job.take(0, made("d"))
    job.commit()  # and nobody answers
    job.take(0, made("e", "length"))
    assert job.is_over
    ending = job.ending()
    assert ending.num_committed == 2
    assert [each.text for each in ending.deltas] == ["ab", "c", "d", "e"]
    assert isinstance(ending.end, Done) and ending.end.position == 5
    assert ending.end.usage.completion_tokens == 5 and ending.end.usage.prompt_tokens == 1
    assert job.ending() == ending


def test_the_first_reason_to_fail_wins_and_nothing_is_added_after_it():
    job = active(LOG)
    job.take(0, made("d"))
    job.expire()
    job.cancel()
    job.take(0, made("e"))
    ending = job.ending()
    assert (ending.end.state, ending.end.position) == ("expired", 4)


def test_a_log_with_every_choice_finished_is_over():
    log = [*LOG, Delta(position=3, index=0, token_ids=[EOS], finish_reason="stop")]
    job = active(log)
    assert job.is_over and not job.additions(b"")
    assert isinstance(job.ending().end, Done)


def test_a_budget_cuts_the_deltas_that_are_not_logged_at_its_last_token():
    """Inside a delta, between two, and before all; what was held back of the text comes with it."""
    for position, texts in ((5, ["d", "e"]), (6, ["d", "ef"]), (3, []), (7, ["d", "ef\ufffd"])):
        job = active(LOG)
        job.take(0, made("d"))
        job.commit()  # which is told to stop
        job.take(0, made("ef"))
        job.take(0, Output("", [0xC3]))
        job.take(0, Output("", [0xA9]))
        job.ending()
        job.cut(position)
        ending = job.ending()
        new = ending.deltas[len(LOG) :]
        assert [each.text for each in new] == texts
        assert isinstance(ending.end, Done)
        assert (ending.end.position, ending.end.finish_reason) == (position, "budget")
        assert ending.end.usage.completion_tokens == position
        cursor = Cursor(job.job.job_id, 0)
        for event in [*ending.deltas, ending.end]:
            cursor.take(event)
        assert cursor.position == position
        job.take(0, made("more"))
        again = job.ending()
        assert (again.deltas, again.end.usage) == (ending.deltas, ending.end.usage)
        assert job.is_over


def test_the_result_of_a_job_out_of_budget_gives_its_log_again():
    job = active(LOG)
    job.take(0, made("de"))
    job.cut(4)
    ending = job.ending()
    kept = fold(job.job.job_id, "fake", 2, ending.deltas, ending.end)
    assert [choice.finish_reason for choice in kept.choices] == ["budget", "stop"]
    again = list(kept.events())
    assert [event.token_ids for event in again[:-1]] == [each.token_ids for each in ending.deltas]
    assert [event.finish_reason for event in again] == [None, "stop", None, "budget"]
    assert again[-1] == ending.end
