"""A server of others, as engines meet it: it speaks /v1/completions, in one of several dialects.

Each token is a digest of all tokens before it, so a completion goes on alike after its first part.
A seed, counts of penalties and a grammar are states of a server's: where one is asked for, a token
also depends on how many the request has made. `fail` in a prompt asks for a fault.
"""

import argparse
import asyncio
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

import httpx
import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from tokenizers import Tokenizer

from penstock.worker.bundled.paths import BUNDLED_MODEL

EOS, FIRST, VOCAB = 3, 300, 4000  # whole words of the bundled model's vocabulary
# What an answer says instead of its next token, before its connection ends.
IN_STREAM = {
    "cut": "",
    "crash": "",
    "hang": "",
    "freeze": "",
    "nonsense": "{nonsense",
    "foreign": '{"choices":[{"token_ids":[99999],"text":"?"}]}',
    "negative": '{"choices":[{"token_ids":[-1],"text":"?"}]}',
    "silent": '{"choices":[{"text":"words without ids"}]}',
    "unended": "[DONE]",
    "abort": '{"choices":[{"text":"","finish_reason":"abort"}]}',
    "refusal": '{"error":{"message":"the prompt is bad","code":400}}',
    "told": '{"error":{"message":"the engine is dead"}}',
}
_FAULT = re.compile(r"fail ([a-z]+) (\d+)")


