"""Streams of OpenAI's routes: their chunks, their errors, and what a closed connection ends."""

import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace

from event_source import EventSource
from penstock.schemas.errors import InvalidJob, PenstockError, PromptTooLong, WorkerFailed
from penstock.schemas.event import Delta, Failed, TokenLogprob
from stage import (
    MODEL,
    Actor,
    GatewayProcess,
    Wait,
    chosen,
    eventually,
    failed,
    logprob,
    spoken,
)

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": MODEL, "prompt": "hi"}
GATEWAY_FLAGS = ("--ping-s", "0.2")


def chunks_of(text: str) -> list[dict[str, object]]:
    """The JSON of every event but the closing one, which must be there."""
    events = EventSource().read(text)
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def some(connection: socket.socket) -> bytes:
    """What comes next, which is not the end."""
    piece = connection.recv(1 << 20)
    assert piece, "the connection ended"
    return piece


def texts_in(chunk: dict[str, object]) -> list[str]:
    """What the choices of a chunk of either kind say."""
    choices = chunk["choices"]
    assert isinstance(choices, list)
    said = [
        choice["text"] if "text" in choice else choice["delta"].get("content") for choice in choices
    ]
    return [text for text in said if text]


def raw_post(gateway: GatewayProcess, path: str, body: dict[str, object]) -> socket.socket:
    """A connection on which a request was written and nothing read."""
    connection = socket.create_connection(("127.0.0.1", gateway.port), timeout=120)
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def test_a_chat_opens_with_its_role_and_closes_with_reason_usage_and_done(
    http: httpx.Client, actor: Actor
) -> None:
    actor.script = lambda job: spoken("Hé\n", "", ' "q"\u2028', reason="length")
    body = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
    response = http.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache, no-transform"
    assert response.content.isascii()  # no reader of SSE finds a line end in the text
    chunks = chunks_of(response.text)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert [chunk["choices"] for chunk in chunks] == [
        [
            {
                "index": 0,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
        ],
        [{"index": 0, "delta": {"content": "Hé\n"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": ' "q"\u2028'}, "logprobs": None, "finish_reason": None}],
        [
            {
                "index": 0,
                "delta": {},
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        [],
    ]
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    details = {
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert chunks[-1]["usage"] == usage | details
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_a_completion_streams_text_and_closes_with_its_reason(
    http: httpx.Client, actor: Actor
) -> None:
    actor.script = lambda job: [
        *spoken("a", "b")[:1],
        Delta(position=1, token_ids=[2], text="b", finish_reason="stop", stop_reason="END"),
    ]
    chunks = chunks_of(http.post("/v1/completions", json=TEXT | {"stream": True}).text)
    assert [chunk["choices"] for chunk in chunks] == [
        [{"index": 0, "text": "a", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": "b", "logprobs": None, "finish_reason": None}],
        [
            {
                "index": 0,
                "text": "",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": "END",
            }
        ],
    ]
    assert all("usage" not in chunk for chunk in chunks)


def test_usage_can_run_along(http: httpx.Client, actor: Actor) -> None:
    first, *rest = spoken("a", "b", "c")
    actor.script = lambda job: [replace(first, prompt_tokens=5), *rest]
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = TEXT | {"stream": True, "stream_options": options}
    chunks = chunks_of(http.post("/v1/completions", json=body).text)
    usages = [chunk["usage"] for chunk in chunks]
    counts = [usage["completion_tokens"] for usage in usages if isinstance(usage, dict)]
    assert counts == [1, 2, 3, 3, 3]
    alone = body | {"stream_options": {"continuous_usage_stats": True}}
    chunks = chunks_of(http.post("/v1/completions", json=alone).text)
    assert len(chunks) == 4 and not any(chunk.get("usage") for chunk in chunks)
    assert {usage["prompt_tokens"] for usage in usages if isinstance(usage, dict)} == {5}


def test_a_role_comes_before_any_token_in_the_running_usage(
    http: httpx.Client, actor: Actor
) -> None:
    actor.script = lambda job: spoken("a", "b")
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = CHAT | {"stream": True, "stream_options": options}
    chunks = chunks_of(http.post("/v1/chat/completions", json=body).text)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 2, 2]  # type: ignore[index]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("last", ["once ", [{"type": "text", "text": "once "}], None])
def test_a_chat_that_goes_on_can_show_what_it_went_on_from(
    http: httpx.Client, actor: Actor, last: object, n: int
) -> None:
    actor.script = lambda job: chosen("upon", "more")[:n]
    said = [{"role": "user", "content": "hi"}]
    if last is not None:
        said.append({"role": "assistant", "content": last})  # type: ignore[dict-item]
    body = CHAT | {
        "messages": said,
        "n": n,
        "echo": True,
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    begin = "once " if last else ""
    texts = [begin + each for each in ("upon", "more")][:n]
    whole = http.post("/v1/chat/completions", json=body).json()["choices"]
    assert [choice["message"]["content"] for choice in whole] == texts
    shown = [""] * n
    for chunk in chunks_of(http.post("/v1/chat/completions", json=body | {"stream": True}).text):
        for choice in chunk["choices"]:  # type: ignore[attr-defined]
            shown[choice["index"]] += choice["delta"].get("content") or ""
    assert shown == texts


def test_choices_of_several_prompts_are_numbered_and_each_has_its_echo(
    http: httpx.Client, actor: Actor
) -> None:
    actor.script = lambda job: chosen("1", "2", "3", "4")
    body = TEXT | {"prompt": ["one ", "two "], "n": 2, "echo": True}
    whole = http.post("/v1/completions", json=body).json()["choices"]
    texts = ["one 1", "one 2", "two 3", "two 4"]
    assert [(choice["index"], choice["text"]) for choice in whole] == list(enumerate(texts))
    shown = [""] * 4
    for chunk in chunks_of(http.post("/v1/completions", json=body | {"stream": True}).text):
        choices = chunk["choices"]
        assert isinstance(choices, list)
        for choice in choices:
            shown[choice["index"]] += choice["text"]
    assert shown == texts


@pytest.mark.parametrize(
    "prompt, prompts",
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_the_four_forms_of_a_prompt(
    http: httpx.Client, actor: Actor, prompt: object, prompts: object
) -> None:
    actor.script = lambda job: chosen(*["x" for _ in job.prompts])
    assert http.post("/v1/completions", json=TEXT | {"prompt": prompt}).status_code == 200
    assert actor.jobs[-1].prompts == prompts


def test_a_tokens_offset_is_its_place_in_the_shown_text(http: httpx.Client, actor: Actor) -> None:
    """Spellings do not add up to the text: of a token that is not shown, of a space left out."""

    def placed(text: str, offset: int) -> TokenLogprob:
        return replace(logprob(text, -0.5), offset=offset)

    prompt, answer = [placed("<s>", 0), placed(" ab", 0)], [placed(" c", 0), placed("!", 2)]
    actor.script = lambda job: [
        Delta(
            position=0,
            token_ids=[1, 1],
            text=" c!",
            prompt_logprobs=prompt,
            logprobs=answer,
            finish_reason="stop",
        )
    ]
    body = TEXT | {"prompt": "ab", "echo": True, "logprobs": 1}
    whole = http.post("/v1/completions", json=body).json()["choices"][0]
    assert whole["text"] == "ab c!" and whole["logprobs"]["text_offset"] == [0, 0, 2, 4]
    streamed = [
        offset
        for chunk in chunks_of(http.post("/v1/completions", json=body | {"stream": True}).text)
        for choice in chunk["choices"]
        for offset in (choice["logprobs"] or {}).get("text_offset", [])
    ]
    assert streamed == whole["logprobs"]["text_offset"]


def test_log_probabilities_of_a_completion_are_four_lists(http: httpx.Client, actor: Actor) -> None:
    first = logprob("Hé", -0.5, ("Hé", -0.5), ("x", -2.0))
    second = logprob("!", -1.5, ("a", -0.1), ("b", -0.2))
    actor.script = lambda job: [
        Delta(position=0, token_ids=[0], text="Hé", logprobs=[first]),
        Delta(position=1, token_ids=[0], text="!", logprobs=[second], finish_reason="stop"),
    ]
    body = TEXT | {"logprobs": 2}
    whole = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert whole == {
        "tokens": ["Hé", "!"],
        "token_logprobs": [-0.5, -1.5],
        "top_logprobs": [{"Hé": -0.5, "x": -2.0}, {"a": -0.1, "b": -0.2, "!": -1.5}],
        "text_offset": [0, 2],
    }
    joined: dict[str, list[object]] = {name: [] for name in whole}
    for chunk in chunks_of(http.post("/v1/completions", json=body | {"stream": True}).text):
        choices = chunk["choices"]
        assert isinstance(choices, list)
        for name, values in (choices[0]["logprobs"] or {}).items():
            joined[name] += values
    assert joined == whole


REFUSALS: list[PenstockError] = [
    PromptTooLong(5000, 2048),
    InvalidJob("stop_token_ids[0]: 99 is not in the vocabulary", "stop_token_ids[0]"),
    WorkerFailed("the engine broke"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.code)
def test_a_job_that_fails_at_once_is_a_plain_error_also_for_a_stream(
    http: httpx.Client, actor: Actor, refusal: PenstockError, stream: bool
) -> None:
    actor.script = lambda job: [Failed(position=0, state="failed", error=refusal.body())]
    response = http.post("/v1/chat/completions", json=CHAT | {"stream": stream})
    assert response.status_code == refusal.status
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-should-retry"] == str(refusal.retryable).lower()
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (refusal.code, refusal.param)
    assert error["message"] == refusal.message


@pytest.mark.parametrize("path, body", [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
def test_a_later_failure_is_said_inside_the_stream(
    http: httpx.Client, actor: Actor, path: str, body: dict[str, object]
) -> None:
    actor.script = lambda job: [*spoken("a", "b", "c")[:2], failed(2)]
    response = http.post(path, json=body | {"stream": True})
    assert response.status_code == 200
    *chunks, last = chunks_of(response.text)
    assert last["error"] == {
        "message": "the worker's disk is gone",
        "type": "server_error",
        "param": None,
        "code": "worker_failed",
    }
    assert [text for chunk in chunks for text in texts_in(chunk)] == ["a", "b"]
    assert http.post(path, json=body).status_code == 500


def test_no_status_goes_out_before_the_first_event(gateway: GatewayProcess, actor: Actor) -> None:
    held = Wait()
    actor.script = lambda job: [held, *spoken("a", "b")]
    with raw_post(gateway, "/v1/chat/completions", CHAT | {"stream": True}) as connection:
        connection.settimeout(0.5)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        held.set()
        connection.settimeout(10)
        assert connection.recv(12) == b"HTTP/1.1 200"


def test_a_silent_stream_pings(gateway: GatewayProcess, actor: Actor) -> None:
    held = Wait()
    actor.script = lambda job: [*spoken("a", "b")[:1], held, *spoken("a", "b")[1:]]
    with raw_post(gateway, "/v1/chat/completions", CHAT | {"stream": True}) as connection:
        received = b""
        while received.count(b": ping\n") < 3:
            received += some(connection)
        assert received.startswith(b"HTTP/1.1 200")
        assert b": ping\n\n" not in received.replace(b"\r\n", b"")  # that would be an event
        held.set()
        while b"[DONE]" not in received:
            received += some(connection)
    assert b'"content":"b"' in received


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_before", [0, 2])
def test_a_closed_connection_cancels(
    gateway: GatewayProcess, actor: Actor, stream: bool, num_before: int
) -> None:
    spoken_before = spoken(*"abc")[:num_before]
    actor.script = lambda job: [*spoken_before, Wait(), *spoken(*"abc")[num_before:]]
    num_jobs = len(actor.jobs)
    connection = raw_post(gateway, "/v1/chat/completions", CHAT | {"stream": stream})
    eventually(lambda: len(actor.jobs) > num_jobs)
    job_id = actor.jobs[-1].job_id
    if stream and num_before:
        assert connection.recv(12) == b"HTTP/1.1 200"
    connection.close()
    eventually(lambda: job_id in actor.cancelled, within_s=8)


def test_a_job_in_the_background_outlives_its_connection(
    gateway: GatewayProcess, http: httpx.Client, actor: Actor
) -> None:
    held = Wait()
    actor.script = lambda job: [held, *spoken("still ", "here")]
    num_jobs = len(actor.jobs)
    with raw_post(gateway, "/v1/chat/completions", CHAT | {"background": True}):
        eventually(lambda: len(actor.jobs) > num_jobs)
    time.sleep(0.3)  # long enough for a cancel to arrive, were there one
    held.set()
    job_id = actor.jobs[-1].job_id
    eventually(lambda: "result" in http.get(f"/v1/jobs/{job_id}").json())
    assert http.get(f"/v1/jobs/{job_id}").json()["state"] == "succeeded"


def test_who_shares_an_idempotency_key_does_not_end_the_others_answer(
    gateway: GatewayProcess, http: httpx.Client, actor: Actor
) -> None:
    held = Wait()
    actor.script = lambda job: [held, *spoken("for ", "both")]
    headers = {"idempotency-key": "shared"}
    num_jobs = len(actor.jobs)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(lambda: http.post("/v1/chat/completions", json=CHAT, headers=headers))
        eventually(lambda: len(actor.jobs) > num_jobs)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                gateway.url + "/v1/chat/completions", json=CHAT, headers=headers, timeout=0.3
            )
        time.sleep(0.3)
        held.set()
        answer = waiting.result()
    assert answer.json()["choices"][0]["message"]["content"] == "for both"
    assert len(actor.jobs) == num_jobs + 1


@pytest.mark.parametrize("path, body", [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
def test_a_stream_goes_on_behind_its_last_event_id_on_any_gateway(
    gateway: GatewayProcess, actor: Actor, path: str, body: dict[str, object]
) -> None:
    """Not cancelled meanwhile; without the key that it was asked under, nobody can come back."""
    held = Wait()
    texts = ["Once", " upon", " a", " time", ", there"]
    actor.script = lambda job: [*spoken(*texts)[:2], held, *spoken(*texts)[2:]]
    asked = body | {"stream": True}
    headers = {"idempotency-key": f"resumed {path}"}
    num_jobs, events = len(actor.jobs), list[str]()
    with httpx.stream("POST", gateway.url + path, json=asked, headers=headers) as first:
        for line in first.iter_lines():
            events.append(line)
            if " upon" in line:
                break
    [last_id] = [line[4:] for line in events[-2:] if line.startswith("id: ")]
    assert last_id == "2"
    held.set()
    with GatewayProcess(actor.redis_url) as other:
        rest = httpx.post(
            other.url + path, json=asked, headers=headers | {"last-event-id": last_id}, timeout=120
        ).text
        whole = httpx.post(other.url + path, json=asked, headers=headers, timeout=120).text
        refused = [
            httpx.post(other.url + path, json=asked, headers=more)
            for more in ({"last-event-id": "2"}, headers | {"last-event-id": "2.x"})
        ]
    assert "".join(text for chunk in chunks_of(rest) for text in texts_in(chunk)) == (
        " a time, there"
    )
    assert "".join(text for chunk in chunks_of(whole) for text in texts_in(chunk)) == "".join(texts)
    assert len(actor.jobs) == num_jobs + 1
    assert [each.status_code for each in refused] == [400, 400]
    assert {each.json()["error"]["param"] for each in refused} == {"Last-Event-ID"}


def test_a_caller_who_does_not_read_delays_nobody(
    gateway: GatewayProcess, http: httpx.Client, actor: Actor
) -> None:
    line = "x" * 1000
    actor.script = lambda job: spoken(*[line] * 3000) if job.prompts == ["long"] else spoken("hi")
    body = TEXT | {"prompt": "long", "stream": True, "max_tokens": 4000}
    with raw_post(gateway, "/v1/completions", body) as stuck:
        assert stuck.recv(12) == b"HTTP/1.1 200"
        for _ in range(20):
            assert http.post("/v1/completions", json=TEXT | {"stream": True}).status_code == 200
        received = bytearray()
        while b"[DONE]" not in received[-64:]:
            received += some(stuck)
    assert received.count(line.encode()) == 3000


def test_a_hundred_streams_at_once_keep_apart(http: httpx.Client, actor: Actor) -> None:
    actor.script = lambda job: [0.05, *spoken(*[f"{job.prompts[0]};" for _ in range(10)])]

    def text_of(number: int) -> str:
        body = TEXT | {"prompt": f"caller-{number}", "stream": True}
        chunks = chunks_of(http.post("/v1/completions", json=body).text)
        return "".join(text for chunk in chunks for text in texts_in(chunk))

    with ThreadPoolExecutor(25) as pool:
        texts = list(pool.map(text_of, range(100)))
    assert texts == [f"caller-{number};" * 10 for number in range(100)]


def test_on_sigterm_open_streams_end_and_no_more_are_accepted(actor: Actor) -> None:
    held = Wait()
    actor.script = lambda job: [*spoken("a", "b")[:1], held, *spoken("a", "b")[1:]]
    with (
        GatewayProcess(actor.redis_url) as gateway,
        raw_post(gateway, "/v1/chat/completions", CHAT | {"stream": True}) as connection,
    ):
        received = connection.recv(65536)
        assert received.startswith(b"HTTP/1.1 200")
        ended: list[tuple[int, str]] = []
        ending = threading.Thread(target=lambda: ended.append(gateway.terminate()))
        ending.start()
        eventually(lambda: not _accepts(gateway))
        time.sleep(0.5)  # a stop without grace would have cut the stream by now
        held.set()
        while piece := connection.recv(65536):
            received += piece
        ending.join()
    assert b'"content":"b"' in received and received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert ended[0][0] == 0, ended[0][1]
    assert "Traceback" not in ended[0][1]


def test_told_to_end_before_it_serves_it_ends(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for its secret, and uvicorn does not listen for signals yet."""
    secret = tmp_path / "secret"
    os.mkfifo(secret, 0o600)
    monkeypatch.delenv("PENSTOCK_SERVER_SECRET")
    monkeypatch.setenv("PENSTOCK_SERVER_SECRET_FILE", str(secret))
    gateway = GatewayProcess(redis_url)
    with ExitStack() as stack:
        stack.push(gateway)
        with secret.open("w") as stream:  # which opens when the gateway reads
            gateway.process.send_signal(signal.SIGTERM)
            stream.write("s" * 40)
        assert gateway.process.wait(30) == 0


def test_a_gateway_that_stops_leaves_its_jobs_to_others(actor: Actor, http: httpx.Client) -> None:
    held = Wait()
    actor.script = lambda job: [*spoken("a", "b")[:1], held, *spoken("a", "b")[1:]]
    with (
        GatewayProcess(actor.redis_url, "--drain-s", "0") as gateway,
        raw_post(gateway, "/v1/chat/completions", CHAT | {"stream": True}) as connection,
    ):
        assert connection.recv(12) == b"HTTP/1.1 200"
        assert gateway.terminate()[0] == 0
    job_id = actor.jobs[-1].job_id
    held.set()
    events = http.get(f"/v1/jobs/{job_id}/events").text
    assert job_id not in actor.cancelled
    assert '"text":"b"' in events and '"type":"done"' in events


def _accepts(gateway: GatewayProcess) -> bool:
    try:
        socket.create_connection(("127.0.0.1", gateway.port), timeout=1).close()
    except OSError:
        return False
    return True
