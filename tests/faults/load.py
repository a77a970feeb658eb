"""Callers: they submit, read, lose their connection, come back elsewhere, cancel, and compare."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import quote

import httpx

from faults.reference import answer
from gateway.client import Client
from schemas.account import Account
from schemas.errors import PenstockError
from schemas.event import EVENT, Delta, Done, Failed
from schemas.sampling import SamplingParams

PATIENCE_S = 150.0  # with Redis frozen for half a minute, twice
SILENCE_S = 6.0  # gateways of tests say `: ping` each second
RETRY_S = 0.1
_GIVE_AGAIN = (429, 502, 503, 504)


class Broken(AssertionError):
    """A promise was."""


class Tenant(Protocol):
    """For whom a caller asks."""

    @property
    def name(self) -> str: ...

    @property
    def key(self) -> str: ...

    @property
    def account(self) -> Account: ...


@dataclass(frozen=True, slots=True)
class Ask:
    """One job, and what its caller does."""

    prompt: str
    seed: int
    max_tokens: int
    n: int = 1
    stop: tuple[str, ...] = ()
    ignore_eos: bool = True
    background: bool = True
    by_sdk: bool = False
    repeats: int = 0  # further submissions of the same
    is_late: bool = False  # reads only after the end
    cancel_at: int | None = None  # tokens
    timeout_ms: int | None = None
    hop_every: int | None = None  # tokens after which the reader goes elsewhere
    tenant: int = 0  # which of them, where there are some

    @property
    def key(self) -> str:
        return quote(f"{self.prompt}/{self.seed}")

    def params(self) -> dict[str, object]:
        return {
            "seed": self.seed,
            "max_tokens": self.max_tokens,
            "n": self.n,
            "stop": list(self.stop),
            "ignore_eos": self.ignore_eos,
        }

    def body(self, model: str) -> dict[str, object]:
        asked = {"model": model, "prompt": self.prompt, "params": self.params()}
        asked["background"] = self.background
        return asked | ({"timeout_ms": self.timeout_ms} if self.timeout_ms else {})


@dataclass(slots=True, eq=False)
class Told:
    """What a caller was told of one job so far."""

    ask: Ask
    job_id: str = ""
    cursor: int = 0
    deltas: list[Delta] = field(default_factory=list)
    end: Done | Failed | None = None
    heard_s: float = 0.0
    longest_pause_s: float = 0.0
    num_attaches: int = 0

    def take(self, event: Delta | Done | Failed) -> None:
        if self.end is not None:
            raise Broken(f"{self.job_id}: {event} after the end")
        if event.position != self.cursor:
            raise Broken(f"{self.job_id}: an event at {event.position}, read up to {self.cursor}")
        now = time.monotonic()
        if self.heard_s:
            self.longest_pause_s = max(self.longest_pause_s, now - self.heard_s)
        self.heard_s = now
        if isinstance(event, Delta):
            self.deltas.append(event)
            self.cursor = event.end
        else:
            self.end = event

    def check(self) -> None:
        """The end is one that the caller may get, and every token and letter is the right one."""
        ask, end = self.ask, self.end
        allowed = {"succeeded"}
        if ask.cancel_at is not None or not ask.background:
            allowed.add("cancelled")  # a foreground job also when nobody listened for its grace
        if ask.timeout_ms is not None:
            allowed.add("expired")
        if end is None or end.state not in allowed:
            raise Broken(f"{self.job_id}: ended as {end}, asked was {ask}")
        for choice in range(ask.n):
            self._check_choice(choice, is_whole=end.state == "succeeded")

    def _check_choice(self, choice: int, is_whole: bool) -> None:
        ask = self.ask
        expected = answer(
            ask.prompt,
            ask.seed,
            choice,
            max_tokens=ask.max_tokens,
            stop=ask.stop,
            ignore_eos=ask.ignore_eos,
        )
        deltas = [delta for delta in self.deltas if delta.index == choice]
        ids = [token for delta in deltas for token in delta.token_ids]
        text = "".join(delta.text for delta in deltas)
        if is_whole:
            reason = deltas[-1].finish_reason if deltas else None
            same = (ids, text, reason) == (
                expected.token_ids,
                expected.text,
                expected.finish_reason,
            )
        else:
            same = expected.token_ids[: len(ids)] == ids and expected.text.startswith(text)
        if not same:
            raise Broken(f"{self.job_id}, choice {choice}: {text!r} is not {expected.text!r}")


class Callers:
    """Puts asks in and follows each to its end. `gateways` gives the URLs of those that live.

    Without tenants nobody has a key.
    """

    def __init__(
        self,
        model: str,
        gateways: Callable[[], list[str]],
        sdk: Client,
        chance: random.Random,
        tenants: Sequence[Tenant] = (),
    ) -> None:
        self._model = model
        self._gateways = gateways
        self._sdk = sdk
        self._chance = chance
        self._tenants = tenants
        timeout = httpx.Timeout(SILENCE_S, pool=None)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(timeout=timeout, limits=limits)
        self.told: list[Told] = []

    async def aclose(self) -> None:
        await self._http.aclose()

    async def run(self, asks: list[Ask], pace_s: float = 0.0) -> list[Told]:
        """All asks, each begun `pace_s` after the one before. Raises Broken."""
        self.told = [Told(ask) for ask in asks]
        async with asyncio.TaskGroup() as callers:
            for told in self.told:
                callers.create_task(self.call(told))
                await asyncio.sleep(pace_s)
        return self.told

    async def call(self, told: Told) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self.submit(told)
                for _ in range(told.ask.repeats):
                    await self.submit(told)
                if told.ask.is_late:
                    await self._wait_for_end(told)
                while told.end is None:
                    await self.read_once(told)
        except TimeoutError:
            raise Broken(f"{told.job_id}: no end within {PATIENCE_S} s: {told.ask}") from None
        told.check()

    async def submit(self, told: Told) -> None:
        """Until it is accepted; a repeat must be the same job."""
        while True:
            job_id = await (self._submit_sdk if told.ask.by_sdk else self._submit_http)(told.ask)
            if job_id is None:
                await asyncio.sleep(RETRY_S)
                continue
            if told.job_id not in ("", job_id):
                raise Broken(f"{job_id} and {told.job_id} are one submission")
            told.job_id = job_id
            return

    async def read_once(self, told: Told) -> None:
        """One connection's worth of events; returns at its loss, at a hop, or at the end."""
        told.num_attaches += 1
        try:
            await (self._read_sdk if told.ask.by_sdk else self._read_http)(told)
        except httpx.HTTPError:
            await asyncio.sleep(RETRY_S)
        except PenstockError as error:
            if error.status not in _GIVE_AGAIN:
                raise Broken(f"{told.job_id}: {error!r}") from error
            await asyncio.sleep(RETRY_S)

    async def ask_as(self, tenant: Tenant, path: str) -> httpx.Response:
        return await self._http.get(self._some_gateway() + path, headers=_headers(tenant))

    def tenant_of(self, ask: Ask) -> Tenant | None:
        return self._tenants[ask.tenant] if self._tenants else None

    async def _wait_for_end(self, told: Told) -> None:
        while True:
            answer = await self._get(f"/v1/jobs/{told.job_id}", self.tenant_of(told.ask))
            if answer is not None and answer["ended_ms"] is not None:
                return
            await asyncio.sleep(RETRY_S)

    async def _get(self, path: str, tenant: Tenant | None) -> dict[str, object] | None:
        try:
            reply = await self._http.get(self._some_gateway() + path, headers=_headers(tenant))
        except (httpx.HTTPError, LookupError):
            return None
        if reply.status_code in _GIVE_AGAIN:
            return None
        if reply.status_code != 200:
            raise Broken(f"{path}: {reply.status_code} {reply.text}")
        shown: dict[str, object] = reply.json()
        return shown

    def _some_gateway(self) -> str:
        return self._chance.choice(self._gateways())

    async def _submit_http(self, ask: Ask) -> str | None:
        try:
            reply = await self._http.post(
                f"{self._some_gateway()}/v1/jobs",
                json=ask.body(self._model),
                headers={"Idempotency-Key": ask.key} | _headers(self.tenant_of(ask)),
            )
        except (httpx.HTTPError, LookupError):
            return None
        if reply.status_code in _GIVE_AGAIN or self._is_early(reply):
            return None
        if reply.status_code != 202:
            raise Broken(f"submission: {reply.status_code} {reply.text}")
        job_id: str = reply.json()["id"]
        return job_id

    @staticmethod
    def _is_early(reply: httpx.Response) -> bool:
        """No worker has registered the model yet."""
        return reply.status_code == 404 and "model" in reply.text

    async def _submit_sdk(self, ask: Ask) -> str | None:
        tenant = self.tenant_of(ask)
        try:
            return await self._sdk.enqueue(
                ask.prompt,
                model=self._model,
                params=SamplingParams.model_validate(ask.params()),
                idempotency_key=ask.key,
                background=ask.background,
                timeout_ms=ask.timeout_ms,
                tenant=tenant.name if tenant else None,
                account=tenant.account if tenant else None,
            )
        except PenstockError as error:
            if error.status in _GIVE_AGAIN or error.code == "model_not_found":
                return None
            raise Broken(f"submission: {error!r}") from error

    async def _read_sdk(self, told: Told) -> None:
        begun, tenant = told.cursor, self.tenant_of(told.ask)
        events = self._sdk.stream(told.job_id, told.cursor, tenant.name if tenant else None)
        try:
            async for event in events:
                told.take(event)
                if await self._acts(told, begun):
                    return
        finally:
            await events.aclose()

    async def _read_http(self, told: Told) -> None:
        path = f"/v1/jobs/{told.job_id}/events"
        gateways = self._gateways()
        if not gateways:
            await asyncio.sleep(RETRY_S)
            return
        url = self._chance.choice(gateways) + path
        asked = {"starting_after": told.cursor}
        headers = _headers(self.tenant_of(told.ask))
        async with self._http.stream("GET", url, params=asked, headers=headers) as reply:
            if reply.status_code == 200:
                await self._take_lines(told, reply)
            elif reply.status_code not in _GIVE_AGAIN:
                raise Broken(f"{path}: {reply.status_code} {await reply.aread()!r}")
            else:
                await asyncio.sleep(RETRY_S)

    async def _take_lines(self, told: Told, reply: httpx.Response) -> None:
        begun = told.cursor
        async for line in reply.aiter_lines():
            if not line.startswith("data: "):
                continue
            event = EVENT.validate_json(line[6:])
            if isinstance(event, Failed) and _is_of_the_gateway(event):
                return
            told.take(event)
            if await self._acts(told, begun):
                return

    async def _acts(self, told: Told, begun: int) -> bool:
        """Cancels when it is time to; whether to go elsewhere now."""
        ask = told.ask
        if ask.cancel_at is not None and told.cursor >= ask.cancel_at and told.end is None:
            await self._cancel(told)
        return bool(ask.hop_every) and told.cursor - begun >= (ask.hop_every or 0)

    async def _cancel(self, told: Told) -> None:
        """Once; a caller that gets no answer reads on and tries again at the next event."""
        try:
            url = f"{self._some_gateway()}/v1/jobs/{told.job_id}/cancel"
            await self._http.post(url, headers=_headers(self.tenant_of(told.ask)))
        except (httpx.HTTPError, LookupError):
            return


def _headers(tenant: Tenant | None) -> dict[str, str]:
    return {"authorization": f"Bearer {tenant.key}"} if tenant else {}


def _is_of_the_gateway(event: Failed) -> bool:
    """Its own trouble, told in the stream, while the job goes on."""
    return event.state == "failed" and event.error.status in _GIVE_AGAIN
