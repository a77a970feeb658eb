"""The shapes of answers, for /openapi.json. Answers have more fields where more was asked for."""

from typing import Literal

from pydantic import BaseModel, Field, JsonValue

from penstock.schemas.delivery import JobStatus

Fields = dict[str, JsonValue]


class Answered(BaseModel):
    """An answer. It is described here and made elsewhere."""


class TokenUsage(Answered):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int]


class ChatAnswerMessage(Answered):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning: str | None = None
    tool_calls: list[Fields] = []


class ChatAnswerChoice(Answered):
    index: int
    message: ChatAnswerMessage
    logprobs: Fields | None
    finish_reason: str | None
    stop_reason: int | str | None


class ChatCompletion(Answered):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str | None
    service_tier: str
    choices: list[ChatAnswerChoice]
    usage: TokenUsage


class ChatChunkChoice(Answered):
    index: int
    delta: Fields
    logprobs: Fields | None = None
    finish_reason: str | None = None


class ChatCompletionChunk(Answered):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: TokenUsage | None = None


class StoredChat(ChatCompletion):
    metadata: dict[str, str]


class Paged(Answered):
    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class StoredChatList(Paged):
    data: list[StoredChat]


class TextAnswerChoice(Answered):
    index: int
    text: str
    logprobs: Fields | None
    finish_reason: str | None
    stop_reason: int | str | None = None


class TextCompletion(Answered):
    """An answer to a completion; a chunk of its stream has the same shape."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[TextAnswerChoice]
    usage: TokenUsage | None = None


class GeneratedChoice(Answered):
    index: int
    token_ids: list[int]
    logprobs: Fields | None
    finish_reason: str | None
    text: str = ""


class Generated(Answered):
    """Tokens for tokens; a chunk of its stream has the same shape."""

    request_id: str
    output_mode: Literal["text", "tokens"]
    created: int
    model: str
    choices: list[GeneratedChoice]
    usage: TokenUsage | None = None


class Response(Answered):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[Fields]
    usage: Fields | None
    error: Fields | None
    incomplete_details: Fields | None
    metadata: dict[str, str]


class ResponseEvent(Answered):
    type: str
    sequence_number: int


class ConversationShown(Answered):
    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class ResponseTokens(Answered):
    object: Literal["response.input_tokens"]
    input_tokens: int


class AnsweredMessage(Answered):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Fields]
    stop_reason: str | None
    stop_sequence: str | None
    usage: Fields


class MessageEvent(Answered):
    type: str


class MessageTokens(Answered):
    input_tokens: int


class ModelShown(Answered):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    context: int | None
    task: str
    numerics: str | None
    num_workers: int


class ModelList(Answered):
    object: Literal["list"]
    data: list[ModelShown]


class Vectors(Answered):
    """A list of what was made of each input: its vector, its classes, its score."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Fields]
    usage: dict[str, int]


class Ranks(Answered):
    id: str
    model: str
    results: list[Fields] = Field(description="the likeliest first")
    usage: dict[str, int]


class TextTokens(Answered):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TokensText(Answered):
    prompt: str


class RenderedPrompt(Answered):
    request_id: str
    model: str
    token_ids: list[int]
    prompt: str | None
    sampling_params: Fields
    stream: bool


class JobShown(JobStatus):
    """Tells how a job stands, and its result once it has ended."""

    job_id: str = Field(exclude=True)  # shown as `id`
    id: str
    object: Literal["job"]
    usage: dict[str, int]
    result: Fields | None = Field(None, description="its choices, its end, and what it took")


class JobList(Answered):
    object: Literal["list"]
    data: list[JobShown]


class JobEvent(Answered):
    """An event of a job's log. The id of each is the cursor after it."""

    type: str
    position: int


class JobShare(Answered):
    object: Literal["job.share"]
    token: str
    expires_at: int
    url: str


class Deleted(Answered):
    id: str
    object: str
    deleted: Literal[True]


class FileShown(Answered):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: str


class UploadShown(Answered):
    id: str
    object: Literal["upload"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["pending", "completed", "cancelled", "expired"]
    file: FileShown | None


class UploadPart(Answered):
    id: str
    object: Literal["upload.part"]
    upload_id: str
    created_at: int


class FileList(Paged):
    data: list[FileShown]


class ItemList(Paged):
    data: list[Fields]


class BatchShown(Answered):
    id: str
    object: Literal["batch"]
    endpoint: str
    input_file_id: str
    status: str
    request_counts: dict[str, int]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int


class BatchList(Paged):
    data: list[BatchShown]


class Health(Answered):
    status: str


class Version(Answered):
    version: str


class Storage(Answered):
    """Tells what a tenant has stored, in Redis and on disk."""

    tenant: str
    used_bytes: int
    num_things: int


class OwnStorage(Storage):
    max_bytes: int


class Overviewed(Answered):
    """Tells what runs, and how the caller's accounts and jobs stand."""

    version: str
    now_ms: int
    models: list[Fields]
    workers: list[Fields]
    latencies: Fields
    accounts: list[Fields]
    storage: list[Storage]
    jobs: list[Fields]


class TenantUsage(Answered):
    object: Literal["usage"]
    tenant: str
    storage: OwnStorage
    accounts: list[Fields]


class ErrorReason(Answered):
    """Tells why a request was refused, or failed."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answered):
    error: ErrorReason


class MessageError(Answered):
    type: str
    message: str
    code: str | None


class MessageErrorAnswer(Answered):
    """The same in Anthropic's form."""

    type: Literal["error"]
    error: MessageError


Shape = type[object]
