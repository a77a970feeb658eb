"""Tools as agents send them: in namespaces, run by others, defined by Anthropic."""

import json
from collections.abc import Mapping

import httpx
import pytest
from openai import OpenAI

from dialogues import chat_of, marked
from paths import ROOT
from penstock.schemas.event import Delta
from penstock.schemas.markup.forms import Markup
from stage import MODEL, Actor, GatewayProcess, spoken

Body = dict[str, object]
SCHEMA = {"type": "object", "properties": {"target": {"type": "string"}}}
SEARCH = {"type": "web_search", "external_web_access": False}
SPAWN = {"type": "function", "name": "spawn", "description": "Begin one.", "parameters": SCHEMA}
NOTE = {"type": "custom", "name": "note", "description": "Write it."}
CREW = {
    "type": "namespace", "name": "crew", "description": "Other agents.", "tools": [SPAWN, NOTE],
}  # fmt: skip
LONG = {"type": "namespace", "name": "n" * 60, "tools": [SPAWN]}


@pytest.fixture(scope="module")
def url(gateway: GatewayProcess) -> str:
    return gateway.url


def calls(*named: tuple[str, object]) -> list[Delta]:
    """What a model says that calls these."""
    texts = (json.dumps({"name": name, "arguments": given}) for name, given in named)
    whole = "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
    return marked(Markup("hermes"), whole[:40], whole[40:])


def names_of(actor: Actor) -> list[str]:
    return [str(tool["function"]["name"]) for tool in chat_of(actor).tools]  # type: ignore[index,call-overload]


def asked(url: str, path: str, **fields: object) -> httpx.Response:
    """Ask for an answer of one of three protocols."""
    text = {"input": "hi"} if path == "responses" else {"messages": [HI]}
    body = {"model": MODEL, "max_tokens": 99, **text, **fields}
    if path == "responses":
        body["max_output_tokens"] = body.pop("max_tokens")
    return httpx.post(f"{url}/v1/{path}", json=body)


HI = {"role": "user", "content": "hi"}
FUNCTIONS: Mapping[str, Body] = {
    "responses": SPAWN,
    "chat/completions": {"type": "function", "function": {"name": "spawn", "parameters": SCHEMA}},
    "messages": {"name": "spawn", "input_schema": SCHEMA},
}


def test_a_namespace_is_joined_to_its_names_and_told_apart_again(
    client: OpenAI, actor: Actor
) -> None:
    actor.script = lambda job: calls(
        ("crew__spawn", {"target": "a"}), ("crew__note", {"input": "b"})
    )
    given = {"model": MODEL, "tools": [CREW, SPAWN]}
    made = client.responses.create(input="hi", **given)  # type: ignore[call-overload]
    assert names_of(actor) == ["crew__spawn", "crew__note", "spawn"]
    described = [tool["function"]["description"] for tool in chat_of(actor).tools]  # type: ignore[index,call-overload]
    assert described == ["Other agents.\n\nBegin one.", "Write it.", "Begin one."]
    spawn, note = made.output
    assert (spawn.namespace, spawn.name, spawn.arguments) == ("crew", "spawn", '{"target": "a"}')
    assert (note.type, note.namespace, note.name, note.input) == (
        "custom_tool_call", "crew", "note", "b",
    )  # fmt: skip
    assert made.tools[0].type == "namespace" and made.tools[0].name == "crew"
    assert client.responses.retrieve(made.id).output == made.output
    with client.responses.stream(input="hi", **given) as stream:
        events = list(stream)
    told = [
        (item.namespace, item.name)
        for event in events
        if event.type in ("response.output_item.added", "response.output_item.done")
        for item in [event.item]
    ]
    assert told == [("crew", "spawn")] * 2 + [("crew", "note")] * 2
    shown = [(item.type, item.namespace, item.name) for item in events[-1].response.output]
    assert shown == [("function_call", "crew", "spawn"), ("custom_tool_call", "crew", "note")]


