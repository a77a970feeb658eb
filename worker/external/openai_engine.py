"""An engine that is servers of others: vLLM's, SGLang's, llama.cpp's, or any with /v1/completions.

A sequence is one streamed request at a time. Where its connection is lost and the server lives, it
goes on by another request. A server that dies is a crash of this engine: the queue then hands its
jobs on, as it does for any worker, and blames what killed it.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import uvloop

from penstock.schemas.errors import InvalidJob
from penstock.worker.engine.cache.block_changes import BlockChanges
from penstock.worker.engine.io.limits import EngineLimits
from penstock.worker.engine.io.messages import AddSequence, Load, Output, PlanRow, Stats
from penstock.worker.external.requests import Requests, ServerLost
from penstock.worker.external.server import Fitness, Refused, RemoteServer, Unready
from penstock.worker.external.shape import ModelShape, model_shape
from penstock.worker.external.spelling import Speller
from penstock.worker.process.log import log
from penstock.worker.process.settings import WorkerSettings
from penstock.worker.text.model_tokenizer import ModelTokenizer

_START_RETRY_S = 1.0
_TOLD_EVERY_S = 30.0

# To the loop of steps: commands from one side, outputs and the loss of a server from the other.
Letter = AddSequence | str | Output | ServerLost


@dataclass(slots=True)
class _Counted:
    num_prompt: int
    num_made: int


@dataclass(slots=True)
class OpenAIEngine:
    """The engine of a worker whose model is served elsewhere.

    Steps run in the caller's thread, and requests in the thread of `loop`. No block is counted that
    a server holds; those here stand for the tokens of the sequences.
    """

    limits: EngineLimits
    loop: asyncio.AbstractEventLoop
    requests: Requests
    letters: SimpleQueue[Letter]
    note_plan: Callable[[list[PlanRow]], None] | None = None
    _seqs: dict[str, _Counted] = field(default_factory=dict)
    _first: list[Letter] = field(default_factory=list)  # what `wait` took
    _outputs: list[Output] = field(default_factory=list)
    _stats: Stats = field(default_factory=Stats)

    def add(self, addition: AddSequence) -> None:
        self.letters.put(addition)

    def cancel(self, seq_id: str) -> None:
        self.letters.put(seq_id)

    @property
    def busy(self) -> bool:
        return bool(self._seqs or self._first or not self.letters.empty())

    @property
    def num_steps(self) -> int:
        """Return 0: nothing is computed here, so that no step's time stands for its speed."""
        return 0

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return whether there is anything for a step to do, after at most this time."""
        if not self._first:
            try:
                self._first.append(self.letters.get(timeout=timeout_s))
            except Empty:
                return False
        return True

    def step(self) -> list[Output]:
        """Obey what was told, and return what the servers made. Raises ServerLost."""
        for letter in self._first:
            self._take(letter)
        self._first.clear()
        while not self.letters.empty():
            self._take(self.letters.get())
        outputs, self._outputs = self._outputs, []
        return outputs

    def follow_blocks(self, with_token_ids: bool) -> BlockChanges:
        """Return what stays empty: what a server caches is not known here."""
        return BlockChanges(self.limits.block_size, with_token_ids)

    def reset_prefix_cache(self) -> None:
        """Do nothing: it has none of its own."""

    def load(self) -> Load:
        held = sum(self._num_blocks(seq) for seq in self._seqs.values())
        return Load(held, self.requests.num_waiting)

    def stats(self) -> Stats:
        stats = self._stats
        stats.num_blocks, stats.block_size = self.limits.num_blocks, self.limits.block_size
        stats.num_held_blocks, stats.num_waiting = self.load()[:2]
        stats.num_running = len(self._seqs) - stats.num_waiting
        return stats

    def _take(self, letter: Letter) -> None:
        match letter:
            case ServerLost():
                raise letter
            case AddSequence():
                self._begin(letter)
            case Output():
                self._note(letter)
            case str():
                self._seqs.pop(letter, None)
                self.loop.call_soon_threadsafe(self.requests.cancel, letter)

    def _begin(self, addition: AddSequence) -> None:
        if error := self.limits.check(addition):
            self._outputs.append(Output(addition.seq_id, [], error=error.body()))
            return
        self._seqs[addition.seq_id] = _Counted(len(addition.prompt), len(addition.completion))
        self._stats.prompt_tokens += len(addition.prompt)
        self.loop.call_soon_threadsafe(self.requests.begin, addition)

    def _note(self, output: Output) -> None:
        seq = self._seqs.get(output.seq_id)
        if seq is None:
            return  # it was cancelled
        seq.num_made += len(output.token_ids)
        self._stats.generation_tokens += len(output.token_ids)
        if output.finish_reason is not None or output.error is not None:
            del self._seqs[output.seq_id]
        self._outputs.append(output)

    def _num_blocks(self, seq: _Counted) -> int:
        return -(-(seq.num_prompt + seq.num_made) // self.limits.block_size)


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
    letters: SimpleQueue[Letter] = SimpleQueue()
    speller = Speller(ModelTokenizer(settings.tokenizer_folder()), shape.vocab_size)
    if fitness.dialect.tells == "text":
        log.warning("servers tell no token ids: a job that is handed on goes on from its text")

    async def start() -> Requests:
        requests = Requests(servers, fitness, limits, speller, letters.put)
        watch.append(asyncio.ensure_future(requests.watch()))
        return requests

    watch: list[asyncio.Future[None]] = []  # held, or the task could be collected
    requests = asyncio.run_coroutine_threadsafe(start(), loop).result()
    return OpenAIEngine(limits, loop, requests, letters)


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
    asked = settings.max_model_len
    if asked is None and most is None:
        wanted = "max_model_len: the server does not tell its own; give it"
        raise InvalidJob(wanted, "max_model_len")
    if asked is not None and fitness.max_model_len is not None and asked > fitness.max_model_len:
        raise Refused(
            f"max_model_len: {asked} tokens; the server takes {fitness.max_model_len}; ask for no "
            "more",
            "max_model_len",
        )
    length = asked or most or 0
    max_num_seqs = settings.max_num_seqs * num_servers
    return EngineLimits(
        max_model_len=length,
        vocab_size=shape.vocab_size,
        num_blocks=max_num_seqs * -(-length // settings.block_size),
        block_size=settings.block_size,
        max_num_seqs=max_num_seqs,
        eos_token_ids=shape.eos_token_ids,
        unsupported=fitness.dialect.unsupported,
        resumes="text" if fitness.dialect.tells == "text" else "tokens",
    )
