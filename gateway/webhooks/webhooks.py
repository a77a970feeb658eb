"""Webhooks in the Standard Webhooks form: their receivers, and how each one is sent and retried."""

import asyncio
import base64
import hashlib
import hmac
import logging
import random
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from pydantic import JsonValue
from pydantic_core import to_json

from penstock.gateway.tasks.due import Due
from penstock.gateway.webhooks.outbound import NoAnswer, Outbound
from penstock.schemas.errors import InvalidJob
from penstock.schemas.keys import CHORES, short_digest
from penstock.schemas.process.fair_places import FairPlaces
from penstock.schemas.redis.connection import Connection, texts_of
from penstock.schemas.redis.servers import Redis
from penstock.schemas.wire.wire import Report, read_or_none

LIST_LENGTH = 1000  # how many webhooks a tenant's list holds
LIST_KEPT_S = 30 * 86_400  # how long the list is kept after its last webhook
AT_ONCE = 8  # requests of one tenant to one host
HOST_AT_ONCE = 32  # requests of all tenants to one host
TENANT_AT_ONCE, ALL_AT_ONCE = 64, 512  # requests of one tenant to all hosts, and of all tenants
UNIT_LEASE_MS = 5000  # renewed while its webhooks are sent
NEWS_S = 0.5  # how soon a new webhook joins those that are being sent
WINDOW_S = 10.0  # how long one chore serves one tenant at one host
STATES = ("delivered", "failed", "pending")
MOST_DELAY_S = 3600.0
MOST_RETRY_AFTER_S = 86_400.0
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RetrySchedule:
    """A webhook's number of attempts, and the waits between them.

    Each wait is three times as long as the one before, give or take a fifth.
    """

    first_s: float = 5.0
    max_attempts: int = 10
    kept_s: int = 7 * 86_400  # how long an ended webhook is remembered

    def delay_ms(self, attempts: int, retry_after_s: float) -> int:
        own = min(self.first_s * 3 ** (attempts - 1), MOST_DELAY_S) * random.uniform(0.8, 1.2)
        return int(1000 * max(own, min(retry_after_s, MOST_RETRY_AFTER_S)))


class Endpoint(Report):
    """A receiver of all events of a tenant, which an operator has registered."""

    id: str
    url: str


class Webhook(Report):
    """One event for one receiver, and how far its delivery is."""

    id: str
    url: str
    state: str
    attempts: int
    answer: str = ""
    created_ms: int


@dataclass(frozen=True, slots=True)
class Occurrence:
    """The event that a webhook tells of: `subject`, a job or batch, has reached a state."""

    tenant: str
    type: str  # "job.succeeded", "batch.completed"
    subject: str
    at_ms: int
    details: Mapping[str, JsonValue]

    def body(self) -> bytes:
        identity = short_digest(f"{self.subject} {self.type}")
        return to_json(
            {
                "id": f"evt_{identity}",
                "object": "event",
                "created_at": self.at_ms // 1000,
                "type": self.type,
                "data": {"id": self.subject, **self.details},
            }
        )


