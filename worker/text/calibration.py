"""Windows of tokens that a model is quantised with, out of a file of texts or conversations."""

from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError, model_validator

from penstock.schemas.errors import InvalidJob
from penstock.schemas.job import Chat
from penstock.worker.text.model_tokenizer import ModelTokenizer


class CalibrationText(BaseModel):
    """A line of a file: a text, or messages as a chat has them, with its tools."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    text: str | None = None
    messages: list[dict[str, JsonValue]] | None = None
    tools: list[dict[str, JsonValue]] = []

    @model_validator(mode="after")
    def has_one(self) -> "CalibrationText":
        if (self.text is None) == (not self.messages):
            raise ValueError('either "text" or "messages" is to be there')
        return self


def token_windows(
    tokenizer: ModelTokenizer, file: Path, num_windows: int, length: int
) -> list[list[int]]:
    """Return so many windows of so many tokens, from the file's beginning on.

    Texts stand one behind the other, each as the model's tokenizer begins and ends it.
    Raises InvalidJob, which names the file, where it has fewer or cannot be read.
    """
    num_tokens = num_windows * length
    ids: list[int] = []
    for text in _texts(file):
        ids += _ids(tokenizer, text)
        if len(ids) >= num_tokens:
            return [ids[begin : begin + length] for begin in range(0, num_tokens, length)]
    raise InvalidJob(
        f"calibration: {file} has {len(ids):,} tokens, and {num_windows} windows of {length} take "
        f"{num_tokens:,}; give more text, or fewer --samples, or a smaller --length",
        "calibration",
    )


def _texts(file: Path) -> Iterator[CalibrationText]:
    """Yield the texts of a file: of .jsonl one a line, else all of it. Raises InvalidJob."""
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidJob(f"calibration: {file} cannot be read: {error}", "calibration") from error
    if file.suffix != ".jsonl":
        yield CalibrationText(text=content)
        return
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            yield CalibrationText.model_validate_json(line)
        except ValidationError as error:
            message = error.errors()[0]["msg"].removeprefix("Value error, ")
            form = 'a line is {"text": ..} or {"messages": [..]}'
            why = f"calibration: {file}, line {number}: {message}; {form}"
            raise InvalidJob(why, "calibration") from error


def _ids(tokenizer: ModelTokenizer, text: CalibrationText) -> list[int]:
    """Return the tokens of a text, of a conversation as the model's template writes it.

    Where there is no template, or it takes no such conversation, its contents are the text.
    """
    if text.text is not None:
        return tokenizer.encode(text.text)
    messages = text.messages or []
    if tokenizer.has_chat_template:
        try:
            return tokenizer.render(
                Chat(messages=messages, tools=text.tools, add_generation_prompt=False)
            )
        except InvalidJob:
            pass
    return tokenizer.encode("\n".join(str(message.get("content")) for message in messages))
