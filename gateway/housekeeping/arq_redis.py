"""Turns our Redis URLs into arq's settings, as far as arq supports them."""

from dataclasses import replace
from urllib.parse import parse_qsl, urlsplit

from arq.connections import RedisSettings

from penstock.schemas.redis.connection import connect
from penstock.schemas.redis.link import LinkLost, ServerRefused
from penstock.schemas.redis.url import Address, BadUrl, Kind, parse


async def found_settings(redis_url: str, chores_redis_url: str | None = None) -> RedisSettings:
    """Return arq's settings for the server that is primary now.

    The search is the jobs' own, since arq's has no time-out for a sentinel that says nothing.
    Raises BadUrl, ConnectionError.
    """
    async with connect(chores_redis_url or redis_url) as servers:
        try:
            primary = await servers.find("")
        except (LinkLost, ServerRefused) as error:
            raise ConnectionError(str(error)) from error
    return arq_settings(redis_url, chores_redis_url, primary)


def arq_settings(
    redis_url: str, chores_redis_url: str | None = None, primary: Address | None = None
) -> RedisSettings:
    """Return arq's settings for the chores' URL, at the primary, or else its first server.

    Without a URL for the chores it is the next database of the jobs' server. Raises BadUrl.
    """
    url = chores_redis_url or redis_url
    place = parse(url)
    if place.kind is Kind.CLUSTER:
        raise BadUrl("a cluster has no database for chores; name servers, or sentinels")
    if chores_redis_url is None:
        place = replace(place, database=place.database + 1)
    options = dict(parse_qsl(urlsplit(url).query))
    server = primary or place.addresses[0]
    return RedisSettings(
        host=server.host,
        port=server.port,
        unix_socket_path=server.host if not server.port else None,
        database=place.database,
        conn_retries=0,  # arq_loop tries again
        username=place.login.username,
        password=place.login.password,
        ssl=place.tls is not None,
        ssl_ca_certs=options.get("ca"),
        ssl_certfile=options.get("cert"),
        ssl_keyfile=options.get("key"),
        ssl_cert_reqs="none" if options.get("verify") == "none" else "required",
        ssl_check_hostname=place.tls is not None and place.tls.check_hostname,
    )
