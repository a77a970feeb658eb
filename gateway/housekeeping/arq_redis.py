"""Connects arq to the Redis of the chores, at the primary that our own client finds."""

from dataclasses import replace
from urllib.parse import parse_qsl, urlsplit

from arq.connections import ArqRedis

from penstock.gateway.housekeeping.arq_loop import QUEUE, as_json
from penstock.schemas.redis.servers import Redis
from penstock.schemas.redis.url import BadUrl, Kind, RedisUrl, parse

ANSWER_S = 10.0  # within which Redis answers arq, else its connection is taken for broken


def chores_place(redis_url: str, chores_redis_url: str | None = None) -> RedisUrl:
    """Return where the chores are.

    Without a URL of their own that is the next database of the jobs' server. Raises BadUrl.
    """
    place = parse(chores_redis_url or redis_url)
    if place.kind is Kind.CLUSTER:
        raise BadUrl("a cluster has no database for chores; name servers, or sentinels")
    return place if chores_redis_url else replace(place, database=place.database + 1)


async def connect_arq(redis_url: str, chores_redis_url: str | None = None) -> ArqRedis:
    """Return arq's client of the primary, which fails rather than hangs, and looks for no other.

    Raises LinkLost or ServerRefused where no primary is found.
    """
    place = chores_place(redis_url, chores_redis_url)
    async with Redis(place) as redis:
        server = await redis.find("")
    files = dict(parse_qsl(urlsplit(chores_redis_url or redis_url).query))
    return ArqRedis(
        job_serializer=as_json,
        default_queue_name=QUEUE,
        host=server.host,
        port=server.port,
        unix_socket_path=None if server.port else server.host,
        db=place.database,
        username=place.login.username,
        password=place.login.password,
        socket_timeout=ANSWER_S,
        ssl=place.tls is not None,
        ssl_ca_certs=files.get("ca"),
        ssl_certfile=files.get("cert"),
        ssl_keyfile=files.get("key", files.get("cert")),  # one file may hold both
        ssl_cert_reqs="none" if files.get("verify") == "none" else "required",
        ssl_check_hostname=place.tls is not None and place.tls.check_hostname,
    )
