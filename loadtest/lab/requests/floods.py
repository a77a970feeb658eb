"""Floods a service as one tenant may, each kind in a process of its own: `bench flood` starts it.

    python -m penstock.loadtest.lab.requests.floods KIND URL RECEIVER

The tenant's key is in PENSTOCK_FLOOD_KEY. A line says when the flood has begun; at the end of
standard input it ends, and a line of JSON says how many calls were answered and how many refused.
"""

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import httpx

from penstock.loadtest.errors import CannotMeasure

KEY = "PENSTOCK_FLOOD_KEY"
BEGAN = "began"
_READERS, _WRITERS, _ASKERS, _NOTIFIERS = 200, 8, 64, 16
_LOG_TOKENS, _LONG_TOKENS, _PART_BYTES = 500, 1000, 400_000
_PAUSE_S = 0.05  # pause of a caller after a refusal, far below what it is told to wait


class Flood:
    """The callers of one tenant, who ask as fast as they are answered."""

    def __init__(self, http: httpx.AsyncClient, model: str, receiver: str) -> None:
        self.http = http
        self.model = model
        self.receiver = receiver
        self.num_answered = self.num_refused = 0
        self.has_begun = asyncio.Event()

    async def readers(self) -> None:
        """Read the log of a job that ended, again and again."""
        body = self._asked(_LOG_TOKENS)
        job_id = (await self.http.post("/v1/jobs", json=body)).json()["id"]
        await self.http.get(f"/v1/jobs/{job_id}/events")  # until it has ended
        await self._callers(_READERS, lambda: self.http.get(f"/v1/jobs/{job_id}/events"))

    async def storage(self) -> None:
        """Store conversations."""
        item = {"type": "message", "role": "user", "content": "x" * _PART_BYTES}
        await self._callers(
            _WRITERS, lambda: self.http.post("/v1/conversations", json={"items": [item]})
        )

    async def long_jobs(self) -> None:
        """Ask for long answers, more at once than run."""
        body = self._asked(_LONG_TOKENS)
        self.has_begun.set()  # an answer takes long
        await self._callers(_ASKERS, lambda: self.http.post("/v1/completions", json=body))

    async def webhooks(self) -> None:
        """Have webhooks sent to a receiver that never answers."""
        place = urlsplit(self.receiver)
        loop = asyncio.get_running_loop()
        assert place.port is not None
        await loop.create_server(asyncio.Protocol, place.hostname, place.port)  # it says nothing
        body = self._asked(1) | {"webhook": self.receiver}
        await self._callers(_NOTIFIERS, lambda: self.http.post("/v1/jobs", json=body))

    def _asked(self, num_tokens: int) -> dict[str, Any]:
        return {"model": self.model, "prompt": "x", "max_tokens": num_tokens, "ignore_eos": True}

    async def _callers(self, count: int, call: Callable[[], Awaitable[httpx.Response]]) -> None:
        """Run so many callers for ever."""
        async with asyncio.TaskGroup() as callers:
            for _ in range(count):
                callers.create_task(self._caller(call))

    async def _caller(self, call: Callable[[], Awaitable[httpx.Response]]) -> None:
        while True:
            try:
                answer = await call()
            except httpx.HTTPError:
                self.num_refused += 1
                await asyncio.sleep(_PAUSE_S)
                continue
            self.has_begun.set()
            self.num_answered += answer.is_success
            self.num_refused += not answer.is_success
            if not answer.is_success:
                await asyncio.sleep(_PAUSE_S)


KINDS: dict[str, Callable[[Flood], Awaitable[None]]] = {
    "readers": Flood.readers,
    "storage": Flood.storage,
    "long jobs": Flood.long_jobs,
    "webhooks": Flood.webhooks,
}


async def _run(kind: str, url: str, receiver: str) -> Flood:
    limits = httpx.Limits(max_connections=None)
    headers = {"authorization": f"Bearer {os.environ[KEY]}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=600) as http:
        models = (await http.get("/v1/models")).json()["data"]
        flood = Flood(http, models[0]["id"], receiver)
        flood_task = asyncio.ensure_future(KINDS[kind](flood))
        begin_task = asyncio.create_task(flood.has_begun.wait())
        await asyncio.wait({flood_task, begin_task}, return_when=asyncio.FIRST_COMPLETED)
        if flood_task.done():
            raise CannotMeasure(f"{kind}: {flood_task.exception()}")
        print(BEGAN, flush=True)
        await asyncio.to_thread(sys.stdin.read)
        flood_task.cancel()
        await asyncio.gather(flood_task, return_exceptions=True)
    return flood


def main() -> int:
    flood = asyncio.run(_run(*sys.argv[1:]))
    print(json.dumps({"answered": flood.num_answered, "refused": flood.num_refused}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
