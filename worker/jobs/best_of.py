"""best_of: a job that draws more answers to each prompt than it shows, the likeliest at the end."""

import time
from dataclasses import dataclass, field

from penstock.schemas.params.sampling import SamplingParams
from penstock.worker.engine.io.messages import Output
from penstock.worker.jobs.active_job import ActiveJob
from penstock.worker.text.best_of import mean_logprob, with_logprobs
from penstock.worker.text.completion import Completion, TextPiece


@dataclass(slots=True, eq=False)
class BestOfJob(ActiveJob):
    """Runs `best_of` sequences a prompt, and makes its `n` completions of the likeliest.

    Nothing of a prompt's answers is logged before all of its candidates have ended. Their tokens
    follow from the job's seed, so another worker that draws them again ranks them alike.

    candidates  `best_of` of each prompt, one prompt after the other; their places are the indices
                of the sequences
    """

    candidates: list[Completion] = field(default_factory=list)
    _pieces: dict[int, TextPiece] = field(default_factory=dict)
    _totals: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        num_drawn, n = self.job.params.num_drawn, self.job.params.n
        for first in self.completions[::n]:
            assert isinstance(first, Completion), "a vector has no candidates"
            self.candidates += [first.anew() for _ in range(num_drawn)]
        ActiveJob.__post_init__(self)  # a dataclass with slots has no other super

    @property
    def num_sequences(self) -> int:
        return len(self.candidates)

    def has_ended(self, index: int) -> bool:
        return self.candidates[index].is_finished

    def open_choices(self) -> list[int]:
        return [
            index
            for index, candidate in enumerate(self.candidates)
            if not candidate.is_finished and not self._is_shown(index)
        ]

    def sampling_params(self) -> SamplingParams:
        return with_logprobs(ActiveJob.sampling_params(self))

    def drawn_ids(self, index: int) -> list[int]:
        return list(self.candidates[index].token_ids)

    def take(self, index: int, output: Output) -> bool:
        candidate = self.candidates[index]
        if candidate.is_finished or self.failure is not None or self.is_spent:
            return False
        piece = candidate.take(output)
        pending = self._pieces.get(index)
        self._pieces[index] = pending.joined(piece) if pending else piece
        logprobs = (output.logprobs or [])[: len(piece.token_ids)]
        self._totals[index] = self._totals.get(index, 0.0) + sum(
            logprob.logprob for logprob in logprobs
        )
        self._num_cached.setdefault(index, output.num_cached)
        if not self.times.first_ns:
            self.times.first_ns = time.time_ns()
        if piece.finish_reason is None:
            return False
        self._num_open -= 1
        num_drawn = self.job.params.num_drawn
        first = index - index % num_drawn
        if all(peer.is_finished for peer in self.candidates[first : first + num_drawn]):
            self._show(range(first, first + num_drawn))
        return output.finish_reason is None

    def _num_drawn(self) -> int:
        num_drawn = sum(len(candidate.token_ids) for candidate in self.candidates)
        return max(ActiveJob._num_drawn(self), num_drawn)

    def _is_shown(self, index: int) -> bool:
        """Return whether the answers to the candidate's prompt are in the log."""
        params = self.job.params
        first = index // params.num_drawn * params.n
        return all(
            completion.is_finished for completion in self.completions[first : first + params.n]
        )

    def _show(self, places: range) -> None:
        """Make a prompt's completions of its likeliest candidates; of equal ones the first."""

        def rank(index: int) -> float:
            return -mean_logprob(self._totals[index], len(self.candidates[index].token_ids))

        completions = list(self.completions)
        first = places.start // self.job.params.num_drawn * self.job.params.n
        for choice, index in enumerate(sorted(places, key=rank)[: self.job.params.n], first):
            if completions[choice].is_finished:  # an earlier attempt logged it
                continue
            completions[choice] = self.candidates[index]
            self._pending[choice] = self._pieces[index]
            self.num_behind += len(self._pieces[index].token_ids)
        self.completions = completions
        self.behind_since_s = time.monotonic()
        if not self._num_open:
            self.times.last_ns = time.time_ns()
