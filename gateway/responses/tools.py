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
    told: str | None = None  # what the first tool's description says of the namespace


def joined(namespace: str | None, name: str) -> str:
    """Return the name of a tool in a chat. One that is too long ends with a digest of it."""
    whole = f"{namespace}__{name}" if namespace else name
    if namespace is None or len(whole) <= _MOST_CHARS:
        return whole
    begin = whole[: _MOST_CHARS - _DIGEST_CHARS - 1]
    return f"{begin}_{short_digest(whole)[:_DIGEST_CHARS]}"


def flat(tools: Sequence[ResponseTool]) -> Iterator[FlatTool]:
    """Yield the tools that the caller runs, with those in namespaces."""
    for each in tools:
        if isinstance(each, Namespace):
            told = each.description
            for tool in each.tools:
                if not isinstance(tool, ForeignTool):
                    yield FlatTool(joined(each.name, tool.name), tool, each.name, told)
                    told = None
        elif not isinstance(each, ForeignTool):
            yield FlatTool(each.name, each)


def namespaces(tools: Sequence[ResponseTool]) -> dict[str, tuple[str, str]]:
    """Return the namespace and the own name of each tool in one, by its name in a chat."""
    return {
        each.name: (each.namespace, each.tool.name)
        for each in flat(tools)
        if each.namespace is not None
    }


def custom_names(tools: Sequence[ResponseTool]) -> frozenset[str]:
    """Return the names in a chat of the tools that take a text."""
    return frozenset(each.name for each in flat(tools) if isinstance(each.tool, ResponseCustom))


def chat_tools(asked: ResponsesRequest) -> JsonObject:
    """Return the fields of a chat that say which tools there are. Raises InvalidJob."""
    tools, known = [*flat(asked.tools)], dict[str, str | None]()
    if not tools and asked.tool_choice == "auto":
        return {}
    for each in tools:
        if each.name in known and (each.namespace or known[each.name]):
            raise InvalidJob(f"tools: two tools are called {each.name!r}; rename one", "tools")
        known[each.name] = each.namespace
    return {
        "tools": [_chat_tool(each) for each in tools],
        "tool_choice": _choice(asked),
        "parallel_tool_calls": asked.parallel_tool_calls,
    }


def shown_tools(tools: Sequence[ResponseTool]) -> list[JsonValue]:
    """Return the tools as they are understood, without those that are left out."""
    return [_shown(tool) for tool in tools if not isinstance(tool, ForeignTool)]


def _chat_tool(each: FlatTool) -> JsonValue:
    told: JsonObject = each.tool.model_dump(exclude={"type"}, exclude_none=True)
    told["name"] = each.name
    if each.told:
        told["description"] = "\n\n".join(filter(None, (each.told, each.tool.description)))
    if isinstance(each.tool, ResponseCustom) and isinstance(each.tool.format, InputGrammar):
        grammar = each.tool.format.model_dump(exclude={"type"})
        told["format"] = {"type": "grammar", "grammar": grammar}  # in chats it lies deeper
    return {"type": each.tool.type, each.tool.type: told}


def _choice(asked: ResponsesRequest) -> JsonValue:
    choice = asked.tool_choice
    if isinstance(choice, AllowedChoices):
        tools = [named for one in choice.tools for named in _named(one, asked)]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
    if isinstance(choice, str):
        return choice
    return next(_named(choice, asked))


def _named(
    choice: NamedChoice | NamedNamespace | ForeignTool, asked: ResponsesRequest
) -> Iterator[JsonValue]:
    """Yield the tools that a choice names, as a chat's choice names each."""
    if isinstance(choice, ForeignTool):
        yield {"type": choice.type}
    elif isinstance(choice, NamedNamespace):
        for each in flat(asked.tools):
            if each.namespace == choice.name:
                yield {"type": each.tool.type, each.tool.type: {"name": each.name}}
    else:
        yield {"type": choice.type, choice.type: {"name": joined(choice.namespace, choice.name)}}


def _shown(tool: Namespace | ResponseFunction | ResponseCustom) -> JsonValue:
    """Return a tool as it is understood: its arguments are held strictly, or as far as they can."""
    told: JsonObject = tool.model_dump(exclude_none=True)
    if isinstance(tool, ResponseFunction):
        return {"parameters": {}, **told, "strict": tool.strict is True}
    if isinstance(tool, Namespace):
        return {"description": "", **told, "tools": shown_tools(tool.tools)}
    return told
