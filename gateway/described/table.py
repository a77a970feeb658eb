"""The body and the answer of each route, for /openapi.json."""

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel, Field

from penstock.gateway.auth.key_desk import KeyChange, KeyRequest
from penstock.gateway.auth.share_tokens import ShareRequest
from penstock.gateway.batches.batches import BatchAsked
from penstock.gateway.described import answers as a
from penstock.gateway.described import operators as o
from penstock.gateway.files.uploads import CompleteRequest, UploadRequest
from penstock.schemas.api.anthropic import CountTokensRequest, MessagesRequest
from penstock.schemas.api.openai import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    MetadataRequest,
)
from penstock.schemas.api.pooling_requests import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from penstock.schemas.api.responses import ConversationRequest, ItemsRequest, ResponsesRequest
from penstock.schemas.api.text_requests import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeRequest,
)
from penstock.schemas.delivery import DeadLetter
from penstock.schemas.params.sampling import SamplingParams


class UploadForm(BaseModel):
    file: bytes = Field(json_schema_extra={"format": "binary"})
    purpose: str


class PartForm(BaseModel):
    data: bytes = Field(json_schema_extra={"format": "binary"})


@dataclass(frozen=True, slots=True)
class Described:
    """The body that a route takes, and its answer.

    answer       its shape; a text is the media type of one that is no JSON
    bodies       shapes that the body has all of; none: no body
    any_of       more shapes, of which the body has one
    events       the shape of each event's `data`, where the answer may be a stream
    status       the answer's
    is_form      whether the body is multipart/form-data
    may_be_empty whether the body may be left out
    knows_model  whether the model may be left out where only one is served
    """

    answer: a.Shape | str
    bodies: tuple[type[BaseModel], ...] = ()
    any_of: tuple[type[BaseModel], ...] = ()
    events: a.Shape | None = None
    status: int = 200
    is_form: bool = False
    may_be_empty: bool = False
    knows_model: bool = False


