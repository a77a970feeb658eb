"""The documents that generators make: a plain text, or a chat with the tools it may call."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Json: TypeAlias = "str | int | float | bool | Sequence[Json] | Mapping[str, Json] | None"

WIDE = (", ", ": ")
COMPACT = (",", ":")


def dumps(value: Json, separators: tuple[str, str] = WIDE) -> str:
    return json.dumps(value, ensure_ascii=False, separators=separators)


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    kind: str
    description: str


@dataclass(frozen=True, slots=True)
class ToolSpec:
    name: str
    description: str
    parameters: tuple[Parameter, ...]

    def as_json(self) -> dict[str, Json]:
        """Return the function as OpenAI's clients send it."""
        properties: dict[str, Json] = {
            p.name: {"type": p.kind, "description": p.description} for p in self.parameters
        }
        parameters: dict[str, Json] = {
            "type": "object",
            "properties": properties,
            "required": [p.name for p in self.parameters],
        }
        function: dict[str, Json] = {
            "name": self.name,
            "description": self.description,
            "parameters": parameters,
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Turn:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Passage:
    """A document without a chat around it."""

    content: str


@dataclass(frozen=True, slots=True)
class Dialogue:
    turns: tuple[Turn, ...]
    tools: tuple[ToolSpec, ...] = ()


Exchange: TypeAlias = tuple[Turn, ...]
Document: TypeAlias = Passage | Dialogue


def exchange(question: str, answer: str) -> Exchange:
    return Turn("user", question), Turn("assistant", answer)
