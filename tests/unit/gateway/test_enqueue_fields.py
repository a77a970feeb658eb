"""`Client.enqueue` spells the fields of a job for the sake of types; none is left out."""

import inspect

from penstock.gateway.client import Client
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
