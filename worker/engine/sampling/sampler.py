"""The sampler: it turns logits into tokens, for rows that may each have other parameters.

Its logits processors are, in order: logit_bias; allowed_token_ids; bad_words; eos and stop ids
forbidden before min_tokens; repetition, frequency and presence penalties; DRY; the grammar's mask.
Then comes at temperature 0 the likeliest token, else temperature, min_p, top_k, top_p and a draw.
What excludes more is in `cuts.py`. Log probabilities are of the logits as the model gave them.

A row's token depends on nothing but the row: its logits, its params, its token ids, its seed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.numbers.transfers import send
from penstock.kernels.sampling.sample import NO_TOKEN as NO_TOKEN
from penstock.kernels.sampling.sample import WAY, Sample, forbid, log_total, plan_sample
from penstock.kernels.sampling.token_mask import allow_all_but
from penstock.worker.engine.grammar.constraints import BITS, Constraint, Masks
from penstock.worker.engine.io.messages import Logprob
from penstock.worker.engine.sampling.cuts import CutRow, Cuts
from penstock.worker.engine.sampling.dry import DryTokens
from penstock.worker.engine.sampling.logprobs import PackedLogprobs, read_logprob, with_drawn
from penstock.worker.engine.sampling.penalties import SeenTokens, penalise
from penstock.worker.engine.sampling.sampler_row import SamplerRow
from penstock.worker.engine.sampling.transfers import Arriving


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens drawn, one for each row; NO_TOKEN where the logits were NaN or allowed nothing.

    spoilt_places  in the plan, of slices with hidden states that are not finite
    prompt_logprobs  by place in the plan: those of a slice of a prompt, where they are asked for
    """

    token_ids: list[int]
    logprobs: list[Logprob | None]
    spoilt_places: list[int] = field(default_factory=list)
    prompt_logprobs: dict[int, list[Logprob]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class DrawnTokens:
    """Tokens that were drawn, [rows] int64 on the device; `read` waits until the host has them."""

    tokens: Tensor
    read: Callable[[], Sampled]


_Kind = Literal["likeliest", "named", "candidates"]


class Sampler:
    """The sampler of one engine.

    It keeps the columns made of the last rows; the same rows again cost one comparison of lists.
    """

    def __init__(
        self, vocab_size: int, eos_token_ids: frozenset[int], device: torch.device | str = "cpu"
    ) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.device = torch.device(device)
        self._masks = Masks(vocab_size)
        self._columns = self._read([])

    def masks(self, constraints: list[Constraint | None]) -> Tensor | None:
        """Return the masks of what the rows' grammars allow, for `sample`.

        It is meant to run while the model computes.
        """
        return self._masks.fill(constraints)

    def sample(
        self,
        logits: Tensor,
        rows: list[SamplerRow],
        masks: Tensor | None = None,
        lengths: NDArray[np.int64] | None = None,
    ) -> Sampled:
        """Draw the next token of each row, and wait for it."""
        return self.draw(logits, rows, masks, lengths).read()

    def draw(
        self,
        logits: Tensor,
        rows: list[SamplerRow],
        masks: Tensor | None = None,
        lengths: NDArray[np.int64] | None = None,
    ) -> DrawnTokens:
        """Draw the next token of each row. The list of rows is kept, to recognise it next time.

        logits  [rows, vocab]             float32, contiguous; overwritten
        masks   [rows, ceil(vocab / 32)]  int32 bits, 1 allows; on the host; read only for rows with
                                          structured_outputs, and overwritten
        lengths [rows]                    tokens of each row; None means the length of its list
        """
        if not rows:
            return DrawnTokens(torch.empty(0, dtype=torch.int64), lambda: Sampled([], []))
        if rows is not self._columns.rows and rows != self._columns.rows:
            self._columns = self._read(rows)
        columns = self._columns
        scored_logits, named_logits, beam_logits = (
            logits[askers.index] if askers else None
            for askers in (columns.scored_rows, columns.named_rows, columns.beams)
        )
        totals = None if beam_logits is None else log_total(beam_logits)
        positions = columns.positions(lengths)
        self._alter(logits, columns, masks)
        if columns.cuts is not None:
            forbid(logits, masks, columns.masked_cuts)
            columns.cuts.exclude(logits, positions)
        tokens = columns.sample(logits, positions, masks)
        reports = []
        if scored_logits is not None and columns.scored_rows is not None:
            reports.append(_scored(tokens, scored_logits, columns.scored_rows))
        if named_logits is not None and columns.named_rows is not None:
            reports.append(_named(tokens, named_logits, columns.named_rows))
        if totals is not None and columns.beams is not None:
            reports.append(_candidates(logits, totals, columns.beams))
        if reports:
            return _with_logprobs(tokens, reports)
        transfer, count = Arriving(tokens), len(rows)
        return DrawnTokens(tokens, lambda: Sampled(transfer.wait().tolist(), [None] * count))

    def _alter(self, logits: Tensor, columns: "_Columns", masks: Tensor | None) -> None:
        """Apply bias, allowed tokens, min_tokens and penalties to the logits, in place."""
        if columns.biases is not None:
            rows, ids, values = columns.biases
            logits[rows, ids] += values
        if columns.exclusions is not None:
            index, ids = columns.exclusions
            logits[index] = logits[index].masked_fill(ids, -torch.inf)
        never = [(place, token) for place, row in columns.word_rows for token in row.forbidden()]
        for ban in columns.bans:
            if not ban.holds:
                continue
            if masks is not None and ban.row.is_masked:
                ban.forbid(masks[ban.index])
            else:
                never += [(ban.index, token) for token in ban.token_ids]
        if never:
            rows, ids = send([np.array(never, np.int64).T], self.device)[0]
            logits[rows, ids] = -torch.inf
        if columns.seen_tokens:
            penalise(logits, columns.seen_tokens)
        for place, dry in columns.dry:
            tokens, losses = dry.losses()
            if len(tokens):
                index, loss = send([tokens, losses], self.device)
                logits[place, index] -= loss

    def _read(self, rows: list[SamplerRow]) -> "_Columns":
        ways = np.frombuffer(b"".join([row.way for row in rows]), WAY)
        special = [(i, row) for i, row in enumerate(rows) if not row.is_plain]
        return _Columns(
            rows=rows,
            num_prompt=np.array([row.num_prompt for row in rows], np.int64),
            biases=self._biases(special),
            exclusions=self._exclusions(special),
            word_rows=[(i, row) for i, row in special if row.words.bad_words],
            bans=self._bans(special),
            seen_tokens=[(i, row.seen_tokens) for i, row in special if row.seen_tokens is not None],
            dry=[(i, row.dry) for i, row in special if row.dry is not None],
            cuts=self._cuts(special),
            masked_cuts=self._masked_cuts(special),
            scored_rows=self._askers(special, "likeliest"),
            named_rows=self._askers(special, "named"),
            beams=self._askers(special, "candidates"),
            sample=plan_sample(ways, self.vocab_size, self.device),
        )

    def _biases(self, rows: list[tuple[int, SamplerRow]]) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the row, token id and value of each bias; None where there is no bias."""
        entries = [
            (i, token, bias) for i, row in rows for token, bias in row.params.logit_bias.items()
        ]
        if not entries:
            return None
        index, ids, values = zip(*entries, strict=True)
        places = np.array([index, ids], np.int64)
        (places_there, biases) = send([places, np.array(values, np.float32)], self.device)
        return places_there[0], places_there[1], biases

    def _exclusions(self, rows: list[tuple[int, SamplerRow]]) -> tuple[Tensor, Tensor] | None:
        """Return some rows, and of each [rows, vocab] whether a token is not allowed."""
        entries = [(i, row.allowed_ids) for i, row in rows if row.allowed_ids is not None]
        if not entries:
            return None
        mask = np.ones((len(entries), self.vocab_size), np.bool_)
        for place, (_, ids) in enumerate(entries):
            mask[place, ids] = False
        index, mask_there = send([np.array([i for i, _ in entries]), mask], self.device)
        return index, mask_there

    def _cuts(self, rows: list[tuple[int, SamplerRow]]) -> Cuts | None:
        cut = [CutRow(i, row.params, row.seed, row.choice) for i, row in rows if row.is_cut]
        return Cuts(cut, self.vocab_size, self.device) if cut else None

    def _askers(self, rows: list[tuple[int, SamplerRow]], kind: "_Kind") -> "_Askers | None":
        """Return the rows that ask for log probabilities of this kind; None where none does."""
        entries = [(i, row) for i, row in rows if row.tells == kind]
        if not entries:
            return None
        ids = [row.params.logprob_token_ids or [] for _, row in entries]
        width = max(map(len, ids))
        table = [token_ids + token_ids[:1] * (width - len(token_ids)) for token_ids in ids]
        places = [i for i, _ in entries]
        columns = [np.array(places), np.array(table, np.int64)]
        counts = {
            "likeliest": [row.params.logprobs or 0 for _, row in entries],
            "named": [len(token_ids) for token_ids in ids],
            "candidates": [row.num_candidates for _, row in entries],
        }
        index, there = send(columns, self.device)
        return _Askers(places, index, there, counts[kind])

    def _masked_cuts(self, rows: list[tuple[int, SamplerRow]]) -> NDArray[np.int64]:
        return np.array([i for i, row in rows if row.is_cut and row.is_masked], np.int64)

    def _bans(self, rows: list[tuple[int, SamplerRow]]) -> list["_Ban"]:
        bans = []
        for index, row in rows:
            ends = set(row.params.stop_token_ids) if row.params.min_tokens else set()
            if row.params.min_tokens and not row.params.ignore_eos:
                ends |= self.eos_token_ids
            if ends:
                bans.append(_Ban(row, index, sorted(ends)))
        return bans


@dataclass(frozen=True, slots=True)
class _Ban:
    """The eos and stop ids that a row must not draw until it has min_tokens."""

    row: SamplerRow
    index: int
    token_ids: list[int]

    @property
    def holds(self) -> bool:
        return self.row.position < self.row.params.min_tokens

    def forbid(self, mask: Tensor) -> None:
        """Forbid the ids in the grammar's mask, unless nothing else is left.

        A grammar that allows only an end is over, and the ban gives way to it.
        """
        rest = mask & allow_all_but(self.token_ids, BITS * len(mask))
        if rest.any():
            mask.copy_(rest)


@dataclass(frozen=True, slots=True)
class _Columns:
    """The params of one batch of rows as columns, so that one operation covers all rows."""

    rows: list[SamplerRow]
    num_prompt: NDArray[np.int64]
    biases: tuple[Tensor, Tensor, Tensor] | None
    exclusions: tuple[Tensor, Tensor] | None
    word_rows: list[tuple[int, SamplerRow]]
    bans: list[_Ban]
    seen_tokens: list[tuple[int, SeenTokens]]
    dry: list[tuple[int, DryTokens]]
    cuts: Cuts | None
    masked_cuts: NDArray[np.int64]  # the rows that are cut under a grammar
    scored_rows: "_Askers | None"
    named_rows: "_Askers | None"
    beams: "_Askers | None"
    sample: Sample

    def positions(self, lengths: NDArray[np.int64] | None) -> NDArray[np.int64]:
        """Return the position of each row's next token in its completion [rows]."""
        if lengths is None:
            lengths = np.array([len(row.token_ids) for row in self.rows], np.int64)
        return lengths - self.num_prompt


@dataclass(frozen=True, slots=True, eq=False)
class _Askers:
    """The rows that ask for log probabilities of one kind.

    places  their places in the batch; `index` is the same on the device
    ids     [rows, some]  the tokens that a row names, the first again where others name more
    counts  how many log probabilities each row asks for
    """

    places: list[int]
    index: Tensor
    ids: Tensor
    counts: list[int]


class _Report(NamedTuple):
    """Numbers for the rows that asked for them."""

    pack: PackedLogprobs
    askers: _Askers
    kind: _Kind


def _scored(tokens: Tensor, raw: Tensor, askers: _Askers) -> _Report:
    """Return the log probabilities of the tokens and of the likeliest.

    raw [askers, vocab]: the logits of those rows as the model gave them.
    """
    token_ids = tokens[askers.index].clamp(min=0)
    return _Report(PackedLogprobs.of(raw, token_ids, any(askers.counts)), askers, "likeliest")


def _named(tokens: Tensor, raw: Tensor, askers: _Askers) -> _Report:
    """Return the log probabilities of the tokens that rows name, raw as for `_scored`."""
    token_ids = tokens[askers.index].clamp(min=0)
    return _Report(PackedLogprobs.named(raw, token_ids, askers.ids), askers, "named")


def _candidates(logits: Tensor, totals: Tensor, askers: _Askers) -> _Report:
    """Return the likeliest tokens for the beams.

    They are the largest of the altered logits, but still less the totals of the model's own, as
    transformers ranks beams.
    """
    beam_logits = logits[askers.index]
    pack = PackedLogprobs.largest(beam_logits, beam_logits.argmax(-1), max(askers.counts), totals)
    return _Report(pack, askers, "candidates")


def _with_logprobs(tokens: Tensor, reports: list[_Report]) -> DrawnTokens:
    """Return the tokens with what is told of them: one transfer for all."""
    transfer = Arriving(
        torch.cat([tokens.double(), *(report.pack.rows.flatten() for report in reports)])
    )
    return DrawnTokens(
        tokens, lambda: _read_reports(transfer.wait().tolist(), len(tokens), reports)
    )


def _read_reports(flat: list[float], num_rows: int, reports: list[_Report]) -> Sampled:
    """Read the tokens of all rows and what `_with_logprobs` packed. A beam's is the likeliest."""
    token_ids = [int(token) for token in flat[:num_rows]]
    logprobs: list[Logprob | None] = [None] * num_rows
    begin = num_rows
    for pack, askers, kind in reports:
        width = 2 * pack.num_top + 1
        for row, count in zip(askers.places, askers.counts, strict=True):
            values, begin = flat[begin : begin + width], begin + width
            if kind == "candidates":
                token_ids[row] = int(values[0])
            logprob = read_logprob(values, token_ids[row], pack.num_top, count)
            if logprob is None:
                token_ids[row] = NO_TOKEN
            elif token_ids[row] != NO_TOKEN:
                logprobs[row] = with_drawn(logprob) if kind == "named" else logprob
    return Sampled(token_ids, logprobs)
