"""The form in which a model marks its thinking and its calls, as its chat template shows it."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from penstock.schemas.wire.markup import THINKING, CallFormat, Markup, ReasoningFormat

# What is in a template that teaches a form. The first that is found counts.
_CALLS: tuple[tuple[CallFormat, str], ...] = (
    ("openai", "<|channel|>"),
    ("qwen3_xml", "<function="),
    ("hermes", "<tool_call>"),
    ("mistral", "[TOOL_CALLS]"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>"),  # noqa: RUF001
    ("llama3_json", "<|python_tag|>"),
    ("llama3_json", '"parameters": dictionary of argument name'),
    ("pythonic", "[func_name1("),
)
_REASONING: tuple[tuple[ReasoningFormat, str], ...] = (
    ("openai_gptoss", "<|channel|>"),
    ("mistral", "[THINK]"),
    ("qwen3", "</think>"),
)
_SAME: Mapping[str, CallFormat] = {"qwen3_coder": "qwen3_xml", "deepseek_v31": "deepseek_v3"}
_MANY = 16  # tokens, among which a mark that begins the thinking is


class Parsers(NamedTuple):
    """The settings of these names."""

    calls: str
    reasoning: str


AS_FOUND = Parsers("auto", "auto")


def find_markup(template: str, parsers: Parsers) -> Markup:
    """Return the form that the settings name, else the one that the template shows.

    Calls are `hermes` where neither does.
    """
    calls = next((name for name, sign in _CALLS if sign in template), "hermes")
    reasoning = next((name for name, sign in _REASONING if sign in template), None)
    given: dict[str, object] = {"calls": calls, "reasoning": reasoning}
    if parsers.calls != "auto":
        given["calls"] = _SAME.get(parsers.calls, parsers.calls)
    if parsers.reasoning != "auto":
        given["reasoning"] = None if parsers.reasoning == "none" else parsers.reasoning
    return msgspec.convert(given, Markup)


def of_answer(model: Markup, has_tools: bool, prompt_end: str) -> Markup | None:
    """Return the form of the answer to a prompt that ends so; None: it thinks and calls nothing.

    model  the form that its model knows
    """
    calls, reasoning = model.calls if has_tools else None, model.reasoning
    _, end = THINKING.get(reasoning or "", ("", ""))
    if end and prompt_end.rstrip().endswith(end):
        reasoning = None  # the prompt has ended it
    if calls is None and reasoning is None:
        return None
    return Markup(calls, reasoning, _is_open(reasoning, prompt_end))


def _is_open(reasoning: ReasoningFormat | None, prompt_end: str) -> bool:
    """Return whether a prompt that ends so has begun the thinking."""
    begin, _ = THINKING.get(reasoning or "", ("", ""))
    if reasoning == "deepseek_r1":
        return True  # it thinks always, and does not always begin with the mark
    return bool(begin) and prompt_end.rstrip().endswith(begin)


def num_reasoning(
    markup: Markup,
    token_ids: Sequence[int],
    decode: Callable[[Sequence[int]], str],
    piece: Callable[[int], str | None],
) -> int:
    """Return how many tokens are thinking, its marks included.

    decode  returns the text of ids, marks included
    piece   returns the string of an id
    """
    if markup.reasoning == "openai_gptoss":
        return _num_in_channels(token_ids, piece)
    if not markup.reasoning:
        return 0
    begin, end = THINKING[markup.reasoning]
    if not markup.is_open and not decode(token_ids[:_MANY]).lstrip().startswith(begin):
        return 0
    for place, token_id in enumerate(token_ids):
        if piece(token_id) == end:
            return place + 1
    few, many = 0, len(token_ids)  # a mark that is no token comes with one of those between
    if end not in decode(token_ids):
        return many
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if end in decode(token_ids[:middle]) else (middle, many)
    return many


def _num_in_channels(token_ids: Sequence[int], piece: Callable[[int], str | None]) -> int:
    count, header, thinks, is_header = 0, "", False, True
    for token_id in token_ids:
        text = piece(token_id) or ""
        if text == "<|message|>":
            is_header, thinks = False, "analysis" in header
        elif text in ("<|channel|>", "<|start|>"):
            is_header, header = True, ""
        elif is_header:
            header += text
        elif text in ("<|end|>", "<|call|>", "<|return|>"):
            thinks = False
        else:
            count += thinks
    return count
