"""Messages as OpenAI's clients send them, made into what chat templates read."""

import json

from pydantic import JsonValue

from penstock.schemas.errors import InvalidJob
from penstock.schemas.job import Message


def plain_messages(messages: list[Message], in_parts: bool = False) -> list[Message]:
    """Return the messages with content as one string or absent, and calls' arguments as objects.

    Raises InvalidJob that names the message and the field that cannot be read so.

    in_parts  content is a list of parts or absent
    """
    return [_plain(message, place, in_parts) for place, message in enumerate(messages)]


def _plain(message: Message, place: int, in_parts: bool) -> Message:
    if not isinstance(message.get("role"), str):
        raise InvalidJob(f"messages[{place}].role: give a string", "messages")
    plain = dict(message)
    content = message.get("content")
    if not isinstance(content, str | list | None):
        raise InvalidJob(f"messages[{place}].content: give a string or a list of parts", "messages")
    if content is not None:
        parts = content if isinstance(content, list) else [content]
        texts = [_part_text(part, place) for part in parts]
        told: list[JsonValue] = [{"type": "text", "text": text} for text in texts]
        plain["content"] = told if in_parts else "\n".join(texts)
    calls = message.get("tool_calls")
    if calls is not None:
        plain["tool_calls"] = _calls(calls, place)
    return plain


def _part_text(part: JsonValue, place: int) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise InvalidJob(
        f"messages[{place}].content: a part of type {kind!r}; this model reads text parts",
        "messages",
    )


def _calls(calls: JsonValue, place: int) -> JsonValue:
    """Return tool calls with their arguments as objects, from which templates write them.

    OpenAI's clients send arguments as a string of JSON.
    """
    if not isinstance(calls, list):
        raise InvalidJob(f"messages[{place}].tool_calls: give a list", "messages")
    return [
        _call(call, f"messages[{place}].tool_calls[{number}]") for number, call in enumerate(calls)
    ]


def _call(call: JsonValue, where: str) -> JsonValue:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise InvalidJob(f"{where}.function: give an object with name and arguments", "messages")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(arguments or "{}")}}
    except ValueError as error:
        raise InvalidJob(f"{where}.function.arguments: not JSON: {error}", "messages") from error
