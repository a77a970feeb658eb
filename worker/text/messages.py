"""Messages as callers send them, made into what chat templates read, whatever way they came."""

from collections.abc import Iterator

from pydantic import JsonValue, TypeAdapter

from penstock.schemas.api.json_size import too_much
from penstock.schemas.errors import InvalidJob
from penstock.schemas.job import Message
from penstock.schemas.markup.forms import CUSTOM_INPUT, UNPARSED_KEY

_OBJECT: TypeAdapter[Message] = TypeAdapter(Message)
_ROLES = {"developer": "system", "function": "tool"}  # OpenAI's roles that templates lack


def plain_messages(messages: list[Message], in_parts: bool = False) -> list[Message]:
    """Return the messages with content, one system role, and calls of functions with objects.

    What is null is left out, and the content of an assistant who only calls is empty. Raises
    InvalidJob that names the message and the field that cannot be read so.

    in_parts  content is a list of parts, else one string
    """
    refuse_large_arguments(messages)
    return [_plain(message, f"messages[{at}]", in_parts) for at, message in enumerate(messages)]


def refuse_large_arguments(messages: list[Message]) -> None:
    """Raise InvalidJob where arguments hold more than may be parsed, of one call or together."""
    texts = [*_argument_texts(messages)]
    for where, text in texts:
        if excess := too_much(text):
            raise InvalidJob(f"{where}: they hold {excess}; send fewer", "messages")
    if excess := too_much(*(text for _, text in texts)):
        sentence = f"messages: the arguments of all calls hold {excess} together; send fewer"
        raise InvalidJob(sentence, "messages")


def _argument_texts(messages: list[Message]) -> Iterator[tuple[str, bytes]]:
    """Yield the arguments that are to be parsed, and where each is."""
    for at, message in enumerate(messages):
        calls = message.get("tool_calls")
        functions = [
            (f"tool_calls[{number}].function", call.get("function"))
            for number, call in enumerate(calls if isinstance(calls, list) else [])
            if isinstance(call, dict)
        ]
        for name, function in [*functions, ("function_call", message.get("function_call"))]:
            text = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(text, str):
                yield f"messages[{at}].{name}.arguments", text.encode(errors="replace")


def _plain(message: Message, where: str, in_parts: bool) -> Message:
    fields: Message = {name: value for name, value in message.items() if value is not None}
    role, function_call = fields.get("role"), fields.pop("function_call", None)
    if not isinstance(role, str):
        raise InvalidJob(f"{where}.role: give a string", "messages")
    plain = fields | {"role": _ROLES.get(role, role), "content": _content(fields, where, in_parts)}
    if role == "function":
        plain["tool_call_id"] = fields.get("name")
    calls = fields.get("tool_calls", [])
    if function_call is not None and not calls:
        plain["tool_calls"] = [_older_call(function_call, f"{where}.function_call")]
    elif not isinstance(calls, list):
        raise InvalidJob(f"{where}.tool_calls: give a list", "messages")
    elif "tool_calls" in fields:
        entries = enumerate(calls)
        plain["tool_calls"] = [_call(call, f"{where}.tool_calls[{at}]") for at, call in entries]
    return plain


def _content(message: Message, where: str, in_parts: bool) -> JsonValue:
    content = message.get("content")
    if content is None and message["role"] == "assistant":
        content = ""
    if not isinstance(content, str | list):
        raise InvalidJob(f"{where}.content: give a string or a list of parts", "messages")
    parts = content if isinstance(content, list) else [content]
    texts = [_part_text(part, where) for part in parts]
    if not in_parts:
        return "\n".join(texts)
    return [{"type": "text", "text": text} for text in texts or [""]]


def _part_text(part: JsonValue, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise InvalidJob(
        f"{where}.content: a part of type {kind!r}; this model reads text parts", "messages"
    )


def _call(call: JsonValue, where: str) -> JsonValue:
    """Return a call as one of a function. A custom tool is a function with one argument."""
    if isinstance(call, dict) and isinstance(custom := call.get("custom"), dict):
        arguments: JsonValue = {CUSTOM_INPUT: custom.get("input", "")}
        call = {**call, "function": {"name": custom.get("name"), "arguments": arguments}}
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise InvalidJob(f"{where}.function: give an object with name and arguments", "messages")
    own = {name: value for name, value in call.items() if name != "custom" and value is not None}
    return own | {"type": "function", "function": _function(function, f"{where}.function")}


def _older_call(call: JsonValue, where: str) -> JsonValue:
    """Return the call of a message that has one at most, whose result comes under its name."""
    if not isinstance(call, dict):
        raise InvalidJob(f"{where}: give an object with name and arguments", "messages")
    function = _function(call, where)
    return {"id": call.get("name"), "type": "function", "function": function}


def _function(function: Message, where: str) -> JsonValue:
    return {**function, "arguments": _arguments(function.get("arguments"), f"{where}.arguments")}


def _arguments(value: JsonValue, where: str) -> JsonValue:
    """Return arguments as an object, from which templates write them.

    OpenAI's clients send its text. One that is no JSON object stays readable.
    """
    if isinstance(value, dict):
        return value
    if not isinstance(value, str | None):
        raise InvalidJob(f"{where}: give an object, or its JSON as a string", "messages")
    text = value or "{}"
    try:
        return _OBJECT.validate_json(text)
    except ValueError:
        return {UNPARSED_KEY: text}
