"""One server that speaks `/v1/completions`: what it serves, whether it lives, and its answers."""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import msgspec
from pydantic import JsonValue

from penstock.schemas.errors import InvalidJob
from penstock.schemas.network.event_stream import (
    EventReader,
    HttpServer,
    PageReader,
    Said,
    exchange,
)
from penstock.worker.external.dialect import DIALECTS, FALLBACK, Answer, CompletionChunk, Dialect

_LOOK_S = 5.0  # at most, for a server to say that it lives
_LATE_S = 0.5  # a wait that lasts so much longer was not only for the server
_PROBE_S = 120.0  # for a first token; a server may compile something for it
_DONE = b"[DONE]"
_REFUSAL = "connection refused"


class Unready(Exception):
    """Raised when a server does not answer as yet; it may later."""


class Refused(InvalidJob):
    """Raised when a server refuses what it is asked, or is none for this model. Says why."""


class ServerBusy(Exception):
    """Raised when a server has no room for a request now."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Broken(Exception):
    """Raised when a request ended before its answer did, or with what is no answer."""


class _MetaData(msgspec.Struct):
    n_ctx: int | None = None


class Served(msgspec.Struct):
    """A model that a server says it serves."""

    id: str
    owned_by: str = ""
    max_model_len: int | None = None
    meta: _MetaData | None = None

    @property
    def length(self) -> int | None:
        return self.max_model_len or (self.meta.n_ctx if self.meta else None)


class _Listed(msgspec.Struct):
    data: list[Served]


@dataclass(frozen=True, slots=True)
class Fitness:
    """The findings about a server, made before it gets work."""

    model: str
    kind: str
    dialect: Dialect
    takes_ids: bool
    max_model_len: int | None
    token_id: int  # the token that it was tried with

    def differs(self, peer: "Fitness", max_model_len: int) -> str | None:
        """Return why the other server cannot stand beside this one, or None where it can."""
        if peer.dialect != self.dialect or peer.takes_ids != self.takes_ids:
            return f"it is of {peer.kind} and acts otherwise than the first, of {self.kind}"
        if (peer.max_model_len or max_model_len) < max_model_len:
            return f"it takes {peer.max_model_len} tokens, the first {max_model_len}"
        return None


class RemoteServer:
    """One server, and how much of its room is taken.

    silent_s  a server that neither answers nor sends anything for so long is gone
    """

    def __init__(self, url: str, api_key: str | None, silent_s: float) -> None:
        self.http = HttpServer(url, api_key)
        self._silent_s = silent_s
        self.fitness: Fitness | None = None  # None while it is not known to live
        self.num_running = 0
        self.heard_s = 0.0  # when it last sent anything, by the loop's clock
        self._look_s = min(_LOOK_S, silent_s)
        self._health = "/health"

    async def examine(self, model: str | None, token_id: int) -> Fitness:
        """Find out what the server serves and how it tells tokens. Raises Unready or Refused.

        It is asked for one token after `token_id`.
        """
        entry = await self._chosen(model)
        kind = entry.owned_by if entry.owned_by in DIALECTS else "unknown"
        dialect = DIALECTS.get(kind, FALLBACK)
        body: dict[str, JsonValue] = {**dialect.constants, "model": entry.id, "max_tokens": 1}
        body |= {"temperature": 0, "stream": True}
        takes_ids = True
        try:
            answers = await self._probe({**body, "prompt": [token_id]})
        except Refused:
            takes_ids = False
            answers = await self._probe({**body, "prompt": "1"})
        tells_ids = takes_ids and any(answer.drawn_ids() for answer in answers)
        if dialect.tells != "text" and not tells_ids:
            raise Refused(f"engine_url: {self.http.base_url} is of {kind} and tells no token ids")
        if tells_ids and dialect.tells == "text":
            dialect = replace(dialect, tells="token_ids")
        return Fitness(entry.id, kind, dialect, takes_ids, entry.length, token_id)

    async def is_alive(self) -> bool:
        """Return whether the server answers, or has sent something of late.

        It is asked once more where this process stood still while it waited for the answer.
        """
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        is_alive = await self._is_heard()
        if is_alive or loop.time() - began_s < self._look_s + _LATE_S:
            return is_alive
        return await self._is_heard()

    async def _is_heard(self) -> bool:
        now = asyncio.get_running_loop().time()
        try:
            await self._get(self._health)
        except Refused:
            self._health = "/v1/models"
            return True  # it answers
        except Unready as error:
            return _REFUSAL not in str(error).lower() and now - self.heard_s < self._silent_s
        return True

    async def complete(self, body: Mapping[str, JsonValue], take: Callable[[Answer], bool]) -> None:
        """Stream the answer to a request, until `take` returns True for a part of it.

        Raises Refused for a request that is refused, ServerBusy, and Broken.
        """
        request = self.http.http("POST", "/v1/completions", json.dumps(body).encode())
        reader = _Completion(request, self, take)
        error = await exchange(self.http, reader, None)
        if reader.failure is not None:
            raise reader.failure
        if reader.is_done and reader.has_ended:
            return
        if reader.status in (400, 413, 422):
            raise Refused(f"the engine's server refused the job: {error.partition(': ')[2]}")
        if reader.status in (429, 503):
            raise ServerBusy(error, _seconds(reader.retry_after))
        raise Broken(error or "the stream ended before the answer")

    async def _chosen(self, model: str | None) -> Served:
        text = await self._get("/v1/models")
        url = self.http.url("/v1/models")
        try:
            models = msgspec.json.decode(text, type=_Listed).data
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            why = f"engine_url: {url} is no list of models: {error}"
            raise Refused(why, "engine_url") from None
        names = ", ".join(entry.id for entry in models) or "no model"
        if model is None and len(models) == 1:
            return models[0]
        if model is None:
            raise Refused(f"engine_model: {url} lists {names}; say which one it is", "engine_model")
        for entry in models:
            if entry.id == model:
                return entry
        raise Refused(f"engine_model: {url} lists {names}, not {model!r}", "engine_model")

    async def _probe(self, body: dict[str, JsonValue]) -> list[Answer]:
        answers: list[Answer] = []

        def take(answer: Answer) -> bool:
            answers.append(answer)
            return answer.finish_reason is not None

        try:
            async with asyncio.timeout(_PROBE_S):
                await self.complete(body, take)
        except TimeoutError:
            raise Unready(f"no token within {_PROBE_S:.0f} s") from None
        except (ServerBusy, Broken) as error:
            raise Unready(str(error)) from error
        return answers

    async def _get(self, endpoint: str) -> bytes:
        """Return what a page says. Raises Unready, and Refused for a refusal."""
        reader = PageReader(self.http.http("GET", endpoint))
        error = await exchange(self.http, reader, self._look_s)
        if not error:
            return reader.page
        sentence = f"{self.http.url(endpoint)} answers {reader.status}"
        if reader.status in (401, 403):
            raise Refused(f"engine_api_key: {sentence}", "engine_api_key")
        if 300 <= reader.status < 500:
            raise Refused(f"engine_url: {sentence}; give the URL that has /v1 below it")
        raise Unready(sentence if reader.status >= 500 else f"{self.http.base_url}: {error}")


_decode = msgspec.json.Decoder(CompletionChunk).decode


class _Completion(EventReader):
    """Reads the stream of a completion."""

    def __init__(
        self, request: bytes, server: RemoteServer, take: Callable[[Answer], bool]
    ) -> None:
        super().__init__(request)
        self._server = server
        self._take = take
        self.has_ended = False
        self.failure: Exception | None = None

    def take(self, event_id: str, event: bytes) -> None:
        self._server.heard_s = asyncio.get_running_loop().time()
        if self.has_ended:
            return
        if event == _DONE:
            self.is_done = True
            return
        try:
            chunk = _decode(event)
            if chunk.error is not None:
                raise _failure(chunk.error)
            for answer in chunk.choices[:1]:
                self.has_ended = self._take(answer)
        except Exception as error:
            is_nonsense = isinstance(error, msgspec.MsgspecError | UnicodeDecodeError)
            self.failure = Broken(f"an event cannot be read: {error}") if is_nonsense else error
            self.fail(str(error))
        if self.has_ended:
            self.is_done = True
            self._end()


def _failure(error: Said | str) -> Exception:
    """Return what an error in an answer is: a refusal of the job, if its code says so."""
    if isinstance(error, Said) and error.code in (400, 413, 422, "400", "413", "422"):
        return Refused(f"the engine's server refused the job: {error.message}")
    return Broken(error if isinstance(error, str) else error.message)


def _seconds(retry_after: str) -> float:
    try:
        return min(60.0, max(0.0, float(retry_after)))
    except ValueError:
        return 1.0
