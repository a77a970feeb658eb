"""`Client.enqueue` spells the fields of a job for the sake of types; none is left out."""

import asyncio
import inspect

import pytest
from pydantic import JsonValue

from penstock.gateway.client import Client
from penstock.schemas.errors import InvalidJob
from penstock.schemas.job import Job

OTHERWISE = {
    "job_id": "idempotency_key",
    "prompts": "prompt",
    "chat": "messages",
}


def test_every_field_of_a_job_can_be_given_with_its_own_default() -> None:
    taken = inspect.signature(Client.enqueue).parameters
    for name, field in Job.model_fields.items():
        if name == "repeated":  # it is an API's that keeps jobs, above this one
            continue
        keyword = OTHERWISE.get(name, name)
        assert keyword in taken
        default = taken[keyword].default
        assert default is None or default == field.default, name


@pytest.mark.parametrize(
    "given, told",
    [
        ({"max_token": 5}, "max_token: no job has it: did you mean max_tokens?"),
        ({"mesages": []}, "mesages: no job has it: did you mean messages?"),
        ({"xyzzy": 5}, "xyzzy: no job has it; leave it out"),
    ],
)
def test_a_typo_gets_a_guess(given: dict[str, JsonValue], told: str) -> None:
    async def asked() -> None:
        async with Client.from_url("redis://127.0.0.1:1") as client:
            await client.enqueue("Hi", model="any", **given)

    with pytest.raises(InvalidJob) as refused:
        asyncio.run(asked())
    assert refused.value.message == told
    assert refused.value.param == next(iter(given))
