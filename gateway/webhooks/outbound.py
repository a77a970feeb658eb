"""Sends requests to callers' URLs, but never into the network of this server (SSRF).

The requests go through httpcore, httpx's own transport: it follows no redirect, reads no proxy from
the environment and asks one function for its connections. (aiohttp can pin addresses too, but
follows redirects unless told at each call; smokescreen and other proxies are one more process to
run.)
"""

import asyncio
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Annotated

import httpcore
import httpx
from pydantic import BeforeValidator, Field, field_validator
from pydantic_settings import NoDecode

from penstock.schemas.errors import InvalidJob, Unavailable
from penstock.schemas.process.start import Settings, words_of

MAX_URL_CHARS = 2048
MAX_RETRY_AFTER_S = 86_400.0  # a receiver that asks for more gets this
PORTS = (443, 8443)
# Global by the registries, but never a receiver's: relays, and the own host of a cloud.
IPV4_NEVER = [
    IPv4Network(network) for network in ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16")
]
# Networks that carry an IPv4 address inside (6to4, Teredo and its kind), or are for examples.
IPV6_NEVER = [IPv6Network(network) for network in ("2001::/23", "2002::/16", "3fff::/20")]
IPV6_GLOBAL = IPv6Network("2000::/3")  # no IPv4-mapped or -compatible, NAT64, local, multicast
ORIGIN = re.compile(r"https?://[^/?#@\s]+/?")
NAME = re.compile(r"([a-z0-9_-]{1,63}\.)*(?!0x[0-9a-f]*$)(?=[0-9-]*[a-z])[a-z0-9-]{1,63}")

ALLOW_FLAGS = "--webhook-public or --webhook-private"  # flags of gateway, housekeeping, penstock up

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class OutboundSettings(Settings):
    """The receivers that this server may call."""

    webhook_public: bool = Field(False, description="jobs may name https receivers anywhere")
    webhook_private: Annotated[list[str], NoDecode, BeforeValidator(words_of)] = Field(
        default_factory=list,
        description="receivers of your own, as http://host:port; their address is not checked",
    )
    webhook_timeout_s: float = Field(10.0, gt=0, le=30, description="for the whole of one request")

    @field_validator("webhook_private")
    @classmethod
    def is_of_origins(cls, origins: list[str]) -> list[str]:
        for origin in origins:
            if not ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin} is not like http://host:port")
        return origins


class NoAnswer(Unavailable):
    """Raised when the receiver does not answer in time, or not in HTTP."""

    code = "no_answer"
    status = 504


@dataclass(frozen=True, slots=True)
class Destination:
    """A URL that may be called, if its address may be called too."""

    url: httpx.URL
    host: str
    port: int
    is_private: bool  # the operator named it, so its address is not checked


@dataclass(frozen=True, slots=True)
class ReceiverAnswer:
    """The answer of a receiver, without its body, which is not read."""

    status: int
    retry_after_s: float = 0.0  # 0 if it gave none, or a date