_EVENTS = "text/event-stream"
_RERANK = Described(a.Ranks, (RerankRequest,))
_SCORE = Described(a.Vectors, (ScoreRequest,))
_HEALTH = Described(a.Health)
_OF_JOBS = (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    PoolingRequest,
    ScoreRequest,
    RerankRequest,
)
ROUTES: Mapping[str, Described] = {
    "POST /v1/chat/completions": Described(
        a.ChatCompletion, (ChatRequest, SamplingParams), events=a.ChatCompletionChunk
    ),
    "GET /v1/chat/completions": Described(a.StoredChatList),
    "GET /v1/chat/completions/{completion_id}": Described(a.StoredChat),
    "POST /v1/chat/completions/{completion_id}": Described(a.StoredChat, (MetadataRequest,)),
    "DELETE /v1/chat/completions/{completion_id}": Described(a.Deleted),
    "GET /v1/chat/completions/{completion_id}/messages": Described(a.ItemList),
    "POST /v1/completions": Described(
        a.TextCompletion, (CompletionRequest, SamplingParams), events=a.TextCompletion
    ),
    "POST /inference/v1/generate": Described(
        a.Generated, (GenerateRequest,), events=a.Generated, knows_model=True
    ),
    "POST /abort_requests": Described(a.Fields, (AbortRequest,)),
    "POST /inference/v1/abort_requests": Described(a.Fields, (AbortRequest,)),
    "POST /v1/chat/completions/render": Described(
        a.RenderedPrompt, (ChatRequest, SamplingParams), knows_model=True
    ),
    "POST /v1/completions/render": Described(
        list[a.RenderedPrompt], (CompletionRequest, SamplingParams), knows_model=True
    ),
    "POST /tokenize": Described(
        a.TextTokens, any_of=(TokenizeRequest, TokenizeChatRequest), knows_model=True
    ),
    "POST /detokenize": Described(a.TokensText, (DetokenizeRequest,), knows_model=True),
    "GET /tokenizer_info": Described(a.Fields),
    "GET /load": Described(a.Fields),
    "GET /server_info": Described(a.Fields),
    "GET /v1/models": Described(a.ModelList),
    "GET /v1/models/{name}": Described(a.ModelShown),
    "POST /v1/responses": Described(
        a.Response, (ResponsesRequest, SamplingParams), events=a.ResponseEvent
    ),
    "POST /v1/responses/input_tokens": Described(a.ResponseTokens, (ResponsesRequest,)),
    "GET /v1/responses/{response_id}": Described(a.Response, events=a.ResponseEvent),
    "DELETE /v1/responses/{response_id}": Described(a.Deleted),
    "POST /v1/responses/{response_id}/cancel": Described(a.Response),
    "GET /v1/responses/{response_id}/input_items": Described(a.ItemList),
    "POST /v1/conversations": Described(
        a.ConversationShown, (ConversationRequest,), may_be_empty=True
    ),
    "GET /v1/conversations/{conversation_id}": Described(a.ConversationShown),
    "POST /v1/conversations/{conversation_id}": Described(a.ConversationShown, (MetadataRequest,)),
    "DELETE /v1/conversations/{conversation_id}": Described(a.Deleted),
    "POST /v1/conversations/{conversation_id}/items": Described(a.ItemList, (ItemsRequest,)),
    "GET /v1/conversations/{conversation_id}/items": Described(a.ItemList),
    "GET /v1/conversations/{conversation_id}/items/{item_id}": Described(a.Fields),
    "DELETE /v1/conversations/{conversation_id}/items/{item_id}": Described(a.ConversationShown),
    "POST /v1/messages": Described(a.AnsweredMessage, (MessagesRequest,), events=a.MessageEvent),
    "POST /v1/messages/count_tokens": Described(a.MessageTokens, (CountTokensRequest,)),
    "POST /v1/embeddings": Described(a.Vectors, (EmbeddingRequest,)),
    "POST /pooling": Described(a.Vectors, (PoolingRequest,)),
    "POST /classify": Described(a.Vectors, (ClassifyRequest,)),
    "POST /score": _SCORE,
    "POST /v1/score": _SCORE,
    "POST /rerank": _RERANK,
    "POST /v1/rerank": _RERANK,
    "POST /v2/rerank": _RERANK,
    "POST /v1/jobs": Described(a.JobShown, any_of=_OF_JOBS, status=202),
    "GET /v1/jobs": Described(a.JobList),
    "GET /v1/jobs/{job_id}": Described(a.JobShown),
    "DELETE /v1/jobs/{job_id}": Described(a.Deleted),
    "GET /v1/jobs/{job_id}/events": Described(_EVENTS, events=a.JobEvent),
    "POST /v1/jobs/{job_id}/cancel": Described(a.JobShown),
    "POST /v1/jobs/{job_id}/share": Described(a.JobShare, (ShareRequest,), may_be_empty=True),
    "POST /v1/files": Described(a.FileShown, (UploadForm,), is_form=True),
    "GET /v1/files": Described(a.FileList),
    "GET /v1/files/{file_id}": Described(a.FileShown),
    "DELETE /v1/files/{file_id}": Described(a.Deleted),
    "GET /v1/files/{file_id}/content": Described("application/octet-stream"),
    "POST /v1/uploads": Described(a.UploadShown, (UploadRequest,)),
    "POST /v1/uploads/{upload_id}/parts": Described(a.UploadPart, (PartForm,), is_form=True),
    "POST /v1/uploads/{upload_id}/complete": Described(a.UploadShown, (CompleteRequest,)),
    "POST /v1/uploads/{upload_id}/cancel": Described(a.UploadShown),
    "POST /v1/batches": Described(a.BatchShown, (BatchAsked,)),
    "GET /v1/batches": Described(a.BatchList),
    "GET /v1/batches/{batch_id}": Described(a.BatchShown),
    "POST /v1/batches/{batch_id}/cancel": Described(a.BatchShown),
    "GET /v1/admin/keys": Described(o.KeyList),
    "POST /v1/admin/keys": Described(o.KeyMade, (KeyRequest,), may_be_empty=True),
    "POST /v1/admin/keys/{key_id}": Described(o.KeyShown, (KeyChange,)),
    "DELETE /v1/admin/keys/{key_id}": Described(o.KeyShown),
    "GET /v1/admin/queues": Described(o.QueueList),
    "POST /v1/admin/queues/{model}/pause": Described(o.QueueShown),
    "POST /v1/admin/queues/{model}/resume": Described(o.QueueShown),
    "GET /v1/admin/workers": Described(o.WorkerList),
    "POST /v1/admin/workers/{worker}/drain": Described(o.WorkerTold),
    "POST /v1/admin/workers/{worker}/sleep": Described(o.WorkerTold),
    "POST /v1/admin/workers/{worker}/wake": Described(o.WorkerTold),
    "POST /reset_prefix_cache": Described(o.WorkersTold),
    "GET /v1/admin/dead_letters": Described(o.DeadLetterList),
    "GET /v1/admin/dead_letters/{job_id}": Described(DeadLetter),
    "POST /v1/admin/dead_letters/{job_id}/requeue": Described(o.Requeued),
    "DELETE /v1/admin/dead_letters/{job_id}": Described(a.Deleted),
    "GET /v1/usage": Described(a.TenantUsage),
    "GET /v1/status": Described(a.Overviewed),
    "GET /v1/status/events": Described(_EVENTS, events=a.Overviewed),
    "GET /metrics": Described("text/plain"),
    "GET /version": Described(a.Version),
    "GET /health": _HEALTH,
    "GET /health/live": _HEALTH,
    "GET /health/ready": _HEALTH,
    "GET /health/queue": _HEALTH,
    "GET /ping": _HEALTH,
}
