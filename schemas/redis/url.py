"""The URL of Redis, read once, with errors that name the part that is wrong.

    redis://[user:password@]host[:port][/database]        one server
    redis://host:port,host:port/0                         several: the one that is primary
    redis+sentinel://host:26379,host/service[/database]   the primary that sentinels name
    redis+cluster://host:port,host:port                   a cluster, by any of its nodes
    unix:///path/of/socket[?db=0]

`rediss` in place of `redis` speaks TLS. After `?`: ca, cert and key (files), verify=none,
timeout_s, retry_s, sentinel_username, sentinel_password.
"""

import ssl
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qsl, unquote, urlsplit

from pydantic import AfterValidator

TIMEOUT_S = 5.0
PORT, SENTINEL_PORT = 6379, 26379
OPTIONS = {
    "db", "ca", "cert", "key", "verify", "timeout_s", "retry_s", "sentinel_username",
    "sentinel_password",
}  # fmt: skip


class BadUrl(ValueError):
    """Raised for a wrong URL. The message names the part, and never holds a password."""


class Kind(Enum):
    HOSTS = "hosts"
    SENTINELS = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class Address:
    """A host and its port. Port 0 means that the host is the path of a Unix socket."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" if self.port else self.host


@dataclass(frozen=True, slots=True)
class Login:
    username: str | None
    password: str | None


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """A URL of Redis.

    timeout_s  a server that sends nothing for so long is dead
    retry_s    a call is tried again for so long at the least; 0 means a few times
    """

    kind: Kind
    addresses: tuple[Address, ...]
    login: Login
    database: int = 0
    service: str = ""
    sentinel_login: Login = Login(None, None)
    tls: ssl.SSLContext | None = None
    timeout_s: float = TIMEOUT_S
    retry_s: float = 0.0


def parse(url: str) -> RedisUrl:
    """Parse the URL of Redis. Raises BadUrl."""
    scheme, separator, _ = url.partition("://")
    if not separator:
        raise BadUrl("no scheme: a URL begins like redis://host:6379/0")
    if scheme == "unix":
        return _parse_unix(url)
    family, _, kind = scheme.partition("+")
    if family not in ("redis", "rediss") or kind not in ("", "sentinel", "cluster"):
        raise BadUrl(
            f"scheme: {scheme!r} is none of redis, rediss, unix, "
            "or one of the first two followed by +sentinel or +cluster"
        )
    parts = urlsplit(url)
    options = _options(parts.query)
    how = Kind(kind) if kind else Kind.HOSTS
    login, hosts = _split_login(parts.netloc)
    words = [word for word in parts.path.split("/") if word]
    service = ""
    if how is Kind.SENTINELS:
        if not words:
            raise BadUrl("service: name it after the hosts, as in redis+sentinel://host/mymaster")
        service = unquote(words.pop(0))
    if len(words) > 1:
        raise BadUrl(f"path: {parts.path!r} is more than a database's number")
    database = _database(words[0] if words else options.get("db", "0"))
    if how is Kind.CLUSTER and database:
        raise BadUrl("database: a cluster has only number 0")
    port = SENTINEL_PORT if how is Kind.SENTINELS else PORT
    return RedisUrl(
        how,
        tuple(_address(host, port) for host in hosts.split(",")),
        login,
        database,
        service,
        Login(options.get("sentinel_username"), options.get("sentinel_password")),
        _tls(options, family == "rediss"),
        _seconds(options, "timeout_s", TIMEOUT_S, 0.05),
        _seconds(options, "retry_s", 0.0, 0.0),
    )


def shown(url: str) -> str:
    """Return the URL without its login and options, for people to read."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _checked(url: str) -> str:
    parse(url)
    return url


RedisUrlSetting = Annotated[str, AfterValidator(_checked)]


def _parse_unix(url: str) -> RedisUrl:
    parts = urlsplit(url)
    login, host = _split_login(parts.netloc)
    if host or not parts.path.strip("/"):
        raise BadUrl("path: a Unix socket's path begins with /, as in unix:///run/redis.sock")
    options = _options(parts.query)
    return RedisUrl(
        Kind.HOSTS,
        (Address(unquote(parts.path), 0),),
        login,
        _database(options.get("db", "0")),
        tls=_tls(options, False),
        timeout_s=_seconds(options, "timeout_s", TIMEOUT_S, 0.05),
        retry_s=_seconds(options, "retry_s", 0.0, 0.0),
    )


def _split_login(netloc: str) -> tuple[Login, str]:
    login, at, hosts = netloc.rpartition("@")
    if not at:
        return Login(None, None), hosts
    username, colon, password = login.partition(":")
    if not colon:
        raise BadUrl("password: missing; the part before @ is user:password, or :password")
    return Login(unquote(username) or None, unquote(password)), hosts


def _address(text: str, port: int) -> Address:
    host, colon, number = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, number = text, str(port)
    if not number.isdecimal() or not 0 < int(number) < 65536:
        raise BadUrl(f"port: {number!r} is no number from 1 to 65535")
    host = unquote(host.strip("[]"))
    if not host:
        raise BadUrl("host: missing")
    return Address(host, int(number))


def _options(query: str) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    for name in options:
        if name not in OPTIONS:
            raise BadUrl(f"option: {name!r} is none of {', '.join(sorted(OPTIONS))}")
    return options


def _database(text: str) -> int:
    if not text.isdecimal():
        raise BadUrl(f"database: {text!r} is no number")
    return int(text)


def _seconds(options: dict[str, str], name: str, usual: float, least: float) -> float:
    text = options.get(name, str(usual))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not least <= seconds <= 600:
        raise BadUrl(f"{name}: {text!r} is no number of seconds from {least:g} to 600")
    return seconds


def _tls(options: dict[str, str], is_wanted: bool) -> ssl.SSLContext | None:
    if not is_wanted:
        for name in ("ca", "cert", "key", "verify"):
            if name in options:
                raise BadUrl(f"{name}: only rediss:// speaks TLS")
        return None
    for name in ("ca", "cert", "key"):
        if name in options and not Path(options[name]).is_file():
            raise BadUrl(f"{name}: there is no file {options[name]!r}")
    if options.get("verify", "full") not in ("full", "none"):
        raise BadUrl(f"verify: {options['verify']!r} is neither full nor none")
    if "key" in options and "cert" not in options:
        raise BadUrl("cert: missing; the key alone says nothing")
    try:
        context = ssl.create_default_context(cafile=options.get("ca"))
        if "cert" in options:
            context.load_cert_chain(options["cert"], options.get("key"))
    except ssl.SSLError as error:
        raise BadUrl(f"ca, cert, key: not what they should be: {error.reason}") from error
    if options.get("verify") == "none":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
