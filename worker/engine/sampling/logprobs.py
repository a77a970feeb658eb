"""Log probabilities of tokens, of rows of logits."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.sampling.sample import log_total
from penstock.schemas.params.sampling import MAX_LOGPROBS
from penstock.worker.engine.io.messages import Logprob

LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have


@dataclass(frozen=True, slots=True)
class PackedLogprobs:
    """The log probabilities of some tokens and of the likeliest ones, one row for each token.

    A row is [2 * num_top + 1] float64, which holds every id exactly: the likeliest ids, the token's
    log probability, and those of the likeliest.
    """

    rows: Tensor
    num_top: int

    @classmethod
    def of(cls, logits: Tensor, token_ids: Tensor, wants_top: bool) -> "PackedLogprobs":
        """Pack what the logits [rows, vocab] float32 say of the tokens [rows] int64."""
        # Always the same number, so that other rows do not decide which of equal logits are listed.
        return cls.largest(logits, token_ids, MAX_LOGPROBS * wants_top, log_total(logits))

    @classmethod
    def largest(
        cls, logits: Tensor, token_ids: Tensor, num_top: int, totals: Tensor
    ) -> "PackedLogprobs":
        """Pack them with as many of the likeliest tokens, if there are so many.

        totals  [rows] float64, to be subtracted from logits so that they are log probabilities
        """
        top, top_ids = _ordered(*logits.topk(min(num_top, logits.shape[1])))
        return cls._packed(logits, token_ids, top_ids, top, totals)

    @classmethod
    def named(cls, logits: Tensor, token_ids: Tensor, named_ids: Tensor) -> "PackedLogprobs":
        """Pack them with the tokens `named_ids` [rows, some] int64 in place of the likeliest."""
        totals = log_total(logits)
        return cls._packed(logits, token_ids, named_ids, logits.gather(1, named_ids), totals)

    @classmethod
    def _packed(
        cls, logits: Tensor, token_ids: Tensor, ids: Tensor, values: Tensor, totals: Tensor
    ) -> "PackedLogprobs":
        own = logits.gather(1, token_ids[:, None])
        values = torch.cat([own, values], -1).double() - totals[:, None]
        rows = torch.cat([ids.double(), values.clamp_(min=LEAST_LOGPROB)], -1)
        return cls(rows, ids.shape[1])


def read_logprob(
    row: list[float], token_id: int, num_top: int, num_logprobs: int
) -> Logprob | None:
    """Read a row of `PackedLogprobs`, with the `num_logprobs` likeliest tokens.

    Return None where the logits were no numbers.
    """
    count = min(num_logprobs, num_top)
    logprob, top_logprobs = row[num_top], row[num_top + 1 : num_top + 1 + count]
    if math.isnan(logprob):
        return None
    return Logprob(token_id, logprob, [int(number) for number in row[:count]], top_logprobs)


def with_drawn(row: Logprob) -> Logprob:
    """Return it with the drawn token among the others, each once and the likeliest first."""
    pairs = dict(zip(row.top_ids, row.top_logprobs, strict=True)) | {row.token_id: row.logprob}
    ids = sorted(pairs, key=lambda token_id: (-pairs[token_id], token_id))
    return Logprob(row.token_id, row.logprob, ids, [pairs[token_id] for token_id in ids])


def _ordered(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Order by value, the largest first, and equal values by id, the smallest first."""
    ids, by_id = ids.sort(-1)
    values, by_value = values.gather(1, by_id).sort(stable=True, descending=True)
    return values, ids.gather(1, by_value)