class Webhooks:
    """Endpoints and webhooks in Redis. `Postman.deliver` sends them."""

    def __init__(self, redis: Redis) -> None:
        self._connection = Connection(redis)
        self.due = Due(redis, "webhooks")

    # Receivers.

    async def secret(self, tenant: str) -> str:
        """Return the secret that signs the tenant's webhooks. It is made at first use."""
        key = f"{CHORES}secrets"
        candidate = "whsec_" + base64.b64encode(secrets.token_bytes(24)).decode()
        await self._connection.call("HSETNX", key, tenant, candidate)
        text = await self._connection.call("HGET", key, tenant)
        assert isinstance(text, bytes)
        return text.decode()

    async def forget_secret(self, tenant: str) -> None:
        """Delete the tenant's secret. The next use makes another."""
        await self._connection.call("HDEL", f"{CHORES}secrets", tenant)

    async def add(self, tenant: str, url: str) -> Endpoint:
        endpoint = Endpoint(id=f"we_{short_digest(tenant + ' ' + url)}", url=url)
        await self._connection.call("HSET", _endpoints(tenant), endpoint.id, endpoint.dump())
        return endpoint

    async def remove(self, tenant: str, endpoint_id: str) -> bool:
        return await self._connection.call("HDEL", _endpoints(tenant), endpoint_id) == 1

    async def endpoints(self, tenant: str) -> list[Endpoint]:
        texts = texts_of(await self._connection.call("HVALS", _endpoints(tenant)))
        return [endpoint for text in texts if (endpoint := read_or_none(Endpoint, text))]

    async def has_endpoints(self, tenant: str) -> bool:
        return await self._connection.call("EXISTS", _endpoints(tenant)) == 1

    # Webhooks.

    async def tell(self, occurrence: Occurrence, url: str) -> None:
        """Make webhooks for the tenant's endpoints, and for `url` unless it is empty.

        It may be repeated.
        """
        endpoints = await self.endpoints(occurrence.tenant)
        for receiver in dict.fromkeys(
            [*([url] if url else []), *(endpoint.url for endpoint in endpoints)]
        ):
            identity = short_digest(f"{occurrence.subject} {occurrence.type} {receiver}")
            unit, webhook_id = f"{host_of(receiver)} {occurrence.tenant}", f"wh_{identity}"
            reply = await self._run(
                "webhooks/notify",
                webhook_id,
                occurrence.tenant,
                receiver,
                unit,
                occurrence.body(),
                LIST_LENGTH,
                LIST_KEPT_S,
            )
            if reply == [b"pending"]:
                await self.due.poke(unit, webhook_id)

    async def redeliver(self, tenant: str, webhook_id: str) -> bool:
        """Send a webhook again under its id. Returns False if it is not known, or was forgotten."""
        reply = await self._run("webhooks/redeliver", tenant, webhook_id)
        if reply[0] == b"missing":
            return False
        await self.due.poke(reply[1].decode(), webhook_id)
        return True

    async def webhooks(self, tenant: str) -> list[Webhook]:
        """Return the tenant's webhooks that are still remembered, the newest first."""
        ids = await self._connection.call("ZREVRANGE", f"{CHORES}webhooks:{tenant}", 0, -1)
        webhooks = []
        for webhook_id in [text.decode() for text in texts_of(ids)]:
            pairs = texts_of(
                await self._connection.call("HGETALL", f"{CHORES}webhook:{webhook_id}")
            )
            texts = [text.decode() for text in pairs]
            if texts:
                fields = dict(zip(texts[::2], texts[1::2], strict=True))
                webhooks.append(Webhook.model_validate({"id": webhook_id, **fields}))
        return webhooks

    async def num_attempts(self) -> dict[str, int]:
        """Return how many attempts to send webhooks there were, by the state that each led to."""
        names = [f"webhooks_{state}" for state in STATES]
        values = await self._connection.call("HMGET", f"{CHORES}counts", *names)
        assert isinstance(values, list)
        counts = [int(value) if isinstance(value, bytes) else 0 for value in values]
        return dict(zip(STATES, counts, strict=True))

    async def _run(self, script: str, *args: str | bytes | int) -> list[bytes]:
        return await self._connection.run(script, CHORES, *args)


