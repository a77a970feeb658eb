"""Chats that were stored: which there are, and each shown again from its job and its result."""

from dataclasses import replace

from pydantic import JsonValue

from penstock.gateway.auth.access import Caller
from penstock.gateway.openai.forms import CHAT_KEY, chat_form
from penstock.gateway.openai.responses import AnswerContext, chat_answer
from penstock.schemas.api.openai import JsonObject
from penstock.schemas.delivery import JobStatus
from penstock.schemas.errors import JobNotFound, PenstockError
from penstock.schemas.event import Result
from penstock.schemas.job import Job, Message
from penstock.schemas.keys import CHORES
from penstock.schemas.redis.connection import Connection, texts_of
from penstock.schemas.redis.servers import Redis

PREFIX = "chatcmpl-"  # an id begins with it, before the job's
MOST_LISTED = 10_000  # newest chats of a tenant
LISTED_S = 86_400  # longer than the last one is kept
_REQUEST_FIELDS = (
    "temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "response_format",
    "tools", "tool_choice",
)  # fmt: skip


class StoredChats:
    """Knows the jobs of each tenant's stored chats, in the order in which they were submitted.

    A job may be gone before it is forgotten here: whoever finds it so calls `forget`.
    """

    def __init__(self, redis: Redis) -> None:
        self._connection = Connection(redis)

    async def add(self, job: Job, kept_s: int) -> None:
        """Note a job that was submitted. It may be repeated."""
        args = job.tenant, job.job_id, MOST_LISTED, kept_s + LISTED_S
        await self._connection.run("storage/note_chat", CHORES, *args)

    async def ids(self, tenant: str) -> list[str]:
        """Return the ids of a tenant's jobs, the oldest first."""
        return [
            text.decode()
            for text in texts_of(await self._connection.call("ZRANGE", _key(tenant), 0, -1))
        ]

    async def forget(self, tenant: str, *job_ids: str) -> None:
        if job_ids:
            await self._connection.call("ZREM", _key(tenant), *job_ids)


class ChatNotFound(JobNotFound):
    """Raised for what is no chat's id, as the word of another server's route is none."""

    code = "not_found"

    def __init__(self, completion_id: str) -> None:
        sentence = f"completion_id: {completion_id[:60]!r} is no chat completion's id"
        PenstockError.__init__(self, sentence, "completion_id")


def chat_job_id(completion_id: str) -> str:
    """Return the id of a chat's job. Raises ChatNotFound for what is no chat's id."""
    if not completion_id.startswith(f"{PREFIX}job_"):
        raise ChatNotFound(completion_id)
    return completion_id.removeprefix(PREFIX)


def stored_form(job: Job, created_ms: int) -> AnswerContext:
    """Return how a stored chat's answer looks. Raises JobNotFound for a job that is none."""
    request = job.repeated.get(CHAT_KEY)
    if job.chat is None or not isinstance(request, dict):
        raise JobNotFound(job.job_id)
    any_message: JsonObject = {"role": "user", "content": ""}
    form = chat_form(Caller(job.tenant), {**request, "messages": [any_message]}, job.job_id)
    return replace(form, job=job, created_s=created_ms // 1000)


def shown_chat(form: AnswerContext, status: JobStatus, result: Result) -> JsonObject:
    """Return a stored chat, with its metadata and what of its request OpenAI repeats."""
    request = form.job.repeated[CHAT_KEY]
    assert isinstance(request, dict)
    fields = {name: request.get(name) for name in _REQUEST_FIELDS}
    metadata = dict[str, JsonValue](status.metadata)
    more: JsonObject = {"metadata": metadata, "request_id": form.job.job_id, "input_user": None}
    return {**chat_answer(form, result), **fields, **more}


def stored_messages(job: Job) -> list[JsonObject]:
    """Return what a stored chat was asked with, each message with an id."""
    assert job.chat is not None
    return [
        {"id": f"{PREFIX}{job.job_id}-{at}", **_message(message)}
        for at, message in enumerate(job.chat.messages)
    ]


def _message(message: Message) -> JsonObject:
    content = message.get("content")
    parts = content if isinstance(content, list) else None
    texts = (str(part.get("text")) for part in parts or () if isinstance(part, dict))
    shape: JsonObject = {**message, "content": "\n".join(texts) if parts else content}
    return shape | {"content_parts": parts}


def _key(tenant: str) -> str:
    return f"{CHORES}stored:{tenant}"
