"""An engine that is servers of others: vLLM's, SGLang's, llama.cpp's, or any with /v1/completions.

A sequence is one streamed request at a time. Where its connection is lost and the server lives, it
goes on by another request. A server that dies is a crash of this engine: the queue then hands its
jobs on, as it does for any worker, and blames what killed it.
"""

import asyncio
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import uvloop

from penstock.schemas.errors import InvalidJob
from penstock.worker.engine.any_engine import AnyEngine
from penstock.worker.engine.io.limits import EngineLimits
from penstock.worker.engine.io.mailbox import Callback
from penstock.worker.engine.io.messages import AddSequence, Load, Output, Stats
from penstock.worker.external.requests import Requests, ServerLost
from penstock.worker.external.server import Fitness, Refused, RemoteServer, Unready
from penstock.worker.external.shape import ModelShape, model_shape
from penstock.worker.external.spelling import Speller
from penstock.worker.process.log import log
from penstock.worker.process.settings import WorkerSettings
from penstock.worker.text.model_tokenizer import ModelTokenizer

_START_RETRY_S = 1.0
_TOLD_EVERY_S = 30.0


@dataclass(slots=True)
class _Counted:
    num_prompt: int
    num_completion: int


@dataclass(slots=True)
class OpenAIEngine(AnyEngine):
    """The engine of a worker whose model is served elsewhere.

    Steps run in the caller's thread, and requests in the thread of `loop`. No step is counted, so
    that none's time stands for its speed, nor a block that a server holds: those here stand for
    the tokens of the sequences.
    """

    loop: asyncio.AbstractEventLoop
    servers: list[RemoteServer]
    fitness: Fitness
    speller: Speller
    requests: Requests = field(init=False)
    _watch: Future[None] = field(init=False)  # held, or the task could be collected
    _seqs: dict[str, _Counted] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.requests = Requests(self.servers, self.fitness, self.limits, self.speller, self._post)
        self._watch = asyncio.run_coroutine_threadsafe(self.requests.watch(), self.loop)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Sleep until a command or an output came: others compute what is in work."""
        return self.mailbox.wait(timeout_s)

    def step(self) -> list[Output]:
        """Carry out the commands, and return what the servers made. Raises ServerLost."""
        return self.mailbox.drain(self._carry_out)

    def load(self) -> Load:
        num_blocks = sum(self._num_blocks(seq) for seq in self._seqs.values())
        return Load(num_blocks, self.requests.num_waiting)

    def stats(self) -> Stats:
        stats = self._stats
        stats.num_blocks, stats.block_size = self.limits.num_blocks, self.limits.block_size
        stats.num_held_blocks, stats.num_waiting = self.load()[:2]
        stats.num_running = len(self._seqs) - stats.num_waiting
        return stats

    def _add(self, addition: AddSequence) -> None:
        self._seqs[addition.seq_id] = _Counted(len(addition.prompt), len(addition.completion))
        self._stats.prompt_tokens += len(addition.prompt)
        self.loop.call_soon_threadsafe(self.requests.begin, addition)

    def _cancel(self, seq_id: str) -> None:
        self._seqs.pop(seq_id, None)
        self.loop.call_soon_threadsafe(self.requests.cancel, seq_id)

    def _post(self, output: Output | ServerLost) -> None:
        self.mailbox.put(Callback(partial(self._note, output)))

    def _note(self, output: Output | ServerLost) -> Output | None:
        if isinstance(output, ServerLost):
            raise output
        seq = self._seqs.get(output.seq_id)
        if seq is None:
            return None  # it was cancelled
        seq.num_completion += len(output.token_ids)
        self._stats.generation_tokens += len(output.token_ids)
        if output.finish_reason is not None or output.error is not None:
            del self._seqs[output.seq_id]
        return output

    def _num_blocks(self, seq: _Counted) -> int:
        return -(-(seq.num_prompt + seq.num_completion) // self.limits.block_size)


def load_openai_engine(settings: WorkerSettings) -> OpenAIEngine:
    """Return the engine once a server answers. Raises InvalidJob where one can never serve."""
    folder = settings.checkpoint()
    shape = model_shape(folder)
    loop = uvloop.new_event_loop()
    threading.Thread(target=_run, args=(loop,), name="servers", daemon=True).start()
    servers = [
        RemoteServer(url, settings.engine_api_key, settings.step_timeout_s)
        for url in settings.engine_url
    ]
    fitness = asyncio.run_coroutine_threadsafe(_first_fit(servers, settings, shape), loop).result()
    limits = _limits(settings, shape, fitness, len(servers))
    speller = Speller(ModelTokenizer(settings.tokenizer_folder()), shape.vocab_size)
    if fitness.dialect.tells == "text":
        log.warning("servers tell no token ids: a job that is handed on goes on from its text")
    return OpenAIEngine(limits, loop, servers, fitness, speller)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()


async def _first_fit(
    servers: list[RemoteServer], settings: WorkerSettings, shape: ModelShape
) -> Fitness:
    """Wait until a server answers, and return what it is. Raises Refused for one that is unfit."""
    told_s = -_TOLD_EVERY_S
    while True:
        why = ""
        for server in servers:
            try:
                server.fitness = await server.examine(
                    settings.engine_model, min(100, shape.vocab_size - 1)
                )
                return server.fitness
            except Unready as error:
                why = str(error)
        if time.monotonic() - told_s >= _TOLD_EVERY_S:
            log.warning("no server answers, trying again: %s", why)
            told_s = time.monotonic()
        await asyncio.sleep(_START_RETRY_S)


def _limits(
    settings: WorkerSettings, shape: ModelShape, fitness: Fitness, num_servers: int
) -> EngineLimits:
    most = fitness.max_model_len or shape.max_model_len
    limit = settings.max_model_len
    if limit is None and most is None:
        why = "max_model_len: the server does not tell its own; give it"
        raise InvalidJob(why, "max_model_len")
    if limit is not None and fitness.max_model_len is not None and limit > fitness.max_model_len:
        raise Refused(
            f"max_model_len: {limit} tokens; the server takes {fitness.max_model_len}; ask for no "
            "more",
            "max_model_len",
        )
    length = limit or most or 0
    max_num_seqs = settings.max_num_seqs * num_servers
    return EngineLimits(
        max_model_len=length,
        vocab_size=shape.vocab_size,
        num_blocks=max_num_seqs * -(-length // settings.block_size),
        block_size=settings.block_size,
        max_num_seqs=max_num_seqs,
        eos_token_ids=shape.eos_token_ids,
        unsupported_fields=fitness.dialect.unsupported,
        resumes="text" if fitness.dialect.tells == "text" else "tokens",
    )
