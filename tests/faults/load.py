"""Callers: they submit, read, lose their connection, come back elsewhere, cancel, and compare.

They forgive nothing: each line, id and checksum is looked at. Where Redis lost what it had written
(`may_lose`), a job may be unknown and a stream may say that it diverged; never less than that.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Protocol

import httpx

import stage
from faults.told import Ask, Broken, Told
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.account import Account
from penstock.schemas.errors import JobGone, JobNotFound, PenstockError, StreamDiverged
from penstock.schemas.event import EVENT, ErrorBody, Failed
from penstock.schemas.params.sampling import SamplingParams

PATIENCE_S = 1.25 * stage.PATIENCE_S  # with Redis frozen for half a minute, twice
SILENCE_S = 6.0  # gateways of tests say `: ping` each second
RETRY_S = 0.1
_GIVE_AGAIN = (429, 502, 503, 504)


class Tenant(Protocol):
    """For whom a caller asks."""

    @property
    def name(self) -> str: ...

    @property
    def key(self) -> str: ...

    @property
    def account(self) -> Account: ...


class Callers:
    """Puts asks in and follows each to its end. `gateways` gives the URLs of those that live.

    Without tenants nobody has a key. `may_lose` and `may_expire` are those of a `Schedule`.
    """

    def __init__(
        self,
        model: str,
        gateways: Callable[[], list[str]],
        sdk: QueueClient,
        chance: random.Random,
        tenants: Sequence[Tenant] = (),
        may_lose: bool = False,
        may_expire: bool = False,
    ) -> None:
        self._model = model
        self._gateways = gateways
        self._sdk = sdk
        self._chance = chance
        self._tenants = tenants
        self._may_lose = may_lose
        self._may_expire = may_expire
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
                while told.end is None and not told.is_unknown:
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
            await self._hear(told, error.body())

    async def _hear(self, told: Told, error: ErrorBody) -> None:
        """Of trouble that is not the job's own end."""
        is_unknown = error.code == JobNotFound.code and (self._may_lose or self._may_expire)
        if is_unknown or (error.code == JobGone.code and self._may_expire):
            told.is_unknown = True
        elif self._may_lose and error.code == StreamDiverged.code:
            told.begin_again()
        elif error.status not in _GIVE_AGAIN:
            raise Broken(f"{told.job_id}: {error!r}")
        await asyncio.sleep(RETRY_S)

    async def ask_as(self, tenant: Tenant, path: str) -> httpx.Response:
        return await self._http.get(self._some_gateway() + path, headers=_headers(tenant))

    def tenant_of(self, ask: Ask) -> Tenant | None:
        return self._tenants[ask.tenant] if self._tenants else None

    async def _wait_for_end(self, told: Told) -> None:
        while not told.is_unknown:
            answer = await self._look(told)
            if answer is not None and answer["ended_ms"] is not None:
                return
            await asyncio.sleep(RETRY_S)

    async def _look(self, told: Told) -> dict[str, object] | None:
        url, headers = f"/v1/jobs/{told.job_id}", _headers(self.tenant_of(told.ask))
        try:
            reply = await self._http.get(self._some_gateway() + url, headers=headers)
        except (httpx.HTTPError, LookupError):
            return None
        if reply.status_code != 200:
            await self._hear(told, _error_of(reply))
            return None
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
        if reply.status_code in _GIVE_AGAIN:
            return None
        if reply.status_code != 202:
            raise Broken(f"submission: {reply.status_code} {reply.text}")
        job_id: str = reply.json()["id"]
        return job_id

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
            if error.status in _GIVE_AGAIN:
                return None
            raise Broken(f"submission: {error!r}") from error

    async def _read_sdk(self, told: Told) -> None:
        begun, tenant = told.cursor, self.tenant_of(told.ask)
        events = self._sdk.stream(told.job_id, told.last_id, tenant.name if tenant else None)
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
        headers = _headers(self.tenant_of(told.ask)) | told.source.connect()
        async with self._http.stream("GET", url, headers=headers) as reply:
            if reply.status_code == 200:
                await self._take_lines(told, reply)
            else:
                await reply.aread()
                await self._hear(told, _error_of(reply))

    async def _take_lines(self, told: Told, reply: httpx.Response) -> None:
        begun, own = told.cursor, None
        async for line in reply.aiter_lines():
            if (data := told.source.feed(line)) is None:
                continue
            event = EVENT.validate_json(data)
            if own is not None:
                raise Broken(f"{told.job_id}: {event} after the gateway's own error")
            if isinstance(event, Failed) and event.state == "failed":
                own = event  # no job of these ends so
                if (event.position, told.source.last_id) != (told.cursor, told.last_id):
                    raise Broken(f"{told.job_id}: {told.source.last_id}, had was {told.last_id}")
                continue
            told.take(event)
            if told.source.last_id != told.last_id:
                raise Broken(f"{told.job_id}: {told.source.last_id} is the id of {told.last_id}")
            if await self._acts(told, begun):
                return
        if own is not None:
            await self._hear(told, own.error)
        elif told.end is None:
            raise Broken(f"{told.job_id}: the answer ended, at {told.last_id}, and the job did not")

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
            reply = await self._http.post(url, headers=_headers(self.tenant_of(told.ask)))
        except (httpx.HTTPError, LookupError):
            return
        if reply.status_code == 404 and (self._may_lose or self._may_expire):
            return
        if reply.status_code not in (200, *_GIVE_AGAIN):
            raise Broken(f"cancel: {reply.status_code} {reply.text}")


def _headers(tenant: Tenant | None) -> dict[str, str]:
    return {"authorization": f"Bearer {tenant.key}"} if tenant else {}


def _error_of(reply: httpx.Response) -> ErrorBody:
    shown = reply.json()["error"]
    return ErrorBody(code=shown["code"], message=shown["message"], status=reply.status_code)
