"""Requests in Anthropic's form, as far as they mean something here."""

import re
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from penstock.schemas.api.openai import AskedOfModel, Foreign, FunctionName, JsonObject
from penstock.schemas.job import MAX_MESSAGES
from penstock.schemas.wire.wire import Report


class TextBlock(Report):
    type: Literal["text"]
    text: str


class TextSource(Report):
    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str

    @property
    def text(self) -> str:
        return self.data


class ContentSource(Report):
    type: Literal["content"]
    content: str | list[TextBlock]

    @property
    def text(self) -> str:
        parts = self.content
        return parts if isinstance(parts, str) else "\n".join(part.text for part in parts)


class Citations(Report):
    enabled: Literal[False] = Field(False, description="a model here makes none")


class DocumentBlock(Report):
    """A document of text: the model reads it after its title and what is said of it."""

    type: Literal["document"]
    source: Annotated[TextSource | ContentSource, Field(discriminator="type")]
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None

    @property
    def text(self) -> str:
        return "\n\n".join(filter(None, (self.title, self.context, self.source.text)))


TextLike = TextBlock | DocumentBlock


class ThinkingBlock(Report):
    type: Literal["thinking"]
    thinking: str


class RedactedBlock(Report):
    """Thinking that only its maker can read: it is left out."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Report):
    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject


class ToolResultBlock(Report):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Annotated[TextLike, Field(discriminator="type")]] = ""
    is_error: bool = False


Block = Annotated[
    TextLike | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class AnthropicMessage(Report):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(fail_fast=True)]


class AnthropicTool(Report):
    """A tool of the caller's. The server runs none itself."""

    type: Literal["custom"] = "custom"
    name: FunctionName
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = None


class ClientTool(Report):
    """A tool that Anthropic defines and the caller runs: its type says what it takes."""

    type: str
    name: FunctionName
    max_characters: int | None = Field(None, description="of a file, which the caller cuts")


_OF_CLIENTS = re.compile(r"(bash|text_editor|memory)_\d{8}")


def _tool_tag(tool: object) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    if not isinstance(kind, str) or kind == "custom":
        return "custom"
    return "client" if _OF_CLIENTS.fullmatch(kind) else ""


AnyTool = Annotated[
    Annotated[AnthropicTool, Tag("custom")] | Annotated[ClientTool, Tag("client")] | Foreign,
    Discriminator(_tool_tag),
]


class AnthropicChoice(Report):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="of the tool, for type tool")
    disable_parallel_tool_use: bool = False


class Thinking(Report):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1)


class OutputFormat(Report):
    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(Report):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class KeptTurns(Report):
    type: Literal["thinking_turns"]
    value: int = Field(ge=1)


class ClearThinking(Report):
    """Earlier thinking is left out of the prompt, but for that of the last turns."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | KeptTurns = KeptTurns(type="thinking_turns", value=1)


class ContextManagement(Report):
    edits: list[ClearThinking] = Field(default_factory=list, max_length=8)

    @property
    def num_kept(self) -> int | None:
        """Return of how many turns the thinking stays; None for all."""
        turns = [edit.keep.value for edit in self.edits if isinstance(edit.keep, KeptTurns)]
        return min(turns, default=None)


class RequestMetadata(Report):
    user_id: str | None = None


class CountTokensRequest(AskedOfModel):
    """The fields that say what the prompt is."""

    messages: Annotated[list[AnthropicMessage], Field(fail_fast=True)] = Field(
        min_length=1, max_length=MAX_MESSAGES
    )
    system: str | list[TextBlock] = ""
    tools: list[AnyTool] = Field(default_factory=list, max_length=128)
    tool_choice: AnthropicChoice | None = None
    thinking: Thinking = Thinking(type="disabled")
    context_management: ContextManagement = ContextManagement()
    output_config: OutputConfig = OutputConfig()
    output_format: OutputFormat | None = Field(None, description="the older place of its format")


class MessagesRequest(CountTokensRequest):
    """A request for the next message."""

    max_tokens: int = Field(ge=1)
    stream: bool = False
    stop_sequences: list[str] = Field(default_factory=list)
    metadata: RequestMetadata = RequestMetadata()
