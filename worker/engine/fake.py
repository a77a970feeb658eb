"""An engine without a model: each token is a digest of prompt, seed, choice and its place.

It costs nothing and imports no torch, so tests can put queue and recovery under load. Its
vocabulary is the 256 bytes and two special tokens. An embedding is a digest of the prompt. Its
completions are words of eight bytes, with
characters of several bytes among them. As with a model, a completion can be continued from the
tokens so far. A long prompt takes a step for each `prefill_tokens` of it.

With `poison`, a word, it also fails as engines do. A prompt that begins `<word>:crash:5` kills its
process in the step that would make the sixth token; `hang` never ends that step, `raise` ends it
by an exception, and `idle` is a step that ends and computes nothing, for ever.
"""

import hashlib
import mmap
import os
import re
import signal
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.schemas.event import FinishReason
from penstock.schemas.metrics import names
from penstock.schemas.metrics.tally import Tally
from penstock.worker.engine.any_engine import AnyEngine
from penstock.worker.engine.io.limits import EngineLimits, PoolingFacts
from penstock.worker.engine.io.messages import AddSequence, Load, Logprob, Output, PlanRow, Stats

EOS, BOS = 256, 257
VOCAB_SIZE = 258
_WORDS = [
    word.encode()
    for word in (
        "the sea ", "a crêpe", "🦥 up ", "waters, ", "penstock", "turbine.", "naïve, ", "日本, ",
        "flowing ", "at dawn ", "€ 3.5\n", "gates.  ", "through ", "dams and", "🚀🚀", "(almost)",
    )
]  # fmt: skip
_WORD_BYTES = 8
_VECTOR_SIZE = 16
_WORDS_A_COMPLETION = 64  # on average


class Stamps:
    """A file in which the steps note when they made each token, to measure delivery.

    Times are monotonic seconds, which all processes of a machine share; 0 means not made. A row is
    the number that a prompt ends with, in three digits; a column is a token's place in the
    completion.
    """

    ROWS, COLUMNS = 256, 4096

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            file.truncate(self.ROWS * self.COLUMNS * 8)
            self._cells = memoryview(mmap.mmap(file.fileno(), 0)).cast("d")

    def note(self, prompt: Sequence[int], place: int, at_s: float) -> None:
        self._cells[int(bytes(prompt[-3:])) * self.COLUMNS + place] = at_s

    def row(self, number: int) -> "memoryview[float]":
        return self._cells[number * self.COLUMNS : (number + 1) * self.COLUMNS]


@dataclass(slots=True, eq=False)
class _Sequence:
    addition: AddSequence
    key: bytes
    num_completion: int
    num_computed: int = 0

    @property
    def num_pending(self) -> int:
        return len(self.addition.prompt) + self.num_completion - self.num_computed