@pytest.mark.parametrize("goes_on", ["items", "previous_response_id", "conversation"])
def test_a_call_in_a_namespace_goes_back_under_the_name_that_the_model_knows(
    client: OpenAI, actor: Actor, goes_on: str
) -> None:
    actor.script = lambda job: calls(
        ("crew__spawn", {"target": "a"}), ("crew__note", {"input": "b"})
    )
    before: Body = {}
    if goes_on == "conversation":
        before["conversation"] = client.conversations.create().id
    given = {"model": MODEL, "tools": [CREW]}
    made = client.responses.create(input="hi", **given, **before)  # type: ignore[call-overload]
    results = [
        {"type": "function_call_output", "call_id": made.output[0].call_id, "output": "done"},
        {"type": "custom_tool_call_output", "call_id": made.output[1].call_id, "output": "noted"},
    ]
    items: list[object] = [*results]
    if goes_on == "items":
        items = [{"role": "user", "content": "hi"}, *made.model_dump()["output"], *results]
    elif goes_on == "previous_response_id":
        before["previous_response_id"] = made.id
    actor.script = lambda job: spoken("Well.")
    later = client.responses.create(input=items, **given, **before)  # type: ignore[call-overload]
    said = chat_of(actor).messages[1]["tool_calls"]
    assert [call["function"]["name"] for call in said] == ["crew__spawn", "crew__note"]  # type: ignore[union-attr,index,call-overload]
    listed = client.responses.input_items.list(later.id, order="asc").data
    kinds = [
        (item.type, getattr(item, "namespace", None), getattr(item, "name", None))
        for item in listed
    ]
    assert kinds == [
        ("message", None, None),
        ("function_call", "crew", "spawn"),
        ("custom_tool_call", "crew", "note"),
        ("function_call_output", None, None),
        ("custom_tool_call_output", None, None),
    ]


def test_a_name_that_is_too_long_with_its_namespace_is_shortened(
    client: OpenAI, actor: Actor
) -> None:
    actor.script = lambda job: calls((str(job.chat and job.chat.tools[0]["function"]["name"]), {}))  # type: ignore[index,call-overload]
    other = LONG | {"name": "n" * 59 + "m"}
    made = client.responses.create(model=MODEL, input="hi", tools=[LONG, other])  # type: ignore[list-item]
    names = names_of(actor)
    assert len(set(names)) == 2 and all(len(name) == 64 for name in names)
    assert [(each.namespace, each.name) for each in made.output] == [("n" * 60, "spawn")]  # type: ignore[union-attr]
    client.responses.create(
        model=MODEL, input=[HI, *made.model_dump()["output"]], tools=[LONG, other]
    )  # type: ignore[call-overload]
    [call] = chat_of(actor).messages[1]["tool_calls"]  # type: ignore[misc,union-attr]
    assert call["function"]["name"] == names[0]  # type: ignore[call-overload,index]


@pytest.mark.parametrize(
    "choice, mode, callable_tools",
    [
        ({"type": "function", "name": "spawn", "namespace": "crew"}, "required", ["crew__spawn"]),
        (
            {
                "type": "allowed_tools", "mode": "auto",
                "tools": [{"type": "namespace", "name": "crew"}, {"type": "web_search"}],
            },
            "auto",
            ["crew__spawn", "crew__note"],
        ),
    ],
)  # fmt: skip
def test_a_choice_names_what_is_in_a_namespace(
    url: str, actor: Actor, choice: object, mode: str, callable_tools: list[str]
) -> None:
    actor.script = lambda job: spoken("a")
    answer = asked(url, "responses", tools=[CREW, SEARCH], tool_choice=choice)
    assert answer.status_code == 200, answer.text
    assert (chat_of(actor).tool_choice, chat_of(actor).callable_tools) == (mode, callable_tools)


