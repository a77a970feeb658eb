"""The limits of one engine, and the check of a sequence against them.

The worker's I/O side uses the same check.
"""

from dataclasses import dataclass

from penstock.schemas.errors import InvalidJob, PenstockError, PromptTooLong
from penstock.schemas.sampling import SamplingParams
from penstock.worker.engine.messages import AddSequence


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The limits of one engine.

    max_model_len counts prompt and completion, and never exceeds what the KV cache can hold.
    """

    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    eos_token_ids: frozenset[int]

    def max_tokens(self, num_prompt: int, params: SamplingParams) -> int:
        return params.max_tokens or self.max_model_len - num_prompt

    def check(self, addition: AddSequence) -> PenstockError | None:
        """Return None when the sequence can run to its end, alone if need be; else the error.

        The error says why the sequence can never run.
        """
        return self._check_length(addition) or self._check_ids(addition)

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
