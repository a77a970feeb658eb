"""A model's own chat template, rendered by transformers. To import this takes half a second."""

import inspect
from importlib.metadata import version
from importlib.util import find_spec
from operator import methodcaller
from pathlib import Path
from typing import Literal

from jinja2 import TemplateError
from pydantic import JsonValue
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from penstock.schemas.errors import InvalidJob
from penstock.schemas.job import Chat, Message
from penstock.worker.models.folder.errors import BrokenModel, is_failure, reason
from penstock.worker.models.folder.files import read_object
from penstock.worker.text.messages import plain_messages
from penstock.worker.text.time_limit import TookTooLong, limit_time

_TOKENIZER = "tokenizer.json"
_TEMPLATE = "chat_template.json"
_OF_FOLDER = {"name_or_path", "tokenizer_object", "chat_template"}  # not of the tokenizer
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_OTHER_FORMS = ("*.model", "vocab.json", "vocab.txt", "tekken.json", "*.tiktoken")

_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError)
RENDER_S = 5.0  # processor's time for one chat; a template is a program
_PROBE = "what is said here"  # written by a template that reads it
_PART_AS_PYTHON = "'type':"  # shows that a list was written as it stands

# What a job may not set through `template_kwargs`: the template itself above all.
_KEYWORDS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {
    "documents",
    "kwargs",
}


