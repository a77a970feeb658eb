"""Turns our Redis URLs into arq's settings, as far as arq supports them."""

from dataclasses import replace
from urllib.parse import parse_qsl, urlsplit

from arq.connections import RedisSettings

from penstock.schemas.redis.url import BadUrl, Kind, Login, parse


def arq_settings(redis_url: str, chores_redis_url: str | None = None) -> RedisSettings:
    """Return arq's settings for the chores' URL.

    Without one it is the next database of the jobs' server. Raises BadUrl.
    """
    url = chores_redis_url or redis_url
    place = parse(url)
    if place.kind is Kind.CLUSTER:
        raise BadUrl("a cluster has no database for chores; name a single server, or sentinels")
    if chores_redis_url is None:
        place = replace(place, database=place.database + 1)
    is_named = place.kind is Kind.SENTINELS
    if len(place.addresses) > 1 and not is_named:
        raise BadUrl("chores take one server; of several, name one, or sentinels")
    options = dict(parse_qsl(urlsplit(url).query))
    if is_named and (place.sentinel_login != Login(None, None) or options.keys() & _FILES):
        raise BadUrl("chores take sentinels without a login, ca, cert or key; name their primary")
    hosts = [(address.host, address.port) for address in place.addresses]
    (host, port), *_ = hosts
    return RedisSettings(
        host=hosts if is_named else host,
        port=port,
        unix_socket_path=host if not port else None,
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
        sentinel=is_named,
        sentinel_master=place.service,
    )


_FILES = {"ca", "cert", "key", "verify"}
