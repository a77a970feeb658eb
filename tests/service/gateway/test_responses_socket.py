"""Responses over a websocket, through OpenAI's client and its lanes, and by plain messages."""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI
from openai.lib.responses_websocket import ResponsesWebSocketLimits, ResponsesWebSocketSession
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

import api_keys
from dialogues import CALL, marked, plain_chat
from penstock.compose.server import Server
from penstock.gateway.sockets.session import MAX_ACTIVE, MAX_LANES, MAX_WAITING
from penstock.schemas.job import Job
from penstock.schemas.markup.forms import Markup
from stage import MODEL, Actor, GatewayProcess, Line, Wait, eventually, failed, spoken

EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
LIMITS = ResponsesWebSocketLimits(
    max_lanes=8,
    max_events_per_lane=128,
    max_events=512,
    max_bytes_per_lane=1 << 24,
    max_bytes=1 << 25,
)
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


@pytest.fixture(autouse=True)
def plain(actor: Actor) -> None:
    actor.script = lambda job: spoken("Hello", " world")
    actor.jobs.clear()


def opened(gateway: GatewayProcess, path: str = "/v1/responses", **more: Any) -> ClientConnection:
    return connect(f"ws://127.0.0.1:{gateway.port}{path}", max_size=None, **more)


def create(socket: ClientConnection, **fields: object) -> None:
    asked = {"type": "response.create", "model": MODEL, "input": "hi", **fields}
    socket.send(json.dumps(asked))


def received(socket: ClientConnection) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(socket.recv(timeout=60))
    return event


def until_end(socket: ClientConnection) -> list[dict[str, Any]]:
    events = [received(socket)]
    while events[-1]["type"] not in ENDS:
        events.append(received(socket))
    return events


def said(actor: Actor, at: int = -1) -> list[tuple[str, str]]:
    """What a job was told, the latest unless said otherwise."""
    chat = plain_chat(actor.jobs[at])
    return [(f"{each['role']}", f"{each.get('content')}") for each in chat.messages]


def test_the_events_are_those_of_a_post(gateway: GatewayProcess, actor: Actor) -> None:
    asked = {"model": MODEL, "input": "hi", "stream": True}
    posted = httpx.post(f"{gateway.url}/v1/responses", json=asked, timeout=60).text
    over_http = [json.loads(line[6:]) for line in posted.split("\n") if line.startswith("data: ")]
    with opened(gateway) as socket:
        create(socket)
        events = until_end(socket)
    for event in events:
        EVENT.validate_python(event)

    kinds = [event["type"] for event in events]
    assert kinds == [event["type"] for event in over_http]
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    posted_last, last = over_http[-1]["response"], events[-1]["response"]
    assert last.keys() == posted_last.keys()
    assert [each["content"] for each in last["output"]] == [
        each["content"] for each in posted_last["output"]
    ]
    stored = httpx.get(f"{gateway.url}/v1/responses/{events[-1]['response']['id']}").json()
    assert stored["output"] == events[-1]["response"]["output"]


def test_openais_client_has_conversations_on_lanes(gateway: GatewayProcess, actor: Actor) -> None:
    def answer(job: Job) -> list[Line]:
        last = plain_chat(job).messages[-1]["content"]
        return [*spoken("re: ", f"{last}")]

    actor.script = answer
    client = OpenAI(base_url=f"{gateway.url}/v1", api_key="EMPTY", max_retries=0)
    with (
        client.responses.connect() as connection,
        ResponsesWebSocketSession(connection, limits=LIMITS) as session,
    ):
        lanes = [session.default, session.lane("a"), session.lane("b.2")]
        ids = list[str]()
        for turn in range(3):
            for at, lane in enumerate(lanes):
                more = {"previous_response_id": ids[-3]} if turn else {}
                asked = {"model": MODEL, "input": f"{turn} of {at}", "store": False, **more}
                lane.send({"type": "response.create", **asked})  # type: ignore[typeddict-item]
                response = lane.get_final_response(timeout=60)
                assert response.output_text == f"re: {turn} of {at}"
                ids.append(response.id)
    assert said(actor) == [
        ("user", "0 of 2"), ("assistant", "re: 0 of 2"), ("user", "1 of 2"),
        ("assistant", "re: 1 of 2"), ("user", "2 of 2"),
    ]  # fmt: skip


