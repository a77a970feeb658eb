"""Checks, once at the start, that a server can keep the queue's promises."""

import asyncio
import logging
from collections.abc import Iterator

from penstock.schemas.errors import QueueUnreachable
from penstock.schemas.keys import Lane
from penstock.schemas.redis.group_sync import UNKNOWN_COMMAND, Durability, sync_for
from penstock.schemas.redis.link import Link, LinkLost, ServerRefused, pack
from penstock.schemas.redis.servers import Redis
from penstock.schemas.redis.url import Address, Kind

log = logging.getLogger(__name__)
OLDEST = (6, 2)
RETRY_S = 1.0
LOGIN = {"NOAUTH", "WRONGPASS"}
# Lanes of no model, for a key to wait for: so many that some lie on every server of a cluster.
CHECK_LANES = [Lane("check", number) for number in range(1024)]
Facts = dict[str, str]


class UnfitServer(Exception):
    """Raised when a server is unfit. The message says which, what is wrong, and what to do."""


async def check_servers(redis: Redis, durability: Durability = "server") -> list[str]:
    """Check all servers and return warnings.

    Raises UnfitServer, or QueueUnreachable where no server answers.
    """
    warnings, unreachable = [], []
    addresses = await _addresses(redis)
    for address in addresses:
        try:
            link = await redis.open(address)
        except LinkLost as error:
            unreachable.append(str(error))
            continue
        except ServerRefused as error:
            if error.code in LOGIN:
                raise UnfitServer(f"{address} refuses the URL's login: {error}") from error
            unreachable.append(f"{address}: {error}")
            continue
        try:
            warnings += await _check(link, address, redis.place.kind, durability)
        except LinkLost as error:
            unreachable.append(str(error))
        finally:
            link.close()
    if len(unreachable) == len(addresses):
        raise QueueUnreachable(f"Redis could not be reached: {'; '.join(unreachable)}")
    return warnings


async def check_when_reached(redis: Redis, durability: Durability = "server") -> list[str]:
    """Call `check_servers` until a server answers, and return its warnings. Raises UnfitServer.

    The wait is logged, and so is what `check_disks` finds.
    """
    is_told = False
    while True:
        try:
            warnings = await check_servers(redis, durability)
        except QueueUnreachable as error:
            if not is_told:
                log.warning("%s; trying again until it can", error.message)
            is_told = True
            await asyncio.sleep(RETRY_S)
        else:
            if is_told:
                log.info("Redis is reached")
            await check_disks(redis, durability)
            return warnings


async def check_disks(redis: Redis, durability: Durability) -> list[str]:
    """Wait once on each primary as answers will, and return what would keep them back.

    It may pass, as a replica that restarts does, and so no process ends for it.
    """
    if durability == "server":
        return []
    sync = sync_for(redis, durability)

    async def prove(lane: Lane) -> str:
        try:
            await sync.prove(await sync.begin(lane.prefix))
        except QueueUnreachable as error:
            return error.message
        return ""

    try:
        lanes = {await redis.find(lane.prefix): lane for lane in CHECK_LANES}
        faults = await asyncio.gather(*map(prove, lanes.values()))
    except (LinkLost, ServerRefused) as error:
        faults = [f"Redis could not be reached: {error}"]
    finally:
        sync.close()
    return [f"durability {durability}: {fault}" for fault in faults if fault]


async def _addresses(redis: Redis) -> tuple[Address, ...]:
    if redis.place.kind is not Kind.SENTINELS:
        return redis.place.addresses
    try:
        return (await redis.find(""),)
    except (LinkLost, ServerRefused) as error:
        raise QueueUnreachable(f"Redis could not be reached: {error}") from error


async def _check(link: Link, address: Address, kind: Kind, durability: Durability) -> list[str]:
    warnings = []
    try:
        facts = _parse(await link.ask(pack("INFO")))
    except ServerRefused as error:
        facts = {}
        warnings.append(f"{address} does not let INFO be asked, so it was not checked: {error}")
    if facts:
        for sentence in _faults(facts, kind):
            raise UnfitServer(f"{address}: {sentence}")
        if facts.get("aof_enabled") == "0":
            warnings.append(f"{address}: appendonly is no: jobs are lost when the server ends")
    if durability != "server":
        warnings += await _check_durability(link, address, facts, durability)
    return warnings


def _faults(facts: Facts, kind: Kind) -> Iterator[str]:
    version = facts.get("redis_version", "0")
    if tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) < OLDEST:
        yield f"version {version} is too old; the queue needs 6.2 or newer"
    policy = facts.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        yield f"maxmemory-policy is {policy} and drops accepted jobs; set it to noeviction"
    is_cluster = facts.get("cluster_enabled") == "1"
    if is_cluster and kind is not Kind.CLUSTER:
        yield "it is one of a cluster; the URL of a cluster begins with redis+cluster://"
    if not is_cluster and kind is Kind.CLUSTER:
        yield "it is no cluster; the URL of a single server begins with redis://"


async def _check_durability(
    link: Link, address: Address, facts: Facts, durability: Durability
) -> list[str]:
    """Require what the server needs for `fsync` or `replicas`, and return warnings.

    Without WAITAOF `fsync` needs an append-only file that is written through before every reply.
    Raises UnfitServer.
    """
    if facts.get("aof_enabled") == "0":
        raise UnfitServer(f"{address}: durability {durability} needs appendonly yes")
    is_written_through = await _is_written_through(link)
    warnings = []
    if not is_written_through and _is_early(facts):
        warnings.append(
            f"{address}: WAITAOF of this version answers before the disk has it, unless appendfsync"
            " is always; set that here and on all replicas"
        )
    if facts.get("role") == "slave":  # it takes no WAITAOF
        return warnings
    try:
        await link.ask(pack("WAITAOF", 0, 0, 0))
    except ServerRefused as refusal:
        if durability == "replicas" and UNKNOWN_COMMAND in str(refusal):
            return [f"{address} has no WAITAOF: what is answered is in a replica's memory alone"]
        if durability == "fsync" and is_written_through:
            return []
        instead = ", or appendfsync always" if durability == "fsync" else ""
        raise UnfitServer(
            f"{address}: durability {durability} needs WAITAOF, of Redis 7.2 or newer or Valkey"
            f"{instead}; {refusal}"
        ) from refusal
    return warnings


def _is_early(facts: Facts) -> bool:
    """Return whether WAITAOF answers once the file is written, though the disk is yet to follow.

    So it is with appendfsync everysec, in Redis 7.4 (https://github.com/redis/redis/pull/13793) and
    in Valkey up to 9.1 at least.
    """
    return "valkey_version" in facts or facts.get("redis_version", "").startswith("7.4.")


async def _is_written_through(link: Link) -> bool:
    try:
        return await link.ask(pack("CONFIG", "GET", "appendfsync")) == [b"appendfsync", b"always"]
    except ServerRefused:
        return False


def _parse(reply: object) -> Facts:
    text = reply.decode(errors="replace") if isinstance(reply, bytes) else ""
    pairs = (line.partition(":") for line in text.splitlines() if ":" in line)
    return {name: value.strip() for name, _, value in pairs}
