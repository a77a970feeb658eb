"""What no well-behaved client sends: it gets an answer in OpenAI's form, or a closed door."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress

import httpx
import pytest

from penstock.gateway.server.protocol import (
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_PIPELINED,
    MAX_TARGET_BYTES,
)
from penstock.schemas.api.json_size import MAX_GROUPS, MAX_VALUES
from stage import MODEL, Actor, GatewayProcess

PATH = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
GET = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n"
TEXT = json.dumps({"model": MODEL, "prompt": "hi"}).encode()
WHOLE = PATH + b"content-length: %d\r\n\r\n" % len(TEXT) + TEXT


@pytest.fixture(scope="module")
def hasty(actor: Actor) -> Iterator[GatewayProcess]:
    """A gateway that waits for nobody."""
    flags = ["--head-timeout-s", "0.5", "--body-timeout-s", "0.5", "--keep-alive-s", "1"]
    with GatewayProcess(actor.redis_url, *flags) as gateway:
        yield gateway


def dialled(gateway: GatewayProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", gateway.port), 60)


def said(connection: socket.socket) -> bytes:
    """All until the other side closes."""
    received = b""
    while True:
        try:
            piece = connection.recv(65536)
        except ConnectionResetError:
            return received
        if not piece:
            return received
        received += piece


def exchanged(gateway: GatewayProcess, sent: bytes) -> bytes:
    with closing(dialled(gateway)) as connection:
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(sent)
        return said(connection)


def error_of(answer: bytes) -> tuple[int, str]:
    """The status and code of the last answer, after a look at its form."""
    head, _, body = answer.rpartition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower(), answer
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(head[head.rindex(b"HTTP/1.1 ") + 9 :][:3]), error["code"]


def head_of(num_bytes: int, end: bytes = b"\r\n\r\n") -> bytes:
    return GET + b"x: " + b"y" * (num_bytes - len(GET) - 3 - len(end)) + end


def test_a_head_of_the_limit_is_read(gateway: GatewayProcess) -> None:
    with closing(dialled(gateway)) as connection:
        connection.sendall(head_of(MAX_HEAD_BYTES))
        assert connection.recv(12) == b"HTTP/1.1 200"


@pytest.mark.parametrize("end", [b"\r\n\r\n", b""], ids=["whole", "unfinished"])
def test_a_head_past_the_limit_in_one_piece_is_431(gateway: GatewayProcess, end: bytes) -> None:
    sent = head_of(MAX_HEAD_BYTES + 1, end)
    assert len(sent) == 65537
    assert error_of(exchanged(gateway, sent)) == (431, "head_too_large")


def test_a_head_past_the_limit_in_small_pieces_is_431(gateway: GatewayProcess) -> None:
    with closing(dialled(gateway)) as connection:
        connection.sendall(GET + b"x: ")
        for _ in range(65):
            connection.sendall(b"y" * 1024)
        assert error_of(said(connection)) == (431, "head_too_large")


@pytest.mark.parametrize("size", [MAX_TARGET_BYTES, 1 << 17])
def test_a_url_past_the_limit_is_414(gateway: GatewayProcess, size: int) -> None:
    sent = b"GET /" + b"a" * size + b" HTTP/1.1\r\n\r\n"
    assert error_of(exchanged(gateway, sent)) == (414, "target_too_long")


def test_too_many_fields_are_431(gateway: GatewayProcess) -> None:
    some = b"a: b\r\n" * (MAX_HEADERS - 1)
    with closing(dialled(gateway)) as connection:
        connection.sendall(GET + some + b"\r\n")
        assert connection.recv(12) == b"HTTP/1.1 200"
    more = exchanged(gateway, GET + some + b"a: b\r\n\r\n")
    assert error_of(more) == (431, "head_too_large")


@pytest.mark.parametrize(
    "sent",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        GET + b"a b: c\r\n\r\n",
        GET + b"a: \x00\r\n\r\n",
        GET + b": c\r\n\r\n",
        PATH + b"content-length: -1\r\n\r\n",
        PATH + b"content-length: 5x\r\n\r\n",
        PATH + b"content-length: " + b"9" * 5000 + b"\r\n\r\n",
        PATH + b"content-length: 5\r\ncontent-length: 6\r\n\r\n",
        PATH + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        PATH + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        PATH + b"transfer-encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\n",
    ],
)
def test_what_is_no_request_is_400(gateway: GatewayProcess, sent: bytes) -> None:
    assert error_of(exchanged(gateway, sent)) == (400, "invalid_request")


def test_more_than_was_announced_is_no_part_of_the_body(gateway: GatewayProcess) -> None:
    assert error_of(exchanged(gateway, WHOLE + b"x y")) == (400, "invalid_request")


def test_a_body_of_another_encoding_is_415(gateway: GatewayProcess) -> None:
    headers = {"content-encoding": "br"}
    response = httpx.post(f"{gateway.url}/v1/completions", content=TEXT, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_encoding")


def test_requests_in_one_piece_are_answered_in_order(gateway: GatewayProcess) -> None:
    other = b"GET /nowhere HTTP/1.1\r\nhost: localhost\r\n\r\n"
    last = GET + b"connection: close\r\n\r\n"
    answer = exchanged(gateway, WHOLE + other + WHOLE + last)
    statuses = [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"200", b"404", b"200", b"200"]


def test_too_many_requests_in_one_piece_end_the_connection(gateway: GatewayProcess) -> None:
    answer = exchanged(gateway, (GET + b"\r\n") * 1000)
    assert answer.count(b"HTTP/1.1 ") <= MAX_PIPELINED + 2


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HT", GET, PATH + b"content-length: 9\r\n\r\n", WHOLE[:-1]],
    ids=["nothing", "part of a line", "part of a head", "no body", "part of a body"],
)
def test_who_does_not_go_on_is_sent_away(hasty: GatewayProcess, sent: bytes) -> None:
    assert error_of(exchanged(hasty, sent)) == (408, "too_slow")


@pytest.mark.parametrize("first", [GET, PATH + b"content-length: 4000\r\n\r\n"])
def test_a_byte_now_and_then_is_not_going_on(hasty: GatewayProcess, first: bytes) -> None:
    began_s = time.monotonic()
    with closing(dialled(hasty)) as connection:
        connection.sendall(first)
        connection.settimeout(0.1)
        answer = b""
        while not answer:
            assert time.monotonic() - began_s < 60
            try:
                connection.sendall(b"a")
                answer = connection.recv(65536)
            except TimeoutError:
                continue
        connection.settimeout(60)
        assert error_of(answer + said(connection)) == (408, "too_slow")


def test_an_idle_connection_is_closed(hasty: GatewayProcess) -> None:
    answer = exchanged(hasty, WHOLE)
    assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("pieces", [[WHOLE + b"\r\nGET"], [WHOLE, b"\r\nGET"]])
def test_a_long_answer_is_no_slow_request(
    actor: Actor, hasty: GatewayProcess, pieces: list[bytes]
) -> None:
    """With the beginning of another request behind it, too."""
    actor.script, before = (lambda job: [2.5, *actor_words()]), actor.script
    try:
        with closing(dialled(hasty)) as connection:
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(0.2)
            assert connection.recv(12) == b"HTTP/1.1 200"
    finally:
        actor.script = before


def test_one_connection_too_many_is_503(actor: Actor) -> None:
    with GatewayProcess(actor.redis_url, "--max-connections", "8") as few, ExitStack() as stack:
        held = [stack.enter_context(closing(dialled(few))) for _ in range(9)]
        for connection in held[:8]:
            connection.sendall(GET + b"\r\n")
        answers = [connection.recv(12) for connection in held[:7]]
        assert answers == [b"HTTP/1.1 200"] * 7
        assert any(error_of(said(each)) == (503, "too_many_connections") for each in held[8:])


VALUES = MAX_VALUES + 1
WIDE = {
    "unknown": TEXT[:-1] + b', "x": [' + b"1," * VALUES + b"1]}",
    "prompt": b'{"model": "m", "prompt": [' + b"1," * VALUES + b"1]}",
    "names": b"{" + b",".join(b'"%d":1' % number for number in range(VALUES + 1)) + b"}",
    "lists": TEXT[:-1] + b', "x": [' + b"[]," * VALUES + b"1]}",
    "one name": b"{" + b'"a":1,' * VALUES + b'"a":1}',
}
NESTED = {
    "lists": TEXT[:-1] + b', "x": [' + b"[]," * MAX_GROUPS + b"1]}",
    "objects": TEXT[:-1] + b', "x": [' + b"{}," * MAX_GROUPS + b"1]}",
}


@pytest.mark.parametrize("body", NESTED.values(), ids=NESTED.keys())
def test_a_body_of_too_many_lists_is_413(gateway: GatewayProcess, body: bytes) -> None:
    response = httpx.post(f"{gateway.url}/v1/chat/completions", content=body, timeout=60)
    assert response.status_code == 413, response.text
    assert str(MAX_GROUPS) in response.json()["error"]["message"]


@pytest.mark.parametrize("body", WIDE.values(), ids=WIDE.keys())
def test_a_body_of_too_many_values_is_413(gateway: GatewayProcess, body: bytes) -> None:
    response = httpx.post(f"{gateway.url}/v1/completions", content=body, timeout=60)
    assert response.status_code == 413, response.text
    assert str(MAX_VALUES) in response.json()["error"]["message"]


def test_commas_in_texts_are_no_values(gateway: GatewayProcess) -> None:
    body = {"model": MODEL, "prompt": 'a, \\"b", ' * (MAX_VALUES // 2)}
    response = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200


def test_many_wrong_values_are_told_as_one(gateway: GatewayProcess) -> None:
    """Each kind of prompt is tried; what fails at each of its values must not cost the square."""
    for item in (b"1,", b"null,", b"[-1],", b'{"a":[]},'):
        count = VALUES // 3 if item.isalnum() else MAX_GROUPS // 2 - 4
        body = b'{"model": "m", "prompt": [' + item * count + b'"a"]}'
        response = httpx.post(f"{gateway.url}/v1/completions", content=body, timeout=60)
        assert response.status_code == 400
        assert response.json()["error"]["param"].startswith("prompt[")


EXTREMES = {
    "a huge integer": b"1" * 4_000_000,
    "a long integer": b"1" * 4_000,
    "a long fraction": b"0." + b"1" * 4_000_000 + b'"',
    "deep lists": b"[" * 4_000_000,
    "deep objects": b'{"a":' * 800_000,
    "not a number": b"NaN",
    "infinite": b"-Infinity",
}


@pytest.mark.parametrize("value", EXTREMES.values(), ids=EXTREMES.keys())
def test_an_extreme_value_is_refused_at_once(gateway: GatewayProcess, value: bytes) -> None:
    body = TEXT[:-1] + b', "seed": ' + value + b"}"
    response = httpx.post(f"{gateway.url}/v1/completions", content=body, timeout=60)
    assert response.status_code in (400, 413) and len(response.content) < 1000


def test_of_a_name_given_twice_the_last_counts(actor: Actor, gateway: GatewayProcess) -> None:
    body = TEXT[:-1] + b', "prompt": "last"}'
    assert httpx.post(f"{gateway.url}/v1/completions", content=body, timeout=60).is_success
    assert actor.jobs[-1].prompts == ["last"]


def test_nothing_wrong_reached_redis_or_the_log(actor: Actor) -> None:
    """A gateway of its own, whose whole output is read, and a count of what was submitted."""
    before = len(actor.jobs)
    gateway = GatewayProcess(actor.redis_url, "--log-level", "debug")
    with gateway:
        wrong = [*WIDE.values(), *(TEXT[:-1] + b', "canary' + each for each in EXTREMES.values())]
        for body in [b'"canary', b'{"canary": "\xff"}', *wrong]:
            response = httpx.post(f"{gateway.url}/v1/completions", content=body, timeout=60)
            assert 400 <= response.status_code < 500
        exchanged(gateway, b"canary\r\n\r\n")
        httpx.post(f"{gateway.url}/v1/completions?api_key=canary", content=TEXT, timeout=60)
        status, output = gateway.terminate()
    assert len(actor.jobs) == before + 1
    assert status == 0 and "Traceback" not in output and "canary" not in output


def actor_words() -> list[object]:
    from stage import spoken

    return list(spoken("a", "b"))
