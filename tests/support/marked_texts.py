"""Calls as models write them, in each form, and texts of bits of all forms."""

import json
from itertools import pairwise

from hypothesis import strategies as st

from penstock.gateway.markup.reader import Reading
from penstock.schemas.markup.forms import CALL_FORMS, THINKING_FORMS, Markup
from penstock.schemas.markup.source import Found, whole

SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}, "n": {"type": "integer"}}}
TOOLS = {"f": SCHEMA, "g": {}}


_BEGIN, _CALL, _MIDDLE, _END, _LAST = CALL_FORMS["deepseek_v3"].marks
WRITTEN = {  # of each form: a call, and what is between two
    "hermes": ('<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>', "\n"),
    "llama3_json": ('{{"name": "{name}", "parameters": {arguments}}}', "; "),
    "mistral": ("[TOOL_CALLS]{name}[ARGS]{arguments}", ""),
    "qwen3_xml": ("<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>", "\n"),
    "deepseek_v3": (f"{_CALL}function{_MIDDLE}{{name}}\n```json\n{{arguments}}\n```{_END}", "\n"),
    "pythonic": ("{name}({values})", ", "),
    "openai": (
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>",
        "<|start|>assistant",
    ),
}
AROUND = {"deepseek_v3": (_BEGIN, _LAST), "pythonic": ("[", "]")}
VALUES = {
    "qwen3_xml": "<parameter={key}>\n{text}\n</parameter>\n",
    "pythonic": "{key}={value!r}, ",
}  # of forms that write each by itself
FORMS = (*CALL_FORMS.values(), *THINKING_FORMS.values())
MARKS = sorted({mark for form in FORMS for mark in form.marks if mark})
BITS = [
    "<tool", "_call>", "<", "\n", " ", "é", "ü", "éü", "🙂", '"', "}", "{", "[", "]", "\\", "1",
    '{"name":"f","arguments":{"x":"é ü"}}', '\n{"name": "g", "arguments": "{}"}\n', '{"name":5}',
    "f", "<function=f>", "<parameter=n>", "</function>", "f(n=1)", "<|channel|>final",
    "<|channel|>analysis", "<|channel|>commentary to=functions.f", *MARKS,
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(BITS), max_size=14).map("".join)
MARKUPS = st.builds(
    Markup,
    st.sampled_from([*CALL_FORMS, None]),
    st.sampled_from([*THINKING_FORMS, None]),
    st.booleans(),
)


def written(kind: str, calls: list[tuple[str, dict[str, object]]]) -> str:
    (call, between), (before, after) = WRITTEN[kind], AROUND.get(kind, ("", ""))
    own, texts = VALUES.get(kind, ""), []
    for name, arguments in calls:
        pairs = [(k, v, v if isinstance(v, str) else json.dumps(v)) for k, v in arguments.items()]
        values = "".join(own.format(key=k, value=v, text=text) for k, v, text in pairs)
        as_json = json.dumps(arguments, ensure_ascii=False)
        texts.append(call.format(name=name, arguments=as_json, values=values))
    return before + between.join(texts) + after


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(places)]


def read(pieces: list[str], markup: Markup | None, reading: Reading = Reading(TOOLS)) -> Found:  # noqa: B008
    """What a gateway shows of a text."""
    reader = reading.reader(markup)
    return whole([*(reader.feed(piece) for piece in pieces), reader.finish()])
