"""The limits of one engine, and the check of a sequence against them.

The worker's I/O side uses the same check.
"""

from dataclasses import dataclass
from typing import Literal

from penstock.schemas.errors import InvalidJob, PenstockError, PromptTooLong, UnsupportedByEngine
from penstock.schemas.sampling import SamplingParams
from penstock.worker.engine.messages import AddSequence

_DEFAULTS = SamplingParams()
_NEUTRAL = {"top_k": (0, -1)}  # values that ask for nothing, where there are several


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The limits of one engine.

    max_model_len counts prompt and completion, and never exceeds what the KV cache can hold.
    unsupported   fields of SamplingParams that the engine does not obey; of structured_outputs
                  such as structured_outputs.regex
    resumes       what a sequence that was begun elsewhere goes on from
    """

    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    eos_token_ids: frozenset[int]
    unsupported: frozenset[str] = frozenset()
    resumes: Literal["tokens", "text"] = "tokens"

    def max_tokens(self, num_prompt: int, params: SamplingParams) -> int:
        return params.max_tokens or self.max_model_len - num_prompt

    def check(self, addition: AddSequence) -> PenstockError | None:
        """Return None when the sequence can run to its end, alone if need be; else the error.

        The error says why the sequence can never run.
        """
        return (
            self._check_length(addition)
            or self._check_ids(addition)
            or self._check_obeyed(addition.params)
        )

    def _check_obeyed(self, params: SamplingParams) -> PenstockError | None:
        for name in sorted(self.unsupported):
            field, _, kind = name.partition(".")
            asked = getattr(params, field)
            if kind and asked is not None and asked.constraint[0] == kind:
                return UnsupportedByEngine(name)
            if not kind and asked not in _NEUTRAL.get(field, (getattr(_DEFAULTS, field),)):
                return UnsupportedByEngine(name)
        return None

    def _check_length(self, addition: AddSequence) -> PenstockError | None:
        num_prompt, asked = len(addition.prompt), addition.params.max_tokens
        if not num_prompt:
            return InvalidJob("prompt: it has no tokens; give at least one", "prompt")
        if num_prompt >= self.max_model_len:
            return PromptTooLong(num_prompt, self.max_model_len)
        if asked is not None and num_prompt + asked > self.max_model_len:
            return InvalidJob(
                f"max_tokens: {num_prompt} prompt tokens and {asked} to come are more than the "
                f"{self.max_model_len} that this model takes; ask for at most "
                f"{self.max_model_len - num_prompt}",
                "max_tokens",
            )
        return None

    def _check_ids(self, addition: AddSequence) -> PenstockError | None:
        params = addition.params
        for name, ids in (
            ("prompt", addition.prompt),
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
        ):
            if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
                worst = max(ids) if max(ids) >= self.vocab_size else min(ids)
                return InvalidJob(
                    f"{name}: token id {worst} is outside the vocabulary, "
                    f"0 to {self.vocab_size - 1}",
                    name,
                )
        return None
