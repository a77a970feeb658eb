"""The way from the queue to the engine: it reads jobs while there is room, and starts them."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.schemas.counted import counted
from penstock.schemas.delivery import Ending, Entry, JobSignal, Started
from penstock.schemas.errors import (
    BudgetExceeded,
    InvalidJob,
    PenstockError,
    PromptTooLong,
    Unavailable,
    UnsupportedTask,
    WorkerFailed,
)
from penstock.schemas.event import Failed
from penstock.schemas.job import Job
from penstock.schemas.keys import Lane
from penstock.schemas.process.time_awake import TimeAwake
from penstock.schemas.process.trace_context import log_fields
from penstock.schemas.queue.worker_queue import WorkerQueue
from penstock.worker.engine.io.limits import EngineLimits
from penstock.worker.engine.io.messages import NO_WORDS, AddSequence
from penstock.worker.jobs.active_job import ActiveJob, Times
from penstock.worker.jobs.best_of import BestOfJob
from penstock.worker.jobs.capacity import Capacity, ReadRequest
from penstock.worker.jobs.lease_clock import LeaseClock
from penstock.worker.jobs.pooled import Pooled
from penstock.worker.jobs.streamer import Streamer
from penstock.worker.jobs.text_choices import DONE, text_choices
from penstock.worker.process.log import log
from penstock.worker.process.sampling_defaults import Generation
from penstock.worker.process.settings import WorkerSettings
from penstock.worker.text.answer_form import TAGS, AnswerForm, refuse_budget
from penstock.worker.text.completion import Completion
from penstock.worker.text.model_tokenizer import ModelTokenizer
from penstock.worker.text.text_inputs import read_inputs

READ_BLOCK_MS = 1000
_RETRY_S = 0.5
_EMPTY_S = 1.0
LOOKS = 10  # at whether jobs are read, in the time after which they should have been
_PEEK_S = 0.05  # how often a full worker looks for a job that others would give way to
_PEEK_TEXTS_S = 0.2  # the same for a job that needs no room
_PEEK_BATCH_MS = 100  # how often a worker with enough jobs of the class batch looks for more
_INLINE_CHARS = 2000  # shorter texts are tokenised faster than a thread is woken


@dataclass(frozen=True, slots=True)
class Intake:
    """The parts of a worker that turn a job into sequences."""

    settings: WorkerSettings
    text: ModelTokenizer
    limits: EngineLimits
    generation: Generation

    async def prepare(self, attempt: Started) -> ActiveJob:
        """Return the job with its prompts as ids. Raises InvalidJob if it can never run."""
        times = Times(started_ns=time.time_ns())
        params = self.generation.applied(attempt.job.params)
        job = attempt.job.model_copy(update={"params": params})
        if job.text is not None:
            return await self._prepare_text(attempt, times)
        if attempt.priority_class == "text":
            sentence = "text is for jobs of `text` alone; give high, normal or batch"
            raise InvalidJob(f"priority_class: {sentence}", "priority_class")
        if job.pooling is None and not self.limits.generates:
            raise UnsupportedTask("generate", self.limits.tasks)
        job.refuse_large_answer(self.limits.max_model_len)
        attempt = replace(attempt, job=job)
        is_short = job.chat is None and job.guess_bytes() < _INLINE_CHARS
        if job.pooling is not None:
            return await self._prepare_pooled(attempt, times, is_short)
        prompts = self._read(job) if is_short else await asyncio.to_thread(self._read, job)
        job.refuse_large_scores(prompts)
        job.refuse_many_ids(prompts)
        if attempt.budget_left is not None:
            self._check_budget(attempt, sum(map(len, prompts)), attempt.budget_left)
            self._check_unshown(attempt, prompts, attempt.budget_left)
        enders = self.limits.eos_token_ids
        form = (
            await asyncio.to_thread(self._form, job, prompts) if job.chat else self._form(job, [])
        )
        tells = job.return_token_ids
        offsets: list[Sequence[int]] = [()] * len(prompts)
        if job.params.prompt_logprobs is not None:
            offsets = await asyncio.to_thread(self._prompt_offsets, job, prompts)
        completions = [
            Completion(self.text, job.params, enders, prompt, form.markup, tells, begins)
            for prompt, begins in zip(prompts, offsets, strict=True)
            for _ in range(job.params.n)
        ]
        has_words = job.params.bad_words or job.params.dry_multiplier
        words = await asyncio.to_thread(self.text.word_ids, job.params) if has_words else NO_WORDS
        kind = ActiveJob if job.params.num_sequences == job.params.n else BestOfJob
        return kind(
            attempt,
            prompts,
            completions,
            times=times,
            words=words,
            structure=form.structure,
        )

    def _form(self, job: Job, prompts: list[list[int]]) -> AnswerForm:
        if job.chat is None:
            refuse_budget(job.params)
            return AnswerForm(None, job.params.structured_outputs)
        holds_tags = TAGS not in self.limits.unsupported_fields
        return self.text.answer_form(job.chat, prompts[0], job.params, holds_tags)

    async def _prepare_text(self, attempt: Started, times: Times) -> ActiveJob:
        """Return a job that is done: the tokenizer's answers are its choices."""
        job = attempt.job
        choices = await asyncio.to_thread(text_choices, self.text, job, self.limits)
        active = ActiveJob(attempt, [[] for _ in choices], choices, times=times)
        for index in active.open_choices():
            active.take(index, DONE)
        return active

    async def _prepare_pooled(self, attempt: Started, times: Times, is_short: bool) -> ActiveJob:
        job = attempt.job
        assert job.pooling is not None
        args = self.text, job.prompts, job.pooling, self.limits
        inputs = read_inputs(*args) if is_short else await asyncio.to_thread(read_inputs, *args)
        if attempt.budget_left is not None:
            self._check_budget(attempt, sum(len(item.ids) for item in inputs), attempt.budget_left)
        assert self.limits.pooling is not None, "the inputs were read for it"
        is_class = self.limits.pooling.task_of(job.pooling) == "classify"
        labels = self.limits.pooling.labels if is_class else ()
        prompts, splits = [item.ids for item in inputs], [item.split for item in inputs]
        return ActiveJob(
            attempt, prompts, [Pooled(labels) for _ in inputs], times=times, splits=splits
        )

    def additions(self, active: ActiveJob) -> list[AddSequence]:
        job = active.job
        return active.additions(self.settings.cache_salt(job.tenant, job.cache_salt))

    def _check_budget(self, attempt: Started, num_prompt: int, num_left: int) -> None:
        if not attempt.log and num_prompt >= num_left:
            has = counted(num_prompt, "token")
            sentence = f"prompt: {has}; the account's budget has {num_left} left"
            raise BudgetExceeded(sentence, "prompt", reset_at=attempt.budget_reset_at)

    def _check_unshown(self, attempt: Started, prompts: list[list[int]], num_left: int) -> None:
        """Raise BudgetExceeded where answers that are drawn and not shown may be more than is left.

        A budget that ends meanwhile cannot end them: none is shown before all are drawn.
        """
        params = attempt.job.params
        if params.num_drawn == params.n and not params.use_beam_search:
            return
        num_prompt = [len(prompt) for prompt in prompts]
        most = sum(self.limits.max_tokens(count, params) for count in num_prompt)
        num_tokens = sum(num_prompt) + params.num_drawn * most
        if num_tokens > num_left:
            field = "best_of" if params.best_of else "n"
            raise BudgetExceeded(
                f"{field}: {params.num_drawn} answers drawn to each prompt may take {num_tokens} "
                f"tokens; the account's budget has {num_left} left; ask for fewer, or less "
                "max_tokens",
                field,
                reset_at=attempt.budget_reset_at,
            )

    def _read(self, job: Job) -> list[list[int]]:
        args = job.params, self.limits.prompt_room(job.params)
        if job.chat is not None:
            param, prompts = "messages", [self.text.render(job.chat, *args)]
        else:
            param = "prompt"
            prompts = [self.text.prompt_ids(prompt, *args) for prompt in job.prompts]
        for prompt in prompts:
            self._check(job, prompt, param)
        return prompts

    def _prompt_offsets(self, job: Job, prompts: list[list[int]]) -> list[Sequence[int]]:
        texts = job.prompts or prompts  # a chat's text is nowhere shown but as its tokens
        return [
            self.text.prompt_offsets(prompt, ids, job.params)
            for prompt, ids in zip(texts, prompts, strict=True)
        ]

    def _check(self, job: Job, prompt: list[int], param: str) -> None:
        if len(prompt) >= self.limits.max_model_len:
            raise PromptTooLong(len(prompt), self.limits.max_model_len, param)
        error = self.limits.check(AddSequence("", prompt, job.params))
        if error is not None:
            raise error


