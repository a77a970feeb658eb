"""The sandbox process: for each question it forks a child that is killed at the limits.

A question is whether a grammar can be made of a text, or whether a completion is what a schema
says.

The process is the template of its children, so it stays small (no torch, no transformers) and
starts no thread. A child gets one question over a socket that comes with the request, and answers
over the same socket.
"""

import json
import os
import random
import resource
import signal
import socket
import struct
import sys
import time
from functools import partial
from pathlib import Path
from typing import TypedDict

from llguidance import LLMatcher, LLTokenizer

from penstock.worker.engine.grammar.checked import schema_error
from penstock.worker.engine.grammar.structural_tag import special_ids
from penstock.worker.engine.grammar.structured import (
    LIMITS,
    FormKind,
    Marks,
    grammar_of,
    place_in,
    reason_of,
)

MASK_S = 0.05  # CPU time for one mask, which a step of the model waits for
NUM_STEPS = 24  # tokens of a random completion, whose masks are timed

_LENGTH = struct.Struct("!I")


class Start(TypedDict):
    """The first message: the tokenizer as JSON, and the limits of each attempt."""

    backend: str
    vocab_size: int
    eos_token_ids: list[int]
    cpu_s: int
    wall_s: float
    memory_bytes: int


class Question(TypedDict):
    """A form to compile, or a schema and a completion to be checked against it."""

    kind: FormKind
    text: str
    completion: str | None


class SandboxAnswer(TypedDict):
    """The grammar that compiled, or the reason why none did; the other one is empty.

    For a completion the reason is why it is not what the schema says.
    """

    grammar: str
    reason: str


class Verdict(TypedDict):
    """How the child ended: its exit status and the memory it took.

    The status of a child that a signal ended is minus the signal's number.
    """

    status: int
    num_bytes: int


def send(wire: socket.socket, value: object) -> None:
    raw = json.dumps(value).encode()
    wire.sendall(_LENGTH.pack(len(raw)) + raw)


def receive(wire: socket.socket) -> bytes:
    """Receive one value as JSON.

    Raises EOFError when there is none, and TimeoutError as the socket does.
    """
    return _exactly(wire, _LENGTH.unpack(_exactly(wire, _LENGTH.size))[0])


def main() -> None:
    """Serve the control socket whose number is the only argument.

    The tokenizer comes first, then a socket for each question.
    """
    control = socket.socket(fileno=int(sys.argv[1]))
    start: Start = json.loads(receive(control))
    tokenizer = LLTokenizer(
        start["backend"], n_vocab=start["vocab_size"], eos_token=start["eos_token_ids"]
    )
    marks = Marks(
        special_ids(start["backend"], tokenizer),
        start["eos_token_ids"],
        partial(_refusal, tokenizer),
    )
    send(control, "ready")
    while True:
        _, files, _, _ = socket.recv_fds(control, 1, 1)
        if not files:
            return
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that the forked watchers need no wait
        if os.fork() == 0:
            control.close()
            _watch(socket.socket(fileno=files[0]), tokenizer, marks, start)
        os.close(files[0])


def _watch(wire: socket.socket, tokenizer: LLTokenizer, marks: Marks, start: Start) -> None:
    """Fork once more to answer the question, and report how that child ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        try:
            _limit(start)
            question: Question = json.loads(receive(wire))
            grammar, reason = _tried(tokenizer, question, marks)
            send(wire, SandboxAnswer(grammar=grammar, reason=reason))
        finally:
            os._exit(0)
    _, status, usage = os.wait4(pid, 0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    growth = max(0, usage.ru_maxrss * 1024 - pages * resource.getpagesize())
    send(wire, Verdict(status=os.waitstatus_to_exitcode(status), num_bytes=growth))
    os._exit(0)


def _limit(start: Start) -> None:
    """Set the limits, each of which ends the process; let it dump and print nothing."""
    quiet = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(quiet, number)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (size + start["memory_bytes"],) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (start["cpu_s"], start["cpu_s"] + 1))
    signal.setitimer(signal.ITIMER_REAL, start["wall_s"])


def _tried(tokenizer: LLTokenizer, question: Question, marks: Marks) -> tuple[str, str]:
    """Return the grammar that compiled and no reason, or no grammar and the reason."""
    kind, text = question["kind"], question["text"]
    if question["completion"] is not None:
        return "", schema_error(text, question["completion"])
    try:
        grammar = grammar_of(kind, text, marks)
    except ValueError as error:
        return "", str(error)
    if reason := _why(tokenizer, grammar):
        return "", place_in(kind, text, reason, partial(_why, tokenizer))
    reason = _cost(tokenizer, grammar)
    return ("", reason) if reason else (grammar, "")


def _refusal(tokenizer: LLTokenizer, grammar: str) -> str:
    """Return why a grammar cannot be used; "" where it can."""
    return _why(tokenizer, grammar) or _cost(tokenizer, grammar)


def _cost(tokenizer: LLTokenizer, grammar: str) -> str:
    """Return that the masks of a random completion take too long; "" where they do not."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    draw = random.Random(0)
    for _ in range(NUM_STEPS):
        began_s = time.thread_time()
        mask = matcher.compute_bitmask()
        if time.thread_time() - began_s > MASK_S:
            return f"its masks take more than {MASK_S * 1000:g} ms of a step"
        if not _advance(matcher, mask, draw):
            break
    return ""


def _why(tokenizer: LLTokenizer, grammar: str) -> str:
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    matcher.compute_bitmask()  # finds forms that nothing matches
    return reason_of(matcher) if matcher.is_error() else ""


def _advance(matcher: LLMatcher, mask: bytes, draw: random.Random) -> bool:
    """Take a random token that the mask allows; return False at the end."""
    places = [place for place, byte in enumerate(mask) if byte]
    if not places or matcher.is_stopped():
        return False
    place = draw.choice(places)
    bits = [bit for bit in range(8) if mask[place] >> bit & 1]
    return bool(matcher.consume_token(8 * place + draw.choice(bits)))


def _exactly(wire: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = wire.recv(count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


if __name__ == "__main__":
    main()
