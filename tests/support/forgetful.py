"""A model as forgetful as a transformer: what it knows of a token is in the slots alone.

A fake that looked at `seq.token_ids` would not notice a wrong, stale or lost block.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from penstock.schemas.params.sampling import SamplingParams
from penstock.worker.engine.cache.block_pool import BlockPool
from penstock.worker.engine.cache.state_pool import StatePool
from penstock.worker.engine.engine import Engine
from penstock.worker.engine.grammar.constraints import Grammars
from penstock.worker.engine.io.limits import EngineLimits
from penstock.worker.engine.io.messages import AddSequence
from penstock.worker.engine.sampling.sampler import DrawnTokens, Sampled
from penstock.worker.engine.scheduling.scheduler import Scheduler
from penstock.worker.engine.sequences.columns import Numbers
from penstock.worker.engine.sequences.sequence import Plan, Sequence, Slice

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
        self.copy(plan.copies_after, rows)
        return Computed(plan, states)

    def copy(self, blocks: list[tuple[int, int]], rows: list[tuple[int, int]]) -> None:
        size = self.block_size
        for source, target in blocks:
            copied = self.slots[source * size : (source + 1) * size]
            self.slots[target * size : (target + 1) * size] = copied

    def draw(self, computed: "Computed") -> DrawnTokens:
        tokens = [
            _next_token(state, seq.sampling.choice)
            for state, seq in zip(computed.states, computed.plan.drawing_seqs, strict=True)
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


def make_engine(
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    budget: int = 16,
    remembers: bool = True,
    threshold: int | None = None,
    goes_ahead: bool = False,
    num_states: int | None = None,
) -> tuple[Engine, ForgetfulRunner]:
    """num_states  of prefixes, that a model keeps which has a state; None: one that has none"""
    limits = EngineLimits(
        num_blocks * block_size, VOCAB, num_blocks, block_size, max_num_seqs, frozenset()
    )
    runner = ForgetfulRunner(num_blocks, block_size)
    states = None
    if num_states is not None:
        rows = range(max_num_seqs, max_num_seqs + num_states)
        runner = StatefulRunner(num_blocks, block_size, rows.stop)
        states = StatePool(rows, runner.copy_row) if rows else None
    pool = BlockPool(num_blocks, block_size, remembers and num_states != 0, states)
    scheduler = Scheduler(pool, max_num_seqs, budget, threshold)
    grammars = Grammars(Path(), 1000, frozenset())
    return Engine(limits, scheduler, runner, grammars, runner if goes_ahead else None), runner


def addition(seq_id: str, prompt: list[int], max_tokens: int, **more: object) -> AddSequence:
    return AddSequence(seq_id, prompt, SamplingParams(max_tokens=max_tokens, temperature=0), **more)


def assert_idle_and_whole(engine: Engine) -> None:
    pool = engine.scheduler.pool
    assert pool.num_held == 0
    assert not engine.scheduler.running and not engine.scheduler.waiting
    assert not pool._promises and not any(pool._holders)
    assert sorted([*pool._blank, *pool._lru]) == list(range(pool.num_blocks))
    assert set(pool._lru) == set(pool._blocks.values())
    assert {pool._digest[block] for block in pool._blocks.values()} == set(pool._blocks)
    if pool.states is not None:
        assert pool.states._rows.keys() <= pool._blocks.keys()


def stepped(engine: Engine, num_steps: int) -> None:
    for _ in range(num_steps):
        engine.step()


def running(engine: Engine) -> list[str]:
    return [seq.seq_id for seq in engine.scheduler.running]
