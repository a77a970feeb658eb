"""The step from logits to tokens, for rows that may each ask for something else.

In order: logit_bias; eos and stop ids forbidden before min_tokens; repetition, frequency and
presence penalties; the grammar's mask; the likeliest at temperature 0; else temperature, min_p,
top_k, top_p and a draw. Log probabilities are of the logits as the model gave them.

What a row gets depends on nothing but the row: its logits, its params, its token ids, its seed.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.draw import UNIT, Cut, draw, draw_cut, likeliest, mass
from kernels.philox import Words, key_schedule, uniforms
from kernels.token_mask import allow_all_but, apply_token_mask, byte_penalties
from schemas.sampling import MAX_LOGPROBS, SamplingParams
from worker.engine.constraints import BITS, Constraint, Masks
from worker.engine.messages import Logprob
from worker.engine.penalties import Seen, penalise

GREEDY_BELOW = 1e-5  # one token has all the probability anyway; vLLM draws the line here too
LEAST_LOGPROB = -9999.0  # of what the model rules out: JSON has no infinity
NO_TOKEN = -1


@dataclass(slots=True, eq=False)
class SamplerRow:
    """What the sampler needs of one sequence, for as long as the sequence lives.

    `token_ids` is the sequence's own list, prompt and then completion, and grows with it. All that
    is kept follows from it, so a sequence rebuilt from its ids gets the same tokens.
    """

    params: SamplingParams
    seed: int
    choice: int
    token_ids: list[int]
    num_prompt: int
    seen: Seen | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        params = self.params
        weighs = params.presence_penalty or params.frequency_penalty
        if weighs or params.repetition_penalty != 1:
            self.seen = Seen(params, self.token_ids, self.num_prompt)

    @property
    def position(self) -> int:
        """Of the next token in the completion."""
        return len(self.token_ids) - self.num_prompt


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token for each row; NO_TOKEN where the logits were no numbers or allowed nothing."""

    token_ids: list[int]
    logprobs: list[Logprob | None]


class Sampler:
    """Keeps the columns of the last rows: the same rows again cost one comparison of lists."""

    def __init__(
        self, vocab_size: int, eos_token_ids: frozenset[int], device: torch.device | str = "cpu"
    ) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.device = torch.device(device)
        self._byte_penalties = byte_penalties(self.device)
        self._masks = Masks(vocab_size)
        self._columns = self._read([])

    def masks(self, constraints: list[Constraint | None]) -> Tensor | None:
        """What the grammars of the rows allow, for `sample`; meant to run beside the model."""
        return self._masks.fill(constraints)

    def sample(
        self, logits: Tensor, rows: list[SamplerRow], masks: Tensor | None = None
    ) -> Sampled:
        """Draw the next token of each row.

        logits  [rows, vocab]             float32, contiguous; overwritten
        masks   [rows, ceil(vocab / 32)]  int32 bits, 1 allows; on the host, and read only for
                                          rows with structured_outputs
        """
        if not rows:
            return Sampled([], [])
        if rows != self._columns.rows:
            self._columns = self._read(rows)
        columns = self._columns
        if not columns.scored:
            self._alter(logits, columns, masks)
            return Sampled(_pick(logits, columns).tolist(), [None] * len(rows))
        raw = logits[columns.scored]
        self._alter(logits, columns, masks)
        return _with_logprobs(_pick(logits, columns), raw, columns)

    def _alter(self, logits: Tensor, columns: "_Columns", masks: Tensor | None) -> None:
        """Change in place what bias, min_tokens, penalties and grammars change."""
        if columns.biases is not None:
            rows, ids, values = columns.biases
            logits[rows, ids] += values
        bans = [ban for ban in columns.bans if ban.holds]
        for ban in bans:
            if masks is None or ban.place is None:
                logits[ban.index, ban.token_ids] = -torch.inf
        if columns.penalised:
            penalise(logits, columns.penalised)
        if masks is not None and columns.constrained:
            allowed = masks[columns.constrained]
            for ban in bans:
                if ban.place is not None:
                    ban.forbid(allowed[ban.place])
            self._mask(logits, columns.constrained, allowed.to(self.device))

    def _mask(self, logits: Tensor, index: list[int], allowed: Tensor) -> None:
        if len(index) == len(logits):
            apply_token_mask(logits, allowed, self._byte_penalties)
        else:
            some = logits[index]
            apply_token_mask(some, allowed, self._byte_penalties)
            logits[index] = some

    def _read(self, rows: list[SamplerRow]) -> "_Columns":
        every = list(enumerate(rows))
        drawing = [i for i, row in every if row.params.temperature >= GREEDY_BELOW]
        constrained = [i for i, row in every if row.params.structured_outputs is not None]
        return _Columns(
            rows=list(rows),
            biases=self._biases(rows),
            bans=self._bans(rows, constrained),
            penalised=[(i, row.seen) for i, row in every if row.seen is not None],
            constrained=constrained,
            free=self._group(rows, [i for i in drawing if not _is_cut(rows[i].params)]),
            cut=self._group(rows, [i for i in drawing if _is_cut(rows[i].params)]),
            scored=[i for i, row in every if row.params.logprobs is not None],
        )

    def _biases(self, rows: list[SamplerRow]) -> tuple[Tensor, Tensor, Tensor] | None:
        """Row, token id and bias of each."""
        entries = [
            (i, token, bias)
            for i, row in enumerate(rows)
            for token, bias in row.params.logit_bias.items()
        ]
        if not entries:
            return None
        index, ids, values = zip(*entries, strict=True)
        return (
            torch.tensor(index, device=self.device),
            torch.tensor(ids, device=self.device),
            torch.tensor(values, dtype=torch.float32, device=self.device),
        )

    def _bans(self, rows: list[SamplerRow], constrained: list[int]) -> list["_Ban"]:
        bans = []
        for index, row in enumerate(rows):
            ends = set(row.params.stop_token_ids) if row.params.min_tokens else set()
            if row.params.min_tokens and not row.params.ignore_eos:
                ends |= self.eos_token_ids
            if ends:
                place = constrained.index(index) if index in constrained else None
                bans.append(_Ban(row, index, place, sorted(ends)))
        return bans

    def _group(self, rows: list[SamplerRow], index: list[int]) -> "_Group | None":
        if not index:
            return None
        members = [rows[i] for i in index]
        params = [row.params for row in members]
        top_k = [each.top_k if each.top_k > 0 else self.vocab_size for each in params]
        return _Group(
            members,
            torch.tensor(index, device=self.device),
            torch.tensor([each.temperature for each in params], device=self.device),
            Cut(
                torch.tensor(top_k, device=self.device).clamp(max=self.vocab_size),
                torch.tensor([p.top_p for p in params], dtype=torch.float64, device=self.device),
                torch.tensor([p.min_p for p in params], dtype=torch.float64, device=self.device),
            ),
            key_schedule([row.seed for row in members]),
            [row.choice for row in members],
        )


