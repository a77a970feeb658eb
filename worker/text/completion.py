"""One choice while it is made: from drawn ids to certain text, up to the first stop string."""

from collections.abc import Sequence
from itertools import repeat

import msgspec

from penstock.schemas.event import Choice, Delta, FinishReason, TokenLogprob
from penstock.schemas.markup.forms import Markup
from penstock.schemas.params.sampling import SamplingParams
from penstock.worker.engine.io.messages import Logprob, Output
from penstock.worker.text.content_stops import ContentStops
from penstock.worker.text.model_tokenizer import ModelTokenizer
from penstock.worker.text.stop_strings import Match, StopStrings


class TextPiece(msgspec.Struct, frozen=True, gc=False):
    """The part that some ids added to a completion.

    Ids after the one that completed a stop string are left out.
    """

    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    vector: str | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    markup: Markup | None = None
    prompt_tokens: int | None = None
    prompt_ids: list[int] | None = None
    token_strs: list[str] | None = None
    schema_error: str | None = None

    def joined(self, later: "TextPiece") -> "TextPiece":
        has_both = self.logprobs is not None and later.logprobs is not None
        return TextPiece(
            token_ids=self.token_ids + later.token_ids,
            text=self.text + later.text,
            logprobs=[*(self.logprobs or []), *(later.logprobs or [])] if has_both else None,
            finish_reason=later.finish_reason,
            stop_reason=later.stop_reason,
            prompt_logprobs=self.prompt_logprobs,
            markup=self.markup,
            prompt_tokens=self.prompt_tokens,
            prompt_ids=self.prompt_ids,
            schema_error=later.schema_error,
        )

    def delta(self, position: int, index: int, checksum: int) -> Delta:
        return Delta(
            position=position,
            index=index,
            token_ids=self.token_ids,
            text=self.text,
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            checksum=checksum,
            vector=self.vector,
            prompt_logprobs=self.prompt_logprobs,
            markup=self.markup,
            prompt_tokens=self.prompt_tokens,
            prompt_ids=self.prompt_ids,
            token_strs=self.token_strs,
            schema_error=self.schema_error,
        )


class _Read(msgspec.Struct, frozen=True, gc=False):
    """The text that some ids released, and the place at which each id that is kept begins.

    offsets  places in the completion's text; empty where nobody asks for them
    """

    text: str
    num_kept: int
    match: Match | None
    offsets: list[int]


