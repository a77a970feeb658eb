"""The channels of gpt-oss: reasoning, tool calls and the answer, each a message with a header.

Source: the model's chat template, and OpenAI's description of its `harmony` format.
"""

import re

from penstock.schemas.markup.form import Form
from penstock.schemas.markup.source import Emit, Source, Steps

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")


class Channels(Form):
    """Messages of which some are thinking, and some are calls."""

    def read(self, source: Source) -> Steps[None]:
        """Read messages. A text that begins without a header is content, up to the first mark."""
        if (yield from source.next_sign()) not in ("<", ""):
            yield from source.upto(_ENDS, source.content)
        while True:
            header: list[str] = []
            if not (yield from source.upto((_MESSAGE,), header.append)):
                return
            yield from source.upto(_ENDS, _place_of("".join(header), source))


def _place_of(header: str, source: Source) -> Emit:
    if match := _RECIPIENT.search(header):
        source.call(match[1])
        return source.arguments
    if "analysis" in header:
        source.reasoning("\n")  # where more than one message thinks
        return source.reasoning
    return source.content
