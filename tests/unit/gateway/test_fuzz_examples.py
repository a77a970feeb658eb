"""The bodies that the fuzzer changes are good ones: else it would try nothing behind a refusal."""

from faults.fuzz_examples import GOOD
from penstock.gateway.auth.access import Caller
from penstock.gateway.openai.forms import any_job, chat_form, text_form
from penstock.gateway.openai.to_job import flattened


def test_each_good_body_is_taken_and_every_field_of_it_means_something() -> None:
    for form in (
        chat_form(Caller(), GOOD["/v1/chat/completions"]),
        text_form(Caller(), GOOD["/v1/completions"]),
    ):
        assert not form.ignored_names
    assert any_job("", Caller(), flattened(GOOD["/v1/jobs"]))
