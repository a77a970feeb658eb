"""The engine's input and output messages: token ids and numbers, never text."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from penstock.schemas.event import ErrorBody, FinishReason
from penstock.schemas.params.pooling import PoolingParams
from penstock.schemas.params.sampling import SamplingParams


class WordIds(NamedTuple):
    """The tokens of the texts that sampling parameters name.

    bad_words     no completion has one of these sequences
    dry_breakers  tokens over which no repetition reaches
    """

    bad_words: Sequence[list[int]] = ()
    dry_breakers: frozenset[int] = frozenset()


NO_WORDS = WordIds()


BATCH_PRIORITY = 2  # the class batch, which takes what others leave


@dataclass(frozen=True, slots=True)
class AddSequence:
    """A sequence to start, or to continue after the ids in `completion`, drawn elsewhere before.

    pooling  asks for a vector of the prompt in place of a completion, without its queries
    group    shared by sequences with the same prompt, computed once; "" for one of its own
    split    where the second text of a pair begins in a pooled prompt; 0: it is one text
    owner    its tenant: places are shared among the owners, in proportion to their weights
    """

    seq_id: str
    prompt: list[int]
    params: SamplingParams
    seed: int = 0
    choice: int = 0
    completion: list[int] = field(default_factory=list)
    cache_salt: bytes = b""
    priority: int = 0  # the sequence's class; a lower number runs first
    turn: int = 0  # microseconds, comparable over lanes; in a class the earlier goes first
    pooling: PoolingParams | None = None
    split: int = 0
    words: WordIds = NO_WORDS
    group: str = ""
    owner: str = ""
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class CancelSequence:
    """End the sequence without an output. One that has already ended is no error."""

    seq_id: str


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forget what was computed: nothing that comes later finds it. The I/O process passes it on."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """Give the model's memory back once nothing is left to do, and wait for Wake.

    The I/O process is to take no new jobs, and to hand back those that still run after `seconds`.
    """

    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Wake:
    pass


# An engine passes over a command that means nothing to it.
Command = AddSequence | CancelSequence | ResetPrefixCache | Sleep | Wake

# One slice of a step: sequence id, tokens to compute, tokens computed before.
PlanRow = tuple[str, int, int]


class Logprob(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The log probabilities of the drawn token and of the likeliest tokens, likeliest first."""

    token_id: int
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class Output(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The result of one step for one sequence. An error ends the sequence with no token.

    vector  what a pooled prompt becomes: float32, the lower bytes first; it comes with the token 0
    prompt_logprobs  where they are asked for, with the first token: of the prompt's second token
            and on; the first has nothing before it
    schema_error  why a completion that was held loosely is not what its schema says

    It is no dataclass, because one is made for each token and sent to another process.
    """

    seq_id: str
    token_ids: list[int]
    logprobs: list[Logprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached: int = 0
    error: ErrorBody | None = None
    vector: bytes | None = None
    prompt_logprobs: list[Logprob] | None = None
    schema_error: str | None = None


class StoredBlock(NamedTuple):
    """A full block that the prefix cache remembers from now on.

    parent     the digest of the block before it; None for the first of a prompt
    token_ids  None where nobody asked for them
    """

    digest: bytes
    parent: bytes | None
    token_ids: list[int] | None


BlockChange = StoredBlock | bytes  # the bytes are the digest of a block that is forgotten


class BatchLoad(NamedTuple):
    """The load of the class `batch`, which gives way to others.

    num_blocks   blocks that it holds, shared ones each time; they are in `num_held_blocks` too
    num_waiting  sequences without capacity; they are not in the other `num_waiting`
    most_seqs    the number of sequences with which it has enough to do
    """

    num_blocks: int
    num_waiting: int
    most_seqs: int


class Load(NamedTuple):
    """The load of an engine, counted at each step.

    num_waiting  sequences without capacity; not those whose grammar is being compiled
    batch        None for an engine in which nothing gives way once it runs
    """

    num_held_blocks: int = 0
    num_waiting: int = 0
    batch: BatchLoad | None = None


@dataclass(slots=True)
class Stats:
    """The engine's gauges as of now, and its counters since the start.

    `step_seconds` includes `scheduler_seconds`.
    """

    num_blocks: int = 0
    block_size: int = 0
    max_num_batched_tokens: int = 0
    num_held_blocks: int = 0
    num_cached_blocks: int = 0
    num_shared_blocks: int = 0  # how many more would be held if none were held by several
    num_live_slots: int = 0  # KV slots of held blocks that hold a token; the others are unused
    num_running: int = 0
    num_waiting: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0  # tokens of admitted sequences, in the cache or not
    cached_tokens: int = 0  # the same, in the prefix cache or a leader's blocks
    computed_tokens: int = 0  # all that went through the model, repeats after a preemption included
    generation_tokens: int = 0
    forked_sequences: int = 0  # sequences that went on from a prompt that another had computed
    recomputed_tokens: int = 0  # tokens computed again, after a preemption or another worker
    grammar_cache_hits: int = 0
    scheduler_seconds: float = 0.0
    step_seconds: float = 0.0
    histograms: dict[str, list[float]] = field(default_factory=dict)  # dumps of STEP_HISTOGRAMS
    is_asleep: bool = False
