"""The requests to the servers of one model, in an event loop of their own."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from pydantic import JsonValue

from penstock.schemas.errors import PenstockError, StreamDiverged, WorkerFailed
from penstock.schemas.event import FinishReason
from penstock.schemas.params.sampling import SamplingParams
from penstock.worker.engine.io.limits import EngineLimits
from penstock.worker.engine.io.messages import AddSequence, Logprob, Output
from penstock.worker.external.continuation import Continuation, Diverged
from penstock.worker.external.dialect import Answer, Tells
from penstock.worker.external.server import (
    Broken,
    Fitness,
    Refused,
    RemoteServer,
    ServerBusy,
    Unready,
)
from penstock.worker.external.spelling import Speller
from penstock.worker.process.log import log

_LOOK_EVERY_S = 2.0
_MOST_BREAKS = 3  # lost connections of one sequence, with no token between them
_BREAK_S = 0.2
_ENDS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


class ServerLost(PenstockError):
    """Raised when a server that had sequences is gone, or the last one is."""

    code = "server_lost"


class Requests:
    """The sequences that servers compute, one streamed request each.

    post  is given the outputs, and ServerLost when nothing can go on here
    """

    def __init__(
        self,
        servers: Sequence[RemoteServer],
        fitness: Fitness,
        limits: EngineLimits,
        speller: Speller,
        post: Callable[[Output | ServerLost], None],
    ) -> None:
        self._servers = servers
        self._fitness = fitness
        self._limits = limits
        self._most_running = limits.max_num_seqs // len(servers)
        self._speller = speller
        self._post = post
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._change = asyncio.Event()  # room or a server came
        self.num_waiting = 0

    def begin(self, addition: AddSequence) -> None:
        task = asyncio.ensure_future(self._run(addition))
        self._tasks[addition.seq_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(addition.seq_id, None))

    def cancel(self, seq_id: str) -> None:
        if task := self._tasks.get(seq_id):
            task.cancel()

    async def watch(self) -> None:
        """Look after the servers for ever: one that comes gets work, one that is gone is lost."""
        while True:
            for failure in await asyncio.gather(
                *map(self._look, self._servers), return_exceptions=True
            ):
                if failure is not None:
                    log.error("a server cannot be looked after", exc_info=failure)
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _look(self, server: RemoteServer) -> None:
        if server.fitness is not None:
            if not await server.is_alive():
                self._lose(server, "it does not answer")
            return
        try:
            fitness = await server.examine(self._fitness.model, self._fitness.token_id)
        except (Unready, Refused) as error:
            log.debug("server %s is not used: %s", server.http.base_url, error)
            return
        if why := self._fitness.differs(fitness, self._limits.max_model_len):
            log.warning("server %s is not used: %s", server.http.base_url, why)
            return
        log.info("server %s is used", server.http.base_url)
        server.fitness = fitness
        self._change.set()

    def _lose(self, server: RemoteServer, why: str) -> None:
        if server.fitness is None:
            return  # it is known
        server.fitness = None
        log.warning("server %s is lost: %s", server.http.base_url, why)
        if server.num_running or not any(peer.fitness for peer in self._servers):
            self._post(ServerLost(f"engine_url: {server.http.base_url} is lost: {why}"))

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self.num_waiting += 1
        try:
            yield
        finally:
            self.num_waiting -= 1

    @asynccontextmanager
    async def _seat(self) -> AsyncIterator[RemoteServer]:
        """Wait for room at a server, and keep it."""
        with self._waiting():
            while (server := self._freest()) is None:
                self._change.clear()
                await self._change.wait()
        server.num_running += 1
        try:
            yield server
        finally:
            server.num_running -= 1
            self._change.set()

    def _freest(self) -> RemoteServer | None:
        free = [
            server
            for server in self._servers
            if server.fitness is not None and server.num_running < self._most_running
        ]
        return min(free, key=lambda server: server.num_running, default=None)

    async def _run(self, addition: AddSequence) -> None:
        """Ask until the sequence has ended, or nothing can go on here."""
        seq, num_breaks = Continuation.of(addition, self._limits), 0
        again = self._fitness.dialect.tells != "text" and not seq.can_go_on
        while True:
            num_tokens = len(seq.token_ids)
            try:
                async with self._seat() as server:
                    try:
                        await self._ask(server, seq, again)
                        return
                    except Broken as failure:
                        if not await server.is_alive():
                            self._lose(server, str(failure))
                            return
                        raise
            except ServerBusy as busy:
                with self._waiting():
                    await asyncio.sleep(busy.retry_after_s)
            except Broken as failure:
                num_breaks = 1 if len(seq.token_ids) > num_tokens else num_breaks + 1
                log.warning("request of %s broke: %s", addition.seq_id, failure)
                if num_breaks == _MOST_BREAKS:
                    self._post(ServerLost(f"{num_breaks} requests broke in turn: {failure}"))
                    return
                await asyncio.sleep(_BREAK_S)
            except Diverged:
                again = False
                if addition.params.structured_outputs is not None:
                    job_id = addition.seq_id.partition(":")[0]
                    error = StreamDiverged(job_id, len(seq.token_ids))
                    self._post(Output(addition.seq_id, [], error=error.body()))
                    return
                log.warning("request of %s gave other tokens; it goes on", addition.seq_id)
            except Exception as error:
                if not isinstance(error, PenstockError):
                    log.exception("request of %s failed", addition.seq_id)
                    error = WorkerFailed(f"the worker failed at its request ({error!r:.80})")
                self._post(Output(addition.seq_id, [], error=error.body()))
                return

    async def _ask(self, server: RemoteServer, seq: Continuation, again: bool) -> None:
        fitness = server.fitness or self._fitness
        seq.begin(again)
        prompt: JsonValue = [*seq.prompt] if fitness.takes_ids else self._speller.text(seq.prompt)
        body = fitness.dialect.body(fitness.model, seq, prompt)
        await server.complete(body, lambda answer: self._take(answer, seq, fitness.dialect.tells))

    def _take(self, answer: Answer, seq: Continuation, tells: Tells) -> bool:
        """Post what a chunk brings; return whether the sequence has ended with it."""
        params = seq.addition.params
        token_ids = self._ids(answer, tells)[: seq.num_left]
        logprobs = _logprobs(answer, params, len(token_ids))
        finish, reason = _server_end(answer, params)
        if finish is not None and not token_ids:  # not all servers tell the end token
            token_ids = [min(self._limits.eos_token_ids)]
            logprobs = None if logprobs is None else [Logprob(token_ids[0], 0.0, [], [])]
        for number, token_id in enumerate(token_ids, 1):
            if token_id in params.stop_token_ids and number > seq.min_left:
                token_ids, finish, reason = token_ids[:number], "stop", token_id
                break
        num_repeats = seq.take(token_ids)
        if finish is None and not seq.num_left:
            finish = "length"
        if finish is not None and seq.is_behind:
            raise Diverged
        new = token_ids[num_repeats:]
        if new or finish is not None:
            new_logprobs = logprobs[num_repeats : len(token_ids)] if logprobs is not None else None
            self._post(Output(seq.addition.seq_id, new, new_logprobs, finish, reason))
        return finish is not None

    def _ids(self, answer: Answer, tells: Tells) -> list[int]:
        """Return the chunk's tokens. Raises Broken where they are none of the model's."""
        if tells == "text":
            try:
                return self._speller.ids(answer.text or "")
            except ValueError as error:
                raise Broken(f"text cannot be spelled in tokens: {error}") from None
        token_ids = answer.drawn_ids()
        if token_ids is None:
            if answer.text:
                raise Broken("text came without token ids")
            return []
        for token_id in token_ids:
            if not 0 <= token_id < self._limits.vocab_size:
                raise Broken(f"token id {token_id} is outside the vocabulary")
        return token_ids


def _logprobs(answer: Answer, params: SamplingParams, num_tokens: int) -> list[Logprob] | None:
    if params.logprobs is None:
        return None
    try:
        logprobs = answer.drawn_logprobs(params.logprobs) or []
    except ValueError as error:
        raise Broken(f"log probabilities cannot be read: {error}") from None
    if len(logprobs) < num_tokens:
        raise Broken("tokens came without their log probabilities")
    return logprobs


def _server_end(answer: Answer, params: SamplingParams) -> tuple[FinishReason | None, int | None]:
    """Return why the sequence ends, if it does. Raises Broken for an end not its own."""
    if answer.finish_reason is None:
        return None, None
    if answer.finish_reason not in _ENDS:
        raise Broken(f"the server ended the answer: {answer.finish_reason}")
    stop = answer.stop_reason  # a server may tell an end token of its own here
    reason = stop if isinstance(stop, int) and stop in params.stop_token_ids else None
    return _ENDS[answer.finish_reason], reason