@pytest.mark.parametrize("path", FUNCTIONS)
@pytest.mark.parametrize(
    "kind", ["web_search", "mcp", "image_generation", "local_shell", "newer_than_this_2031"]
)
def test_a_tool_that_others_run_is_left_out_and_told(
    url: str, actor: Actor, path: str, kind: str
) -> None:
    actor.script = lambda job: spoken("a")
    before = counted(url)
    foreign = {"type": kind, "name": "theirs", "any": [1]}
    answer = asked(url, path, tools=[FUNCTIONS[path], foreign])
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-penstock-ignored"] == f"tools.1.{kind}"
    assert names_of(actor) == ["spawn"] and counted(url) == before + 1
    assert asked(url, path, tools=[foreign]).status_code == 200
    assert chat_of(actor).tools == []


def counted(url: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.split("\n")
    [line] = [each for each in lines if each.startswith("penstock:ignored_parameters_total ")]
    return float(line.split()[1])


ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]}


@pytest.mark.parametrize(
    "path, choice, told",
    [
        ("responses", {"type": "web_search"}, "web_search"),
        ("responses", {"type": "mcp", "server_label": "x"}, "mcp"),
        ("responses", {"type": "function", "name": "none"}, "not among tools"),
        ("responses", "required", "not among tools"),
        ("responses", ALLOWED, "web_search"),
        ("chat/completions", {"type": "web_search"}, "web_search"),
        ("chat/completions", "required", "not among tools"),
        (
            "chat/completions",
            {"type": "allowed_tools", "allowed_tools": {k: ALLOWED[k] for k in ("mode", "tools")}},
            "web_search",
        ),
        ("messages", {"type": "tool", "name": "theirs"}, "not among tools"),
        ("messages", {"type": "any"}, "not among tools"),
    ],
)  # fmt: skip
def test_a_forced_tool_that_others_run_is_refused_by_name(
    url: str, path: str, choice: object, told: str
) -> None:
    foreign = {"type": "web_search", "name": "theirs"}
    answer = asked(url, path, tools=[foreign], tool_choice=choice)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert message.startswith("tool_choice") and told in message


def test_of_allowed_tools_that_others_run_none_is_called(url: str, actor: Actor) -> None:
    actor.script = lambda job: spoken("a")
    choice = ALLOWED | {"mode": "auto"}
    answer = asked(url, "responses", tools=[SPAWN, SEARCH], tool_choice=choice)
    assert answer.status_code == 200 and chat_of(actor).tools == []


@pytest.mark.parametrize(
    "tools, told",
    [
        ([CREW, SPAWN | {"name": "crew__spawn"}], "two tools are called 'crew__spawn'"),
        ([CREW, CREW], "two tools are called 'crew__spawn'"),
        ([{"type": "namespace", "name": "crew"}], "tools[0].tools"),
        ([{"type": "function"}], "tools[0].name"),
        ([{"name": "spawn"}], "tools[0]: give its type"),
        ([7], "tools[0]"),
    ],
)
def test_tools_that_cannot_be_read_are_refused_by_name(
    url: str, tools: list[object], told: str
) -> None:
    answer = asked(url, "responses", tools=tools)
    assert answer.status_code == 400, answer.text
    assert told in answer.json()["error"]["message"]


def test_a_grammar_that_cannot_be_held_is_told_to_the_model(url: str, actor: Actor) -> None:
    """A patch in Codex's own form has a grammar in Lark."""
    actor.script = lambda job: calls(("apply_patch", {"input": "*** Begin Patch"}))
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" /.+/'}
    patch = {"type": "custom", "name": "apply_patch", "description": "Edit.", "format": form}
    answer = asked(url, "responses", tools=[patch])
    assert answer.headers["x-penstock-ignored"] == "tools.0.format.definition"
    [item] = answer.json()["output"]
    assert (item["type"], item["input"]) == ("custom_tool_call", "*** Begin Patch")
    [tool] = chat_of(actor).tools
    assert form["definition"] in tool["function"]["description"]  # type: ignore[index,call-overload,operator]


