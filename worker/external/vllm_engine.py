"""vLLM as a worker's engine, where it is installed: its scheduler, kernels and parallelism.

Its engine is stepped in this process, so no step runs after the worker's lease is lost; what it
runs in others, as for tensor parallelism or on Ray, is below it and ends with it.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Protocol

from pydantic import JsonValue

from penstock.schemas.errors import InvalidJob, PenstockError, StreamDiverged
from penstock.schemas.event import FinishReason
from penstock.schemas.params.sampling import SamplingParams
from penstock.worker.engine.any_engine import AnyEngine
from penstock.worker.engine.io.config import EngineConfig
from penstock.worker.engine.io.limits import EngineLimits
from penstock.worker.engine.io.messages import AddSequence, Load, Logprob, Output, Stats
from penstock.worker.engine.io.setting_facts import Obeyed, facts, unusual
from penstock.worker.external.continuation import Continuation, Diverged
from penstock.worker.external.shape import model_shape
from penstock.worker.process.loading import loading
from penstock.worker.process.log import log
from penstock.worker.process.settings import WorkerSettings

_SAME = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "ignore_eos", "logprobs",
)  # fmt: skip
# Of a word that another worker's completion began vLLM would not see the beginning.
UNSUPPORTED_FIELDS = frozenset(
    {
        "best_of", "use_beam_search", "length_penalty", "early_stopping",
        "bad_words", "logprob_token_ids", "prompt_logprobs", "thinking_token_budget",
        "repetition_detection",
        "top_n_sigma", "top_a", "typical_p", "xtc_probability", "xtc_threshold",
        "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
        "dry_sequence_breakers", "structured_outputs.structural_tag",
    }
)  # fmt: skip
_ENDS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
# Settings that are vLLM's arguments too, given where they are not as usual.
PASSED_ON = frozenset(name for name, fact in facts(EngineConfig, Obeyed).items() if fact.vllm)
_OF_SETTINGS = PASSED_ON | {"model", "tokenizer"}


class ToldLogprob(Protocol):
    """A chosen token's log probability, or a likely one's, as vLLM tells it."""

    logprob: float


class VLLM(Protocol):
    """The part of vLLM's engine that is used here."""

    def add_request(
        self,
        request_id: str,
        prompt: object,
        params: object,
        arrival_time: float | None = None,
        *,
        priority: int = 0,
    ) -> str: ...

    def abort_request(self, request_ids: list[str]) -> None: ...

    def step(self) -> list["Made"]: ...


