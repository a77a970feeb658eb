"""Responses for every failure: an error in the form of its path, a status, and advice to retry."""

import re
import time
from collections.abc import Mapping, Sequence

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import JsonValue
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match

from penstock.gateway.anthropic.answers import error_answer
from penstock.gateway.openai.large_json import to_json_in_pieces
from penstock.gateway.openai.responses import error
from penstock.gateway.responses.answers import as_called
from penstock.schemas.errors import InvalidJob, PenstockError, Unavailable
from penstock.schemas.event import ErrorBody

# Parts of OpenAI's interface that are not served here: they get 501 and a message that says so.
NOT_SERVED = re.compile(
    r"/v1/(responses/compact|audio|realtime|images|videos|moderations"
    r"|fine_tuning|assistants|threads|vector_stores|evals|containers|webhooks"
    r"|messages/batches)(/.*)?"
)


def error_response(
    body: ErrorBody,
    retry_after_ms: int | None = None,
    more: Mapping[str, JsonValue] | None = None,
    path: str = "",
) -> Response:
    """Return an error as a response, in Anthropic's form under its paths, else in OpenAI's.

    In OpenAI's `more` goes beside the message.

    The header `x-should-retry` overrules the guess that OpenAI's clients make from the status.
    """
    headers = {"x-should-retry": "true" if body.retryable else "false"}
    if retry_after_ms is None and body.reset_at is not None:  # a job's error has no other time
        retry_after_ms = max(1, round((body.reset_at - time.time()) * 1000))
    if retry_after_ms:
        headers["retry-after-ms"] = str(retry_after_ms)
        headers["retry-after"] = str(-(-retry_after_ms // 1000))
    if body.status == 401:
        headers["www-authenticate"] = "Bearer"
    if path.startswith("/v1/responses"):
        body = as_called(body)
    answer = error_answer(body) if path.startswith("/v1/messages") else error(body, more)
    content = to_json_in_pieces(answer)
    return Response(content, body.status, headers, "application/json")


def response_to(failure: PenstockError, path: str) -> Response:
    wait_ms = failure.retry_after_ms if isinstance(failure, Unavailable) else None
    return error_response(failure.body(), wait_ms, path=path)


def install(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Let `app`, which has these routes, answer every error in its path's form.

    It never answers with a stack trace or HTML.
    """

    @app.exception_handler(PenstockError)
    async def ours(request: Request, failure: PenstockError) -> Response:
        return response_to(failure, request.url.path)

    @app.exception_handler(RequestValidationError)
    async def bad_parameter(request: Request, failure: RequestValidationError) -> Response:
        first = failure.errors()[0]
        param = str(first["loc"][-1])
        refusal = InvalidJob(f"{param}: {first['msg']}", param)
        return response_to(refusal, request.url.path)

    @app.exception_handler(HTTPException)
    async def routing(request: Request, failure: HTTPException) -> Response:
        body = _routing_error(request, failure.status_code)
        response = error_response(body, path=request.url.path)
        if failure.status_code == 405:
            response.headers["allow"] = ", ".join(_allowed(routes, request))
        return response

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, failure: Exception) -> Response:
        plain_error = PenstockError("the gateway failed; its log says why")
        return response_to(plain_error, request.url.path)


def _allowed(routes: Sequence[BaseRoute], request: Request) -> list[str]:
    """Return the methods of a path. The router's own error names those of its first route alone.

    A path that is written out is not also one with an id.
    """
    num_ids = dict[str, int]()
    for method in ("DELETE", "GET", "POST"):
        for route in routes:
            match, child_scope = route.matches({**request.scope, "method": method})
            if match is Match.FULL:
                num_ids.setdefault(method, len(child_scope.get("path_params", ())))
    least = min(num_ids.values(), default=0)
    methods = [method for method, number in num_ids.items() if number == least]
    return [*methods, "HEAD"] if "GET" in methods else methods


def _routing_error(request: Request, status: int) -> ErrorBody:
    path = request.url.path
    if status in (404, 405) and NOT_SERVED.fullmatch(path):
        return ErrorBody(code="not_served", message=f"{path} is not served here", status=501)
    if status == 405:
        message = f"{path} does not take {request.method}"
        return ErrorBody(code="method_not_allowed", message=message, status=405)
    return ErrorBody(
        code="not_found", message=f"{path} is not a path of this server", status=status
    )
