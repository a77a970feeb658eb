"""Keeps out web pages of elsewhere, which a browser lets ask any server that it can reach.

Where a key is needed, no page has it. Where none is, the browser itself says who asks, by `Host`,
`Origin` and `Sec-Fetch-Site`, which no page can set. A page whose own name was given the gateway's
address (DNS rebinding) is of the same origin for the browser, so that `Host` alone tells.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Self

from penstock.schemas.errors import ForeignHost, ForeignPage

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
WILDCARD = "*"
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+;=%-]+)(:[0-9]*)?")


def host_in(field: str) -> str:
    """Return the name or address in a `Host`, in its plain form; "" where there is none."""
    match = _HOST.fullmatch(field)
    return match[1].strip("[]").lower().removesuffix(".") if match else ""


def is_loopback(host: str) -> bool:
    """Return whether a name or an address leads to this machine alone."""
    address = _address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


@dataclass(frozen=True, slots=True)
class WebPages:
    """The pages that may ask while nobody needs a key.

    hosts          names and addresses of the gateway, besides those of loopback; "*.NAME": of all
                   names below that one
    takes_address  any address is taken for the gateway's: nobody but its owner gives it a page
    takes_host     any name is taken for the gateway's
    origins        where pages may be that ask; "*": anywhere
    """

    hosts: frozenset[str]
    takes_address: bool
    takes_host: bool
    origins: Sequence[str]

    @classmethod
    def at(
        cls, host: str, is_socket: bool, allowed_hosts: Sequence[str], origins: Sequence[str]
    ) -> Self:
        """Return the pages of a gateway that listens at `host`, or else on a Unix socket.

        No browser reaches such a socket. Beyond loopback a gateway is reached under addresses that
        it does not know, as behind NAT.
        """
        own = host.lower()
        hosts = frozenset({own, *allowed_hosts})
        return cls(hosts, not is_loopback(own), is_socket or WILDCARD in allowed_hosts, origins)

    def check(self, method: str, headers: Mapping[str, str]) -> None:
        """Raise ForeignHost, or ForeignPage where the request may change something."""
        if (field := headers.get("host")) is not None:  # HTTP/1.0, which no browser speaks
            self._check_host(host_in(field))
        if method not in SAFE_METHODS:
            self.check_page(headers)

    def check_page(self, headers: Mapping[str, str]) -> None:
        """Raise ForeignPage for a page that is neither the gateway's own nor one of `origins`.

        Another port is another page, though the browser calls it the same site.
        """
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if WILDCARD in self.origins or origin in self.origins:
            return
        if site is None:  # not every browser says it, and none to a server without TLS elsewhere
            own = headers.get("host", "").lower()
            is_own = origin is None or origin.lower().partition("://")[2] == own
        else:
            is_own = site in ("same-origin", "none")
        if not is_own:
            raise ForeignPage(origin or "another site")

    def _check_host(self, host: str) -> None:
        if self.takes_host or is_loopback(host) or self._is_own(host):
            return
        if not (self.takes_address and _address(host)):
            raise ForeignHost(host)

    def _is_own(self, host: str) -> bool:
        labels = host.split(".")
        above = {".".join([WILDCARD, *labels[at:]]) for at in range(1, len(labels))}
        return host in self.hosts or not above.isdisjoint(self.hosts)


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(host)
    except ValueError:  # it is a name
        return None
    return getattr(address, "ipv4_mapped", None) or address
