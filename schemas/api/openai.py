"""The requests of OpenAI's HTTP interface.

Only the fields that the gateway itself reads are declared here. Those of `SamplingParams` and `Job`
go through to them under their own names, so ranges and defaults are written once; every other field
is ignored, since clients send new ones every month.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    TypeAdapter,
    field_validator,
    model_validator,
)

from penstock.schemas.job import MAX_MESSAGES, PriorityClass, Short
from penstock.schemas.markup.forms import CUSTOM_INPUT
from penstock.schemas.params.sampling import MAX_LOGPROBS
from penstock.schemas.wire.wire import Report

FAIL_FAST = Field(fail_fast=True)  # else each wrong value is reported, at a hundred times its cost
JsonObject = dict[str, JsonValue]
# Longer than OpenAI's 64, since Anthropic's may be.
FunctionName = Annotated[str, Field(min_length=1, max_length=128)]
OBJECT: TypeAdapter[JsonObject] = TypeAdapter(JsonObject)


class StreamOptions(Report):
    include_usage: bool = False
    continuous_usage_stats: bool = Field(False, description="running totals in every chunk")


class TextFormat(Report):
    type: Literal["text"]


class JsonObjectFormat(Report):
    type: Literal["json_object"]
    schema_: JsonObject | bool | None = Field(None, alias="schema", description="llama.cpp's")


class NamedSchema(Report):
    name: str = "answer"
    strict: bool | None = Field(None, description="objects have the named properties alone")
    schema_: JsonObject | bool = Field(alias="schema")


class JsonSchemaFormat(Report):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class StructuralTagFormat(Report):
    """xgrammar's structural tag, in its newer form (`format`) or the older one."""

    model_config = ConfigDict(extra="allow")

    type: Literal["structural_tag"]


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat,
    Field(discriminator="type"),
]


class AskedOfModel(Report):
    """The fields that all requests to a model share."""

    model: str = Field("", description="needed where several are served")
    priority: int = Field(0, description="of the caller's jobs of a class, the lower go first")
    priority_class: PriorityClass | None = Field(None, description="bounded by the key")
    service_tier: str = Field("auto", description="priority: class high; flex: batch")
    include_metrics: bool = Field(False, description="`metrics`: how long the answer took")


class Asked(AskedOfModel):
    """The fields that chat and completion requests share."""

    stream: bool = False
    stream_options: StreamOptions | None = Field(None, description="with stream alone")
    response_format: ResponseFormat | None = None
    return_token_ids: bool = Field(False, description="the ids of prompt and completion too")
    return_tokens_as_token_ids: bool = Field(
        False, description="log probabilities name tokens by their ids, as token_id:5"
    )


class TextPart(Report):
    type: Literal["text"]
    text: str


def _as_text(value: object) -> object:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value


# Of a call, as the JSON of an object; some clients send the object itself.
Arguments = Annotated[str, BeforeValidator(_as_text, json_schema_input_type=str | JsonObject)]


class FunctionCall(Report):
    name: str
    arguments: Arguments = ""


class CustomCall(Report):
    name: str
    input: str = ""


class ToolCall(Report):
    """A call that an assistant made in an earlier turn."""

    id: str | None = None
    type: str | None = None
    function: FunctionCall | None = None
    custom: CustomCall | None = None

    @model_validator(mode="after")
    def calls_one_thing(self) -> Self:
        if (self.function is None) == (self.custom is None):
            raise ValueError("function: give it, or custom")
        return self


class ChatMessage(Report):
    """A message of a chat. Fields beyond these go to the chat template as they are."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[TextPart], FAIL_FAST] | None = None
    tool_calls: Annotated[list[ToolCall], FAIL_FAST] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    function_call: FunctionCall | None = Field(None, description="the older form of tool_calls")

    @model_validator(mode="after")
    def says_something(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"content: a message of role {self.role} needs one")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("tool_call_id: a message of role tool needs one")
        if self.role == "function" and self.name is None:
            raise ValueError("name: a message of role function needs the function's")
        return self

    @property
    def text(self) -> str:
        """Return the content as one text."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


class ForeignTool(Report):
    """A tool that its caller does not run: it is left out, and the response's header names it."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(max_length=256)


Foreign = Annotated[ForeignTool, Tag("")]


def typed(*kinds: str) -> Discriminator:
    """Tell values apart by their types. Every type but these is a `ForeignTool`'s."""

    def tag(value: object) -> str | None:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        if not isinstance(kind, str):
            return None
        return kind if kind in kinds else ""

    hint = f"give its type, such as {kinds[0]}"
    return Discriminator(tag, "type", hint)


class Function(Report):
    name: FunctionName
    description: str | None = None
    parameters: JsonObject = Field({"type": "object"})
    strict: bool | None = Field(None, description="a schema that cannot be held is an error")

    @field_validator("parameters", mode="before")
    @classmethod
    def nothing_is_any_object(cls, parameters: object) -> object:
        return {"type": "object"} if parameters is None else parameters


class FunctionTool(Report):
    type: Literal["function"]
    function: Function


class FreeText(Report):
    type: Literal["text"]


class CustomGrammar(Report):
    syntax: Literal["regex", "lark"]
    definition: str

    @property
    def is_held(self) -> bool:
        return self.syntax == "regex"


class GrammarText(Report):
    type: Literal["grammar"]
    grammar: CustomGrammar


class Custom(Report):
    name: FunctionName
    description: str | None = None
    format: Annotated[FreeText | GrammarText, Field(discriminator="type")] | None = None


