"""Who asks, and what they may: decided from the request's headers and path, never from its body."""

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.types import Scope as Asgi

from penstock.gateway.auth.keyring import Keyring
from penstock.gateway.auth.share_tokens import Shares
from penstock.schemas.account import Account
from penstock.schemas.api_key import MAX_CHARS, ApiKey, Scope
from penstock.schemas.errors import OutOfScope, Unauthorized
from penstock.schemas.job import DEFAULT_TENANT, TRACEPARENT, PriorityClass
from penstock.schemas.keys import READY

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/ping"})
OVER_LIMIT = "x-penstock-over-limit"
TOKEN_HEAD = "pss_"
# The first that a path begins with says what its key must allow; other paths take any key.
NEEDED: tuple[tuple[str, Scope], ...] = (
    ("/v1/jobs", "jobs"),
    ("/v1/batches", "batches"),
    ("/v1/files", "batches"),
    ("/v1/chat/completions", "inference"),
    ("/v1/completions", "inference"),
    ("/metrics", "metrics"),
)


@dataclass(frozen=True, slots=True)
class Caller:
    """Without a key everything is open, and all callers are one tenant."""

    tenant: str = DEFAULT_TENANT
    traceparent: str | None = None
    key: ApiKey | None = None
    over_limit: str | None = None  # of jobs that do not say it themselves
    is_guest: bool = False  # let in by a share token, to read one job

    @property
    def account(self) -> Account | None:
        """What its jobs count for; none: for the tenant, without limits."""
        return self.key.account if self.key else None

    def bounded(self, asked: PriorityClass) -> PriorityClass:
        """The class that was asked for, or the highest that the key allows."""
        most = self.key.max_priority if self.key else "high"
        return max(asked, most, key=READY.index)


class Access:
    def __init__(
        self,
        keyring: Keyring,
        shares: Shares,
        keys: Sequence[str],
        demands_keys: bool,
        open_metrics: bool,
    ) -> None:
        self._keyring = keyring
        self._shares = shares
        self._digests = [_digest(key) for key in keys]
        self._demands_keys = demands_keys or bool(keys)
        self._open_paths = OPEN_PATHS | ({"/metrics"} if open_metrics else set())

    async def caller(self, asgi: Asgi, headers: Headers) -> Caller:
        """Raises Unauthorized, OutOfScope, and QueueUnreachable when keys cannot be checked."""
        traceparent = headers.get("traceparent", "")
        trace = traceparent if re.fullmatch(TRACEPARENT, traceparent) else None
        if asgi["path"] in self._open_paths:
            return Caller(traceparent=trace)
        scheme, _, given = headers.get("authorization", "").partition(" ")
        text = given.strip() if scheme.lower() == "bearer" else ""
        text = text if len(text) <= MAX_CHARS else ""
        token = text if text.startswith(TOKEN_HEAD) else _shared(asgi)
        if token:
            tenant = await self._shares.tenant(token, asgi["method"], asgi["path"])
            return Caller(tenant, trace, is_guest=True)
        if self._is_listed(text):
            return Caller(traceparent=trace)
        await self._keyring.refresh()
        key = await self._keyring.find(text)
        if key is not None:
            _refuse_out_of_scope(asgi["path"], key)
            return Caller(key.tenant, trace, key, headers.get(OVER_LIMIT))
        if self._demands_keys or self._keyring.has_keys:
            raise Unauthorized("give a valid API key as a bearer token")
        return Caller(traceparent=trace)

    def _is_listed(self, text: str) -> bool:
        """Every key is compared, in constant time, so the answer's time tells nothing."""
        given = _digest(text)
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(matches)


def _refuse_out_of_scope(path: str, key: ApiKey) -> None:
    for start, scope in NEEDED:
        if path.startswith(start) and not key.allows(scope):
            allowed = ", ".join(key.scopes) or "nothing"
            raise OutOfScope(f"{path} needs a key with the scope {scope}; yours allows {allowed}")


def _shared(asgi: Asgi) -> str:
    """The token in the address, because a browser's EventSource sends no headers of one's own."""
    query = asgi["query_string"]
    return parse_qs(query.decode("latin-1")).get("share", [""])[0] if b"share=" in query else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