class OtherServer:
    """A process that serves the bundled model's vocabulary, on a port that stays its own."""

    def __init__(self, *flags: str, step_ms: float = 2) -> None:
        self._held = _bound(0)  # it never listens: the port stays ours while nobody does
        self.port = self._held.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._flags = [*flags, "--step-ms", str(step_ms)]
        self.start()

    def start(self) -> None:
        """Start it, again perhaps, on the port that it had."""
        with _bound(self.port) as listener:
            fd = listener.fileno()
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--fd", str(fd), *self._flags],
                pass_fds=[fd],
                env=os.environ | {"PYTHONPATH": "."},
            )

    def ready(self) -> Self:
        while True:
            try:
                httpx.get(f"{self.url}/health", timeout=30)
                return self
            except httpx.HTTPError:
                assert self.process.poll() is None

    def kill(self) -> None:
        """End it at once; from now on connections are refused."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def running(self) -> int:
        return self._counts()[0]

    def most_running(self) -> int:
        """Return how many requests have run at once, at most."""
        return self._counts()[1]

    def _counts(self) -> list[int]:
        return [*map(int, httpx.get(f"{self.url}/running", timeout=30).text.split())]

    def __enter__(self) -> Self:
        return self.ready()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        self._held.close()


def _bound(port: int) -> socket.socket:
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.bind(("127.0.0.1", port))
    return bound


def draw(token_ids: list[int], state: str = "") -> int:
    told = ",".join(map(str, token_ids)) + state
    number = int.from_bytes(hashlib.blake2b(told.encode(), digest_size=8).digest(), "big")
    return EOS if number % 200 == 0 else FIRST + number % (VOCAB - FIRST)


def undisturbed(
    prompt: list[int], max_tokens: int, state: str | None = None, min_tokens: int = 0
) -> list[int]:
    """The completion of a prompt, up to the end token. `state` is that of a seed or a grammar."""
    made: list[int] = []
    while len(made) < max_tokens and made[-1:] != [EOS]:
        made.append(_next(prompt, made, state, len(made) < min_tokens))
    return made


def _next(prompt: list[int], made: list[int], state: str | None, goes_on: bool) -> int:
    token_id = draw(prompt + made, "" if state is None else f"/{state}:{len(made)}")
    return FIRST if goes_on and token_id == EOS else token_id


def state_of(body: dict[str, object]) -> str | None:
    given = [
        str(body[name])
        for name in ("seed", "presence_penalty", "frequency_penalty", "structured_outputs")
        if body.get(name) and (name != "seed" or body.get("temperature", 1))
    ]
    return "/".join(given) or None


def application(given: argparse.Namespace) -> FastAPI:
    # No middleware: with FastAPI's, a stream whose reader is gone may never be told so.
    def authorize(request: Request) -> None:
        wanted = f"Bearer {given.api_key}"
        if given.api_key and request.headers.get("authorization") != wanted:
            raise HTTPException(401, "who are you?")

    app, kind = FastAPI(dependencies=[Depends(authorize)]), given.kind
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    running: set[int] = set()
    most_running = 0
    met: dict[str, int] = {}

    @app.get("/health")
    def health() -> str:
        return "ok"

    @app.get("/running")
    def count() -> Response:
        return Response(f"{len(running)} {most_running}")

    @app.get("/v1/models")
    def listed() -> dict[str, object]:
        about = {"owned_by": kind, "max_model_len": given.max_model_len}
        cards = [{"id": name, **about} for name in given.models]
        return {"object": "list", "data": cards}

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        body = await request.json()
        prompt = body["prompt"]
        if isinstance(prompt, str):
            prompt = tokenizer.encode(prompt).ids
        elif kind == "texts":
            return JSONResponse({"error": {"message": "prompt: give text"}}, 400)
        found = _FAULT.search(tokenizer.decode(prompt))
        fault, after = (found[1], int(found[2])) if found else ("", 0)
        asked = found[0] if found else ""
        met[asked] = met.get(asked, 0) + 1
        if fault == "refuse":
            return JSONResponse({"error": {"message": "the prompt is bad"}}, 400)
        if fault == "busy" and met[asked] <= after:
            return Response(status_code=503, headers={"retry-after": "0.05"})
        if fault == "error" and met[asked] <= after:
            return JSONResponse({"error": {"message": "oh"}}, 500)
        chunks = stream(body, prompt, fault if fault in IN_STREAM else "", after)
        return StreamingResponse(chunks, media_type="text/event-stream")

    async def stream(
        body: dict[str, object], prompt: list[int], fault: str, after: int
    ) -> AsyncIterator[str]:
        nonlocal most_running
        number = id(body)
        running.add(number)
        most_running = max(most_running, len(running))
        made: list[int] = []
        try:
            while True:
                await asyncio.sleep(given.step_ms / 1000)
                if fault and len(made) == after:
                    for text in await fail(fault):
                        yield text
                    return
                least = int(str(body.get("min_tokens") or 0))
                goes_on = given.never_ends or len(made) < least
                token_id = _next(prompt, made, state_of(body), goes_on)
                made.append(token_id)
                end = None
                if token_id == EOS and not body.get("ignore_eos"):
                    end = "stop"
                elif len(made) == body["max_tokens"]:
                    end = "length"
                if end is not None:
                    running.discard(number)  # before its reader can know, and ask for another
                yield event(token_id, end, body)
                if end is not None:
                    yield "data: [DONE]\n\n"
                    return
        finally:
            running.discard(number)

    def event(token_id: int, end: str | None, body: dict[str, object]) -> str:
        text = "" if token_id == EOS else tokenizer.decode([token_id])
        choice: dict[str, object] = {"index": 0, "text": text, "finish_reason": end}
        if kind == "vllm" and body.get("return_token_ids"):
            choice["token_ids"] = [token_id]
        if kind == "vllm" and body.get("logprobs") is not None:
            name = f"token_id:{token_id}"
            choice["logprobs"] = {
                "tokens": [name],
                "token_logprobs": [-0.5],
                "top_logprobs": [{name: -0.5, "token_id:7": -1.5}],
            }
        if kind == "llamacpp" and body.get("logprobs"):
            drawn = {"id": token_id, "logprob": -0.5}
            choice["logprobs"] = {"content": [drawn | {"top_logprobs": [drawn]}]}
        return f"data: {json.dumps({'choices': [choice]})}\n\n"

    async def fail(fault: str) -> list[str]:
        if fault == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        return [f"data: {IN_STREAM[fault]}\n\n"] if IN_STREAM[fault] else []

    return app


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int)
    parser.add_argument("--kind", default="vllm")
    parser.add_argument("--step-ms", type=float, default=2)
    parser.add_argument("--models", nargs="*", default=["theirs"])
    parser.add_argument("--api-key", default="")
    parser.add_argument("--never-ends", action="store_true")
    parser.add_argument("--max-model-len", type=int, default=1024)
    given = parser.parse_args()
    app = application(given)
    uvicorn.run(
        app, fd=given.fd, log_level="warning", access_log=False, timeout_graceful_shutdown=0
    )


if __name__ == "__main__":
    main()
