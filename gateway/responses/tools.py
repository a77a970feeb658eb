"""The tools of a request for a response, and the choice among them, as a chat's.

Chats know no namespaces: there a tool has its namespace and its own name as one name, and a call of
it is told apart again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from penstock.schemas.api.openai import ForeignTool, JsonObject
from penstock.schemas.api.responses import (
    AllowedChoices,
    InputGrammar,
    NamedChoice,
    NamedNamespace,
    Namespace,
    ResponseCustom,
    ResponseFunction,
    ResponsesRequest,
    ResponseTool,
)
from penstock.schemas.errors import InvalidJob
from penstock.schemas.keys import short_digest

_MOST_CHARS = 64  # the longest name that every model's template and client takes
_DIGEST_CHARS = 8


@dataclass(frozen=True, slots=True)
class FlatTool:
    """A tool that the caller runs, and its name in a chat."""

    name: str
    tool: ResponseFunction | ResponseCustom
    namespace: str | None = None
    preface: str | None = None  # what the first tool's description says of the namespace


def joined(namespace: str | None, name: str) -> str:
    """Return the name of a tool in a chat. One that is too long ends with a digest of it."""
    whole = f"{namespace}__{name}" if namespace else name
    if namespace is None or len(whole) <= _MOST_CHARS:
        return whole
    begin = whole[: _MOST_CHARS - _DIGEST_CHARS - 1]
    return f"{begin}_{short_digest(whole)[:_DIGEST_CHARS]}"


def flat(tools: Sequence[ResponseTool]) -> Iterator[FlatTool]:
    """Yield the tools that the caller runs, with those in namespaces."""
    for entry in tools:
        if isinstance(entry, Namespace):
            preface = entry.description
            for tool in entry.tools:
                if not isinstance(tool, ForeignTool):
                    yield FlatTool(joined(entry.name, tool.name), tool, entry.name, preface)
                    preface = None
        elif not isinstance(entry, ForeignTool):
            yield FlatTool(entry.name, entry)


def namespaces(tools: Sequence[ResponseTool]) -> dict[str, tuple[str, str]]:
    """Return the namespace and the own name of each tool in one, by its name in a chat."""
    return {
        entry.name: (entry.namespace, entry.tool.name)
        for entry in flat(tools)
        if entry.namespace is not None
    }


def custom_names(tools: Sequence[ResponseTool]) -> frozenset[str]:
    """Return the names in a chat of the tools that take a text."""
    return frozenset(entry.name for entry in flat(tools) if isinstance(entry.tool, ResponseCustom))


def chat_tools(request: ResponsesRequest) -> JsonObject:
    """Return the fields of a chat that say which tools there are. Raises InvalidJob."""
    tools, by_name = [*flat(request.tools)], dict[str, str | None]()
    if not tools and request.tool_choice == "auto":
        return {}
    for entry in tools:
        if entry.name in by_name and (entry.namespace or by_name[entry.name]):
            raise InvalidJob(f"tools: two tools are called {entry.name!r}; rename one", "tools")
        by_name[entry.name] = entry.namespace
    return {
        "tools": [_chat_tool(entry) for entry in tools],
        "tool_choice": _choice(request),
        "parallel_tool_calls": request.parallel_tool_calls,
    }


def shown_tools(tools: Sequence[ResponseTool]) -> list[JsonValue]:
    """Return the tools as they are understood, without those that are left out."""
    return [_shown(tool) for tool in tools if not isinstance(tool, ForeignTool)]


def _chat_tool(entry: FlatTool) -> JsonValue:
    fields: JsonObject = entry.tool.model_dump(exclude={"type"}, exclude_none=True)
    fields["name"] = entry.name
    if entry.preface:
        fields["description"] = "\n\n".join(filter(None, (entry.preface, entry.tool.description)))
    if isinstance(entry.tool, ResponseCustom) and isinstance(entry.tool.format, InputGrammar):
        grammar = entry.tool.format.model_dump(exclude={"type"})
        fields["format"] = {"type": "grammar", "grammar": grammar}  # in chats it lies deeper
    return {"type": entry.tool.type, entry.tool.type: fields}


def _choice(request: ResponsesRequest) -> JsonValue:
    choice = request.tool_choice
    if isinstance(choice, AllowedChoices):
        tools = [shape for member in choice.tools for shape in _named(member, request)]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
    if isinstance(choice, str):
        return choice
    return next(_named(choice, request))


def _named(
    choice: NamedChoice | NamedNamespace | ForeignTool, request: ResponsesRequest
) -> Iterator[JsonValue]:
    """Yield the tools that a choice names, as a chat's choice names each."""
    if isinstance(choice, ForeignTool):
        yield {"type": choice.type}
    elif isinstance(choice, NamedNamespace):
        for entry in flat(request.tools):
            if entry.namespace == choice.name:
                yield {"type": entry.tool.type, entry.tool.type: {"name": entry.name}}
    else:
        yield {"type": choice.type, choice.type: {"name": joined(choice.namespace, choice.name)}}


def _shown(tool: Namespace | ResponseFunction | ResponseCustom) -> JsonValue:
    """Return a tool as it is understood: its arguments are held strictly, or as far as they can."""
    fields: JsonObject = tool.model_dump(exclude_none=True)
    if isinstance(tool, ResponseFunction):
        return {"parameters": {}, **fields, "strict": tool.strict is True}
    if isinstance(tool, Namespace):
        return {"description": "", **fields, "tools": shown_tools(tool.tools)}
    return fields