class CustomTool(Report):
    """A tool whose one argument is a text. Models know it as a function with that argument."""

    type: Literal["custom"]
    custom: Custom

    @property
    def function(self) -> Function:
        """Return the function. A grammar that is no regex is only told to the model."""
        text: JsonObject = {"type": "string"}
        strict, description = None, self.custom.description
        grammar = (
            self.custom.format.grammar if isinstance(self.custom.format, GrammarText) else None
        )
        if grammar is not None and grammar.is_held:
            strict = True
            text["pattern"] = f"^({grammar.definition})$"
        elif grammar is not None:
            description = (
                f"{description or ''}\n\n`{CUSTOM_INPUT}` follows this grammar:"
                f"\n{grammar.definition}"
            )
        parameters: JsonObject = {
            "type": "object",
            "properties": {CUSTOM_INPUT: text},
            "required": [CUSTOM_INPUT],
        }
        return Function(
            name=self.custom.name, description=description, parameters=parameters, strict=strict
        )


CallersTool = FunctionTool | CustomTool
Tool = Annotated[
    Annotated[FunctionTool, Tag("function")] | Annotated[CustomTool, Tag("custom")] | Foreign,
    typed("function", "custom"),
]


class ToolName(Report):
    name: str


class NamedTool(Report):
    type: Literal["function"]
    function: ToolName

    @property
    def names(self) -> list[str]:
        return [self.function.name]


class NamedCustom(Report):
    type: Literal["custom"]
    custom: ToolName

    @property
    def names(self) -> list[str]:
        return [self.custom.name]


_Named = Annotated[NamedTool, Tag("function")] | Annotated[NamedCustom, Tag("custom")] | Foreign


class AllowedTools(Report):
    mode: Literal["auto", "required"]
    tools: list[Annotated[_Named, typed("function", "custom")]] = Field(
        min_length=1, max_length=128, fail_fast=True
    )


class AllowedChoice(Report):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools

    @property
    def names(self) -> list[str]:
        tools = self.allowed_tools.tools
        return [name for tool in tools if not isinstance(tool, ForeignTool) for name in tool.names]


ToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[
        _Named | Annotated[AllowedChoice, Tag("allowed_tools")],
        typed("function", "custom", "allowed_tools"),
    ]
)


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(Asked):
    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_tokens: int | None = None
    max_completion_tokens: int | None = Field(None, ge=1, description="newer name of max_tokens")
    logprobs: bool = False
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="vLLM's: of the prompt's tokens, not with stream"
    )
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    tools: list[Tool] = Field(default_factory=list, max_length=128, fail_fast=True)
    tool_choice: ToolChoice = "auto"
    functions: list[Function] = Field(
        default_factory=list, max_length=128, fail_fast=True, description="the older form of tools"
    )
    function_call: Literal["none", "auto"] | ToolName = Field(
        "auto", description="the older form of tool_choice; the answer has the older form too"
    )
    parallel_tool_calls: bool | None = Field(
        None, description="several calls; none: yes where the model chooses, else one"
    )
    store: bool = Field(False, description="keep it, to be listed and shown again")
    include_reasoning: bool = Field(True, description="`reasoning`: what the model thinks")
    chat_template_kwargs: JsonObject = Field(default_factory=dict)
    chat_template: str | None = Field(
        None, max_length=65_536, description="Jinja, in place of the model's"
    )
    reasoning_effort: Effort | None = Field(None, description="for the chat template")
    documents: list[JsonObject] = Field(
        default_factory=list,
        max_length=1024,
        fail_fast=True,
        description="vLLM's, for a chat template that reads them",
    )
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    echo: bool = Field(
        False, description="vLLM's: the last message's text, if it is the assistant's, before it"
    )

    @property
    def callers_tools(self) -> Sequence[CallersTool]:
        """Return the tools that the caller runs."""
        return [tool for tool in self.tools if not isinstance(tool, ForeignTool)]

    @model_validator(mode="after")
    def asks_in_one_form(self) -> Self:
        if self.functions and self.tools:
            raise ValueError("functions: they are the older form of tools; give one of them")
        if isinstance(self.function_call, ToolName) and not self.functions:
            raise ValueError("function_call: asks for one that is not among functions")
        return self


class CompletionRequest(Asked):
    prompt: (
        str
        | Annotated[list[int], FAIL_FAST]
        | Annotated[list[str], FAIL_FAST]
        | Annotated[list[Annotated[list[int], FAIL_FAST]], FAIL_FAST]
    )
    echo: bool = Field(False, description="the prompt's text before the completion's")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="vLLM's: of the prompt's tokens, not with stream"
    )


class MetadataRequest(Report):
    """The body of a change to what was stored: other metadata, all of it at once."""

    metadata: dict[Short, Short] = Field(max_length=16)


class AbortRequest(Report):
    """The body that ends jobs by the ids of their answers."""

    request_ids: list[Short] = Field(min_length=1, max_length=1000, fail_fast=True)


class GenerateRequest(Report):
    """vLLM's request of tokens for tokens."""

    model: str = Field("", description="needed where several are served")
    token_ids: Annotated[list[int], FAIL_FAST] = Field(min_length=1)
    sampling_params: JsonObject = Field(default_factory=dict)
    stream: bool = False
    return_token_ids: bool = Field(False, description="the ids of the prompt too")
    output_mode: Literal["tokens", "text"] = "tokens"
