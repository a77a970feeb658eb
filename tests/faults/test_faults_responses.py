"""A response in the background goes on where every process is killed, Redis among them."""

from itertools import islice

import httpx
import pytest
from openai import OpenAI
from openai.types.responses import ResponseStreamEvent

from faults.processes import System, until

WORKER = ("--fake-step-ms", "10", "--max-num-seqs", "16")


def told(events: list[ResponseStreamEvent]) -> list[dict[str, object]]:
    return [event.to_dict() for event in events]


@pytest.mark.slow
def test_it_survives_the_death_of_everything_and_is_followed_from_where_its_reader_was() -> None:
    with System() as system:
        system.worker(*WORKER)
        system.gateway("--ping-s", "1")
        system.ready()
        with system.telling():
            check(system)


def check(system: System) -> None:
    def client() -> OpenAI:
        return OpenAI(base_url=f"{system.gateway_urls()[-1]}/v1", api_key="-", max_retries=0)

    asked = {"model": "fake", "input": "of a river", "max_output_tokens": 300}
    more = {"ignore_eos": True, "seed": 5}
    made = client().responses.create(**asked, background=True, extra_body=more)  # type: ignore[call-overload]
    with client().responses.retrieve(made.id, stream=True) as stream:
        begun = list(islice(stream, 60))
    assert begun[-1].type == "response.output_text.delta"

    old = [*system.workers, *system.gateways]
    for process in old:
        process.kill()
    system.restart_server()
    system.worker(*WORKER)
    system.gateway("--ping-s", "1").ready()
    number = begun[-1].sequence_number
    rest = list(client().responses.retrieve(made.id, stream=True, starting_after=number))
    assert rest[0].sequence_number == number + 1
    assert rest[-1].type == "response.incomplete"  # max_output_tokens

    whole = list(client().responses.retrieve(made.id, stream=True))
    assert told([*begun, *rest]) == told(whole)
    again = client().responses.create(**asked, extra_body=more)  # type: ignore[call-overload]
    assert again.output_text == rest[-1].response.output_text
    attempts = httpx.get(f"{system.gateway_urls()[-1]}/v1/jobs/{made.id[5:]}").json()["timeline"]
    assert sum(each["what"] == "started" for each in attempts) == 2
    until(lambda: client().responses.retrieve(made.id).status == "incomplete", "its end")