class Completion:
    """The ids, text and log probabilities that follow a prompt.

    A completion begins empty; `replay` restores one from a job's log.
    """

    def __init__(
        self,
        text: ModelTokenizer,
        params: SamplingParams,
        eos_token_ids: frozenset[int],
        prompt: Sequence[int] = (),
        markup: Markup | None = None,
        tells_prompt: bool = False,
        prompt_offsets: Sequence[int] = (),
    ) -> None:
        """Begin one. With `tells_prompt` its first piece has the prompt's ids.

        prompt_offsets  where the prompt's tokens begin, for their log probabilities
        """
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._text = text
        self._params = params
        self._prompt = prompt
        self._markup = markup
        self._tells_prompt = tells_prompt
        self._prompt_offsets = prompt_offsets
        self._enders = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self._enders |= eos_token_ids
        marks = markup.marks if markup else frozenset()
        self._detokenizer = text.detokenizer(params.skip_special_tokens, prompt, marks)
        arguments = params.stop, params.include_stop_str_in_output
        self._stops: StopStrings | ContentStops = StopStrings(*arguments)
        if params.stop and markup is not None and not params.stop_everywhere:
            self._stops = ContentStops(*arguments, markup)
        self._texts: list[str] = []
        self._num_read = 0  # characters of the ids so far, released or not
        self._logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self.prompt_logprobs: list[TokenLogprob] | None = None
        self.schema_error: str | None = None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_reasoning(self) -> int:
        """Return how many of its tokens are thinking."""
        return self._text.num_reasoning(self._markup, self.token_ids) if self._markup else 0

    def take(self, output: Output) -> TextPiece:
        """Append what a step drew; its `finish_reason` says that the last id ended the sequence.

        A piece that is finished although no `finish_reason` came was ended by a stop string: the
        engine's sequence is then to be cancelled.
        """
        read = self._detokenize(output.token_ids, output.finish_reason)
        match = read.match
        piece = TextPiece(
            output.token_ids[: read.num_kept],
            read.text,
            self._spelled(output.logprobs, read.offsets),
            "stop" if match else output.finish_reason,
            match.stop if match else output.stop_reason,
            prompt_logprobs=self._scored(output.prompt_logprobs),
            markup=None if self.token_ids else self._markup,
            prompt_tokens=None if self.token_ids else len(self._prompt) or None,
            prompt_ids=[*self._prompt] if self._tells_prompt and not self.token_ids else None,
            schema_error=None if match else output.schema_error,
        )
        self._append(piece)
        return piece

    def anew(self) -> "Completion":
        """Return a completion with the same prompt and parameters, before its first token."""
        arguments = self._text, self._params, self._enders, self._prompt, self._markup
        return Completion(*arguments, self._tells_prompt, self._prompt_offsets)

    def cut(self, delta: Delta, count: int) -> TextPiece:
        """Append the first ids of a delta as the last ones, with all text that was held back.

        No finish reason is set: the job says what ended it.
        """
        token_ids = delta.token_ids[:count]
        text = self._detokenize(token_ids, "budget").text
        logprobs = delta.logprobs and delta.logprobs[:count]
        piece = TextPiece(
            token_ids,
            text,
            logprobs,
            finish_reason=None,
            stop_reason=None,
            prompt_logprobs=delta.prompt_logprobs,
            markup=delta.markup,
            prompt_tokens=delta.prompt_tokens,
            prompt_ids=delta.prompt_ids,
        )
        self._append(piece)
        return piece

    def replay(self, delta: Delta) -> None:
        """Append a delta of the log: the text that readers got, and the state its ids leave."""
        self._detokenize(delta.token_ids, None)
        self._append(
            TextPiece(
                delta.token_ids,
                delta.text,
                delta.logprobs,
                delta.finish_reason,
                delta.stop_reason,
                prompt_logprobs=delta.prompt_logprobs,
                schema_error=delta.schema_error,
            )
        )

    def choice(self, index: int) -> Choice:
        return Choice(
            index=index,
            text="".join(self._texts),
            token_ids=self.token_ids,
            logprobs=self._logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            prompt_logprobs=self.prompt_logprobs,
            markup=self._markup,
            prompt_tokens=len(self._prompt) or None,
            schema_error=self.schema_error,
        )

    def _append(self, piece: TextPiece) -> None:
        self.token_ids += piece.token_ids
        self._texts.append(piece.text)
        if self._logprobs is not None and piece.logprobs is not None:
            self._logprobs += piece.logprobs
        if piece.prompt_logprobs is not None:
            self.prompt_logprobs = piece.prompt_logprobs
        self.finish_reason = piece.finish_reason
        self.stop_reason = piece.stop_reason
        self.schema_error = piece.schema_error

    def _spelled(
        self, logprobs: Sequence[Logprob] | None, offsets: Sequence[int]
    ) -> list[TokenLogprob] | None:
        if self._logprobs is None or logprobs is None:
            return None
        return [*map(self._text.token_logprob, logprobs, offsets)]

    def _scored(self, logprobs: Sequence[Logprob] | None) -> list[TokenLogprob] | None:
        if logprobs is None:
            return None
        first = Logprob(self._prompt[0], 0.0, [], [])
        all_logprobs = (first, *logprobs)
        return [*map(self._text.token_logprob, all_logprobs, self._prompt_offsets or repeat(None))]

    def _detokenize(self, token_ids: Sequence[int], finish_reason: FinishReason | None) -> _Read:
        """Read ids, up to the one that completes a stop string."""
        visible_ids = self._shown(token_ids, finish_reason)
        if not self._params.stop and self._logprobs is None:
            text = self._detokenizer.push(visible_ids)
            if finish_reason is not None:
                text += self._detokenizer.finish()
            return _Read(text, len(token_ids), None, [])
        texts: list[str] = []
        offsets: list[int] = []
        for number, token_id in enumerate(visible_ids, 1):
            # Which texts may stop depends on the count alone, not on how the ids were grouped.
            may_stop = len(self.token_ids) + number > self._params.min_tokens
            text = self._detokenizer.push((token_id,))
            offsets.append(self._num_read)
            self._num_read += len(text)
            part, match = self._stops.push(text, may_stop)
            texts.append(part)
            if match:
                return _Read("".join(texts), number, match, offsets)
        offsets += [self._num_read] * (len(token_ids) - len(visible_ids))
        match = None
        if finish_reason is not None:
            part, match = self._stops.push(self._detokenizer.finish())
            texts.append(part)
            if not match:
                part, match = self._stops.finish()
                texts.append(part)
        return _Read("".join(texts), len(token_ids), match, offsets)

    def _shown(self, token_ids: Sequence[int], finish_reason: FinishReason | None) -> Sequence[int]:
        """Return the ids that are shown as text.

        The id that ended the sequence is left out, unless the job wants to see what stopped it.
        """
        hides = finish_reason == "stop" and not self._params.include_stop_str_in_output
        return (
            token_ids[:-1]
            if hides and token_ids[-1:] and token_ids[-1] in self._enders
            else token_ids
        )
