"""A model as forgetful as a transformer: what it knows of a token is in the slots alone.

A fake that looked at `seq.token_ids` would not notice a wrong, stale or lost block.
"""

import hashlib
from dataclasses import dataclass

from penstock.worker.engine.columns import Numbers
from penstock.worker.engine.engine import Engine
from penstock.worker.engine.messages import AddSequence
from penstock.worker.engine.sampler import DrawnTokens, Sampled
from penstock.worker.engine.sequence import Plan, Sequence, Slice

VOCAB = 97


def _mix(states: list[bytes], token_id: int) -> bytes:
    return hashlib.blake2b(b"".join(states) + bytes([token_id]), digest_size=4).digest()


def _next_token(state: bytes, choice: int) -> int:
    return (int.from_bytes(state) + choice) % VOCAB


def expected_completion(
    prompt: list[int], count: int, is_stateful: bool = False, choice: int = 0
) -> list[int]:
    """The same recurrence, without any cache."""
    token_ids, states, state = list(prompt), list[bytes](), b""
    while len(token_ids) < len(prompt) + count:
        token_id = token_ids[len(states)]
        state = _mix([state], token_id) if is_stateful else b""
        states.append(_mix([*states, state], token_id))
        if len(states) == len(token_ids):
            token_ids.append(_next_token(states[-1], choice))
    return token_ids[len(prompt) :]


@dataclass(frozen=True)
class Computed:
    """A step's plan, and the last state of each sequence that draws."""

    plan: Plan
    states: list[bytes]

    def only(self, places: Numbers) -> "Computed":
        return Computed(self.plan.only(places), [self.states[place] for place in places])


class ForgetfulRunner:
    """Keeps the plans, so that tests can look at them."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots = [b"never written"] * (num_blocks * block_size)
        self.plans: list[list[tuple[str, int]]] = []
        self.num_ahead = 0  # steps that were launched before the tokens of the last were read

    def run(self, plan: Plan) -> Sampled:
        return self.draw(self.launch(plan)).read()

    def launch(
        self, plan: Plan, after: DrawnTokens | None = None, places: Numbers | None = None
    ) -> "Computed":
        """Compute the plan. Tokens drawn by the step before come from there alone."""
        self.plans.append([(piece.seq.seq_id, piece.count) for piece in plan])
        self.num_ahead += after is not None
        states = []
        for at, piece in enumerate(plan):  # all are read before any is drawn
            known = piece.seq.token_ids[piece.start :][: piece.count]
            if after is not None:
                assert not known, "the host does not know it yet"
                known = [after.tokens[at if places is None else places[at]]]
            self._compute(piece, known)
            if piece.draws and not piece.count:
                states.append(states[-1])  # a fork draws from what is before it
            elif piece.draws:
                states.append(self._read(piece.seq, piece.start + piece.count)[-1])
        rows = [(plan.seqs[leader].row, plan.seqs[fork].row) for fork, leader in plan.forks()]
        self.copy(plan.copies, rows)
        return Computed(plan, states)

    def copy(self, blocks: list[tuple[int, int]], rows: list[tuple[int, int]]) -> None:
        size = self.block_size
        for source, target in blocks:
            copied = self.slots[source * size : (source + 1) * size]
            self.slots[target * size : (target + 1) * size] = copied

    def draw(self, computed: "Computed") -> DrawnTokens:
        tokens = [
            _next_token(state, seq.sampling.choice)
            for state, seq in zip(computed.states, computed.plan.drawing, strict=True)
        ]
        return DrawnTokens(tokens, lambda: Sampled(tokens, [None] * len(tokens)))

    def zero(self, blocks: list[int]) -> None:
        """Nothing here is ever NaN."""

    def _compute(self, piece: Slice, token_ids: list[int]) -> None:
        for position, token_id in enumerate(token_ids, piece.start):
            known = [*self._read(piece.seq, position), self._state(piece.seq, position, token_id)]
            self.slots[self._slot(piece.seq, position)] = _mix(known, token_id)

    def _state(self, seq: Sequence, position: int, token_id: int) -> bytes:
        return b""

    def _read(self, seq: Sequence, count: int) -> list[bytes]:
        return [self.slots[self._slot(seq, position)] for position in range(count)]

    def _slot(self, seq: Sequence, position: int) -> int:
        return (
            seq.block_table[position // self.block_size] * self.block_size
            + position % self.block_size
        )


class StatefulRunner(ForgetfulRunner):
    """Also keeps a state in each sequence's row, which is not to be had from the slots."""

    def __init__(self, num_blocks: int, block_size: int, num_rows: int) -> None:
        super().__init__(num_blocks, block_size)
        self.rows = [b"never written"] * num_rows

    def copy(self, blocks: list[tuple[int, int]], rows: list[tuple[int, int]]) -> None:
        super().copy(blocks, rows)
        for source, target in rows:
            self.copy_row(source, target)

    def copy_row(self, source: int, target: int) -> None:
        self.rows[target] = self.rows[source]

    def _state(self, seq: Sequence, position: int, token_id: int) -> bytes:
        self.rows[seq.row] = _mix([self.rows[seq.row] if position else b""], token_id)
        return self.rows[seq.row]


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
