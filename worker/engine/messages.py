"""What goes into the engine and what comes out: token ids and numbers, never text."""

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from penstock.schemas.event import ErrorBody, FinishReason
from penstock.schemas.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class AddSequence:
    """A sequence to run, or to continue: the ids in `completion` were drawn before, elsewhere."""

    seq_id: str
    prompt: list[int]
    params: SamplingParams
    seed: int = 0
    choice: int = 0
    completion: list[int] = field(default_factory=list)
    cache_salt: bytes = b""
    priority: int = 0  # of its class: lower runs first
    turn: int = 0  # in its class the earlier goes first: microseconds, comparable over lanes


PlanRow = tuple[str, int, int]  # of a step: sequence, tokens to compute, tokens computed before


class Logprob(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Log probabilities of the drawn token and of the likeliest, likeliest first."""

    token_id: int
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class Output(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What one step did for one sequence. An error ends it with no token.

    Made once a token, and sent to another process: hence no dataclass.
    """

    seq_id: str
    token_ids: list[int]
    logprobs: list[Logprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached: int = 0
    error: ErrorBody | None = None


class Load(NamedTuple):
    """How full an engine is, counted at each step."""

    num_held_blocks: int = 0
    num_waiting: int = 0  # sequences that lack room; not those whose grammar is being compiled


@dataclass(slots=True)
class Stats:
    """Gauges as of now, and counters since the start; `step_seconds` includes the scheduler's."""

    num_blocks: int = 0
    block_size: int = 0
    max_num_batched_tokens: int = 0
    num_held_blocks: int = 0
    num_cached_blocks: int = 0
    num_live_slots: int = 0  # KV slots of held blocks that hold a token; the others are waste
    num_running: int = 0
    num_waiting: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0  # of sequences admitted, found in the cache or not
    cached_tokens: int = 0  # of those, found in the prefix cache
    computed_tokens: int = 0  # all that went through the model, again after a preemption too
    generation_tokens: int = 0
    scheduler_seconds: float = 0.0
    step_seconds: float = 0.0
