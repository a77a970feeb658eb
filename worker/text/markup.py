"""The form in which a model marks its thinking and its calls, as its chat template shows it."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock.schemas.markup.forms import CALL_FORMS, THINKING_FORMS, Markup, form_of

_HEAD_IDS = 16  # tokens, among which a mark that begins the thinking is


class Parsers(NamedTuple):
    """The settings of these names."""

    calls: str
    reasoning: str


AUTO_PARSERS = Parsers("auto", "auto")


def find_markup(template: str, parsers: Parsers) -> Markup:
    """Return the form that the settings name, else the one that the template shows.

    Calls are `hermes` where neither does.
    """
    calls = form_of(parsers.calls, template, CALL_FORMS) or "hermes"
    return Markup(calls, form_of(parsers.reasoning, template, THINKING_FORMS))


def of_answer(model: Markup, has_tools: bool, prompt_end: str) -> Markup | None:
    """Return the form of the answer to a prompt that ends so; None: it thinks and calls nothing.

    model  the form that its model knows
    """
    calls, prompt_end = model.calls if has_tools else None, prompt_end.rstrip()
    thinking, reasoning = model.thinking, model.reasoning
    if thinking and prompt_end.endswith(thinking.marks[1]):
        thinking = reasoning = None  # the prompt has ended it
    if calls is None and reasoning is None:
        return None
    is_open = thinking and (thinking.is_always or prompt_end.endswith(thinking.marks[0]))
    return Markup(calls, reasoning, bool(is_open))


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
    if (thinking := markup.thinking) is None:
        return _num_in_channels(token_ids, piece) if markup.reasoning else 0
    begin, end = thinking.marks
    if not markup.is_open and not decode(token_ids[:_HEAD_IDS]).lstrip().startswith(begin):
        return 0
    for place, token_id in enumerate(token_ids):
        if piece(token_id) == end:
            return place + 1
    most = len(token_ids)  # a mark that is no token comes with one of those between
    if end not in decode(token_ids):
        return most
    return bisect_left(range(most), True, key=lambda count: end in decode(token_ids[:count]))


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
