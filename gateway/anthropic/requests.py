"""Anthropic's requests, read as chats."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from pydantic import JsonValue
from pydantic_core import to_json

from penstock.gateway.anthropic.client_tools import function_of
from penstock.gateway.auth.access import Caller
from penstock.gateway.openai.forms import chat_form
from penstock.gateway.openai.responses import AnswerContext
from penstock.gateway.openai.texts import TextContext, tokenize_form
from penstock.gateway.openai.translated import as_chat, ignored_beside, with_form_of
from penstock.gateway.openai.validation import validate
from penstock.schemas.api.anthropic import (
    AnthropicChoice,
    AnthropicMessage,
    AnthropicTool,
    ClientTool,
    CountTokensRequest,
    DocumentBlock,
    MessagesRequest,
    TextBlock,
    TextLike,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from penstock.schemas.api.openai import ForeignTool, JsonObject
from penstock.schemas.errors import InvalidJob

Form = TypeVar("Form")

# What asks for work of Anthropic's own servers, or for what a message has no place for.
_NEUTRAL: dict[str, tuple[JsonValue, ...]] = {
    "mcp_servers": ([],),
    "container": ("",),
    "fallbacks": ([],),
    "top_logprobs": (0,),
    "logprob_token_ids": (),
}
_WITHOUT_EFFECT = {"inference_geo", "speed", "cache_control"}  # says nothing of the answer
# Claude Code tells its accounting in a part of the system prompt that is another in each request:
# no prefix of its prompts would ever be found again.
_BILLING_HEADER = "x-anthropic-billing-header"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def messages_form(caller: Caller, body: JsonObject, job_id: str = "") -> AnswerContext:
    """Read a request for a message. Raises InvalidJob."""
    request = validate(MessagesRequest, body)
    more: JsonObject = {"stream": request.stream, "max_tokens": request.max_tokens}
    if request.stop_sequences:
        more["stop"] = list[JsonValue](request.stop_sequences)
    if request.metadata.user_id is not None:
        more["metadata"] = {"user_id": request.metadata.user_id}
    chat = _chat(request, body, more)
    form = _read(lambda: chat_form(caller, chat, job_id))
    assert form.job.chat is not None
    thinks = {"thinking_budget": request.thinking.budget_tokens}
    job = form.job.model_copy(update={"chat": form.job.chat.model_copy(update=thinks)})
    return replace(
        form,
        job=with_form_of(job, "output_config.format"),
        shows_reasoning=form.shows_reasoning and request.thinking.type != "disabled",
        ignored_names=_ignored(request, body),
    )


def count_form(caller: Caller, body: JsonObject, job_id: str = "") -> TextContext:
    """Read a request for the number of a prompt's tokens. Raises InvalidJob."""
    request = validate(CountTokensRequest, body)
    form = _read(lambda: tokenize_form(caller, _chat(request, body, {}), job_id))
    return replace(form, ignored_names=_ignored(request, body))


def _chat(request: CountTokensRequest, body: JsonObject, more: JsonObject) -> JsonObject:
    """Return the body of a chat that asks for the same."""
    own: JsonObject = {
        **more,
        "messages": list[JsonValue](_without_old_thoughts([*_messages(request)], request)),
        "chat_template_kwargs": {"enable_thinking": request.thinking.type != "disabled"},
    }
    tools = [tool for tool in request.tools if not isinstance(tool, ForeignTool)]
    choice = request.tool_choice or AnthropicChoice(type="auto")
    if tools or (request.tools and choice.type in ("any", "tool")):
        own["tools"] = [_tool(tool) for tool in tools]
        own |= _choice(choice)
    if request.messages[-1].role == "assistant":  # its message is to go on
        own |= {"add_generation_prompt": False, "continue_final_message": True}
    if request.output_config.effort is not None:
        own["reasoning_effort"] = request.output_config.effort
    form = request.output_config.format or request.output_format
    if form is not None:
        json_schema: JsonObject = {"name": "output", "schema": form.schema_, "strict": True}
        own["response_format"] = {"type": "json_schema", "json_schema": json_schema}
    return as_chat(request, body, own, _NEUTRAL)


