"""The engine for embeddings, classes and scores: it batches texts by tokens, without a cache."""

import heapq
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from penstock.schemas.metrics import names
from penstock.schemas.metrics.tally import Tally
from penstock.schemas.params.pooling import PoolingTask
from penstock.worker.engine.any_engine import AnyEngine
from penstock.worker.engine.build import refuse_longer, spec_of, take_device
from penstock.worker.engine.io.config import EngineConfig
from penstock.worker.engine.io.limits import EngineLimits, PoolingFacts
from penstock.worker.engine.io.messages import AddSequence, Load, Output, Stats
from penstock.worker.engine.scheduling.step_tokens import most_in_time
from penstock.worker.models.pooling_model import PoolingModel, TextIds, load_pooling_model

_CPU_TOKENS, _GPU_TOKENS = 2048, 16384  # tokens of a step, at most
_USUAL_TOKENS = 64  # tokens of a text, where steps are timed
Vector = np.ndarray[tuple[int], np.dtype[np.float32]]


@dataclass(slots=True)
class PoolingEngine(AnyEngine):
    """An engine whose sequences end with the step that reads them.

    A step reads whole texts, in the order of their turns: as many as have `step_tokens` together,
    and one at least. Nothing is held between steps; blocks are counted so that a worker takes no
    more jobs than it will soon read.
    """

    model: PoolingModel
    facts: PoolingFacts
    step_tokens: int
    num_steps: int = 0  # layers of groups, since the texts of a step may be long
    _seqs: dict[str, AddSequence] = field(default_factory=dict, init=False)
    _line: list[tuple[int, int, int, str]] = field(default_factory=list)  # some may be cancelled
    _number: "itertools.count[int]" = field(default_factory=itertools.count)
    _num_held: int = 0  # blocks
    _tallies: dict[str, Tally] = field(
        default_factory=lambda: {metric.stat: metric.tally() for metric in names.STEP_HISTOGRAMS}
    )

    def __post_init__(self) -> None:
        self.model.follow(self._note_layer)

    def step(self) -> list[Output]:
        outputs, batch = self.mailbox.drain(self._carry_out), self._next()
        if batch:
            began_s = time.perf_counter()
            if self.note_plan is not None:
                self.note_plan([(seq.seq_id, len(seq.prompt), 0) for seq in batch])
            outputs += self._computed(batch)
            self._count(batch, time.perf_counter() - began_s)
        return outputs

    def load(self) -> Load:
        return Load(self._num_held, max(0, len(self._seqs) - self.limits.max_num_seqs))

    def stats(self) -> Stats:
        stats = self._stats
        stats.num_blocks, stats.block_size = self.limits.num_blocks, self.limits.block_size
        stats.max_num_batched_tokens = self.step_tokens
        stats.num_held_blocks, stats.num_waiting = self.load()[:2]
        stats.num_running = len(self._seqs) - stats.num_waiting
        stats.histograms = {stat: tally.dump() for stat, tally in self._tallies.items()}
        return stats

    def _cancel(self, seq_id: str) -> None:
        self._end(seq_id)

    def _add(self, addition: AddSequence) -> None:
        self._end(addition.seq_id)
        self._seqs[addition.seq_id] = addition
        place = addition.priority, addition.turn, next(self._number), addition.seq_id
        heapq.heappush(self._line, place)
        self._num_held += self._num_blocks(addition)

    def _end(self, seq_id: str) -> None:
        if seq := self._seqs.pop(seq_id, None):
            self._num_held -= self._num_blocks(seq)

    def _num_blocks(self, seq: AddSequence) -> int:
        return -(-len(seq.prompt) // self.limits.block_size)

    def _next(self) -> list[AddSequence]:
        """Take the sequences of the next step out of the line."""
        batch: list[AddSequence] = []
        num_tokens = 0
        while self._line and len(batch) < self.limits.max_num_seqs:
            seq = self._seqs.get(self._line[0][-1])
            if seq is not None and batch and num_tokens + len(seq.prompt) > self.step_tokens:
                break
            heapq.heappop(self._line)
            if seq is not None:
                batch.append(seq)
                num_tokens += len(seq.prompt)
        return batch

    def _computed(self, batch: Sequence[AddSequence]) -> list[Output]:
        """Return the batch's outputs. A text that several ask for is read once."""
        texts = [self._texts(seq) for seq in batch]
        places = {text: at for at, text in enumerate(dict.fromkeys(itertools.chain(*texts)))}
        rows = self.model([TextIds(*text) for text in places]).numpy()
        return [
            self._output(seq, [rows[places[text]] for text in own])
            for seq, own in zip(batch, texts, strict=True)
        ]

    def _texts(self, seq: AddSequence) -> list[tuple[tuple[int, ...], int]]:
        ids, split = tuple(seq.prompt), seq.split
        if split and not self.facts.joins_pairs:
            return [(ids[:split], 0), (ids[split:], 0)]
        return [(ids, split)]

    def _output(self, seq: AddSequence, rows: list[Vector]) -> Output:
        assert seq.pooling is not None
        use_activation = seq.pooling.use_activation
        activates = self.model.activates if use_activation is None else use_activation
        if self.facts.joins_pairs:
            numbers = rows[0]
            if activates:
                numbers = self.model.activate(torch.from_numpy(numbers)).numpy()
        elif len(rows) == 2:
            numbers = np.array([np.dot(*(_unit(row) for row in rows))])
        else:
            numbers = rows[0][: seq.pooling.dimensions]
            if activates:
                numbers = _unit(numbers)
        vector = numbers.astype("<f4").tobytes()
        return Output(seq.seq_id, [0], finish_reason="stop", vector=vector)

    def _count(self, batch: Sequence[AddSequence], seconds: float) -> None:
        num_tokens = sum(len(seq.prompt) for seq in batch)
        self._stats.num_steps += 1
        self._stats.prompt_tokens += num_tokens
        self._stats.computed_tokens += num_tokens
        self._stats.generation_tokens += len(batch)
        self._stats.step_seconds += seconds
        self._tallies["step_tokens"].observe(num_tokens)
        for seq in batch:
            self._tallies["request_preemptions"].observe(0)
            self._tallies["prefill_computed_tokens"].observe(len(seq.prompt))
            self._end(seq.seq_id)
        self._note_layer()  # models without layers move by this alone

    def _note_layer(self) -> None:
        self.num_steps += 1


def build_pooling_engine(config: EngineConfig) -> PoolingEngine:
    """Build the engine of a folder's model. Raises a PenstockError or a ModelError."""
    device = take_device(config)
    spec = spec_of(config, device)
    model = load_pooling_model(spec, config.pooler_config)
    length = config.max_model_len or model.max_model_len
    refuse_longer(length, model.max_model_len)
    step_tokens = config.max_num_batched_tokens or _step_tokens(model, device)
    folder = model.folder
    facts = PoolingFacts(
        _tasks(model),
        model.size,
        model.labels,
        dict(folder.prompts),
        folder.default_prompt,
        folder.lowers,
    )
    most = max(length, step_tokens)
    limits = EngineLimits(
        max_model_len=length,
        vocab_size=model.vocab_size,
        num_blocks=config.max_num_seqs * -(-most // config.block_size),
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        eos_token_ids=frozenset(),
        generates=False,
        pooling=facts,
        numerics=spec.arithmetic.rounding,
    )
    return PoolingEngine(limits, model, facts, step_tokens)


def _tasks(model: PoolingModel) -> tuple[PoolingTask, ...]:
    """Return what a model makes: a classifier of one label tells how well two texts go together."""
    if not model.labels:
        return "embed", "score"
    return ("classify", "score") if len(model.labels) == 1 else ("classify",)


def _step_tokens(model: PoolingModel, device: torch.device) -> int:
    """Return how many tokens a step has at most; on a CPU texts of a usual length are timed."""
    if device.type != "cpu":
        return _GPU_TOKENS
    length = min(_USUAL_TOKENS, model.max_model_len)

    def step_s(count: int) -> float:
        began_s = time.perf_counter()
        model([TextIds([0] * min(length, count))] * -(-count // length))
        return time.perf_counter() - began_s

    return most_in_time(_CPU_TOKENS, step_s)


def _unit(vector: Vector) -> Vector:
    """Return the vector scaled to length 1."""
    return vector / max(float(np.linalg.norm(vector)), 1e-12)
