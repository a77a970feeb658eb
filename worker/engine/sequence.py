"""One token stream and its place in the KV cache."""

import hashlib
from array import array
from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from schemas.sampling import SamplingParams
from worker.engine.constraints import Constraint
from worker.engine.sampler import SamplerRow


class Status(Enum):
    """NEW: not with the scheduler yet, its grammar is being compiled."""

    NEW = auto()
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt and completion in one list; the first `num_computed` tokens have KV in the blocks.

    max_tokens  of the completion
    stop_ids    the end tokens too, unless they are ignored
    place       in line: class, turn in the class, order of addition; kept through preemption
    num_cached  tokens of the prompt found in the prefix cache at its first admission
    digests     of every full block's tokens, each with all before it; grows with the tokens
    awaited     digest of the block that another sequence computes for this one to find
    row         its row in the persistent batch while running
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
    num_computed: int = 0
    num_cached: int | None = None
    block_table: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    awaited: bytes | None = None
    row: int = -1

    @property
    def num_pending(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def num_completion(self) -> int:
        return len(self.token_ids) - self.num_prompt

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


class Slice(msgspec.Struct, frozen=True, gc=False, eq=False):
    """The next `count` pending tokens of a sequence, to be computed in one step.

    draws  whether the step reaches the last known token, so that the next one can be drawn

    Made for each sequence in each step: hence no dataclass.
    """

    seq: Sequence
    count: int
    draws: bool
