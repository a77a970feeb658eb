"""Requests for vectors as jobs: embeddings, classification, scores and reranking."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import JsonValue

from penstock.gateway.auth.access import Caller
from penstock.gateway.openai.responses import metrics
from penstock.gateway.openai.to_job import made_job, prompts_of
from penstock.gateway.openai.unsupported import refuse_unless
from penstock.gateway.openai.validation import validate
from penstock.schemas.api.openai import JsonObject
from penstock.schemas.api.pooling_requests import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingAsked,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from penstock.schemas.event import Choice, Result
from penstock.schemas.job import Job
from penstock.schemas.params.pooling import PoolingTask

# Parameters that others know, each with the values that ask for nothing.
NEUTRAL: Mapping[str, tuple[JsonValue, ...]] = {
    "messages": (),
    "add_special_tokens": (True,),
    "stream": (False,),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "truncation_side": ("right",),
    "truncate": (False,),
    "mm_processor_kwargs": ({},),
    "chat_template": ("",),
    "late_chunking": (False,),
    "instruction": ("",),
    "input_type": (),
    "embedding_types": (["float"],),
    "output_dimension": (),
    "max_tokens_per_doc": (),
    "rank_fields": ([],),
}
OF_EMBEDDINGS: Mapping[str, tuple[JsonValue, ...]] = {
    "dimensions": (),
    "encoding_format": ("float",),
    "prompt_name": (),
}
INSTEAD = {
    "messages": "input",
    "truncate": "truncate_prompt_tokens=-1",
    "instruction": "prompt_name, or write it into the input",
    "input_type": "prompt_name",
    "embedding_types": "encoding_format",
    "output_dimension": "dimensions",
    "max_tokens_per_doc": "truncate_prompt_tokens",
}


@dataclass(frozen=True, slots=True)
class PoolingContext:
    """A job that was asked for, and how its vectors shall look.

    documents  are shown with their ranks; none are where it is None
    top_n      ranks that are shown, at most
    """

    job: Job
    encoding_format: Literal["float", "base64"] = "float"
    documents: Sequence[str] | None = None
    top_n: int | None = None
    shows_metrics: bool = False
    created_s: int = field(default_factory=lambda: int(time.time()))


def embedding_form(caller: Caller, body: JsonObject, job_id: str = "") -> PoolingContext:
    """Read a request for embeddings. Raises InvalidJob."""
    refuse_unless({**NEUTRAL, "task": ("embed",)}, body, INSTEAD)
    request = validate(EmbeddingRequest, body)
    return _read(caller, body, job_id, request, "embed")


def pooling_form(caller: Caller, body: JsonObject, job_id: str = "") -> PoolingContext:
    """Read a request for whatever vectors the model makes. Raises InvalidJob."""
    refuse_unless(NEUTRAL, body, INSTEAD)
    request = validate(PoolingRequest, body)
    return _read(caller, body, job_id, request, request.task)


def classify_form(caller: Caller, body: JsonObject, job_id: str = "") -> PoolingContext:
    """Read a request for classes. Raises InvalidJob."""
    refuse_unless({**NEUTRAL, **OF_EMBEDDINGS, "task": ("classify",)}, body, INSTEAD)
    return _read(caller, body, job_id, validate(ClassifyRequest, body), "classify")


def score_form(caller: Caller, body: JsonObject, job_id: str = "") -> PoolingContext:
    """Read a request for scores of pairs. Raises InvalidJob."""
    refuse_unless({**NEUTRAL, **OF_EMBEDDINGS, "task": ("score",)}, body, INSTEAD)
    request = validate(ScoreRequest, body)
    queries, documents = (
        [texts] if isinstance(texts, str) else texts
        for texts in (request.queries, request.documents)
    )
    job = _job(caller, body, job_id, request, "score", documents, queries)
    return PoolingContext(job, shows_metrics=request.include_metrics)


def rerank_form(caller: Caller, body: JsonObject, job_id: str = "") -> PoolingContext:
    """Read a request for ranks. Raises InvalidJob."""
    refuse_unless({**NEUTRAL, **OF_EMBEDDINGS, "task": ("score",)}, body, INSTEAD)
    request = validate(RerankRequest, body)
    job = _job(caller, body, job_id, request, "score", request.texts, [request.query])
    documents = None if request.return_documents is False else request.texts
    return PoolingContext(
        job, documents=documents, top_n=request.top_n, shows_metrics=request.include_metrics
    )


def vectors_form(caller: Caller, body: JsonObject, job_id: str = "") -> PoolingContext:
    """Read a request of any of these kinds, which its fields tell. Raises InvalidJob."""
    if "query" in body:
        return rerank_form(caller, body, job_id)
    return (pooling_form if "input" in body else score_form)(caller, body, job_id)


def embeddings_answer(form: PoolingContext, result: Result) -> JsonObject:
    return _list(form, result, "embd", lambda choice: _vector(form, choice, "embedding"))


def pooling_answer(form: PoolingContext, result: Result) -> JsonObject:
    return _list(form, result, "pool", lambda choice: _vector(form, choice, "data", "pooling"))


def classify_answer(form: PoolingContext, result: Result) -> JsonObject:
    def shape(choice: Choice) -> JsonObject:
        numbers = list[JsonValue](choice.numbers)
        label: JsonObject = {"index": choice.index, "label": choice.text, "probs": numbers}
        return label | {"num_classes": len(numbers)}

    return _list(form, result, "classify", shape)


def score_answer(form: PoolingContext, result: Result) -> JsonObject:
    def shape(choice: Choice) -> JsonObject:
        return {"index": choice.index, "object": "score", "score": choice.numbers[0]}

    return _list(form, result, "score", shape)


def rerank_answer(form: PoolingContext, result: Result) -> JsonObject:
    scores = [choice.numbers[0] for choice in result.choices]
    ranks = sorted(range(len(scores)), key=lambda at: -scores[at])[: form.top_n]
    results: list[JsonValue] = []
    for at in ranks:
        rank: JsonObject = {"index": at, "relevance_score": scores[at]}
        if form.documents is not None:
            rank["document"] = {"text": form.documents[at]}
        results.append(rank)
    return {
        "id": f"rerank-{form.job.job_id}",
        "model": form.job.model,
        "results": results,
        "usage": _usage(result),
        "meta": {"api_version": {"version": "2"}, "tokens": {"input_tokens": _tokens(result)}},
        **metrics(form, result.timing, result.usage),
    }


def _read(
    caller: Caller,
    body: JsonObject,
    job_id: str,
    request: ClassifyRequest,
    task: PoolingTask | None,
) -> PoolingContext:
    job = _job(caller, body, job_id, request, task, prompts_of(request.input))
    encoding = request.encoding_format if isinstance(request, EmbeddingRequest) else "float"
    return PoolingContext(job, encoding, shows_metrics=request.include_metrics)


def _job(
    caller: Caller,
    body: JsonObject,
    job_id: str,
    request: PoolingAsked,
    task: PoolingTask | None,
    prompts: Sequence[str | list[int]],
    queries: Sequence[str] = (),
) -> Job:
    pooling: dict[str, object] = {"task": task, "queries": queries}
    for name in ("use_activation", "truncate_prompt_tokens", "dimensions", "prompt_name"):
        if (value := getattr(request, name, None)) is not None:
            pooling[name] = value
    caller_names = {"prompts": "documents" if queries else "input", "pooling": ""}
    question: dict[str, object] = {"prompts": prompts, "pooling": pooling}
    return made_job(job_id, caller, request, body, question, caller_names)


def _list(
    form: PoolingContext, result: Result, kind: str, shape: Callable[[Choice], JsonObject]
) -> JsonObject:
    return {
        "id": f"{kind}-{form.job.job_id}",
        "object": "list",
        "created": form.created_s,
        "model": form.job.model,
        "data": [shape(choice) for choice in result.choices],
        "usage": _usage(result),
        **metrics(form, result.timing, result.usage),
    }


def _vector(form: PoolingContext, choice: Choice, name: str, kind: str = "embedding") -> JsonObject:
    is_text = form.encoding_format == "base64"
    vector: JsonValue = choice.vector if is_text else list[JsonValue](choice.numbers)
    return {"index": choice.index, "object": kind, name: vector}


def _usage(result: Result) -> JsonObject:
    return {"prompt_tokens": _tokens(result), "total_tokens": _tokens(result)}


def _tokens(result: Result) -> int:
    return result.usage.prompt_tokens
