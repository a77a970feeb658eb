"""The limits of one engine, and the check of a sequence against them.

The worker's I/O side uses the same check.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from penstock.schemas.counted import counted
from penstock.schemas.errors import (
    InputTooLong,
    InvalidJob,
    PenstockError,
    PromptTooLong,
    UnsupportedByEngine,
    UnsupportedTask,
)
from penstock.schemas.params.pooling import PoolingParams, PoolingTask
from penstock.schemas.params.sampling import SamplingParams
from penstock.worker.engine.io.messages import AddSequence

_DEFAULTS = SamplingParams()
_NEUTRAL = {
    "top_k": (0, -1),
    "top_n_sigma": (0, -1),
    "best_of": (None, 1),
}  # values that ask for nothing, where there are several


@dataclass(frozen=True, slots=True)
class PoolingFacts:
    """The facts of a model that makes vectors of texts.

    tasks    what it makes; a classifier reads the texts of a pair together, an embedder each alone
    size     numbers of a vector
    labels   a classifier's, in the order of its numbers
    prompts  texts by name, one of which may go before a text
    lowers   whether texts are lowered first
    """

    tasks: tuple[PoolingTask, ...]
    size: int
    labels: tuple[str, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    lowers: bool = False

    @property
    def joins_pairs(self) -> bool:
        return "classify" in self.tasks

    def task_of(self, pooling: PoolingParams) -> PoolingTask:
        """Return the task that is asked for, or else the first. Raises UnsupportedTask."""
        task = pooling.task or self.tasks[0]
        if task not in self.tasks:
            raise UnsupportedTask(task, self.tasks)
        return task

    def check(self, params: PoolingParams) -> PenstockError | None:
        """Return the error for a parameter that would have no effect; None where each has one."""
        task = params.task or self.tasks[0]
        if params.dimensions is not None and task != "embed":
            return InvalidJob("dimensions: only embeddings have them; leave it out", "dimensions")
        if params.dimensions is not None and params.dimensions > self.size:
            sentence = f"{params.dimensions}; this model's vectors have {self.size}"
            return InvalidJob(f"dimensions: {sentence}", "dimensions")
        if params.prompt_name is not None and task == "score":
            return InvalidJob("prompt_name: scores have none; leave it out", "prompt_name")
        if params.use_activation is not None and task == "score" and not self.joins_pairs:
            sentence = "an embedder's scores are cosines; leave it out"
            return InvalidJob(f"use_activation: {sentence}", "use_activation")
        return None


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The limits of one engine.

    max_model_len counts prompt and completion, and never exceeds what the KV cache can hold.
    unsupported_fields  of SamplingParams, which the engine does not obey; of structured_outputs
                  such as structured_outputs.regex
    resumes       what a sequence that was begun elsewhere goes on from
    generates     whether it makes completions
    pooling       set for an engine that makes vectors
    numerics      what became of weights and keys, in words; empty where nothing has fewer bits
    """

    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    eos_token_ids: frozenset[int]
    unsupported_fields: frozenset[str] = frozenset()
    resumes: Literal["tokens", "text"] = "tokens"
    generates: bool = True
    pooling: PoolingFacts | None = None
    numerics: str = ""

    @property
    def tasks(self) -> tuple[str, ...]:
        """Return the tasks that the engine does, for the error of a job that asks for another."""
        tasks = self.pooling.tasks if self.pooling else ()
        return ("generate", *tasks) if self.generates else tasks

    def max_tokens(self, num_prompt: int, params: SamplingParams) -> int:
        return params.max_tokens or self.max_model_len - num_prompt

    def prompt_room(self, params: SamplingParams) -> int:
        """Return how many tokens a prompt may have, so that `max_tokens` may follow it."""
        return max(1, self.max_model_len - (params.max_tokens or 1))

    def check(self, addition: AddSequence) -> PenstockError | None:
        """Return None when the sequence can run to its end, alone if need be; else the error.

        The error says why the sequence can never run.
        """
        pooling = addition.pooling
        if pooling is not None:
            return self._check_pooled(addition, pooling) or self._check_ids(addition)
        if not self.generates:
            return UnsupportedTask("generate", self.tasks)
        return (
            self._check_length(addition)
            or self._check_ids(addition)
            or self._check_obeyed(addition.params)
        )

    def _check_obeyed(self, params: SamplingParams) -> PenstockError | None:
        for name in sorted(self.unsupported_fields):
            field, _, kind = name.partition(".")
            value = getattr(params, field)
            if kind and value is not None and value.constraint[0] == kind:
                return UnsupportedByEngine(name)
            if not kind and value not in _NEUTRAL.get(field, (getattr(_DEFAULTS, field),)):
                return UnsupportedByEngine(name)
        return None

    def _check_pooled(self, addition: AddSequence, pooling: PoolingParams) -> PenstockError | None:
        if self.pooling is None:
            return UnsupportedTask(pooling.task or "embed", self.tasks)
        num_tokens, split = len(addition.prompt), addition.split
        if not num_tokens:
            return InvalidJob("input: a text has no tokens; give at least one", "input")
        if self.pooling.joins_pairs or not split:
            longest = num_tokens
        else:
            longest = max(split, num_tokens - split)
        if longest > self.max_model_len:
            return InputTooLong(longest, self.max_model_len)
        return self.pooling.check(pooling)

    def _check_length(self, addition: AddSequence) -> PenstockError | None:
        num_prompt, max_tokens = len(addition.prompt), addition.params.max_tokens
        if not num_prompt:
            return InvalidJob("prompt: it has no tokens; give at least one", "prompt")
        if num_prompt >= self.max_model_len:
            return PromptTooLong(num_prompt, self.max_model_len)
        if max_tokens is not None and num_prompt + max_tokens > self.max_model_len:
            return InvalidJob(
                f"max_tokens: {counted(num_prompt, 'prompt token')} and {max_tokens} to come are"
                f" more than the {self.max_model_len} that this model takes; ask for at most "
                f"{self.max_model_len - num_prompt}",
                "max_tokens",
            )
        if addition.params.min_tokens > self.max_model_len - num_prompt:
            return InvalidJob(
                f"min_tokens: {addition.params.min_tokens} are more than the"
                f" {self.max_model_len - num_prompt} that fit after"
                f" {counted(num_prompt, 'prompt token')}",
                "min_tokens",
            )
        return None

    def _check_ids(self, addition: AddSequence) -> PenstockError | None:
        params = addition.params
        for name, ids in (
            ("prompt" if addition.pooling is None else "input", addition.prompt),
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
            ("allowed_token_ids", params.allowed_token_ids),
            ("logprob_token_ids", params.logprob_token_ids),
        ):
            if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
                worst = max(ids) if max(ids) >= self.vocab_size else min(ids)
                return InvalidJob(
                    f"{name}: token id {worst} is outside the vocabulary, "
                    f"0 to {self.vocab_size - 1}",
                    name,
                )
        return None