@dataclass(slots=True)
class FakeEngine(AnyEngine):
    """An engine that takes `step_s` for every step."""

    step_s: float = 0.002
    poison: str = ""
    stamps: Stamps | None = None
    prefill_tokens: int = 2048  # tokens of one prompt in one step
    _seqs: dict[str, _Sequence] = field(default_factory=dict, init=False)
    _num_held: int = 0  # blocks
    _tallies: dict[str, Tally] = field(
        default_factory=lambda: {metric.stat: metric.tally() for metric in names.STEP_HISTOGRAMS}
    )

    def step(self) -> list[Output]:
        outputs = self.mailbox.drain(self._carry_out)
        running = list(self._seqs.values())[: self.limits.max_num_seqs]
        if self.note_plan is not None and running:
            self.note_plan([self._row(seq) for seq in running])
        if self.poison and any(_fails(self.poison, seq) for seq in running):
            time.sleep(self.step_s)
            return outputs
        if running and self.step_s:
            time.sleep(self.step_s)  # stands for the forward pass
        num_pending = sum(min(seq.num_pending, self.prefill_tokens) for seq in running)
        decoding = [seq for seq in running if self._compute(seq)]
        outputs += [self._next(seq) for seq in decoding]
        if self.stamps:
            now_s = time.monotonic()
            for seq in decoding:
                self.stamps.note(seq.addition.prompt, seq.num_completion - 1, now_s)
        if running:
            self._stats.num_steps += 1
            self._tallies["step_tokens"].observe(num_pending)
        self._stats.generation_tokens += len(decoding)
        return outputs

    def load(self) -> Load:
        return Load(self._num_held, max(0, len(self._seqs) - self.limits.max_num_seqs))

    def stats(self) -> Stats:
        self._stats.num_blocks = self.limits.num_blocks
        self._stats.num_running = min(len(self._seqs), self.limits.max_num_seqs)
        self._stats.num_held_blocks, self._stats.num_waiting = self.load()[:2]
        self._stats.histograms = {stat: tally.dump() for stat, tally in self._tallies.items()}
        return self._stats

    def _cancel(self, seq_id: str) -> None:
        self._end(seq_id)

    def _add(self, addition: AddSequence) -> None:
        self._end(addition.seq_id)
        seq = _Sequence(addition, _key(addition), len(addition.completion))
        self._seqs[addition.seq_id] = seq
        self._num_held += self._num_blocks(seq)
        self._stats.prompt_tokens += len(addition.prompt)

    def _end(self, seq_id: str) -> None:
        if seq := self._seqs.pop(seq_id, None):
            self._num_held -= self._num_blocks(seq)
            self._tallies["request_preemptions"].observe(0)
            self._tallies["prefill_computed_tokens"].observe(len(seq.addition.prompt))

    def _num_blocks(self, seq: _Sequence) -> int:
        return -(-(len(seq.addition.prompt) + seq.num_completion) // self.limits.block_size)

    def _row(self, seq: _Sequence) -> PlanRow:
        return seq.addition.seq_id, min(seq.num_pending, self.prefill_tokens), seq.num_computed

    def _compute(self, seq: _Sequence) -> bool:
        """Compute the next part of the prompt; return whether this step gives the next token."""
        seq.num_computed += min(seq.num_pending, self.prefill_tokens)
        return not seq.num_pending

    def _next(self, seq: _Sequence) -> Output:
        if seq.addition.pooling is not None:
            self._end(seq.addition.seq_id)
            return Output(
                seq.addition.seq_id, [0], finish_reason="stop", vector=_vector(seq.addition)
            )
        token_id, num_blocks = self._draw(seq), self._num_blocks(seq)
        seq.num_completion += 1
        self._num_held += self._num_blocks(seq) - num_blocks
        finish_reason, stop_reason = self._finish(seq, token_id)
        if finish_reason is not None:
            self._end(seq.addition.seq_id)
        params = seq.addition.params
        logprobs = None if params.logprobs is None else [_logprob(token_id, params.logprobs)]
        scores, num_top = None, params.prompt_logprobs
        if num_top is not None and seq.num_completion == 1:
            scores = [_logprob(token, num_top) for token in seq.addition.prompt[1:]]
        return Output(
            seq.addition.seq_id,
            [token_id],
            logprobs,
            finish_reason,
            stop_reason,
            prompt_logprobs=scores,
        )

    def _draw(self, seq: _Sequence) -> int:
        word, place = divmod(seq.num_completion, _WORD_BYTES)
        digest = hashlib.blake2b(word.to_bytes(8, "big"), key=seq.key, digest_size=4).digest()
        params = seq.addition.params
        ends = digest[0] % _WORDS_A_COMPLETION == 0 and seq.num_completion >= max(
            params.min_tokens, 1
        )
        if ends and place == 0 and not params.ignore_eos:
            return EOS
        return _WORDS[digest[1] % len(_WORDS)][place]

    def _finish(self, seq: _Sequence, token_id: int) -> tuple[FinishReason | None, int | None]:
        params, num_prompt = seq.addition.params, len(seq.addition.prompt)
        if token_id == EOS:
            return "stop", None
        if token_id in params.stop_token_ids and seq.num_completion >= params.min_tokens:
            return "stop", token_id
        is_full = seq.num_completion >= self.limits.max_tokens(num_prompt, params)
        return ("length", None) if is_full else (None, None)


def fake_engine(
    max_model_len: int | None,
    max_num_seqs: int,
    block_size: int,
    step_s: float,
    poison: str = "",
    stamps: Path | None = None,
    prefill_tokens: int = 2048,
) -> FakeEngine:
    length = max_model_len or 8192
    num_blocks = max_num_seqs * -(-length // block_size)
    limits = EngineLimits(
        length,
        VOCAB_SIZE,
        num_blocks,
        block_size,
        max_num_seqs,
        frozenset([EOS]),
        unsupported_fields=frozenset(["logprob_token_ids", "use_beam_search"]),
        pooling=PoolingFacts(("embed",), _VECTOR_SIZE),
    )
    table = Stamps(stamps) if stamps else None
    return FakeEngine(limits, step_s, poison, table, prefill_tokens)


def _fails(word: str, seq: _Sequence) -> bool:
    """Fail as the prompt asks; return whether the step computes nothing, if it ends at all."""
    prompt = bytes(token for token in seq.addition.prompt if token < EOS).decode(errors="replace")
    match = re.match(re.escape(word) + r":(crash|hang|raise|idle):(\d+)", prompt)
    if not match or seq.num_completion < int(match[2]):
        return False
    if match[1] == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if match[1] == "raise":
        raise RuntimeError(prompt)
    while match[1] == "hang":
        time.sleep(1)
    return True


def _key(addition: AddSequence) -> bytes:
    text = repr((addition.prompt, addition.seed, addition.choice))
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _vector(addition: AddSequence) -> bytes:
    """Return a vector of numbers from 0 to 1, a digest of the prompt."""
    digest = hashlib.blake2b(repr(addition.prompt).encode(), digest_size=_VECTOR_SIZE).digest()
    return struct.pack(f"<{_VECTOR_SIZE}f", *(byte / 255 for byte in digest))


def _logprob(token_id: int, num_top: int) -> Logprob:
    """Return log probabilities that fall with the rank; the drawn token is the likeliest."""
    top_ids = [token_id, *(top_id for top_id in range(num_top + 1) if top_id != token_id)][:num_top]
    return Logprob(token_id, -0.5, top_ids, [-0.5 - rank for rank in range(len(top_ids))])