class ChatTemplate:
    """The template and the tokenizer of one folder.

    template        the template that stands in the place of the folder's
    content_format  string: a message's content is one text; openai: a list of parts; auto: as the
                    template reads it
    trusts_jobs     a chat may bring a template of its own
    """

    def __init__(
        self,
        folder: Path,
        template: str | None = None,
        content_format: Literal["auto", "string", "openai"] = "auto",
        trusts_jobs: bool = False,
    ) -> None:
        self._tokenizer = _load(folder)
        self._trusts_jobs = trusts_jobs
        source = folder / "chat_template.jinja"
        if not source.is_file():
            source = folder / "tokenizer_config.json"
        if not self.is_there and (folder / _TEMPLATE).is_file():
            source = folder / _TEMPLATE
            self._tokenizer.chat_template = _separate(source)
        if template is not None:
            self._tokenizer.chat_template = template
        _check_template(f"model: {source}" if template is None else "chat_template", self._template)
        self._reads_parts = content_format == "openai"
        if content_format == "auto" and self.is_there:
            try:
                self._reads_parts = not self._shows(_PROBE) and self._shows([_part(_PROBE)])
            except TookTooLong as error:
                where = f"model: {source}" if template is None else "chat_template"
                raise _broken(where, str(error)) from error

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer.backend_tokenizer

    @property
    def is_there(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @property
    def source(self) -> str:
        template = self._tokenizer.chat_template
        return "\n".join(template.values()) if isinstance(template, dict) else str(template or "")

    def describe(self) -> dict[str, JsonValue]:
        """Return what the folder's `tokenizer_config.json` says, as transformers has it."""
        tokenizer = self._tokenizer
        config: dict[str, JsonValue] = {
            name: _as_json(value)
            for name, value in tokenizer.init_kwargs.items()
            if not name.endswith("_file") and name not in _OF_FOLDER
        }
        template = {"chat_template": self.source} if self.source else {}
        return {**config, "tokenizer_class": type(tokenizer).__name__, **template}

    def write(self, chat: Chat) -> str:
        if chat.chat_template is not None and not self._trusts_jobs:
            raise InvalidJob(
                "chat_template: the model's workers run none but their own; start them with "
                "--trust-request-chat-template",
                "chat_template",
            )
        if not self.is_there and chat.chat_template is None:
            raise InvalidJob("messages: this model has no chat template; send a prompt", "messages")
        if names := _KEYWORDS & chat.template_kwargs.keys():
            raise InvalidJob(
                f"chat_template_kwargs: {', '.join(sorted(names))} cannot be given by a job",
                "chat_template_kwargs",
            )
        template = chat.chat_template or self._template
        if "documents" in chat.template_kwargs and "documents" not in str(template):
            raise InvalidJob("documents: this model's chat template reads none", "documents")
        try:
            return self._render(
                plain_messages(chat.messages, self._reads_parts),
                chat_template=chat.chat_template,
                tools=[_shown_tool(tool) for tool in chat.tools] or None,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                **chat.template_kwargs,
            )
        except (*_REFUSALS, TookTooLong) as error:
            message = f"messages: the model's chat template refused them: {error}"
            raise InvalidJob(message, "messages") from error

    @property
    def _template(self) -> object:
        return self._tokenizer.chat_template

    def _render(self, messages: list[Message], **options: object) -> str:
        # By name, because transformers' annotation knows messages of plain strings only.
        render = methodcaller("apply_chat_template", messages, tokenize=False, **options)
        try:
            with limit_time(RENDER_S):
                return str(render(self._tokenizer))
        except TookTooLong:
            raise TookTooLong(f"it computed for {RENDER_S:g} s, which is the most") from None

    def _shows(self, content: JsonValue) -> bool:
        """Return whether the template writes a content of this form as the text that it has."""
        try:
            text = self._render([{"role": "user", "content": content}])
        except _REFUSALS:
            return False
        return _PROBE in text and _PART_AS_PYTHON not in text


def _shown_tool(tool: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the tool as models know tools: `strict` is for who holds the call to its schema."""
    function = tool.get("function")
    if not isinstance(function, dict) or "strict" not in function:
        return tool
    return {**tool, "function": {k: v for k, v in function.items() if k != "strict"}}


def _load(folder: Path) -> PreTrainedTokenizerFast:
    """Load tokenizer.json as it stands, or older files through the class that can read them.

    Raises InvalidJob.
    """
    if not folder.is_dir():
        raise InvalidJob(f"model: {folder} is no folder", "model")
    has_json = (folder / _TOKENIZER).is_file()
    if not has_json:
        _refuse_without_json(folder)
    try:
        if has_json:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        else:
            from transformers import AutoTokenizer  # loads torch: a second, for old files only

            tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.encode("")  # some files are only found broken when they are used
    except BaseException as error:
        if not is_failure(error):
            raise
        raise InvalidJob(f"model: {_cause(folder, error)}", "model") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        kind = type(tokenizer).__name__
        raise InvalidJob(f"model: {folder}: a {kind} is not served; {_convert(folder)}", "model")
    return tokenizer


def _refuse_without_json(folder: Path) -> None:
    """Raise InvalidJob if no other file holds the tokenizer, or none that can be read here."""
    files = [file for name in _OTHER_FORMS for file in sorted(folder.glob(name))]
    if not files:
        raise InvalidJob(
            f"model: {folder}: its tokenizer is missing; put the model's {_TOKENIZER} there",
            "model",
        )
    if files[0].suffix == ".model" and find_spec("sentencepiece") is None:
        raise InvalidJob(
            f"model: {files[0]} is no form that is read here; {_convert(folder)}", "model"
        )


def _convert(folder: Path) -> str:
    code = "from transformers import AutoTokenizer as A; A.from_pretrained(p).save_pretrained(p)"
    return (
        f"make a {_TOKENIZER} of it: pip install sentencepiece protobuf, then "
        f"python -c \"p = '{folder}'; {code}\""
    )


def _cause(folder: Path, error: BaseException) -> str:
    """Return which file caused the error, and what can be done."""
    for name in (_TOKENIZER, *_BESIDE):
        path = folder / name
        if not path.is_file():
            continue
        try:
            read_object(path)
            if name == _TOKENIZER:
                Tokenizer.from_file(str(path)).encode("")
        except BrokenModel as failure:
            return str(failure)
        except BaseException as failure:
            if not is_failure(failure):
                raise
            return (
                f"{path}: tokenizers {version('tokenizers')} cannot read it: {reason(failure)}; "
                "fetch it again, or install a newer version of tokenizers"
            )
    return f"{folder}: its tokenizer cannot be read: {reason(error)}; fetch its files again"


def _separate(path: Path) -> str:
    """Return the template in a file that older versions of transformers wrote for a processor."""
    try:
        template = read_object(path).get("chat_template")
    except BrokenModel as error:
        raise InvalidJob(f"model: {error}", "model") from error
    if not isinstance(template, str):
        raise InvalidJob(f"model: {path}: chat_template is missing, or no text", "model")
    return template


def _part(text: str) -> JsonValue:
    return {"type": "text", "text": text}


def _check_template(source: str, template: object) -> None:
    """Raise InvalidJob if a template cannot be compiled."""
    param = source.partition(":")[0]
    templates = template.values() if isinstance(template, dict) else [template]
    for text in templates:
        if text is not None and not isinstance(text, str):
            raise InvalidJob(
                f"{source}: chat_template is a {type(text).__name__}; it must be a text", param
            )
        try:
            render_jinja_template(conversations=[], chat_template=text or "")  # compiles it
        except TemplateError as error:
            raise _broken(source, reason(error)) from error


def _broken(source: str, why: str) -> InvalidJob:
    sentence = f"{source}: its chat template is broken: {why}; mend it, or fetch it again"
    return InvalidJob(sentence, source.partition(":")[0])


def _as_json(value: object) -> JsonValue:
    """Return a setting of transformers' as JSON: tokens become their strings."""
    if isinstance(value, AddedToken):
        return value.content
    if isinstance(value, dict):
        return {str(name): _as_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_as_json(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
