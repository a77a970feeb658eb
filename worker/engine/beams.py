"""The beams of searches, as sequences of the scheduler."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

from penstock.schemas.counted import counted
from penstock.schemas.errors import InvalidJob, PenstockError
from penstock.worker.engine.io.messages import AddSequence, Logprob, Output
from penstock.worker.engine.sampling.beam_search import BeamSearch
from penstock.worker.engine.scheduling.scheduler import Scheduler
from penstock.worker.engine.sequences.sequence import Sequence, Status


class CopyingRunner(Protocol):
    """A way to let sequences go on from what others have computed."""

    def copy(self, blocks: list[tuple[int, int]], rows: list[tuple[int, int]]) -> None:
        """Make the second of each pair a copy of the first: blocks, and the states of rows."""


@dataclass(slots=True, eq=False)
class _LiveSearch:
    """A search that runs.

    addition  the first that asked for one of its answers; all are alike
    seq_ids   the sequence ids of the answers that are owed, by their ranks
    seqs      the sequences of the search's beams, in their order
    logprobs  the likeliest next tokens, of the sequences that have computed them
    """

    addition: AddSequence
    search: BeamSearch
    seq_ids: dict[int, str] = field(default_factory=dict)
    seqs: list[Sequence] = field(default_factory=list)
    logprobs: dict[Sequence, Logprob] = field(default_factory=dict)


class Beams:
    """All searches of one engine.

    Each of the answers to a prompt is asked for as a sequence, all in one group, and gets all its
    tokens at once when the search is over. In the scheduler a search has a sequence for each beam.
    Their tokens are chosen once all of them have computed their logits. As a rule that is in one
    step; then a beam goes on where it is, and its copies share its blocks. Where capacity is short,
    those that have computed theirs wait for the others, and hold nothing: so a search needs no more
    room than one sequence.

    begin  makes the sequence of an addition
    note_end  is told of a sequence of each search that ends
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: CopyingRunner,
        begin: Callable[[AddSequence], Sequence],
        note_end: Callable[[Sequence], None],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._begin = begin
        self._note_end = note_end
        self._running: dict[str, _LiveSearch] = {}  # by their group, or the only sequence in it

    @property
    def num_beams(self) -> int:
        return sum(len(search.seqs) for search in self._running.values())

    def add(self, addition: AddSequence) -> None:
        """Owe one more answer; the first of a group begins its search."""
        key, rank = addition.group or addition.seq_id, addition.choice % addition.params.n
        if key not in self._running:
            seq = self._begin(replace(addition, seq_id=key))
            search = BeamSearch(addition.params, seq.max_tokens, seq.stop_ids)
            self._running[key] = _LiveSearch(addition, search, seqs=[seq])
            self._scheduler.add(seq)
        self._running[key].seq_ids[rank] = addition.seq_id

    def cancel(self, seq_id: str) -> None:
        """Owe an answer no more, and end a search of which nobody wants one."""
        for key, running in self._running.items():
            for rank, answer_id in running.seq_ids.items():
                if answer_id == seq_id:
                    del running.seq_ids[rank]
                    if not running.seq_ids:
                        self._end(key)
                    return

    def take(self, beams: Iterable[tuple[Sequence, Logprob]]) -> list[Output]:
        """Take what a step computed for beams; return the answers of searches that are over."""
        outputs, groups = [], dict[str, list[Sequence]]()
        for seq, likeliest in beams:
            self._running[seq.seq_id].logprobs[seq] = likeliest
            groups.setdefault(seq.seq_id, []).append(seq)
        for key, seqs in groups.items():
            running = self._running[key]
            if len(running.logprobs) == len(running.seqs):
                outputs += self._advance(key, running)
                continue
            for seq in seqs:
                self._scheduler.remove(seq)
        return outputs

    def fail(self, seq: Sequence, error: PenstockError) -> list[Output]:
        """End the search that a sequence belongs to, and refuse all its answers."""
        seq_ids = self._running[seq.seq_id].seq_ids
        self._end(seq.seq_id)
        return [Output(seq_id, [], error=error.body()) for seq_id in seq_ids.values()]

    def _advance(self, key: str, running: _LiveSearch) -> list[Output]:
        search, seqs = running.search, running.seqs
        search.advance([running.logprobs.pop(seq) for seq in seqs])
        if not search.beams:
            self._end(key)
            return self._answers(running)
        heirs = {beam.parent for beam in search.beams}
        for place, seq in enumerate(seqs):
            if place not in heirs:
                self._scheduler.remove(seq)
        next_ids: dict[Sequence, int] = {}
        blocks, rows, running.seqs = [], [], []
        for beam in search.beams:
            parent = seqs[beam.parent]
            if parent.status is Status.RUNNING and parent not in next_ids:
                next_ids[parent] = beam.token_ids[-1]
                running.seqs.append(parent)
                continue
            addition = replace(running.addition, seq_id=key, completion=beam.token_ids)
            child = self._begin(addition)
            blocks += self._scheduler.branch(child, parent)
            running.seqs.append(child)
            if child.status is Status.RUNNING:
                rows.append((parent.row, child.row))
        self._runner.copy(blocks, rows)
        for seq, token_id in next_ids.items():
            seq.token_ids.append(token_id)
            self._scheduler.columns.grow(seq)
        return []

    def _end(self, key: str) -> None:
        seqs = self._running.pop(key).seqs
        self._note_end(seqs[0])
        for seq in seqs:
            self._scheduler.remove(seq)

    def _answers(self, running: _LiveSearch) -> list[Output]:
        params, seq = running.addition.params, running.seqs[0]
        outputs = []
        for rank, seq_id in running.seq_ids.items():
            if rank >= len(running.search.answers):
                possible = counted(len(running.search.answers), "answer")
                sentence = f"{possible} can be made; ask for as many"
                outputs.append(Output(seq_id, [], error=InvalidJob(f"n: {sentence}", "n").body()))
                continue
            _, token_ids, logprobs = running.search.answers[rank]
            last = token_ids[-1]
            outputs.append(
                Output(
                    seq_id,
                    token_ids,
                    None if params.logprobs is None else logprobs,
                    "stop" if last in seq.stop_ids else "length",
                    last if last in params.stop_token_ids else None,
                    seq.num_cached or 0,
                )
            )
        return outputs