class Outbound:
    """Calls the URLs that callers name, as far as the settings allow it."""

    def __init__(
        self,
        settings: OutboundSettings,
        resolve: Resolve | None = None,
        network: httpcore.AsyncNetworkBackend | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Use the system's `resolve`, `network` and `tls` where they are not given."""
        self._settings = settings
        self._private = {_origin(httpx.URL(url)) for url in settings.webhook_private}
        self._resolve = resolve or _resolved
        self._network = network or httpcore.AnyIOBackend()
        self._tls = tls

    def check(self, url: str, param: str = "url") -> Destination:
        """Check a URL by its text alone, without looking up its address.

        Raises InvalidJob, which names `param`, if it may not be called.
        """
        if not self._private and not self._settings.webhook_public:
            sentence = f"this server calls nobody; its operator may allow it by {ALLOW_FLAGS}"
            raise InvalidJob(f"{param}: {sentence}", param)
        try:
            target = self._target(url)
        except (httpx.InvalidURL, ValueError) as error:
            raise InvalidJob(f"{param}: {error}", param) from None
        return target

    async def post(self, url: str, headers: Mapping[str, str], content: bytes) -> ReceiverAnswer:
        """Send one POST request. No redirect is followed.

        A status of any kind is returned: the caller decides whether it tries again. Raises
        InvalidJob when the URL or its address may not be called, NoAnswer when no answer came.
        """
        target = self.check(url)
        limit_s = self._settings.webhook_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._post(target, headers, content)
        except TimeoutError:
            raise NoAnswer(f"the receiver did not answer within {limit_s:g} s") from None
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
            raise NoAnswer(f"the receiver failed: {type(error).__name__}") from None
        except OSError as error:
            raise NoAnswer(f"the receiver has no address: {type(error).__name__}") from None

    def _target(self, url: str) -> Destination:
        if len(url) > MAX_URL_CHARS:
            raise ValueError(f"at most {MAX_URL_CHARS} characters")
        target = httpx.URL(url)
        if target.userinfo:
            raise ValueError("a URL with a user or a password is not called")
        scheme, host, port = origin = _origin(target)
        target = target.copy_with(host=host)
        if origin in self._private:
            return Destination(target, host, port, is_private=True)
        if not self._settings.webhook_public or scheme != "https":
            raise ValueError("only https is called, and what the operator listed")
        if port not in PORTS:
            raise ValueError(f"port {port} is not called; use one of {PORTS}")
        if not NAME.fullmatch(host):
            refuse_local([str(ip_address(host))])  # "2130706433" and "0x7f.1" are neither
        return Destination(target, host, port, is_private=False)

    async def _post(
        self, target: Destination, headers: Mapping[str, str], content: bytes
    ) -> ReceiverAnswer:
        addresses = await self._resolve(target.host, target.port)
        if not target.is_private:
            try:
                refuse_local(addresses)
            except ValueError as error:
                raise InvalidJob(f"url: {error}", "url") from None
        authority = target.url.netloc
        url = httpcore.URL(
            scheme=target.url.raw_scheme,
            host=target.host.encode(),
            port=target.port,
            target=target.url.raw_path,
        )
        all_headers = {**headers, "host": authority.decode(), "content-length": str(len(content))}
        backend = _Pinned(self._network, addresses)
        async with (
            httpcore.AsyncConnectionPool(self._tls, network_backend=backend) as pool,
            pool.stream("POST", url, headers=list(all_headers.items()), content=content) as answer,
        ):
            fields = {name.lower(): value for name, value in answer.headers}
            retry_after = fields.get(b"retry-after", b"").decode("latin-1")
            wait_s = min(float(retry_after), MAX_RETRY_AFTER_S) if retry_after.isdecimal() else 0.0
            return ReceiverAnswer(answer.status, wait_s)


class _Pinned(httpcore.AsyncNetworkBackend):
    """Connects to the addresses that were checked. The host's name serves for TLS alone."""

    def __init__(self, network: httpcore.AsyncNetworkBackend, addresses: Sequence[str]) -> None:
        self._network = network
        self._addresses = addresses

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's name
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        *rest, last = self._addresses
        for address in rest:
            try:
                return await self._network.connect_tcp(address, port)
            except httpcore.ConnectError:
                continue
        return await self._network.connect_tcp(last, port)


def refuse_local(addresses: Sequence[str]) -> None:
    """Raise ValueError if any address is not a single host of the public internet."""
    if not addresses:
        raise ValueError("the name has no address")
    for address in map(ip_address, addresses):
        if isinstance(address, IPv6Address):
            inside, never = address in IPV6_GLOBAL and not address.scope_id, IPV6_NEVER
            is_never = any(address in network for network in never)
        else:
            inside = not address.is_multicast
            is_never = any(address in network for network in IPV4_NEVER)
        if is_never or not inside or not address.is_global:
            raise ValueError("its address is not one of the public internet")


def _origin(url: httpx.URL) -> tuple[str, str, int]:
    port = {"https": 443, "http": 80}.get(url.scheme, 0) if url.port is None else url.port
    return url.scheme, url.raw_host.decode().lower().removesuffix("."), port


async def _resolved(host: str, port: int) -> Sequence[str]:
    addresses = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in addresses]
