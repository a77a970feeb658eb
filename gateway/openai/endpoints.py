"""The endpoints that answer a job at once, by their paths: what they read and what they show."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import JsonValue

from penstock.gateway.auth.access import Caller
from penstock.gateway.openai import pooling
from penstock.gateway.openai.forms import chat_form, text_form
from penstock.gateway.openai.pooling import PoolingContext
from penstock.gateway.openai.responses import AnswerContext, chat_answer, text_answer
from penstock.gateway.openai.texts import TextContext
from penstock.schemas.api.openai import JsonObject
from penstock.schemas.event import Result

Form = TypeVar("Form", AnswerContext, PoolingContext, TextContext)


@dataclass(frozen=True, slots=True)
class RequestKind(Generic[Form]):
    """A kind of request that is answered at once.

    form   reads a caller's body, and takes the job's id; raises InvalidJob
    shape  makes the answer of what the form returned, and the job's result
    """

    form: Callable[[Caller, JsonObject, str], Form]
    shape: Callable[[Form, Result], JsonValue]


_RERANK = RequestKind(pooling.rerank_form, pooling.rerank_answer)
_SCORE = RequestKind(pooling.score_form, pooling.score_answer)
OF_VECTORS: Mapping[str, RequestKind[PoolingContext]] = {
    "/v1/embeddings": RequestKind(pooling.embedding_form, pooling.embeddings_answer),
    "/pooling": RequestKind(pooling.pooling_form, pooling.pooling_answer),
    "/classify": RequestKind(pooling.classify_form, pooling.classify_answer),
    "/score": _SCORE,
    "/v1/score": _SCORE,
    "/rerank": _RERANK,
    "/v1/rerank": _RERANK,
    "/v2/rerank": _RERANK,
}
ENDPOINTS: Mapping[str, RequestKind[Any]] = {
    "/v1/chat/completions": RequestKind(chat_form, chat_answer),
    "/v1/completions": RequestKind(text_form, text_answer),
    **OF_VECTORS,
}
