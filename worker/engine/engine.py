"""The engine and its loop (continuous batching): schedule a step, run it, update the sequences."""

import time
from concurrent.futures import Future
from functools import partial
from typing import Protocol

import msgspec
import numpy as np

from penstock.schemas.errors import PenstockError, WorkerFailed
from penstock.schemas.metrics import names
from penstock.worker.engine.any_engine import AnyEngine
from penstock.worker.engine.beams import Beams, CopyingRunner
from penstock.worker.engine.cache.block_changes import BlockChanges
from penstock.worker.engine.grammar.constraints import Grammar, Grammars
from penstock.worker.engine.io.limits import EngineLimits
from penstock.worker.engine.io.mailbox import Callback
from penstock.worker.engine.io.messages import (
    AddSequence,
    Command,
    Load,
    Logprob,
    Output,
    ResetPrefixCache,
    Stats,
)
from penstock.worker.engine.running.runner import Launched
from penstock.worker.engine.sampling.sampler import NO_TOKEN, DrawnTokens, Sampled
from penstock.worker.engine.scheduling.scheduler import Scheduler
from penstock.worker.engine.scheduling.step_time import num_pairs
from penstock.worker.engine.sequences.additions import sequence_of
from penstock.worker.engine.sequences.columns import Numbers
from penstock.worker.engine.sequences.endings import end_of, refusal, why_no_token
from penstock.worker.engine.sequences.sequence import Plan, Sequence, Status


class Runner(CopyingRunner, Protocol):
    """A way to compute plans."""

    def run(self, plan: Plan) -> Sampled:
        """Compute the plan, and draw the tokens that follow from it.

        One token is drawn for each slice that reaches its sequence's end, in the plan's order.
        """

    def zero(self, blocks: list[int]) -> None:
        """Make the blocks harmless to the sequences that get them next."""


class AheadRunner(Protocol):
    """A way to compute plans whose tokens the host does not know yet."""

    def launch(
        self, plan: Plan, after: DrawnTokens | None = None, places: Numbers | None = None
    ) -> Launched:
        """Launch the plan's forward pass, as `ModelRunner.launch` says."""

    def draw(self, step: Launched) -> DrawnTokens:
        """Draw the tokens that follow from the plan."""