class Postman(Webhooks):
    """Sends the webhooks that are due, each tenant's to each host on their own.

    A dead host delays no other. Tenants that call one host, or many, get places in turn, and none
    holds them all.
    """

    def __init__(
        self, redis: Redis, outbound: Outbound, retries: RetrySchedule, timeout_s: float
    ) -> None:
        super().__init__(redis)
        self._outbound = outbound
        self._retries = retries
        self._attempt_lease_ms = int(1000 * (timeout_s + 5))
        self._places = FairPlaces(ALL_AT_ONCE, TENANT_AT_ONCE)
        self._hosts = WeakValueDictionary[str, FairPlaces]()

    def use(self, outbound: Outbound, retries: RetrySchedule) -> None:
        """Send by these from now on; what is being sent goes on as it began."""
        self._outbound, self._retries = outbound, retries

    async def deliver(self, unit: str, turn: int) -> None:
        """Send one tenant's due webhooks to one host, for about `WINDOW_S` seconds, as a chore."""
        async with (
            self.due.holding(unit, turn, UNIT_LEASE_MS) as lease,
            asyncio.TaskGroup() as requests,
        ):
            until, tasks = time.monotonic() + WINDOW_S, dict[str, asyncio.Task[None]]()
            while lease and (left_s := until - time.monotonic()) > 0:
                for webhook_id in await self.due.items(unit, AT_ONCE - len(tasks)):
                    if webhook_id not in tasks:  # else it waits for a place
                        attempt = self._attempt_in_turn(unit, webhook_id, left_s)
                        tasks[webhook_id] = requests.create_task(attempt)
                if not tasks:
                    return
                await asyncio.wait(
                    tasks.values(), timeout=NEWS_S, return_when=asyncio.FIRST_COMPLETED
                )
                tasks = {key: task for key, task in tasks.items() if not task.done()}

    async def _attempt_in_turn(self, unit: str, webhook_id: str, wait_s: float) -> None:
        """Send a webhook, if it gets its places within `wait_s`."""
        host, _, tenant = unit.partition(" ")
        host_places = self._hosts.setdefault(host, FairPlaces(HOST_AT_ONCE, AT_ONCE))
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(wait_s):
                    await stack.enter_async_context(host_places.place(tenant))
                    await stack.enter_async_context(self._places.place(tenant))
            except TimeoutError:
                return
            await self._attempt(unit, webhook_id)

    async def _attempt(self, unit: str, webhook_id: str) -> None:
        reply = await self._run("webhooks/attempt", webhook_id, unit, self._attempt_lease_ms)
        if reply[0] != b"send":
            return
        turn, attempts, now_s, tenant, url, body = reply[1], int(reply[2]), *reply[3:]
        secret = await self.secret(tenant.decode())
        headers = signed(webhook_id, now_s.decode(), body, [secret])
        state, answer, retry_after_s = await self._post(url.decode(), headers, body)
        if state == "pending" and attempts >= self._retries.max_attempts:
            state = "failed"
        log.info("webhook %s, attempt %d: %s (%s)", webhook_id, attempts, state, answer)
        delay_ms = self._retries.delay_ms(attempts, retry_after_s)
        await self._run(
            "webhooks/outcome",
            webhook_id,
            unit,
            turn,
            state,
            answer,
            delay_ms,
            self._retries.kept_s,
        )

    async def _post(self, url: str, headers: dict[str, str], body: bytes) -> tuple[str, str, float]:
        """Send one webhook.

        Returns its next state, what was answered, and the least seconds until the next try.
        """
        try:
            answer = await self._outbound.post(url, headers, body)
        except InvalidJob as error:
            return "failed", error.message, 0
        except NoAnswer as error:
            return "pending", error.message, 0
        if 200 <= answer.status < 300:
            return "delivered", str(answer.status), 0
        # 410 Gone: the receiver wants no more. After any other, as 503, it is tried again.
        state = "failed" if answer.status == 410 else "pending"
        return state, str(answer.status), answer.retry_after_s


def signed(webhook_id: str, timestamp: str, body: bytes, keys: Sequence[str]) -> dict[str, str]:
    """Return the headers of Standard Webhooks. Attempts share the id, but not the time."""
    content = f"{webhook_id}.{timestamp}.".encode() + body
    marks = [
        hmac.new(base64.b64decode(key.removeprefix("whsec_")), content, hashlib.sha256).digest()
        for key in keys
    ]
    return {
        "content-type": "application/json",
        "webhook-id": webhook_id,
        "webhook-timestamp": timestamp,
        "webhook-signature": " ".join(f"v1,{base64.b64encode(mark).decode()}" for mark in marks),
    }


def host_of(url: str) -> str:
    """Return the host and port of a URL, for which requests at once are limited.

    It holds no space. A text that is no URL gives "none".
    """
    try:
        parts = urlsplit(url)
        return f"{parts.hostname}:{parts.port or 443}".replace(" ", "")
    except ValueError:
        return "none"


def _endpoints(tenant: str) -> str:
    return f"{CHORES}endpoints:{tenant}"
