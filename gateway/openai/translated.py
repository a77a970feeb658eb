"""Requests of other protocols as chats: what of a chat's fields may stand beside their own."""

from collections.abc import Iterable, Mapping

from pydantic import JsonValue

from penstock.gateway.openai.ignored import unknown_inside
from penstock.gateway.openai.to_job import IN_PARAMS, OPTIONS
from penstock.gateway.openai.unsupported import refuse_unless
from penstock.schemas.api.openai import AskedOfModel, ChatRequest, JsonObject
from penstock.schemas.errors import InvalidJob
from penstock.schemas.job import Job

# Fields that say how a chat's answer is shown, which other protocols show in their own way.
_OF_CHOICES: Mapping[str, tuple[JsonValue, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
}
_PROTOCOL_FIELDS = {
    "messages",
    "functions",
    "function_call",
    "stream_options",
}  # in each protocol otherwise
_OF_CHATS = (ChatRequest.model_fields.keys() | IN_PARAMS | {*OPTIONS}) - _PROTOCOL_FIELDS


def as_chat(
    request: AskedOfModel,
    body: JsonObject,
    own: JsonObject,
    neutral: Mapping[str, tuple[JsonValue, ...]],
) -> JsonObject:
    """Return the body of a chat: `own`, and what else of a chat's fields was asked.

    Raises InvalidJob for what is said twice, or would have no effect.

    own      the protocol's fields under a chat's names
    neutral  what is known of the protocol and not here, each with what asks for nothing
    """
    refuse_unless({**_OF_CHOICES, **neutral}, body, {})
    fields = type(request).model_fields
    beside = {name: body[name] for name in body if name in _OF_CHATS and name not in fields}
    caller_kwargs, own_kwargs = beside.get("chat_template_kwargs"), own.get("chat_template_kwargs")
    if isinstance(caller_kwargs, dict) and isinstance(own_kwargs, dict):
        beside["chat_template_kwargs"] = own_kwargs | caller_kwargs
        own = {name: value for name, value in own.items() if name != "chat_template_kwargs"}
    if duplicates := sorted(own.keys() & beside.keys()):
        sentence = "another field says it here too; give one of them"
        raise InvalidJob(f"{duplicates[0]}: {sentence}", duplicates[0])
    return {
        **{name: getattr(request, name) for name in AskedOfModel.model_fields},
        **beside,
        **own,
    }


def ignored_beside(
    request: AskedOfModel, body: JsonObject, more_names: Iterable[str], has_open: str
) -> list[str]:
    """Return the fields of a body that mean nothing here.

    more_names  others than the request's own and a chat's
    has_open    the field whose insides are not looked at, since a conversation is long
    """
    names = {*type(request).model_fields, *_OF_CHATS, *_OF_CHOICES, *more_names}
    inside = {name: value for name, value in body.items() if name != has_open}
    unknown_names = [name for name in body if name not in names]
    return [*unknown_names, *unknown_inside(request, inside, "")]


def with_form_of(job: Job, field: str) -> Job:
    """Return the job with errors of its answer's form under the field that asked for it."""
    outputs = job.params.structured_outputs
    if outputs is None or outputs.asked_as != "response_format":
        return job
    copy = outputs.model_copy(update={"asked_as": field})
    params = job.params.model_copy(update={"structured_outputs": copy})
    return job.model_copy(update={"params": params})