class Consumer:
    """The reader of one lane, which gives its jobs to one streamer."""

    def __init__(
        self,
        queue: WorkerQueue,
        incarnation: str,
        lease: LeaseClock,
        streamer: Streamer,
        intake: Intake,
        capacity: Capacity,
        make_empty: Callable[[], Awaitable[None]],
    ) -> None:
        self._queue = queue
        self._incarnation = incarnation
        self._lease = lease
        self._streamer = streamer
        self._intake = intake
        self._capacity = capacity
        self._make_empty = make_empty
        self._is_closed = False
        self._awake = TimeAwake(intake.settings.step_timeout_s / LOOKS)
        self._looked_s = 0.0
        self._taking_up: dict[str, JobSignal] = {}
        self._cut_off: list[str] = []  # jobs whose start was cancelled: they may be this worker's

    def close(self) -> None:
        """Read no more jobs; a job that was read and is not being started goes back."""
        self._is_closed = True

    def obey(self, signals: Mapping[str, JobSignal]) -> None:
        """Note signals to stop for jobs that are being started: they stop before a first step."""
        for job_id, signal in signals.items():
            if job_id in self._taking_up and signal in (JobSignal.CANCEL, JobSignal.DEADLINE):
                self._taking_up[job_id] = signal

    async def hand_back(self) -> None:
        """Hand back jobs whose start was cut off; for use when `run` was cancelled."""
        for job_id in self._cut_off:
            await self._give_up(job_id)

    def unread_s(self) -> float:
        """Return for how long it has not looked for jobs, as far as this process was awake."""
        return self._awake.now() - self._looked_s

    async def has_waiting_jobs(self) -> bool:
        """Return whether there are jobs that it should read."""
        if self._is_closed:
            return False
        try:
            counts = await self._queue.counts()
        except Unavailable:
            return False
        return counts.num_queued > counts.num_delayed + sum(counts.by_reason.values())

    @property
    def lane(self) -> Lane:
        return self._queue.lane

    async def run(self) -> None:
        """Read and start jobs until the lease is found lost."""
        async with asyncio.TaskGroup() as admissions:
            while not self._is_closed:
                ask = await self._capacity.wait(self)
                entries = await self._read(ask)
                if entries is None:
                    return
                if self._queue.must_be_empty:
                    await self._run_empty()
                for entry in entries:
                    # Decided here and now: what is read next depends on it.
                    is_admitted = self._capacity.admits(entry.job_id, entry.is_suspect)
                    admissions.create_task(self._start(entry, is_admitted))
                if entries:
                    continue
                if ask.down_to == "text":
                    await self._capacity.until_free(_PEEK_TEXTS_S, or_preempts=True)
                elif ask.down_to:
                    await self._capacity.until_free(_PEEK_S)
                else:
                    await self._news(READ_BLOCK_MS if ask.batch != 0 else _PEEK_BATCH_MS)

    async def _run_empty(self) -> None:
        """Hand back all that the worker has, so that a suspect can run alone."""
        log.info("jobs are handed back: a job that may crash workers is to run alone")
        await self._make_empty()
        try:
            async with asyncio.timeout(_EMPTY_S):
                await self._capacity.until_empty(self)
        except TimeoutError:
            return  # a job that was just being started is in work now; the next try hands it back

    async def _read(self, ask: ReadRequest) -> list[Entry] | None:
        entries: list[Entry] = []
        await self._lease.holds()
        incarnation, is_alone = self._incarnation, not self._capacity.is_used
        try:
            reply = await self._queue.read(
                incarnation,
                ask.count,
                is_alone,
                ask.down_to,
                self._capacity.step_us,
                ask.batch,
                ask.held_rows,
            )
            entries = reply or []
            return reply
        except Unavailable as error:
            log.warning("queue could not be read, trying again: %s", error.message)
            await asyncio.sleep(_RETRY_S)
            return []
        finally:
            if ask.down_to != "text":
                self._looked_s = self._awake.now()
            num_batch = sum(entry.is_batch for entry in entries)
            self._capacity.note_read(self, ask, len(entries), num_batch)

    async def _news(self, most_ms: int) -> None:
        """Wait for jobs that the last read did not find; no room is kept meanwhile."""
        try:
            await self._queue.news(most_ms)
        except Unavailable as error:
            log.warning("queue could not be listened to, trying again: %s", error.message)
            await asyncio.sleep(_RETRY_S)

    async def reap(self, lease_ms: int) -> None:
        """Hand on the jobs of dead workers and others that nobody holds.

        It looks when the next lease lapses, and at least twice in the time of a lease.
        """
        while True:
            left_ms = None
            try:
                while count := await self._queue.reap():
                    log.info("handed on %d jobs of workers whose lease lapsed", count)
                left_ms = await self._queue.next_lapse_ms()
            except Unavailable as error:
                log.warning("lapsed leases could not be looked for: %s", error.message)
            wait_ms = lease_ms / 2 if left_ms is None else min(left_ms, lease_ms / 2)
            await asyncio.sleep((wait_ms + lease_ms * random.uniform(0.01, 0.05)) / 1000)

    async def keep_house(self, lease_ms: int) -> None:
        """Hand on jobs that this worker does not know, and end jobs that nobody waits for.

        It does so twice in the time of a lease.
        """
        while True:
            await asyncio.sleep(lease_ms / 2000 * random.uniform(0.8, 1.2))  # not all at once
            try:
                await self._release_unknown(2 * lease_ms)
                await self._queue.sweep()
            except Unavailable as error:
                log.warning("queue could not be swept: %s", error.message)

    async def _release_unknown(self, idle_ms: int) -> None:
        """Hand on jobs that Redis takes for this worker's and that it does not have.

        A server that lost its newest writes (a failover, a power loss) may have lost a job's end.
        """
        incarnation = self._incarnation
        job_ids = await self._queue.held(incarnation, idle_ms)
        strays = job_ids - self._streamer.jobs.keys() - self._taking_up.keys()
        if strays and (count := await self._queue.release(incarnation, strays)):
            log.warning("handed on %d jobs that this worker held and did not know", count)

    async def _start(self, entry: Entry, is_admitted: bool) -> None:
        self._taking_up[entry.job_id] = JobSignal.KEEP
        try:
            if is_admitted and not self._is_closed:
                await self._start_now(entry)
            else:
                await self._give_up(entry.job_id)
        except Unavailable as error:
            # It stays claimed; the next lease's reaper, or a release, hands it on.
            log.warning("job %s could not be started: %s", entry.job_id, error.message)
            await self._give_up(entry.job_id)
        except asyncio.CancelledError:
            self._cut_off.append(entry.job_id)
            raise
        finally:
            self._taking_up.pop(entry.job_id, None)
            self._capacity.note_prepared(entry.is_batch)
            if entry.job_id not in self._streamer.jobs:
                self._capacity.end_trial(entry.job_id)

    async def _start_now(self, entry: Entry) -> None:
        attempt = await self._queue.start(self._incarnation, entry)
        if attempt is None:
            return
        try:
            active = await self._intake.prepare(attempt)
        except PenstockError as error:
            await self._refuse(attempt, error)
        except Exception as error:
            # One job that our code cannot read must not end the others.
            log.exception("job %s could not be prepared", entry.job_id)
            kind = type(error).__name__
            await self._refuse(attempt, WorkerFailed(f"the worker failed to read the job ({kind})"))
        else:
            self._begin(active)

    def _begin(self, active: ActiveJob) -> None:
        log.debug(
            "job %s began: %d prompts, %d tokens, %d choices, %d tokens made before",
            active.job.job_id,
            len(active.prompts),
            sum(map(len, active.prompts)),
            len(active.completions),
            active.position,
            extra=active.log_fields,
        )
        self._streamer.admit(active, self._intake.additions(active))
        signal = self._taking_up.get(active.job.job_id, JobSignal.KEEP)
        self._streamer.obey({active.job.job_id: signal})

    async def _refuse(self, attempt: Started, error: PenstockError) -> None:
        job = attempt.job
        fields = log_fields(job.job_id, job.traceparent)
        log.info("job %s was refused: %s", job.job_id, error.code, extra=fields)
        end = Failed(position=attempt.position, state="failed", error=error.body())
        ending = Ending(job, attempt.epoch, attempt.log, len(attempt.log), end)
        await self._queue.finish(self._incarnation, ending)

    async def _give_up(self, job_id: str) -> None:
        while True:
            try:
                await self._queue.release(self._incarnation, [job_id])
                return
            except Unavailable:
                await asyncio.sleep(_RETRY_S)
