"""One token stream with its block table in the KV cache, and the plan of a step."""

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from penstock.schemas.params.sampling import SamplingParams
from penstock.worker.engine.grammar.constraints import Constraint
from penstock.worker.engine.io.messages import Logprob
from penstock.worker.engine.sampling.sampler_row import SamplerRow


class Status(Enum):
    """The state of a sequence.

    NEW means that the scheduler does not have it yet, since its grammar is being compiled.
    """

    NEW = auto()
    WAITING = auto()
    RUNNING = auto()
    DONE = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence: prompt and completion in one list, and its state.

    For running sequences, `Columns` says how many tokens have KV in the blocks.

    max_tokens  the most tokens that the completion may have
    stop_ids    ids that end the sequence; the end tokens too, unless they are ignored
    place       in line: class, turn in the class, order of addition; kept through preemption
    num_prefix  tokens found in the prefix cache at the last admission
    num_cached  tokens of the prompt found in the prefix cache at the first admission
    num_before  tokens computed before the last preemption, or by the worker that had it before
    num_preemptions  how often it was preempted here
    digests     one for each full block, of its tokens and all before it; grows with the tokens
    awaited_digest  of the block, or name of the state, that another sequence computes for it
    borders     the numbers of computed tokens at which its state is kept for others, in order
    group       shared by sequences with the same prompt; "" for one of its own
    owner       its tenant; the rows are shared among the owners by their weights
    row         its row in the persistent batch while running
    prompt_logprobs  from its prompt's second token on, as far as they are known; None where
                nobody asks for them, or they were given
    is_beam     whether a search says how it goes on, once it knows all its beams' likeliest tokens
    """

    seq_id: str
    params: SamplingParams
    token_ids: list[int]
    num_prompt: int
    max_tokens: int
    stop_ids: frozenset[int]
    cache_salt: bytes
    priority: int
    turn: int
    sampling: SamplerRow
    constraint: Constraint | None = None
    place: tuple[int, ...] = ()
    status: Status = Status.NEW
    num_prefix: int = 0
    num_cached: int | None = None
    num_before: int = 0
    num_preemptions: int = 0
    block_table: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    awaited_digest: bytes | None = None
    borders: list[int] = field(default_factory=list)
    group: str = ""
    owner: str = ""
    weight: float = 1.0
    row: int = -1
    prompt_logprobs: list[Logprob] | None = None
    is_beam: bool = False

    @property
    def num_pending(self) -> int:
        return len(self.token_ids) - self.num_prefix

    @property
    def most_prefix(self) -> int:
        """Return how many of its tokens may come from the prefix cache.

        Those must be computed whose logits are needed: the last one, from which the next token is
        drawn, and the prompt's where log probabilities of the prompt are asked for.
        """
        last = len(self.token_ids) - 1
        return last if self.prompt_logprobs is None else min(last, len(self.prompt_logprobs))

    @property
    def num_completion(self) -> int:
        return len(self.token_ids) - self.num_prompt

    def score(self, start: int, logprobs: list[Logprob]) -> None:
        """Note the log probabilities of the prompt's tokens that follow those from `start` on.

        They may be known already, of a sequence that was preempted.
        """
        if self.prompt_logprobs is not None:
            self.prompt_logprobs[start:] = logprobs

    def grow_digests(self, block_size: int) -> None:
        """Digest the blocks filled since the last call; the first one is seeded by the salt."""
        while (len(self.digests) + 1) * block_size <= len(self.token_ids):
            start = len(self.digests) * block_size
            before = (
                self.digests[-1]
                if self.digests
                else hashlib.blake2b(self.cache_salt, digest_size=16).digest()
            )
            tokens = array("i", self.token_ids[start : start + block_size]).tobytes()
            self.digests.append(hashlib.blake2b(before + tokens, digest_size=16).digest())


@dataclass(frozen=True, slots=True)
class Slice:
    """The next `count` pending tokens of a sequence from `start` on, to be computed in one step.

    draws  whether the step reaches the last known token, so that the next one can be drawn
    """

    seq: Sequence
    start: int
    count: int
    draws: bool


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The plan of one step: a slice of each sequence, `counts` tokens from `starts` on.

    A slice without tokens is that of a fork: it draws from the last token of the slice before it,
    whose prompt is its own.

    rows          the sequences' rows in the columns
    drawing_seqs  the sequences whose last known token is reached, so that the next one is drawn
    draws         a flag for each sequence: whether it is in `drawing_seqs`; as a rule all are
    copies_after  pairs of blocks: once the step is computed, the second is made a copy of the first
    """

    seqs: list[Sequence]
    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    drawing_seqs: list[Sequence]
    draws: NDArray[np.bool_]
    copies_after: list[tuple[int, int]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.seqs)

    def __iter__(self) -> Iterator[Slice]:
        columns = self.starts.tolist(), self.counts.tolist(), self.draws.tolist()
        return map(Slice, self.seqs, *columns)

    @property
    def is_decode(self) -> bool:
        """Return whether each sequence computes only its last known token."""
        num_tokens = int(self.counts.sum())
        return num_tokens == len(self.drawing_seqs) == len(self.seqs) and bool(self.counts.all())

    @property
    def computed(self) -> "Plan":
        """Return the plan without its forks."""
        places = np.flatnonzero(self.counts)
        if len(places) == len(self.seqs):
            return self
        seqs, draws = [self.seqs[place] for place in places.tolist()], self.draws[places]
        drawing_seqs = [seq for seq, flag in zip(seqs, draws.tolist(), strict=True) if flag]
        rows, starts, counts = self.rows[places], self.starts[places], self.counts[places]
        return Plan(seqs, rows, starts, counts, drawing_seqs, draws)

    def with_forks(self, forks: dict[int, list[Sequence]], copies: list[tuple[int, int]]) -> "Plan":
        """Return the plan with forks behind some of its places."""
        seqs = [
            member for place, seq in enumerate(self.seqs) for member in (seq, *forks.get(place, ()))
        ]
        behind = [place + 1 for place, followers in forks.items() for _ in followers]
        new = [seq for followers in forks.values() for seq in followers]
        rows = np.insert(self.rows, behind, [seq.row for seq in new])
        starts = np.insert(self.starts, behind, [seq.num_prompt for seq in new])
        counts, draws = np.insert(self.counts, behind, 0), np.insert(self.draws, behind, True)
        drawing_seqs = [seqs[place] for place in np.flatnonzero(draws).tolist()]
        return Plan(seqs, rows, starts, counts, drawing_seqs, draws, copies)

    def forks(self) -> list[tuple[int, int]]:
        """Return the places of slices without tokens, each with that of the slice it goes on."""
        if self.counts.all():
            return []
        empty = np.flatnonzero(self.counts == 0).tolist()
        full = np.flatnonzero(self.counts)
        return [(place, int(full[np.searchsorted(full, place) - 1])) for place in empty]

    def only(self, places: NDArray[np.int64]) -> "Plan":
        """Return the plan of some of the sequences, where all draw."""
        seqs = [self.seqs[place] for place in places.tolist()]
        rows, starts, counts = self.rows[places], self.starts[places], self.counts[places]
        return Plan(seqs, rows, starts, counts, seqs, self.draws[places])

    def of_drawing(self, column: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the entries of a column that belong to the sequences in `drawing_seqs`."""
        return column if len(self.drawing_seqs) == len(self.seqs) else column[self.draws]
