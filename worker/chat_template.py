"""A model's own chat template, written by transformers. Loading this file takes half a second."""

import inspect
from operator import methodcaller
from pathlib import Path

from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from schemas.errors import InvalidJob
from schemas.job import Chat
from worker.conversation import plain_messages

# What a job may not set through `template_kwargs`: the template itself above all.
_RESERVED = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {
    "documents",
    "kwargs",
}


class ChatTemplate:
    """The template and the tokenizer of one folder."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = _load(folder)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer.backend_tokenizer

    @property
    def is_there(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def write(self, chat: Chat) -> str:
        if not self.is_there:
            raise InvalidJob("messages: this model has no chat template; send a prompt", "messages")
        if taken := _RESERVED & chat.template_kwargs.keys():
            raise InvalidJob(
                f"chat_template_kwargs: {', '.join(sorted(taken))} cannot be given by a job",
                "chat_template_kwargs",
            )
        # By name, because transformers' annotation knows messages of plain strings only.
        render = methodcaller(
            "apply_chat_template",
            plain_messages(chat.messages),
            tools=chat.tools or None,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            tokenize=False,
            **chat.template_kwargs,
        )
        try:
            return str(render(self._tokenizer))
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            message = f"messages: the model's chat template refused them: {error}"
            raise InvalidJob(message, "messages") from error


def _load(folder: Path) -> PreTrainedTokenizerFast:
    """tokenizer.json as it stands; older files go through the class that knows how to read them."""
    if not folder.is_dir():
        raise InvalidJob(f"model: {folder} is no folder", "model")
    try:
        if (folder / "tokenizer.json").is_file():
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        else:
            from transformers import AutoTokenizer  # loads torch: a second, for old files only

            tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise InvalidJob(f"model: its tokenizer cannot be read: {error}", "model") from error
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer
