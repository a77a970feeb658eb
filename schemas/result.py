"""The stored result, which outlives the log and lets a late reader resume inside it."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import msgspec
from pydantic import Field

from penstock.schemas.event import (
    Choice,
    Delta,
    Done,
    EndState,
    Event,
    Failed,
    FinishReason,
    Result,
    TokenLogprob,
)
from penstock.schemas.wire.checksum import EMPTY, roll

MAX_RESULT_BYTES = 2**28  # Redis takes half a GiB in one piece, and each reader holds it whole
_NULL = msgspec.Raw(b"null")
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_CHOICES = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_TOKEN = msgspec.json.Decoder(TokenLogprob)
_LOGPROBS = msgspec.json.Decoder(list[msgspec.Raw] | None)


class KeptResult(Result):
    """A result that also records how its log was cut into deltas, with one mark for each.

    A mark is (choice, tokens, characters of text). Old readers skip the marks.
    """

    marks: list[tuple[int, int, int]] = Field(default_factory=list)
    ended_at: tuple[int, int | None] | None = Field(
        None, description="position and checksum of the end, where the choices were not kept"
    )

    def without_choices(self, end: Done | Failed) -> "KeptResult":
        """Return how the job ended, without its choices, which are more than a result may hold."""
        empty = [Choice(index=choice.index, text="", token_ids=[]) for choice in self.choices]
        at = end.position, end.checksum
        return self.model_copy(update={"choices": empty, "marks": [], "ended_at": at})

    def events(self) -> Iterator[Delta | Done | Failed]:
        """Yield the very events of the log, cut as they were."""
        position, token_at, text_at = 0, [0] * len(self.choices), [0] * len(self.choices)
        checksum = EMPTY
        for index, num_tokens, num_chars in self.marks:
            choice, begin, text_begin = self.choices[index], token_at[index], text_at[index]
            token_at[index], text_at[index] = begin + num_tokens, text_begin + num_chars
            is_last = token_at[index] == len(choice.token_ids)
            token_ids = choice.token_ids[begin : begin + num_tokens]
            own_reason = None if choice.finish_reason == "budget" else choice.finish_reason
            checksum = roll(checksum, index, token_ids)
            yield Delta(
                position=position,
                index=index,
                token_ids=token_ids,
                text=choice.text[text_begin : text_begin + num_chars],
                logprobs=choice.logprobs and choice.logprobs[begin : begin + num_tokens],
                finish_reason=own_reason if is_last else None,
                stop_reason=choice.stop_reason if is_last else None,
                checksum=checksum,
                vector=choice.vector if is_last else None,
                prompt_logprobs=None if begin else choice.prompt_logprobs,
                markup=None if begin else choice.markup,
                prompt_tokens=None if begin else choice.prompt_tokens,
                schema_error=choice.schema_error if is_last else None,
            )
            position += num_tokens
        yield self._end(*(self.ended_at or (position, checksum)))

    def _end(self, position: int, checksum: int | None) -> Done | Failed:
        if self.state == "succeeded" or self.error is None:
            is_cut = any(choice.finish_reason == "budget" for choice in self.choices)
            return Done(
                position=position,
                usage=self.usage,
                checksum=checksum,
                finish_reason="budget" if is_cut else None,
                timing=self.timing,
            )
        return Failed(
            position=position,
            state=self.state,
            error=self.error,
            usage=self.usage,
            checksum=checksum,
        )


def read_result(text: bytes) -> KeptResult:
    """Read a stored result.

    Its log probabilities are read one by one, so that other threads run meanwhile.
    """
    fields = _FIELDS.decode(text)
    choices = _CHOICES.decode(fields["choices"])
    logprobs = {
        name: [_LOGPROBS.decode(choice.pop(name, _NULL)) for choice in choices]
        for name in ("logprobs", "prompt_logprobs")
    }
    slim = msgspec.json.encode(fields | {"choices": choices})
    result = KeptResult.model_validate_json(slim)
    read = result.choices
    for name, of_choices in logprobs.items():
        read = [
            choice
            if raws is None
            else choice.model_copy(update={name: [_TOKEN.decode(raw) for raw in raws]})
            for choice, raws in zip(read, of_choices, strict=True)
        ]
    return result.model_copy(update={"choices": read})


def fold(
    job_id: str, model: str, num_choices: int, deltas: Sequence[Delta], end: Done | Failed
) -> KeptResult:
    """Make the result of a whole log. A choice that never had a token is there, and empty."""
    state: EndState = end.state
    of_choices = defaultdict[int, list[Delta]](list)
    for delta in deltas:
        of_choices[delta.index].append(delta)
    reason = end.finish_reason if isinstance(end, Done) else None
    return KeptResult(
        job_id=job_id,
        model=model,
        state=state,
        choices=[_choice(index, of_choices[index], reason) for index in range(num_choices)],
        usage=end.usage,
        error=end.error if isinstance(end, Failed) else None,
        timing=end.timing if isinstance(end, Done) else None,
        marks=[(delta.index, len(delta.token_ids), len(delta.text)) for delta in deltas],
    )


def _choice(index: int, deltas: Sequence[Delta], reason: FinishReason | None) -> Choice:
    logprobs: list[TokenLogprob] = [token for delta in deltas for token in delta.logprobs or []]
    last = deltas[-1] if deltas else None
    return Choice(
        index=index,
        text="".join(delta.text for delta in deltas),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        logprobs=logprobs or None,
        finish_reason=(last.finish_reason if last else None) or reason,
        stop_reason=last.stop_reason if last else None,
        vector=last.vector if last else None,
        prompt_logprobs=deltas[0].prompt_logprobs if deltas else None,
        markup=deltas[0].markup if deltas else None,
        prompt_tokens=deltas[0].prompt_tokens if deltas else None,
        prompt_ids=deltas[0].prompt_ids if deltas else None,
        token_strs=deltas[0].token_strs if deltas else None,
        schema_error=last.schema_error if last else None,
    )


def after(event: Event, cursor: int) -> Event | None:
    """Return the part of an event that a reader with `cursor` tokens lacks; None if it has all.

    The text of a delta belongs to its last token: a reader whose cursor lies inside has none of
    it, and gets all of it with the tokens that are left. So at every cursor the tokens before and
    after, and the texts before and after, join without a gap or a repeat.
    """
    if not isinstance(event, Delta):
        return event
    if event.end <= cursor:
        return None
    if event.position >= cursor:  # so it is for every live event: nothing to cut, nothing to copy
        return event
    offset = cursor - event.position
    return msgspec.structs.replace(
        event,
        position=cursor,
        token_ids=event.token_ids[offset:],
        logprobs=event.logprobs and event.logprobs[offset:],
    )
