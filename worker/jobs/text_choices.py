"""Choices that the tokenizer makes alone: ids of texts, texts of ids, and what it is."""

from collections.abc import Sequence

from penstock.schemas.errors import AnswerTooLarge, InvalidJob
from penstock.schemas.event import Delta, FinishReason
from penstock.schemas.job import Job, Prompt
from penstock.schemas.params.text import MAX_TEXT_IDS
from penstock.worker.engine.io.limits import EngineLimits
from penstock.worker.engine.io.messages import Output
from penstock.worker.text.completion import TextPiece
from penstock.worker.text.model_tokenizer import ModelTokenizer

DONE = Output("", [0], finish_reason="stop")


class TextChoice:
    """A choice that is known from the beginning, in the place of a `Completion`."""

    def __init__(self, piece: TextPiece) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._piece = piece

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_reasoning(self) -> int:
        return 0

    def take(self, output: Output) -> TextPiece:
        self.token_ids, self.finish_reason = output.token_ids, output.finish_reason
        return self._piece

    def anew(self) -> "TextChoice":
        return TextChoice(self._piece)

    def replay(self, delta: Delta) -> None:
        self.token_ids, self.finish_reason = delta.token_ids, delta.finish_reason


def text_choices(text: ModelTokenizer, job: Job, limits: EngineLimits) -> list[TextChoice]:
    """Return the choices of a job of `text`. Raises InvalidJob, AnswerTooLarge."""
    spec = job.text
    assert spec is not None
    if spec.task == "describe":
        return [_choice(text=text.description())]
    if spec.task == "detokenize":
        return [_choice(text=_text_of(text, prompt, limits)) for prompt in job.prompts]
    room = limits.prompt_room(job.params)
    if job.chat is not None:
        results = [text.write_and_render(job.chat, job.params, room)]
    else:
        results = [("", text.prompt_ids(prompt, job.params, room)) for prompt in job.prompts]
    num_ids = sum(len(ids) for _, ids in results)
    if num_ids > MAX_TEXT_IDS:
        sentence = f"{num_ids} tokens are more than the {MAX_TEXT_IDS} that an answer may have"
        raise AnswerTooLarge(f"prompt: {sentence}; ask in parts", "prompt")
    strings = text.token_strings if spec.return_token_strs else lambda ids: None
    return [_choice(content, ids, strings(ids)) for content, ids in results]


def _text_of(text: ModelTokenizer, prompt: Prompt, limits: EngineLimits) -> str:
    ids: Sequence[int] = () if isinstance(prompt, str) else prompt
    most = max(limits.vocab_size, text.num_tokens)
    if ids and max(ids) >= most:
        sentence = f"token id {max(ids)} is outside the vocabulary, 0 to {most - 1}"
        raise InvalidJob(f"tokens: {sentence}", "tokens")
    return text.decode(ids, skip_special_tokens=False)


def _choice(
    text: str = "", ids: list[int] | None = None, strings: list[str] | None = None
) -> TextChoice:
    piece = TextPiece([0], text, None, "stop", None, prompt_ids=ids, token_strs=strings)
    return TextChoice(piece)