@dataclass(frozen=True, slots=True)
class _Ban:
    """Eos and stop ids, forbidden to a row until it has min_tokens."""

    row: SamplerRow
    index: int
    place: int | None  # among the constrained rows
    token_ids: list[int]

    @property
    def holds(self) -> bool:
        return self.row.position < self.row.params.min_tokens

    def forbid(self, allowed: Tensor) -> None:
        """In the grammar's mask, unless nothing is left then: a grammar knows when it is over."""
        left = allowed & allow_all_but(self.token_ids, BITS * len(allowed))
        if left.any():
            allowed.copy_(left)


@dataclass(frozen=True, slots=True)
class _Group:
    """The rows that draw in one way."""

    rows: list[SamplerRow]
    index: Tensor
    temperature: Tensor
    cut: Cut
    keys: Words
    choices: list[int]

    def uniforms(self) -> Tensor:
        drawn = uniforms(self.keys, self.choices, [row.position for row in self.rows])
        return torch.from_numpy(drawn).to(self.index.device)

    def of(self, logits: Tensor) -> Tensor:
        return logits if len(self.rows) == len(logits) else logits[self.index]


@dataclass(frozen=True, slots=True)
class _Columns:
    """Params of one batch of rows, turned so that each step is over all rows at once.

    free   rows at a temperature, no more
    cut    rows with top_k, top_p or min_p
    """

    rows: list[SamplerRow]
    biases: tuple[Tensor, Tensor, Tensor] | None
    bans: list[_Ban]
    penalised: list[tuple[int, Seen]]
    constrained: list[int]
    free: _Group | None
    cut: _Group | None
    scored: list[int]


def _is_cut(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _pick(logits: Tensor, columns: _Columns) -> Tensor:
    """Token ids [rows], int64."""
    top, tokens = likeliest(logits)
    if columns.free is not None:
        group = columns.free
        tokens[group.index] = draw(group.of(logits), group.temperature, group.uniforms())
    if columns.cut is not None:
        group = columns.cut
        tokens[group.index] = draw_cut(
            group.of(logits), group.temperature, group.cut, group.uniforms()
        )
    return tokens.masked_fill_(~top.isfinite(), NO_TOKEN)


def _with_logprobs(tokens: Tensor, raw: Tensor, columns: _Columns) -> Sampled:
    """raw [scored rows, vocab]: the logits of the rows that want log probabilities."""
    wanted = [columns.rows[i].params.logprobs or 0 for i in columns.scored]
    # Always as many: which of equal logits make the list must not depend on the other rows.
    num_top = min(MAX_LOGPROBS, raw.shape[1]) if any(wanted) else 0
    top, top_ids = _ordered(*raw.topk(num_top))
    drawn = tokens[columns.scored, None].clamp(min=0)
    values = torch.cat([raw.gather(1, drawn), top], -1).double() - _log_total(raw)[:, None]
    packed = torch.cat([top_ids.double(), values.clamp_(min=LEAST_LOGPROB)], -1)
    # One transfer for all; float64 holds every id exactly.
    flat = torch.cat([tokens.double(), packed.flatten()]).tolist()
    token_ids = [int(token) for token in flat[: len(tokens)]]
    logprobs: list[Logprob | None] = [None] * len(tokens)
    width = 2 * num_top + 1
    for place, (row, count) in enumerate(zip(columns.scored, wanted, strict=True)):
        start = len(tokens) + place * width
        ids, (logprob, *others) = flat[start : start + count], flat[start + num_top : start + width]
        if math.isnan(logprob):
            token_ids[row] = NO_TOKEN
        elif token_ids[row] != NO_TOKEN:
            ids_of_top = [int(token) for token in ids]
            logprobs[row] = Logprob(token_ids[row], logprob, ids_of_top, others[:count])
    return Sampled(token_ids, logprobs)


def _log_total(raw: Tensor) -> Tensor:
    """The logarithm of the sum of the exponentials [rows], float64."""
    ones = torch.ones(len(raw), device=raw.device)
    return raw.amax(-1).double() + (mass(raw, ones).double() / UNIT).log()


def _ordered(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Largest value first, and of equal ones the smallest id first."""
    ids, by_id = ids.sort(-1)
    values, by_value = values.gather(1, by_id).sort(stable=True, descending=True)
    return values, ids.gather(1, by_value)