@pytest.mark.parametrize(
    "kind, name, given",
    [
        ("bash_20250124", "bash", {"command": "ls"}),
        ("bash_20250124", "bash", {"restart": True}),
        (
            "text_editor_20250728", "str_replace_based_edit_tool",
            {"command": "insert", "path": "/a", "insert_line": 1, "insert_text": "b"},
        ),
        (
            "text_editor_20250124", "str_replace_editor",
            {"command": "insert", "path": "/a", "insert_line": 1, "new_str": "b"},
        ),
        ("memory_20250818", "memory", {"command": "rename", "old_path": "a", "new_path": "b"}),
    ],
)  # fmt: skip
def test_a_tool_that_anthropics_clients_run_is_served_by_its_published_schema(
    url: str, actor: Actor, kind: str, name: str, given: Body
) -> None:
    actor.script = lambda job: calls((name, given))
    answer = asked(url, "messages", tools=[{"type": kind, "name": name}])
    assert answer.status_code == 200, answer.text
    assert "x-penstock-ignored" not in answer.headers
    [block] = answer.json()["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", name, given)
    [tool] = chat_of(actor).tools
    parameters = tool["function"]["parameters"]  # type: ignore[index,call-overload]
    assert given.keys() <= parameters["properties"].keys()  # type: ignore[index,call-overload,union-attr]
    assert tool["function"]["description"]  # type: ignore[index,call-overload]


CODEX = json.loads((ROOT / "tests/support/recorded/codex.json").read_text())
CLAUDE_CODE = json.loads((ROOT / "tests/support/recorded/claude_code.json").read_text())


def test_codex_is_answered_and_goes_on_with_what_it_got(url: str, actor: Actor) -> None:
    """Its body as its command sends it, with texts cut short."""
    body = CODEX | {"model": MODEL, "stream": False}
    known = next(tool["name"] for tool in body["tools"] if tool["type"] == "function")
    actor.script = lambda job: calls((known, {}))
    first = httpx.post(f"{url}/v1/responses", json=body)
    assert first.status_code == 200, first.text
    assert first.headers["x-penstock-ignored"] == "client_metadata, tools.8.web_search"
    [call] = first.json()["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "done"}
    later = httpx.post(f"{url}/v1/responses", json=body | {"input": [*body["input"], call, result]})
    assert later.status_code == 200, later.text
    assert [each["role"] for each in chat_of(actor).messages][-2:] == ["assistant", "tool"]
    streamed = httpx.post(f"{url}/v1/responses", json=body | {"stream": True})
    assert streamed.status_code == 200 and "event: response.completed" in streamed.text


def test_claude_code_is_answered_and_goes_on_with_what_it_got(url: str, actor: Actor) -> None:
    """Its body as its command sends it, with texts cut short."""
    body = CLAUDE_CODE | {"model": MODEL, "stream": False}
    actor.script = lambda job: calls((body["tools"][0]["name"], {}))
    first = httpx.post(f"{url}/v1/messages?beta=true", json=body)
    assert first.status_code == 200, first.text
    [use] = first.json()["content"]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "done"}
    turns = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    later = httpx.post(
        f"{url}/v1/messages?beta=true", json=body | {"messages": [*body["messages"], *turns]}
    )
    assert later.status_code == 200, later.text
    assert [each["role"] for each in chat_of(actor).messages][-2:] == ["assistant", "tool"]
    streamed = httpx.post(f"{url}/v1/messages?beta=true", json=body | {"stream": True})
    assert streamed.status_code == 200 and "event: message_stop" in streamed.text


def test_computers_and_toolsets_are_left_out(url: str, actor: Actor) -> None:
    """They answer with pictures, which no model here reads."""
    actor.script = lambda job: spoken("a")
    screen = {"display_width_px": 1, "display_height_px": 1}
    tools = [
        {"type": "computer_20250124", "name": "computer", **screen},
        {"type": "mcp_toolset", "mcp_server_name": "x"},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 2},
        {"type": "code_execution_20250825", "name": "code_execution"},
    ]
    answer = asked(url, "messages", tools=tools, tool_choice={"type": "auto"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-penstock-ignored"] == (
        "tools.0.computer_20250124, tools.1.mcp_toolset, tools.2.web_search_20250305, "
        "tools.3.code_execution_20250825"
    )
    assert chat_of(actor).tools == []
