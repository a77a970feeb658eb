"""Requests in the form of OpenAI's Responses, as far as they mean something here."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, Tag

from penstock.schemas.api.openai import (
    Arguments,
    AskedOfModel,
    CustomGrammar,
    Effort,
    Foreign,
    FreeText,
    FunctionName,
    JsonObject,
    typed,
)
from penstock.schemas.job import MAX_MESSAGES, Short
from penstock.schemas.wire.wire import Report


class InputText(Report):
    type: Literal["input_text", "output_text", "summary_text", "reasoning_text", "text"]
    text: str


class Refusal(Report):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


Part = Annotated[InputText | Refusal, Field(discriminator="type")]
Parts = Annotated[list[Part], Field(fail_fast=True)]


class MessageItem(Report):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts


class FunctionCallItem(Report):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Arguments
    namespace: str | None = None


class CustomCallItem(Report):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    namespace: str | None = None


class CallOutputItem(Report):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | Parts


class ReasoningItem(Report):
    """An item of thinking. That of another maker's server is encrypted, and left out."""

    type: Literal["reasoning"]
    summary: Parts = Field(default_factory=list)
    content: Parts | None = None


Item = Annotated[
    MessageItem | FunctionCallItem | CustomCallItem | CallOutputItem | ReasoningItem,
    Field(discriminator="type"),
]


def _typed(items: object) -> object:
    """Give each item a type: one without it is a message."""
    if not isinstance(items, list):
        return items
    return [
        {"type": "message", **item} if isinstance(item, dict) and "type" not in item else item
        for item in items
    ]


Items = Annotated[list[Item], Field(fail_fast=True), BeforeValidator(_typed)]


class ConversationRequest(Report):
    """The body that begins a conversation."""

    items: Items = Field(default_factory=list, max_length=20)
    metadata: dict[Short, Short] = Field(default_factory=dict, max_length=16)


class ItemsRequest(Report):
    """The body that adds to a conversation."""

    items: Items = Field(min_length=1, max_length=20)


class ResponseFunction(Report):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class InputGrammar(CustomGrammar):
    type: Literal["grammar"]


class ResponseCustom(Report):
    type: Literal["custom"]
    name: FunctionName
    description: str | None = None
    format: Annotated[FreeText | InputGrammar, Field(discriminator="type")] | None = None


_Callers = Annotated[ResponseFunction, Tag("function")] | Annotated[ResponseCustom, Tag("custom")]
InNamespace = Annotated[_Callers | Foreign, typed("function", "custom")]


class Namespace(Report):
    """Tools under a name of their own, which their calls have beside theirs."""

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    tools: list[InNamespace] = Field(max_length=128, fail_fast=True)


ResponseTool = Annotated[
    _Callers | Annotated[Namespace, Tag("namespace")] | Foreign,
    typed("function", "custom", "namespace"),
]


class NamedChoice(Report):
    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class NamedNamespace(Report):
    type: Literal["namespace"]
    name: str


_Named = Annotated[NamedChoice, Tag("function")] | Annotated[NamedChoice, Tag("custom")] | Foreign


class AllowedChoices(Report):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[
        Annotated[
            _Named | Annotated[NamedNamespace, Tag("namespace")],
            typed("function", "custom", "namespace"),
        ]
    ] = Field(min_length=1, max_length=128)


class TextForm(Report):
    """A form of the text; the fields of a schema stand beside its type."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: JsonObject | None = Field(None, alias="schema")


class TextConfig(Report):
    format: TextForm = TextForm(type="text")
    verbosity: Literal["low", "medium", "high"] | None = Field(
        None, description="for the chat template"
    )


class ReasoningConfig(Report):
    effort: Effort | None = Field(None, description="for the chat template")
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="the thinking is shown whole, and not summarized"
    )


class ResponsesRequest(AskedOfModel):
    """A request for the next items of a conversation."""

    input: str | Annotated[Items, Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    tools: list[ResponseTool] = Field(default_factory=list, max_length=128, fail_fast=True)
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[
            _Named | Annotated[AllowedChoices, Tag("allowed_tools")],
            typed("function", "custom", "allowed_tools"),
        ]
    ) = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = TextConfig()
    reasoning: ReasoningConfig = ReasoningConfig()
    truncation: Literal["auto", "disabled"] = Field(
        "disabled", description="auto: of a prompt that is too long the end is kept"
    )
    stream: bool = False
    store: bool = Field(True, description="it is kept, to be asked for again")
    background: bool = Field(False, description="it is made although nobody waits")
    previous_response_id: str | None = Field(None, description="the conversation that goes on")
    include: list[str] = Field(default_factory=list)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    metadata: dict[str, str] = Field(default_factory=dict, max_length=16)
