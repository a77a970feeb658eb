"""The marks that set reasoning (thinking) and tool calls apart from the answer in a text."""

from collections.abc import Mapping
from typing import Literal

import msgspec

CallFormat = Literal[
    "hermes", "llama3_json", "mistral", "qwen3_xml", "deepseek_v3", "pythonic", "openai", "json"
]
ReasoningFormat = Literal["deepseek_r1", "qwen3", "mistral", "openai_gptoss"]
CUSTOM_INPUT = "input"  # the one argument of a custom tool, which models know as a function
UNPARSED = "unparsed_arguments"  # stands for those of a call that are no JSON object

# What begins and what ends the thinking. gpt-oss has channels instead, `penstock.gateway.markup`.
THINKING: Mapping[str, tuple[str, str]] = {
    "deepseek_r1": ("<think>", "</think>"),
    "qwen3": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
}
_CHANNELS = ("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<|call|>")
# Every mark of a format, what begins a call first. Those that are special tokens are shown too.
MARKS: Mapping[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    "qwen3_xml": ("<tool_call>", "</tool_call>"),
    "deepseek_v3": (  # its bars are full width
        "<｜tool▁calls▁begin｜>",  # noqa: RUF001
        "<｜tool▁call▁begin｜>",  # noqa: RUF001
        "<｜tool▁sep｜>",  # noqa: RUF001
        "<｜tool▁call▁end｜>",  # noqa: RUF001
        "<｜tool▁calls▁end｜>",  # noqa: RUF001
    ),
    "pythonic": (),
    "json": (),
    "": (),
    "openai": _CHANNELS,
    "openai_gptoss": _CHANNELS,
}


class Markup(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The marks of one completion, as far as its worker knows its model.

    calls      how calls of tools are written, json where a grammar holds them to be nothing else
    reasoning  how thinking is written; None for a model that does not think
    is_open    the prompt has begun the thinking, so the completion begins in the middle of it
    """

    calls: CallFormat | None = None
    reasoning: ReasoningFormat | None = None
    is_open: bool = False

    @property
    def marks(self) -> frozenset[str]:
        """Return every mark that may be in the completion."""
        thinking = THINKING.get(self.reasoning or "", ()) or MARKS.get(self.reasoning or "", ())
        return frozenset((*MARKS.get(self.calls or "", ()), *thinking))
