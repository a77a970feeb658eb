"""The parameters of jobs that a model's tokenizer answers alone."""

from typing import Literal

from pydantic import Field

from penstock.schemas.wire.wire import Wire

TextTask = Literal["tokenize", "detokenize", "describe"]
MAX_TEXT_IDS = 2**19  # ids of all prompts in one answer


class TextParams(Wire):
    """The parameters of a job that a worker's I/O process answers, without its engine.

    task  tokenize: the ids of each prompt, or of a chat with the text that its template makes;
          detokenize: the text of each prompt, a list of ids; describe: the tokenizer's
          configuration, as JSON
    """

    task: TextTask
    return_token_strs: bool = Field(False, description="the tokens of `tokenize` as strings too")