def test_one_that_is_not_stored_is_known_to_its_connection_alone(
    gateway: GatewayProcess, actor: Actor
) -> None:
    with opened(gateway) as socket, opened(gateway) as other:
        create(socket, store=False, instructions="be brief")
        first = until_end(socket)[-1]["response"]["id"]
        for connection, is_known in ((other, False), (socket, True)):
            create(
                connection, store=False, previous_response_id=first, input="on", instructions="x"
            )
            end = until_end(connection)[-1]
            if not is_known:
                assert (end["type"], end["status"]) == ("error", 400)
                assert end["error"]["code"] == "previous_response_not_found"
        assert end["response"]["previous_response_id"] == first
        assert said(actor) == [
            ("system", "x"), ("user", "hi"), ("assistant", "Hello world"), ("user", "on"),
        ]  # fmt: skip
        create(socket, store=False, previous_response_id=first)  # the lane has gone on
        assert until_end(socket)[-1]["error"]["code"] == "previous_response_not_found"
    assert httpx.get(f"{gateway.url}/v1/responses/{first}").status_code == 404


def test_a_stored_one_goes_on_over_another_connection(
    gateway: GatewayProcess, actor: Actor
) -> None:
    with opened(gateway) as socket:
        create(socket)
        first = until_end(socket)[-1]["response"]["id"]
    with opened(gateway) as socket:
        create(socket, previous_response_id=first, input="on")
        assert until_end(socket)[-1]["type"] == "response.completed"
    assert said(actor) == [("user", "hi"), ("assistant", "Hello world"), ("user", "on")]


def test_a_call_of_a_tool_is_answered_by_its_output_alone(
    gateway: GatewayProcess, actor: Actor
) -> None:
    tools = [{"type": "function", "name": "weather", "parameters": {}, "strict": False}]
    actor.script = lambda job: marked(Markup("hermes"), CALL)
    with opened(gateway) as socket:
        create(socket, store=False, tools=tools)
        made = until_end(socket)[-1]["response"]
        call = next(item for item in made["output"] if item["type"] == "function_call")
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}
        actor.script = lambda job: spoken("fine")
        create(socket, store=False, tools=tools, previous_response_id=made["id"], input=[output])
        assert until_end(socket)[-1]["response"]["output"][0]["content"][0]["text"] == "fine"
    assert [role for role, _ in said(actor)] == ["user", "assistant", "tool"]


@pytest.mark.parametrize("told", [{}, {"input": []}])
def test_a_warm_up_computes_the_prompt_and_answers_nothing(
    gateway: GatewayProcess, actor: Actor, told: dict[str, object]
) -> None:
    with opened(gateway) as socket:
        create(socket, generate=False, instructions="be brief", **told)
        events = until_end(socket)
        kinds = ["response.created", "response.in_progress", "response.completed"]
        assert [event["type"] for event in events] == kinds
        for number, event in enumerate(events):
            EVENT.validate_python(event)
            assert event["sequence_number"] == number
        response = events[-1]["response"]
        assert (response["output"], response["usage"]["output_tokens"]) == ([], 0)
        assert actor.jobs[-1].params.max_tokens == 1
        create(socket, store=False, previous_response_id=response["id"], input="on")
        assert until_end(socket)[-1]["type"] == "response.completed"
    assert said(actor) == ([] if told else [("user", "hi")]) + [("user", "on")]


