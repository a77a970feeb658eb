"""A model as forgetful as a transformer: what it knows of a token is in the slots alone.

A fake that looked at `seq.token_ids` would not notice a wrong, stale or lost block.
"""

import hashlib

from penstock.worker.engine.engine import Engine
from penstock.worker.engine.messages import AddSequence
from penstock.worker.engine.sampler import Sampled
from penstock.worker.engine.sequence import Plan, Sequence, Slice

VOCAB = 97


def _mix(states: list[bytes], token_id: int) -> bytes:
    return hashlib.blake2b(b"".join(states) + bytes([token_id]), digest_size=4).digest()


def _next_token(state: bytes) -> int:
    return int.from_bytes(state) % VOCAB


def expected_completion(prompt: list[int], count: int) -> list[int]:
    """The same recurrence, without any cache."""
    token_ids, states = list(prompt), list[bytes]()
    while len(token_ids) < len(prompt) + count:
        states += [_mix(states, token_id) for token_id in token_ids[len(states) : len(states) + 1]]
        if len(states) == len(token_ids):
            token_ids.append(_next_token(states[-1]))
    return token_ids[len(prompt) :]


class ForgetfulRunner:
    """Keeps the plans, so that tests can look at them."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots = [b"never written"] * (num_blocks * block_size)
        self.plans: list[list[tuple[str, int]]] = []

    def run(self, plan: Plan) -> Sampled:
        self.plans.append([(piece.seq.seq_id, piece.count) for piece in plan])
        for piece in plan:  # all are read before any is drawn, as in one forward pass
            self._compute(piece)
        drawn = [
            _next_token(self._read(piece.seq, len(piece.seq.token_ids))[-1])
            for piece in plan
            if piece.draws
        ]
        return Sampled(drawn, [None] * len(drawn))

    def zero(self, blocks: list[int]) -> None:
        """Nothing here is ever NaN."""

    def _compute(self, piece: Slice) -> None:
        seq = piece.seq
        for position in range(piece.start, piece.start + piece.count):
            self.slots[self._slot(seq, position)] = _mix(
                self._read(seq, position), seq.token_ids[position]
            )

    def _read(self, seq: Sequence, count: int) -> list[bytes]:
        return [self.slots[self._slot(seq, position)] for position in range(count)]

    def _slot(self, seq: Sequence, position: int) -> int:
        return (
            seq.block_table[position // self.block_size] * self.block_size
            + position % self.block_size
        )


def run_to_end(
    engine: Engine, additions: list[AddSequence], max_steps: int = 100_000
) -> dict[str, list[int]]:
    for addition in additions:
        engine.add(addition)
    completions: dict[str, list[int]] = {addition.seq_id: [] for addition in additions}
    for _ in range(max_steps):
        if not engine.busy:
            return completions
        for output in engine.step():
            assert output.error is None, output.error
            completions[output.seq_id] += output.token_ids
    raise AssertionError(f"still busy after {max_steps} steps")