def _messages(request: CountTokensRequest) -> Iterator[JsonObject]:
    system = request.system
    if isinstance(system, list):
        parts = [part for part in system if not part.text.startswith(_BILLING_HEADER)]
        if parts:
            yield {"role": "system", "content": _texts(parts)}
    elif system:
        yield {"role": "system", "content": system}
    for message in request.messages:
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
        elif message.role == "assistant":
            yield _assistant_turn(message)
        else:
            yield from _user_turns(message)
    last = request.messages[-1]
    if last.role == "assistant" and any(isinstance(block, ToolUseBlock) for block in last.content):
        raise InvalidJob("messages: the last one uses a tool; give its result", "messages")


def _without_old_thoughts(
    messages: list[JsonObject], request: CountTokensRequest
) -> list[JsonObject]:
    """Return the messages without the thinking that is not to be kept."""
    num_kept = request.context_management.num_kept
    if num_kept is None:
        return messages
    thoughtful = [at for at, message in enumerate(messages) if "reasoning_content" in message]
    for at in thoughtful[: max(0, len(thoughtful) - num_kept)]:
        messages[at] = {k: v for k, v in messages[at].items() if k != "reasoning_content"}
    return messages


def _assistant_turn(message: AnthropicMessage) -> JsonObject:
    """Return what the model said: its text, its calls, and what it thought."""
    texts, calls, thoughts = list[TextBlock](), list[JsonValue](), list[str]()
    for block in message.content:
        if isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            arguments = to_json(block.input).decode()
            function: JsonObject = {"name": block.name, "arguments": arguments}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ToolResultBlock | DocumentBlock):
            sentence = f"a {block.type} stands in a message of the user"
            raise InvalidJob(f"messages: {sentence}", "messages")
    turn: JsonObject = {"role": message.role, "content": _texts(texts) if texts else ""}
    if calls:
        turn["tool_calls"] = calls
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    return turn


def _user_turns(message: AnthropicMessage) -> Iterator[JsonObject]:
    """Yield what the model was told: results of tools, each as a message, and then the text."""
    texts = list[TextLike]()
    for block in message.content:
        if isinstance(block, TextLike):
            texts.append(block)
        elif isinstance(block, ToolResultBlock):
            result = block.content
            text = result if isinstance(result, str) else "\n".join(part.text for part in result)
            content = f"Error: {text}" if block.is_error else text
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
        else:
            sentence = "thinking and tool_use stand in messages of the assistant"
            raise InvalidJob(f"messages: {sentence}", "messages")
    if texts or not message.content:
        yield {"role": message.role, "content": _texts(texts) if texts else ""}


def _texts(blocks: Sequence[TextLike]) -> JsonValue:
    return [{"type": "text", "text": block.text} for block in blocks]


def _tool(tool: AnthropicTool | ClientTool) -> JsonValue:
    if isinstance(tool, ClientTool):
        return {"type": "function", "function": function_of(tool)}
    function: JsonObject = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _choice(choice: AnthropicChoice) -> JsonObject:
    """Return which tools may be called, as chats say it. Raises InvalidJob."""
    tool_choice: JsonValue = _CHOICES.get(choice.type)
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidJob("tool_choice.name: give the tool's name", "tool_choice")
        tool_choice = {"type": "function", "function": {"name": choice.name}}
    single: JsonObject = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    return {"tool_choice": tool_choice, **single}


def _read(form: Callable[[], Form]) -> Form:
    """Read a chat; an error names the field that its caller gave."""
    try:
        return form()
    except InvalidJob as error:
        if error.param is None or not error.param.startswith("stop"):
            raise
        message = error.message.replace("stop", "stop_sequences", 1)
        raise InvalidJob(message, error.param.replace("stop", "stop_sequences", 1)) from None


def _ignored(request: CountTokensRequest, body: JsonObject) -> list[str]:
    names = ignored_beside(request, body, _NEUTRAL.keys() | _WITHOUT_EFFECT, "messages")
    return [name for name in names if not name.endswith(".cache_control")]
