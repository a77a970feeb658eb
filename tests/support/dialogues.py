"""What a scripted worker says to tests of several protocols: text, thinking and calls."""

from msgspec.structs import replace
from pydantic import BaseModel

from penstock.schemas.event import Delta
from penstock.schemas.job import Chat, Job
from penstock.schemas.markup.forms import Markup
from penstock.worker.text.messages import plain_messages
from stage import Actor, spoken

CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Bern"}}\n</tool_call>'
THINKS = Markup("hermes", "qwen3", is_open=True)


class Person(BaseModel):
    name: str
    age: int


def marked(markup: Markup, *texts: str) -> list[Delta]:
    """As `spoken`, with what its first event tells of the prompt and the answer's form."""
    first, *others = spoken(*texts)
    return [replace(first, markup=markup, prompt_tokens=5), *others]


SCRIPTS: dict[str, list[Delta]] = {
    "text": spoken("Hel", "", "lo ", "é\u2028", "!"),
    "thinking": marked(THINKS, "I ", "see</thi", "nk>\n\nHel", "lo"),
    "a call": marked(Markup("hermes"), "Let me", " look. <tool", CALL[5:20], CALL[20:]),
    "calls": marked(Markup("hermes"), CALL + "\n", CALL.replace("Bern", "Basel")),
    "all": marked(THINKS, "So</think>", "\n\nWell. ", CALL[:30], CALL[30:60], CALL[60:]),
    "nothing": spoken(""),
    "cut off": [replace(marked(Markup("hermes"), CALL[:55])[0], finish_reason="length")],
}


def chat_of(actor: Actor) -> Chat:
    """The chat of the job that came last, as its worker gives it to the model's template."""
    return plain_chat(actor.jobs[-1])


def plain_chat(job: Job) -> Chat:
    assert job.chat is not None
    return job.chat.model_copy(update={"messages": plain_messages(job.chat.messages)})