CREATE = {"type": "response.create"}
INVALID = "invalid_value"
REFUSED: dict[str, tuple[object, str | None, str]] = {
    "no JSON": ("{", None, INVALID),
    "a list": ([], None, INVALID),
    "no text": (b"\xff\xfe", None, INVALID),
    "no type": ({}, "type", INVALID),
    "steering": ({"type": "response.steer", "input": "x"}, "type", INVALID),
    "a name of a lane": (CREATE | {"stream_id": "a b"}, "stream_id", "invalid_stream_id"),
    "not streamed": (CREATE | {"stream": False}, "stream", INVALID),
    "in the background": (CREATE | {"background": True}, "background", INVALID),
    "generate": (CREATE | {"generate": "no"}, "generate", INVALID),
    "no input": (CREATE | {"model": MODEL}, "input", INVALID),
    "an unknown model": (CREATE | {"model": "x", "input": "hi"}, "model", "model_not_found"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_refused_is_told_and_the_connection_stays(
    gateway: GatewayProcess, why: str
) -> None:
    sent, param, code = REFUSED[why]
    with opened(gateway) as socket:
        socket.send(sent if isinstance(sent, str | bytes) else json.dumps(sent))
        event = received(socket)
        error = event["error"]
        assert (event["type"], error["param"], error["code"]) == ("error", param, code)
        assert event["status"] in (400, 404) and error["message"]
        create(socket)
        assert until_end(socket)[-1]["type"] == "response.completed"


def test_a_failure_on_a_lane_forgets_what_it_went_on_with(
    gateway: GatewayProcess, actor: Actor
) -> None:
    with opened(gateway) as socket:
        create(socket, store=False, stream_id="a")
        first = until_end(socket)[-1]["response"]["id"]
        create(socket, store=False, stream_id="b", previous_response_id=first, temperature=9)
        refused = until_end(socket)[-1]
        assert (refused["stream_id"], refused["error"]["param"]) == ("b", "temperature")
        asked = {"store": False, "stream_id": "a", "previous_response_id": first}
        for warmth, code in ((9, INVALID), (0, "previous_response_not_found")):
            create(socket, temperature=warmth, **asked)
            assert until_end(socket)[-1]["error"]["code"] == code


def test_one_that_fails_ends_with_its_own_event(gateway: GatewayProcess, actor: Actor) -> None:
    actor.script = lambda job: [*spoken("Hel", "lo")[:1], failed(1)]
    with opened(gateway) as socket:
        create(socket, stream_id="a")
        end = until_end(socket)[-1]
    assert (end["type"], end["stream_id"]) == ("response.failed", "a")


def test_lanes_go_beside_each_other_and_each_in_turn(gateway: GatewayProcess, actor: Actor) -> None:
    wait, asked = Wait(), list[str]()

    def answer(job: Job) -> list[Line]:
        asked.append(f"{plain_chat(job).messages[0]['content']}")
        return [wait, *spoken("x")] if asked[-1] == "slow" else [*spoken("x")]

    actor.script = answer
    with opened(gateway) as socket:
        create(socket, stream_id="a", input="slow")
        create(socket, stream_id="a", input="next")
        create(socket, stream_id="b", input="quick")
        assert {event["stream_id"] for event in until_end(socket)} == {"b"}
        wait.set()
        first, second = until_end(socket), until_end(socket)
    assert {event["stream_id"] for event in [*first, *second]} == {"a"}
    assert first[-1]["response"]["id"] != second[-1]["response"]["id"]
    assert asked.index("slow") < asked.index("next") and asked[-1] == "next"


def test_there_are_limits_on_what_a_connection_asks(gateway: GatewayProcess, actor: Actor) -> None:
    wait = Wait()
    actor.script = lambda job: [wait, *spoken("x")]
    with opened(gateway) as socket:
        for number in range(MAX_LANES):
            create(socket, stream_id=f"lane-{number}")
        create(socket, stream_id="one-more")
        event = received(socket)
        assert (event["error"]["code"], event["stream_id"]) == (
            "websocket_stream_limit_reached", "one-more",
        )  # fmt: skip
        eventually(lambda: len(actor.jobs) == MAX_ACTIVE)
        for _ in range(MAX_ACTIVE + MAX_WAITING - MAX_LANES):
            create(socket, stream_id="lane-0")
        create(socket, stream_id="lane-0")
        event = received(socket)
        assert (event["status"], event["error"]["code"]) == (429, "too_many_waiting")
        assert len(actor.jobs) == MAX_ACTIVE
        wait.set()
        ends = [until_end(socket)[-1]["type"] for _ in range(MAX_ACTIVE + MAX_WAITING)]
    assert {*ends} == {"response.completed"}
    assert len(actor.jobs) == MAX_ACTIVE + MAX_WAITING


def test_whoever_leaves_ends_what_was_asked(gateway: GatewayProcess, actor: Actor) -> None:
    wait = Wait()
    actor.script = lambda job: [wait, *spoken("x")]
    with opened(gateway) as socket:
        create(socket, stream_id="a")
        create(socket, stream_id="a")
        create(socket, stream_id="b")
        eventually(lambda: len(actor.jobs) == 2)
    eventually(lambda: {job.job_id for job in actor.jobs} <= actor.cancelled)
    assert len(actor.jobs) == 2, "what was not begun is not asked"


def test_a_gateway_that_ends_answers_what_was_asked(actor: Actor) -> None:
    wait = Wait()
    actor.script = lambda job: [wait, *spoken("Hello")]
    with GatewayProcess(actor.redis_url) as gateway, opened(gateway) as socket:
        with opened(gateway) as idle:
            create(socket)
            eventually(lambda: len(actor.jobs) == 1)
            gateway.process.terminate()
            with pytest.raises(ConnectionClosed) as closed:
                idle.recv(timeout=60)
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1012
        create(socket, stream_id="late")
        kinds = [received(socket)["type"]]
        wait.set()
        kinds += [event["type"] for event in until_end(socket)]
        assert kinds[0] == "error" and kinds[-1] == "response.completed"
        with pytest.raises(ConnectionClosed):
            socket.recv(timeout=60)
        assert gateway.process.wait(60) == 0
        log = gateway.log.read_text()
    assert "Traceback" not in log and "ERROR" not in log


def test_a_job_outlives_the_gateway_that_had_no_time(actor: Actor) -> None:
    wait = Wait()
    actor.script = lambda job: [*spoken("Hel", "lo")[:1], wait, *spoken("Hel", "lo")[1:]]
    with GatewayProcess(actor.redis_url, "--drain-s", "1") as gateway, opened(gateway) as socket:
        create(socket)
        response = received(socket)["response"]["id"]
        gateway.process.terminate()
        assert gateway.process.wait(60) == 0
        assert "Traceback" not in gateway.log.read_text()
    assert actor.jobs[-1].job_id not in actor.cancelled
    with GatewayProcess(actor.redis_url) as gateway:
        wait.set()
        url = f"{gateway.url}/v1/responses/{response}?stream=true&starting_after=0"
        rest = httpx.get(url, timeout=60).text
    assert "response.completed" in rest and "response.created" not in rest


@pytest.fixture(scope="module")
def narrow(actor: Actor) -> Iterator[GatewayProcess]:
    with GatewayProcess(actor.redis_url, "--max-body-bytes", "100000") as gateway:
        yield gateway


def test_a_message_may_be_as_large_as_a_body(narrow: GatewayProcess, actor: Actor) -> None:
    with opened(narrow) as socket:
        create(socket, input="x" * 90_000)
        assert until_end(socket)[-1]["type"] == "response.completed"
        create(socket, input="x" * 110_000)
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=60)
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009
    assert len(actor.jobs) == 1


def test_what_waits_on_a_connection_is_bounded(narrow: GatewayProcess, actor: Actor) -> None:
    wait = Wait()
    actor.script = lambda job: [wait, *spoken("x")]
    with opened(narrow) as socket:
        for _ in range(3):
            create(socket, input="x" * 90_000)
        event = received(socket)
        assert (event["status"], event["error"]["code"]) == (429, "too_many_waiting")
        wait.set()
        ends = [until_end(socket)[-1]["type"] for _ in range(2)]
    assert ends == ["response.completed"] * 2


def test_what_is_kept_of_a_connection_is_bounded(narrow: GatewayProcess) -> None:
    """The oldest lane's response is forgotten, and its caller hears of it."""
    with opened(narrow) as socket:
        ids, ends = list[str](), list[str]()
        for name in ("a", "b", "c"):
            create(socket, store=False, stream_id=name, input="x" * 40_000)
            ids.append(until_end(socket)[-1]["response"]["id"])
        for name, made in (("a", ids[0]), ("c", ids[2])):
            create(socket, store=False, stream_id=name, previous_response_id=made)
            ends.append(until_end(socket)[-1]["type"])
    assert ends == ["error", "response.completed"]


def test_a_page_of_elsewhere_is_refused(gateway: GatewayProcess, actor: Actor) -> None:
    for origin in ("https://evil.example", "null"):
        with pytest.raises(InvalidStatus) as refused:
            opened(gateway, origin=origin)
        assert refused.value.response.status_code == 403
        assert b"allowed-origins" in (refused.value.response.body or b"")
    own = f"http://127.0.0.1:{gateway.port}"
    with opened(gateway, origin=own) as socket:
        create(socket)
        assert until_end(socket)[-1]["type"] == "response.completed"
    page = "https://app.example"
    with (
        GatewayProcess(actor.redis_url, "--allowed-origins", page) as other,
        opened(other, origin=page) as socket,
    ):
        create(socket)
        assert until_end(socket)[-1]["type"] == "response.completed"


def test_no_path_is_logged_since_it_may_hold_a_token(actor: Actor) -> None:
    with GatewayProcess(actor.redis_url) as gateway:
        with opened(gateway, path="/v1/responses?x=canary-5") as socket:
            create(socket)
            assert until_end(socket)[-1]["type"] == "response.completed"
        with pytest.raises(InvalidStatus):
            opened(gateway, path="/v1/nothing?share=canary-5")
        assert gateway.terminate()[0] == 0
        log = gateway.log.read_text()
    assert "canary-5" not in log and "WebSocket" not in log and "connection" not in log


def test_other_paths_take_no_websocket(gateway: GatewayProcess) -> None:
    for path in ("/v1/chat/completions", "/", "/v1/nothing"):
        with pytest.raises(InvalidStatus) as refused:
            opened(gateway, path=path)
        assert refused.value.response.status_code == 403


def test_a_handshake_that_breaks_the_rules_is_refused(gateway: GatewayProcess) -> None:
    url, upgrade = f"{gateway.url}/v1/responses", {"Connection": "Upgrade", "Upgrade": "websocket"}
    for call in (
        httpx.get(url, headers=upgrade),
        httpx.get(url, headers={**upgrade, "x-long": "x" * 20_000}),
        httpx.post(url, headers=upgrade, json={"x": 1}),
    ):
        assert 400 <= call.status_code < 500
    assert httpx.get(f"{gateway.url}/health").status_code == 200


def test_it_lies_below_the_root_path_too(actor: Actor) -> None:
    with GatewayProcess(actor.redis_url, "--root-path", "/llm") as gateway:
        for path in ("/v1/responses", "/llm/v1/responses"):
            with opened(gateway, path=path) as socket:
                create(socket)
                assert until_end(socket)[-1]["type"] == "response.completed"


def test_keys_are_asked_for_at_the_door_and_of_each_request() -> None:
    with Server() as server, Actor(server.url), GatewayProcess(server.url) as gateway:
        mine, narrow = api_keys.issue(server.url), api_keys.issue(server.url, scopes=["jobs"])
        for headers, status in (({}, 401), (api_keys.bearer(narrow), 403)):
            with pytest.raises(InvalidStatus) as refused:
                opened(gateway, additional_headers=headers)
            assert refused.value.response.status_code == status
            assert json.loads(refused.value.response.body or b"")["error"]["message"]
        with opened(gateway, additional_headers=api_keys.bearer(mine)) as socket:
            create(socket, store=False)
            assert until_end(socket)[-1]["type"] == "response.completed"
            api_keys.revoke(server.url, mine)
            until = time.monotonic() + 60
            while time.monotonic() < until:
                create(socket)
                if (end := until_end(socket)[-1])["type"] == "error":
                    break
            assert (end["status"], end["error"]["type"]) == (401, "authentication_error")
