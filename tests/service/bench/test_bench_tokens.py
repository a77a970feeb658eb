"""No run passes that lost a token, got one twice, or got another's."""

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.loadtest import bench
from penstock.loadtest.errors import CannotMeasure
from penstock.loadtest.requests.drive import drive, proved
from penstock.loadtest.requests.http_stream import Target
from penstock.loadtest.requests.tokens import SeenPiece, TokenErrors, against_counts, against_log
from penstock.loadtest.requests.way import Way
from penstock.loadtest.requests.workload import Request
from penstock.schemas.event import Delta
from penstock.schemas.keys import Lane
from penstock.schemas.wire.checksum import EMPTY, roll

FAKE = ["serve", "--model", "fake", "--load-format", "fake", "--fake-step-ms", "1"]
SMALL = ["--num-prompts", "10", "--input-len", "9", "--output-len", "12"]
JOB = Lane("x").new_job_id()


def logged(*pieces: tuple[list[int], str]) -> list[Delta]:
    position, checksum, deltas = 0, EMPTY, list[Delta]()
    for token_ids, text in pieces:
        checksum = roll(checksum, 0, token_ids)
        deltas.append(Delta(position, token_ids, text=text, checksum=checksum))
        position += len(token_ids)
    return deltas


LOG = logged(([5], "a"), ([6, 7], "bc"), ([8], ""), ([9], "d"), ([5], "a"))
A, BC, NONE, D, LAST = (SeenPiece(delta.id, delta.text) for delta in LOG)


@pytest.mark.parametrize(
    "seen, wrong",
    [
        ([A, BC, NONE, D, LAST], TokenErrors()),
        ([A, BC, D, LAST], TokenErrors()),  # an event without text need not be shown
        ([A, NONE, D, LAST], TokenErrors(num_lost=2, num_foreign=0)),
        ([A, BC, NONE, LAST], TokenErrors(num_lost=1)),
        ([A, BC, NONE, D], TokenErrors(num_lost=1)),
        ([BC, NONE, D, LAST], TokenErrors(num_lost=1)),
        ([], TokenErrors(num_lost=6)),
        ([A, BC, BC, NONE, D, LAST], TokenErrors(num_repeated=2)),
        ([A, BC, NONE, D, LAST, LAST], TokenErrors(num_repeated=1)),
        ([A, SeenPiece(BC.id, "bx"), NONE, D, LAST], TokenErrors(num_foreign=2)),
        ([A, BC, NONE, SeenPiece("5-00000000", "d"), LAST], TokenErrors(num_lost=1, num_foreign=1)),
        ([A, BC, NONE, D, LAST, SeenPiece("", "z")], TokenErrors(num_foreign=1)),
    ],
)
def test_a_stream_is_held_against_the_log(seen: list[SeenPiece], wrong: TokenErrors) -> None:
    assert against_log(seen, LOG) == wrong
    assert bool(wrong) == (wrong != TokenErrors())


def test_a_log_that_is_short_or_has_a_hole_has_lost_tokens() -> None:
    assert against_log([A, BC, D, LAST], LOG, num_expected=8) == TokenErrors(num_lost=2)
    assert against_log([A], [LOG[0], *LOG[2:]]).num_lost >= 2


def test_of_another_server_only_the_counts_are_known() -> None:
    assert against_counts(5, 5, 5) == against_counts(3, 5, 5) == TokenErrors()
    assert against_counts(5, 4, None) == TokenErrors(num_repeated=1)
    assert against_counts(4, 4, 5) == TokenErrors(num_lost=1)
    assert against_counts(6, None, 5) == TokenErrors(num_repeated=1)


@contextmanager
def gateway(seen: Sequence[SeenPiece], log: Sequence[Delta] | None) -> Iterator[Target]:
    """A server that streams these events to all who ask, and has that log, or none."""
    ready, loop = threading.Event(), asyncio.new_event_loop()
    port = 0
    chunks = [
        b"id: %b\ndata: %b\n\n" % (event.id.encode(), json.dumps(_chunk(event.text)).encode())
        for event in seen
    ]
    usage = {"prompt_tokens": 1, "completion_tokens": 6}
    ending = json.dumps({"choices": [], "usage": usage}).encode()
    streamed = b"".join([*chunks, b"data: %b\n\ndata: [DONE]\n\n" % ending])
    done = b'data: {"type":"done","position":6,"usage":{}}\n\n'
    lines = [b"data: " + delta.dump().encode() + b"\n\n" for delta in log or ()]
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    answers = {b"POST": head + streamed, b"GET": head + b"".join([*lines, done])}
    if log is None:
        answers[b"GET"] = b"HTTP/1.1 404 No\r\nContent-Length: 2\r\n\r\n{}"

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        writer.write(answers[asked.split()[0]])
        writer.close()

    async def serve() -> None:
        nonlocal port
        server = await asyncio.start_server(reply, "127.0.0.1")
        port = server.sockets[0].getsockname()[1]
        ready.set()

    loop.create_task(serve())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    ready.wait()
    try:
        yield Target(f"http://127.0.0.1:{port}")
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _chunk(text: str) -> dict[str, object]:
    return {"id": f"cmpl-{JOB}", "choices": [{"index": 0, "text": text}]}


@pytest.mark.parametrize(
    "seen, log, wrong",
    [
        ([A, BC, D, LAST], LOG, TokenErrors()),
        ([A, BC, BC, D, LAST], LOG, TokenErrors(num_repeated=2)),
        ([A, BC, LAST], LOG, TokenErrors(num_lost=2)),
        ([A, BC, D, LAST], None, TokenErrors(num_unproved=1)),
    ],
)
def test_a_server_that_repeats_or_drops_an_event_is_found(
    seen: list[SeenPiece], log: list[Delta] | None, wrong: TokenErrors
) -> None:
    with gateway(seen, log) as server:
        found = asyncio.run(drive(server, "x", [Request("Hello", 6)] * 2, Way()))
    assert found.errors == []
    assert [one.token_errors for one in found.timelines] == [wrong, wrong]
    assert found.token_errors == wrong + wrong
    if wrong:
        with pytest.raises(CannotMeasure, match="wrong tokens"):
            proved(found)
    else:
        assert proved(found) is found
    assert found.timelines[0].job_id == JOB


def test_a_run_with_a_repeated_token_ends_with_status_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--model", "x", "--num-prompts", "1", "--output-len", "6"]
    for seen, status in (([A, BC, D, LAST], 0), ([A, BC, D, D, LAST], 1)):
        with gateway(seen, LOG) as server:
            assert bench.main(["serve", "--base-url", server.base_url, *words]) == status
    said = capsys.readouterr()
    assert "0 lost, 1 repeated, 0 foreign" in said.out
    assert f"{JOB}: wrong tokens: 0 lost, 1 repeated, 0 foreign" in said.err


@pytest.mark.parametrize("backend", ["openai-chat", "penstock-sdk"])
def test_each_backend_proves_every_token_of_its_run(tmp_path: Path, backend: str) -> None:
    words = ["--backend", backend, "--request-rate", "100", "--goodput", "e2el:60000 tpot:60000"]
    words += ["--save-result", "--save-detailed", "--result-dir", str(tmp_path)]
    assert bench.main([*FAKE, *SMALL, *words, "--result-filename", "found.json"]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (10, 0, 120)
    assert found["lost_tokens"] == found["unproved_streams"] == 0
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])
    assert len({*found["job_ids"]}) == len({*found["trace_ids"]}) == 10
    assert all(each.startswith("job_") for each in found["job_ids"])
    assert found["queue_depth"][0][0] >= -1