class MadeChoice(Protocol):
    token_ids: list[int]
    logprobs: list[dict[int, ToldLogprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None


class Made(Protocol):
    """The output of a step for one request."""

    request_id: str
    outputs: list[MadeChoice]
    num_cached_tokens: int | None


class Counters(Protocol):
    num_running_reqs: int
    num_waiting_reqs: int
    kv_cache_usage: float


class Preemptions(Protocol):
    num_preempted_reqs: int


class StepRecorder:
    """Stands for vLLM's loggers: notes its counters at each step."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats

    def record(
        self,
        scheduler_stats: Counters | None = None,
        iteration_stats: Preemptions | None = None,
        mm_cache_stats: object = None,
        engine_idx: int = 0,
    ) -> None:
        stats = self._stats
        if scheduler_stats is not None:
            stats.num_running = scheduler_stats.num_running_reqs
            stats.num_waiting = scheduler_stats.num_waiting_reqs
            stats.num_held_blocks = round(scheduler_stats.kv_cache_usage * stats.num_blocks)
        if iteration_stats is not None:
            stats.num_preemptions += iteration_stats.num_preempted_reqs

    def log(self) -> None:
        return


@dataclass(slots=True)
class VllmEngine(AnyEngine):
    """An engine that steps vLLM's.

    prompt_of  makes vLLM's prompt of token ids and a salt
    params_of  makes vLLM's parameters of a request
    refusals   its errors of a request that it does not take
    """

    vllm: VLLM
    prompt_of: Callable[[dict[str, JsonValue]], object]
    params_of: Callable[[Continuation], object]
    refusals: tuple[type[Exception], ...]
    _seqs: dict[str, Continuation] = field(default_factory=dict, init=False)

    def step(self) -> list[Output]:
        outputs = self.mailbox.drain(self._carry_out)
        if self._seqs:
            if self.note_plan is not None:  # its slices are vLLM's own affair
                self.note_plan(
                    [(seq_id, 0, len(seq.token_ids)) for seq_id, seq in self._seqs.items()]
                )
            notes = [self._note(result) for result in self.vllm.step()]
            outputs += [output for output in notes if output is not None]
            self._stats.num_steps += 1
        if not self._seqs:
            self._stats.num_running = self._stats.num_waiting = self._stats.num_held_blocks = 0
        return outputs

    def load(self) -> Load:
        return Load(self._stats.num_held_blocks, self._stats.num_waiting)

    def stats(self) -> Stats:
        return self._stats

    def _add(self, addition: AddSequence) -> Output | None:
        seq = Continuation.of(addition, self.limits)
        self._stats.prompt_tokens += len(addition.prompt)
        return self._begin(seq, again=not seq.can_go_on)

    def _cancel(self, seq_id: str) -> None:
        if self._seqs.pop(seq_id, None) is not None:
            self.vllm.abort_request([seq_id])

    def _begin(self, seq: Continuation, again: bool) -> Output | None:
        """Make a request for the sequence, or return why vLLM refuses it."""
        addition = seq.addition
        seq.begin(again)
        prompt: dict[str, JsonValue] = {"prompt_token_ids": [*seq.prompt]}
        if addition.cache_salt:
            prompt["cache_salt"] = addition.cache_salt.hex()
        try:
            self.vllm.add_request(
                addition.seq_id,
                self.prompt_of(prompt),
                self.params_of(seq),
                addition.turn / 1e6,
                priority=addition.priority,
            )
        except self.refusals as error:  # what only its own checks find, such as a bad grammar
            reason = " ".join(str(error).split())
            refusal = InvalidJob(f"vLLM refused the job: {reason:.300}")
            return Output(addition.seq_id, [], error=refusal.body())
        self._seqs[addition.seq_id] = seq
        return None

    def _note(self, result: Made) -> Output | None:
        seq = self._seqs.get(result.request_id)
        if seq is None:
            return None
        [choice] = result.outputs
        params, token_ids = seq.addition.params, [*choice.token_ids]
        if choice.finish_reason not in (None, *_ENDS):
            raise EngineFailed(f"vLLM ended a request: {choice.finish_reason}")
        try:
            num_repeats = seq.take(token_ids)
            if choice.finish_reason is not None and seq.is_behind:
                raise Diverged
        except Diverged:
            return self._go_on(seq)
        finish, reason = _ENDS.get(choice.finish_reason or ""), choice.stop_reason
        if finish is not None:
            del self._seqs[result.request_id]
        self._stats.generation_tokens += len(token_ids) - num_repeats
        if num_repeats == len(token_ids) and finish is None:
            return None
        logprobs = None
        if params.logprobs is not None and choice.logprobs is not None:
            logprobs = _logprobs(token_ids, choice.logprobs, params.logprobs)[num_repeats:]
        stop_id = reason if isinstance(reason, int) and reason in params.stop_token_ids else None
        num_cached = result.num_cached_tokens or 0
        return Output(
            result.request_id, token_ids[num_repeats:], logprobs, finish, stop_id, num_cached
        )

    def _go_on(self, seq: Continuation) -> Output | None:
        """Go on from the tokens that are known, which the request did not give again."""
        seq_id = seq.addition.seq_id
        del self._seqs[seq_id]
        self.vllm.abort_request([seq_id])
        if seq.addition.params.structured_outputs is not None:
            error = StreamDiverged(seq_id.partition(":")[0], len(seq.token_ids))
            return Output(seq_id, [], error=error.body())
        log.warning("request of %s gave other tokens; it goes on", seq_id)
        return self._begin(seq, again=False)


class EngineFailed(PenstockError):
    """Raised when vLLM cannot go on."""

    code = "engine_failed"


def load_vllm_engine(settings: WorkerSettings) -> VllmEngine:
    """Return vLLM's engine, loaded. Raises InvalidJob where it cannot be."""
    # Stepped in this process, which a worker's end takes with it; and no word to its makers.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    try:
        from vllm import SamplingParams as VllmParams
        from vllm.engine.arg_utils import EngineArgs
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
        from vllm.v1.engine.llm_engine import LLMEngine
    except ImportError as error:
        why = f"engine: vllm cannot be loaded here ({error}); install it beside Penstock"
        raise InvalidJob(why, "engine") from error
    folder = settings.checkpoint()
    arguments = _arguments(settings, str(folder), frozenset(EngineArgs.__dataclass_fields__))
    with loading(settings.model):
        engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    config, shape = engine.vllm_config, model_shape(folder)
    enders = sorted(shape.eos_token_ids)
    limits = EngineLimits(
        max_model_len=config.model_config.max_model_len,
        vocab_size=config.model_config.get_vocab_size(),
        num_blocks=config.cache_config.num_gpu_blocks,
        block_size=config.cache_config.block_size,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        eos_token_ids=shape.eos_token_ids,
        unsupported_fields=UNSUPPORTED_FIELDS,
    )

    def params_of(seq: Continuation) -> object:
        params = seq.addition.params
        stops = [*params.stop_token_ids, *([] if params.ignore_eos else enders)]
        return VllmParams(
            **{name: getattr(params, name) for name in _SAME},
            top_k=max(0, params.top_k),
            logit_bias=params.logit_bias or None,
            allowed_token_ids=params.allowed_token_ids,
            seed=seq.seed,
            max_tokens=seq.num_left,
            min_tokens=seq.min_left,
            stop_token_ids=stops,
            structured_outputs=_structure(params, StructuredOutputsParams),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )

    wrapper = VllmEngine(
        limits,
        engine,
        lambda prompt: engine.renderer.render_cmpl([prompt])[0],
        params_of,
        (ValueError, VLLMClientError),
    )
    stats = wrapper.stats()
    stats.num_blocks, stats.block_size = limits.num_blocks, limits.block_size
    stats.max_num_batched_tokens = config.scheduler_config.max_num_batched_tokens
    engine.logger_manager = StepRecorder(stats)
    return wrapper


def _arguments(settings: WorkerSettings, folder: str, names: frozenset[str]) -> dict[str, object]:
    """Return the arguments of vLLM's engine. Raises InvalidJob for those that are none."""
    if "hf_token" in settings.engine_args:
        why = "engine_args: hf_token has no effect, since vLLM is given a folder; set HF_TOKEN"
        raise InvalidJob(why, "engine_args")
    for name in settings.engine_args:
        if name in _OF_SETTINGS:
            flag = name.replace("_", "-")
            raise InvalidJob(
                f"engine_args: {name} is a setting of its own: --{flag}", "engine_args"
            )
        if name not in names:
            near = ", ".join(get_close_matches(name, names, 2)) or "nothing that is near"
            why = f"engine_args: {name!r} is no argument of vLLM's engine; it has {near}"
            raise InvalidJob(why, "engine_args")
    return {
        "model": folder,
        "max_num_seqs": settings.max_num_seqs,
        "scheduling_policy": "priority",
        **{name: value for name, value in unusual(settings).items() if name in PASSED_ON},
        **({"tokenizer": str(settings.tokenizer_folder())} if settings.tokenizer else {}),
        **settings.engine_args,
    }


def _structure(params: SamplingParams, make: Callable[..., object]) -> object | None:
    if params.structured_outputs is None:
        return None
    return make(**params.structured_outputs.as_vllm_has_it())


def _logprobs(
    token_ids: list[int], tops: list[dict[int, ToldLogprob]], num_top: int
) -> list[Logprob]:
    logprobs = []
    for token_id, of_token in zip(token_ids, tops, strict=True):
        best = sorted(of_token.items(), key=lambda item: -item[1].logprob)[:num_top]
        ids, values = [top_id for top_id, _ in best], [entry.logprob for _, entry in best]
        logprobs.append(Logprob(token_id, of_token[token_id].logprob, ids, values))
    return logprobs