class Engine(AnyEngine):
    """The engine: tokens in, tokens out. It knows nothing of text, Redis or HTTP.

    ahead  the runner, where a step's forward pass is launched before the tokens of the step before
           it are read; the host then works while the device computes
    """

    def __init__(
        self,
        limits: EngineLimits,
        scheduler: Scheduler,
        runner: Runner,
        grammars: Grammars,
        ahead: AheadRunner | None = None,
    ) -> None:
        super().__init__(limits)
        self.scheduler = scheduler
        self.runner = runner
        self.grammars = grammars
        self.ahead = ahead
        self._next_step: Launched | None = None  # launched ahead
        self._num_step_tokens, self._num_step_pairs = 0, 0.0  # the last step's
        self._seqs: dict[str, Sequence] = {}
        self._beams = Beams(scheduler, runner, partial(sequence_of, limits=limits), self._note_end)
        self._stats = Stats(limits.num_blocks, limits.block_size, scheduler.max_num_batched_tokens)
        self._tallies = {metric.stat: metric.tally() for metric in names.STEP_HISTOGRAMS}
        self._step_tokens = self._tallies["step_tokens"]
        grammars.note_compiled = self._tallies["compile_seconds"].observe

    def step(self) -> list[Output]:
        """Compute one step; return the new tokens, and the errors of refused sequences."""
        outputs = self.mailbox.drain(self._carry_out)
        begin = time.perf_counter()
        step = self._take_launched()
        if step is not None:
            outputs += self._finish(step)
        elif plan := self._schedule():
            outputs += (
                self._update(plan, self.runner.run(plan))
                if self.ahead is None
                else self._finish(self.ahead.launch(plan))
            )
        else:
            return outputs
        seconds = time.perf_counter() - begin
        self._stats.num_steps += 1
        self._stats.step_seconds += seconds
        self.scheduler.note_step(self._num_step_tokens, self._num_step_pairs, seconds)
        return outputs

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting or self.mailbox)

    def follow_blocks(self, with_token_ids: bool) -> BlockChanges:
        pool = self.scheduler.pool
        pool.changes = BlockChanges(pool.block_size, with_token_ids)
        return pool.changes

    def load(self) -> Load:
        scheduler = self.scheduler
        return Load(scheduler.pool.num_held, scheduler.num_waiting, scheduler.batch_load())

    def stats(self) -> Stats:
        pool = self.scheduler.pool
        self._stats.num_running = len(self.scheduler.running)
        num_seqs = len(self._seqs) + self._beams.num_beams
        self._stats.num_waiting = num_seqs - len(self.scheduler.running)
        self._stats.num_held_blocks = pool.num_held
        self._stats.num_cached_blocks = pool.num_cached
        self._stats.num_shared_blocks = pool.num_shared
        self._stats.forked_sequences = self.scheduler.num_forks
        self._stats.num_live_slots = self.scheduler.num_live_slots()
        self._stats.num_preemptions = self.scheduler.num_preemptions
        self._stats.prompt_tokens = self.scheduler.num_admitted_tokens
        self._stats.cached_tokens = self.scheduler.num_cached_tokens
        self._stats.recomputed_tokens = self.scheduler.num_recomputed_tokens
        self._stats.grammar_cache_hits = self.grammars.num_hits
        self._stats.histograms = {stat: tally.dump() for stat, tally in self._tallies.items()}
        return self._stats

    def _schedule(self) -> Plan:
        begin = time.perf_counter()
        plan = self.scheduler.schedule()
        self._stats.scheduler_seconds += time.perf_counter() - begin
        self._note(plan)
        return plan

    def _note(self, plan: Plan) -> None:
        if plan and self.note_plan is not None:
            self.note_plan([(at.seq.seq_id, at.count, at.start) for at in plan])

    def _take_launched(self) -> Launched | None:
        """Return the step that was launched ahead, without sequences that have ended since."""
        step, self._next_step = self._next_step, None
        if step is None:
            return None
        runs = [seq.status is Status.RUNNING for seq in step.plan.seqs]
        if all(runs):
            return step
        return step.only(np.flatnonzero(runs)) if any(runs) else None

    def _finish(self, step: Launched) -> list[Output]:
        """Draw the step's tokens, launch the next step if that can be, and record this one."""
        assert self.ahead is not None
        draw = self.ahead.draw(step)
        after = self.scheduler.plan_ahead(step.plan)
        if after is not None:
            plan, places = after
            self._note(plan)
            self._next_step = self.ahead.launch(plan, draw, places)
        return self._update(step.plan, draw.read())

    def _carry_out(self, command: Command) -> Output | None:
        if isinstance(command, ResetPrefixCache):
            self.scheduler.pool.forget_all()
        return super()._carry_out(command)

    def _add(self, addition: AddSequence) -> None:
        if addition.params.use_beam_search:
            self._beams.add(addition)
            return
        seq = sequence_of(addition, self.limits)
        self._seqs[seq.seq_id] = seq
        if addition.params.structured_outputs is None:
            self.scheduler.add(seq)
            return
        grammar = self.grammars.compile(addition.params.structured_outputs)
        ready = Callback(partial(self._constrain, seq, grammar))
        grammar.add_done_callback(lambda _: self.mailbox.put(ready))

    def _constrain(self, seq: Sequence, grammar: Future[Grammar]) -> Output | None:
        """Start a sequence whose grammar is ready, or refuse it. Until now it held no blocks."""
        if seq.status is Status.DONE:
            return None
        error = grammar.exception()
        if error is not None:
            del self._seqs[seq.seq_id]
            return refusal(
                seq.seq_id, error if isinstance(error, PenstockError) else WorkerFailed(str(error))
            )
        seq.constraint = grammar.result().constraint(seq.token_ids[seq.num_prompt :])
        self.scheduler.add(seq)
        return None

    def _cancel(self, seq_id: str) -> None:
        seq = self._seqs.get(seq_id)
        if seq is not None:
            self._end(seq)
        else:
            self._beams.cancel(seq_id)

    def _end(self, seq: Sequence) -> None:
        del self._seqs[seq.seq_id]
        self.scheduler.remove(seq)
        self._note_end(seq)

    def _note_end(self, seq: Sequence) -> None:
        self._tallies["request_preemptions"].observe(seq.num_preemptions)
        if seq.num_cached is not None:
            self._tallies["prefill_computed_tokens"].observe(seq.num_prompt - seq.num_cached)

    def _update(self, plan: Plan, sample: Sampled) -> list[Output]:
        """Record what the step computed, and end the sequences that are complete."""
        columns, block_size = self.scheduler.columns, self.limits.block_size
        ends = plan.starts + plan.counts
        columns.num_computed[plan.rows] = ends
        for place in np.flatnonzero(ends // block_size > plan.starts // block_size).tolist():
            self.scheduler.pool.remember(
                plan.seqs[place], int(plan.starts[place]), int(ends[place])
            )
        for place, logprobs in sample.prompt_logprobs.items():
            plan.seqs[place].score(int(plan.starts[place]), logprobs)
        for place, leader in plan.forks():
            if (scores := plan.seqs[leader].prompt_logprobs) is not None:
                plan.seqs[place].prompt_logprobs = [*scores]
        if self.scheduler.pool.states is not None:
            self.scheduler.keep_states(plan, sample.spoilt_places)
        num_tokens = int(plan.counts.sum())
        self._num_step_tokens, self._num_step_pairs = (
            num_tokens,
            num_pairs(plan.starts, plan.counts),
        )
        self._stats.computed_tokens += num_tokens
        self._step_tokens.observe(num_tokens)
        outputs = []
        for place in sample.spoilt_places:
            if not plan.draws[place]:
                outputs += self._spoil(plan.seqs[place])
        return outputs + self._draw(plan, sample)

    def _draw(self, plan: Plan, sample: Sampled) -> list[Output]:
        if not plan.drawing_seqs:
            return []
        columns = self.scheduler.columns
        seqs, token_ids = plan.drawing_seqs, sample.token_ids
        special = columns.draw(plan.of_drawing(plan.rows), np.array(token_ids))
        rest: list[Output] = []
        if special.any():
            places = np.flatnonzero(special).tolist()
            rest = self._watch([(seqs[at], token_ids[at], sample.logprobs[at]) for at in places])
            plain = np.flatnonzero(~special).tolist()
            seqs, token_ids = [seqs[at] for at in plain], [token_ids[at] for at in plain]
        for seq, token_id in zip(seqs, token_ids, strict=True):
            seq.token_ids.append(token_id)
        outputs = [
            Output(seq.seq_id, [token_id], None, None, None, seq.num_cached or 0)
            for seq, token_id in zip(seqs, token_ids, strict=True)
        ]
        self._stats.generation_tokens += len(outputs) + sum(
            [len(output.token_ids) for output in rest]
        )
        return outputs + rest

    def _watch(self, tokens: list[tuple[Sequence, int, Logprob | None]]) -> list[Output]:
        """Look closely at what was drawn for some sequences: they may end, or be beams."""
        outputs: list[Output] = []
        beams = []
        for seq, token_id, logprob in tokens:
            if seq.status is Status.DONE:  # a beam of a search that just failed
                continue
            scores, seq.prompt_logprobs = seq.prompt_logprobs, None
            # Without all scores the logits of a prompt's token were no numbers.
            if token_id == NO_TOKEN or (scores is not None and len(scores) != seq.num_prompt - 1):
                outputs += self._spoil(seq)
            elif seq.is_beam:
                assert logprob is not None, "a beam is told its likeliest tokens"
                beams.append((seq, logprob))
            else:
                outputs += self._append(seq, token_id, logprob, scores)
        return outputs + self._beams.take(
            beam for beam in beams if beam[0].status is not Status.DONE
        )

    def _spoil(self, seq: Sequence) -> list[Output]:
        """End the sequence with an error, and clear the blocks of its own, which may hold NaN."""
        self.runner.zero(self.scheduler.pool.forget_own(seq))
        return self._fail(seq, why_no_token(seq))

    def _fail(self, seq: Sequence, error: PenstockError) -> list[Output]:
        if seq.is_beam:
            return self._beams.fail(seq, error)
        self._end(seq)
        return [refusal(seq.seq_id, error)]

    def _append(
        self,
        seq: Sequence,
        token_id: int,
        logprob: Logprob | None,
        scores: list[Logprob] | None,
    ) -> list[Output]:
        seq.token_ids.append(token_id)
        if seq.constraint is not None:
            seq.constraint.advance(token_id)
            if seq.constraint.error is not None:
                return self._fail(seq, why_no_token(seq))
        finish_reason, stop_reason = end_of(seq, token_id)
        if finish_reason is not None:
            self._end(seq)
        output = Output(
            seq.seq_id,
            [token_id],
            None if logprob is None else [logprob],
            finish_reason,
            stop_reason,
            seq.num_cached or 0,
            prompt_logprobs=scores,
        )
        if finish_reason == "stop" and seq.constraint is not None and seq.constraint.loose_schema:
            self._check(seq, output)
            return []
        return [output]

    def _check(self, seq: Sequence, output: Output) -> None:
        """Hold the sequence's last output back until it is known whether its form is right."""
        assert seq.constraint is not None
        completion = seq.token_ids[seq.num_prompt :]
        if completion[-1] in seq.stop_ids:
            completion.pop()
        verdict = self.grammars.check(seq.constraint.loose_schema, completion)

        def with_verdict() -> Output:
            return msgspec.structs.replace(output, schema_error=verdict.result() or None)

        verdict.add_done_callback(lambda _: self.mailbox.put(Callback(with_verdict)))
