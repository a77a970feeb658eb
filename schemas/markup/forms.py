"""Tool calling and reasoning: the forms in which models write tool calls and thinking.

A row is all that a form is: its reader, the tag that holds a model to it, and its signs in a chat
template follow from it. A form has the name of its parser in vLLM. In a template that has signs of
several forms, the first row counts. Sources: the models' chat templates.
"""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from penstock.schemas.markup.channels import Channels
from penstock.schemas.markup.form import Form, ThinkingMarks
from penstock.schemas.markup.json_calls import DeepSeek, ForcedJson, MarkedJson, NamedJson
from penstock.schemas.markup.python_calls import PythonCalls
from penstock.schemas.markup.source import Source, Steps
from penstock.schemas.markup.tagged_values import TaggedValues

CUSTOM_INPUT = "input"  # the one argument of a custom tool, which models know as a function
UNPARSED_KEY = "unparsed_arguments"  # stands for those of a call that are no JSON object
FORCED_FORM = "json"  # no model's own form: a grammar holds the answer to it
_CHANNELS = Channels(
    ("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<|call|>"),
    signs=("<|channel|>",),
)
CALL_FORMS: Mapping[str, Form] = {
    "openai": _CHANNELS,
    "qwen3_xml": TaggedValues(
        ("<tool_call>", "</tool_call>"), name=("<function=", ">", "</function>"),
        key=("<parameter=", ">", "</parameter>"), pad="\n", style="qwen_xml",
        signs=("<function=",), aliases=("qwen3_coder",),
    ),
    "hermes": MarkedJson(
        ("<tool_call>", "</tool_call>"), pad="\n", between="\n", signs=("<tool_call>",)
    ),
    "mistral": NamedJson(
        ("[TOOL_CALLS]", "", "[CALL_ID]", "[ARGS]"), is_list=True, between=", ",
        signs=("[TOOL_CALLS]",),
    ),
    "deepseek_v3": DeepSeek(  # its bars are full width
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",  # noqa: RUF001
         "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),  # noqa: RUF001
        signs=("<｜tool▁calls▁begin｜>",), aliases=("deepseek_v31",),  # noqa: RUF001
    ),
    "llama3_json": MarkedJson(
        ("<|python_tag|>", ""), key="parameters", between="; ", is_bare=True,
        signs=("<|python_tag|>", '"parameters": dictionary of argument name'),
    ),
    "pythonic": PythonCalls(signs=("[func_name1(",)),
    FORCED_FORM: ForcedJson(),
}  # fmt: skip
THINKING_FORMS: Mapping[str, Form] = {
    "openai_gptoss": _CHANNELS,
    "mistral": ThinkingMarks(("[THINK]", "[/THINK]"), signs=("[THINK]",)),
    "qwen3": ThinkingMarks(("<think>", "</think>"), signs=("</think>",)),
    "deepseek_r1": ThinkingMarks(("<think>", "</think>"), is_always=True),
}
_NO_FORM = Form()


class Markup(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The forms of one completion, as far as its worker knows its model.

    calls      how calls of tools are written, json where a grammar holds them to be nothing else
    reasoning  how thinking is written; None for a model that does not think
    is_open    the prompt has begun the thinking, so the completion begins in the middle of it
    """

    calls: str | None = None
    reasoning: str | None = None
    is_open: bool = False

    def __post_init__(self) -> None:
        for name, forms in ((self.calls, CALL_FORMS), (self.reasoning, THINKING_FORMS)):
            if name is not None and name not in forms:
                raise ValueError(f"{name!r} is none of the forms {', '.join(forms)}")

    @property
    def call_form(self) -> Form:
        return CALL_FORMS[self.calls] if self.calls else _NO_FORM

    @property
    def thinking(self) -> ThinkingMarks | None:
        """Return the form of thinking between two marks; None where it is no such form."""
        form = THINKING_FORMS.get(self.reasoning or "")
        return form if isinstance(form, ThinkingMarks) else None

    @property
    def marks(self) -> frozenset[str]:
        """Return every mark that may be in the completion."""
        forms = self.call_form, THINKING_FORMS.get(self.reasoning or "", _NO_FORM)
        return frozenset(mark for form in forms for mark in form.marks if mark)

    def read(self, source: Source) -> Steps[None]:
        """Read the text of the completion."""
        calls, thinking = self.call_form, self.thinking
        if calls is _CHANNELS or (self.reasoning and thinking is None):
            return _CHANNELS.read(source)
        return thinking.read_before(source, calls, self.is_open) if thinking else calls.read(source)


def form_of(parser: str, template: str, forms: Mapping[str, Form]) -> str | None:
    """Return the name of the form that a parser of this name reads; None where there is none.

    The parser `auto` reads the form that the chat template shows.
    """
    for name, form in forms.items():
        is_shown = parser == "auto" and any(sign in template for sign in form.signs)
        if is_shown or parser in (name, *form.aliases):
            return name
    return None


def _parsers(forms: Mapping[str, Form]) -> list[str]:
    return [parser for name, form in forms.items() for parser in (name, *form.aliases)]


class CallParser(StrEnum):
    """The parsers of calls that a setting may name."""

    locals().update({name: name for name in ("auto", *_parsers(CALL_FORMS)) if name != FORCED_FORM})


class ReasoningParser(StrEnum):
    """The parsers of thinking that a setting may name."""

    locals().update({name: name for name in ("auto", "none", *_parsers(THINKING_FORMS))})
