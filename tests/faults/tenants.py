"""The tenants of a run: each has a key and a share, finds no other's jobs, and pays for its own."""

import asyncio
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass

import httpx
import redis

from faults.invariants import check_ledger, ledger
from faults.load import Callers
from faults.told import Told
from penstock.gateway.auth.api_key import ApiKey
from penstock.gateway.auth.keyring import KeyStore
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.account import Account
from penstock.schemas.errors import JobNotFound
from penstock.schemas.keys import Lane
from penstock.schemas.redis.connection import connect

SECRET = "of-this-run-alone-" * 2  # the gateways' server secret
# Shares, and one that is held by its own limit most of the time.
TENANTS: dict[str, dict[str, float]] = {
    "acme": {"weight": 2},
    "globex": {"weight": 1},
    "initech": {"weight": 0.5, "max_running": 4},
}
Used = dict[str, Counter[str]]


@dataclass(frozen=True, slots=True)
class Tenant:
    name: str
    key: str
    account: Account


def enroll(url: str) -> list[Tenant]:
    """Make each its key. From then on the gateways let in nobody without one."""

    async def main() -> list[Tenant]:
        made = []
        async with connect(url) as link:
            for name, limits in TENANTS.items():
                record: dict[str, object] = {"tenant": name, "limits": limits}
                text, key = ApiKey.issue(SECRET.encode(), record)
                await KeyStore(link).add(key)
                made.append(Tenant(name, text, key.account))
        return made

    return asyncio.run(main())


async def check_apart(callers: Callers, sdk: QueueClient, tenants: Sequence[Tenant]) -> None:
    """Nobody finds another's job: not by the SDK, and not with its key at a gateway."""
    for number, told in enumerate(callers.told):
        other = tenants[(told.ask.tenant + 1) % len(tenants)]
        try:
            await sdk.status(told.job_id, other.name)
        except JobNotFound:
            pass
        else:
            raise AssertionError(f"{other.name} sees {told.job_id}")
        if number % 10 == 0:
            await _check_gateway(callers, told, other)


async def _check_gateway(callers: Callers, told: Told, other: Tenant) -> None:
    for path in ("", "/result", "/events"):
        try:
            reply = await callers.ask_as(other, f"/v1/jobs/{told.job_id}{path}")
        except httpx.HTTPError:
            continue  # a gateway that is just being started again
        shown = reply.status_code in (404, 503) and told.ask.prompt not in reply.text
        assert shown, f"{other.name}: {path} of {told.job_id}: {reply.status_code}"


def used(store: redis.Redis, lane: Lane, tenants: Sequence[Tenant]) -> Used:
    """What each was charged with so far, over all months."""
    return {tenant.name: ledger(store, lane, tenant.account.name) for tenant in tenants}


def check_accounts(
    store: redis.Redis,
    lane: Lane,
    tenants: Sequence[Tenant],
    told: Sequence[Told],
    known: Set[str],
    before: Used | None,
) -> None:
    """Each paid for its own known jobs, which ended, and for their tokens and prompts, once.

    Without `before`, since a count was lost, what they paid is not looked at.
    """
    for number, tenant in enumerate(tenants):
        mine = [each.job_id for each in told if each.ask.tenant == number]
        mine = [job_id for job_id in mine if job_id in known]
        for job_id in mine:
            owner, account = store.hmget(lane.job(job_id), "tenant", "account")
            assert (owner, account) == (tenant.name.encode(), tenant.account.name.encode())
        if before is not None:
            check_ledger(store, lane, mine, before[tenant.name], tenant.account.name)
        counts = store.hmget(f"{lane.prefix}account:{tenant.account.name}", "running", "queued")
        assert all(int(count or 0) == 0 for count in counts), f"{tenant.name} counts {counts}"
