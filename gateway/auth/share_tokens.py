"""Share tokens, `pss_<expiry>_<signature>`: each lets its holder read one job until it expires."""

import base64
import hmac
import re
from collections.abc import Awaitable, Callable

from pydantic import Field

from penstock.schemas.errors import NotServed, Unauthorized
from penstock.schemas.process.secret import sign
from penstock.schemas.wire.wire import Wire

MAX_S = 30 * 86400
TOKEN = re.compile(r"pss_([0-9]{1,12})_([a-z2-7]{52})")
READABLE = re.compile(r"/v1/jobs/([^/]+)(/events)?")  # what a token opens, by GET only


class ShareRequest(Wire):
    """The body of a request for a token."""

    expires_s: int = Field(3600, ge=1, le=MAX_S, description="from now")


OwnerOf = Callable[[str], Awaitable[str | None]]
TimeMs = Callable[[], Awaitable[int]]


class Shares:
    """Makes and checks share tokens. The signature covers job and tenant; the token names neither.

    `time_ms` must be a clock that all gateways share.
    """

    def __init__(self, secret: bytes | None, owner_of: OwnerOf, time_ms: TimeMs) -> None:
        self._secret = secret
        self._owner_of = owner_of
        self._time_ms = time_ms

    async def issue(self, job_id: str, tenant: str, lasts_s: int) -> tuple[str, int]:
        """Return a token for the job, and when it expires, in Unix seconds."""
        expires_s = await self._time_ms() // 1000 + lasts_s
        return f"pss_{expires_s}_{self._signature(job_id, tenant, expires_s)}", expires_s

    async def tenant(self, token: str, method: str, path: str) -> str:
        """Return the tenant of the job in this path, if the token opens it. Raises Unauthorized."""
        match, place = TOKEN.fullmatch(token), READABLE.fullmatch(path)
        if match and place and method == "GET":
            tenant = await self._owner_of(place[1])
            signature = self._signature(place[1], tenant or "", int(match[1]))
            is_right = hmac.compare_digest(signature, match[2])
            is_old = int(match[1]) * 1000 <= await self._time_ms()
            if is_right and not is_old and tenant is not None:
                return tenant
        raise Unauthorized("the share token is not valid for this, or has expired")

    def _signature(self, job_id: str, tenant: str, expires_s: int) -> str:
        if self._secret is None:
            raise NotServed("sharing needs a server secret: set PENSTOCK_SERVER_SECRET")
        digest = sign(self._secret, "share", job_id, tenant, str(expires_s))
        return base64.b32encode(digest).decode().lower().rstrip("=")
