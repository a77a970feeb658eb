"""A sequence in an engine of others, which begins each request anew.

Such an engine knows nothing of tokens that were drawn before, by another worker or before a
connection was lost. Where the next token depends on no more than the tokens before it, they are
simply added to the prompt. Where it depends on a state of the engine's (a seed's place, counts of
penalties, a grammar), the request is made again from its start, and the tokens that come again are
compared with those that are known.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.worker.engine.io.limits import EngineLimits
from penstock.worker.engine.io.messages import AddSequence

_SEEDS = 2**31  # what every server takes


class Diverged(Exception):
    """Raised when a request that was made again gave other tokens than it did before."""


@dataclass(slots=True)
class Continuation:
    """The tokens of one sequence, over all requests for it.

    max_tokens  the most in the whole completion
    token_ids   of the completion so far
    """

    addition: AddSequence
    max_tokens: int
    token_ids: list[int] = field(default_factory=list)
    _at: int = 0  # the place in the completion of the request's next token

    @classmethod
    def of(cls, addition: AddSequence, limits: EngineLimits) -> "Continuation":
        most = limits.max_tokens(len(addition.prompt), addition.params)
        return cls(addition, most, list(addition.completion))

    @property
    def can_go_on(self) -> bool:
        """Return whether the next token depends on no state of an engine's but the tokens."""
        params = self.addition.params
        is_seeded = params.seed is not None and params.temperature > 0
        counts = params.presence_penalty or params.frequency_penalty
        return not (is_seeded or counts or params.structured_outputs)

    def begin(self, again: bool) -> None:
        """Begin a request: from the start of the completion, or after what is made of it."""
        self._at = 0 if again else len(self.token_ids)

    @property
    def prompt(self) -> list[int]:
        """Return the prompt of the request that was begun."""
        return self.addition.prompt + self.token_ids[: self._at]

    @property
    def num_left(self) -> int:
        """Return the most tokens that the request may make."""
        return self.max_tokens - self._at

    @property
    def min_left(self) -> int:
        return max(0, self.addition.params.min_tokens - self._at)

    @property
    def seed(self) -> int | None:
        """Return the request's seed; None where the job asks for no certain one.

        It is the job's own for what begins with the job's first choice. Other choices, and what
        goes on later, draw from streams of their own.
        """
        addition = self.addition
        if addition.params.seed is None:
            return None
        if not addition.choice and not self._at:
            return addition.params.seed % _SEEDS
        key = f"{addition.seed}:{addition.choice}:{self._at}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") % _SEEDS

    def take(self, token_ids: Sequence[int]) -> int:
        """Add what the request made, and return how many of its first tokens were known.

        Raises Diverged where they are others than those known.
        """
        prefix = self.token_ids[self._at : self._at + len(token_ids)]
        if list(token_ids[: len(prefix)]) != prefix:
            raise Diverged
        self._at += len(token_ids)
        self.token_ids += token_ids[len(prefix) :]
        return len(prefix)

    @property
    def is_behind(self) -> bool:
        """Return whether the request has not come as far as an earlier one did."""
        return self._at < len(self.token_ids)
