"""Authentication and authorization, from a request's headers, path and query.

It decides who a caller is and what it may do (scopes), and never reads the request's body.
"""

import asyncio
import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qs

from penstock.gateway.auth.api_key import MAX_CHARS, ApiKey, Scope
from penstock.gateway.auth.keyring import Keyring
from penstock.gateway.auth.share_tokens import Shares
from penstock.gateway.auth.web_pages import WebPages
from penstock.schemas.account import Account
from penstock.schemas.errors import OutOfScope, Unauthorized
from penstock.schemas.job import DEFAULT_TENANT, TRACEPARENT, PriorityClass
from penstock.schemas.keys import READY

# The pages ask for a key themselves, and what the API takes is no secret.
PAGE_PATHS = frozenset({"/", "/page/page.css", "/page/page.js"})
DOCS_PATHS = frozenset(
    {
        "/docs",
        "/docs/docs.js",
        "/docs/swagger-ui-bundle.js",
        "/docs/swagger-ui.css",
        "/openapi.json",
    }
)
OPEN_PATHS = (
    PAGE_PATHS
    | DOCS_PATHS
    | {
        "/health",
        "/health/live",
        "/health/queue",
        "/health/ready",
        "/ping",
    }
)
OVER_LIMIT = "x-penstock-over-limit"
TOKEN_HEAD = "pss_"
ADMIN = "/v1/admin"  # not open to everybody where no key was made
# The first entry that a path begins with names the scope its key needs; other paths take any key.
PATH_SCOPES: tuple[tuple[str, Scope], ...] = (
    ("/v1/jobs", "jobs"),
    ("/v1/batches", "batches"),
    ("/v1/files", "batches"),
    ("/v1/uploads", "batches"),
    ("/v1/chat/completions", "inference"),
    ("/v1/completions", "inference"),
    ("/v1/messages", "inference"),
    ("/v1/responses", "inference"),
    ("/v1/conversations", "inference"),
    ("/v1/embeddings", "inference"),
    ("/v1/score", "inference"),
    ("/v1/rerank", "inference"),
    ("/v2/rerank", "inference"),
    ("/score", "inference"),
    ("/rerank", "inference"),
    ("/classify", "inference"),
    ("/pooling", "inference"),
    ("/inference", "inference"),
    ("/abort_requests", "inference"),
    ("/tokenize", "inference"),
    ("/detokenize", "inference"),
    ("/tokenizer_info", "inference"),
    (ADMIN, "admin"),
    ("/server_info", "admin"),
    ("/reset_prefix_cache", "admin"),
    ("/load", "metrics"),
    ("/metrics", "metrics"),
    ("/v1/status", "metrics"),
)


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The part of a request before its body. Headers are found by their names in lower case."""

    method: str
    path: str
    query: bytes
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request.

    A guest may read one job. Any other caller without an API key's record may do everything, and is
    of the default tenant.
    """

    tenant: str = DEFAULT_TENANT
    traceparent: str | None = None
    key: ApiKey | None = None
    over_limit: str | None = None  # for jobs that do not set it themselves
    is_guest: bool = False  # let in by a share token, to read one job
    key_end: asyncio.Event | None = None  # set once its key is revoked or expires

    @property
    def account(self) -> Account | None:
        """The account that its jobs count for. None means the tenant, without limits."""
        return self.key.account if self.key else None

    @property
    def is_operator(self) -> bool:
        """Return whether it may see what all tenants have."""
        return not self.is_guest and self.may("admin")

    def may(self, scope: Scope) -> bool:
        return self.key is None or self.key.allows(scope)

    def bounded(self, priority: PriorityClass) -> PriorityClass:
        """Return the priority class that was asked for, or the highest that the key allows."""
        most = self.key.max_priority if self.key else "high"
        return max(priority, most, key=READY.index)


class Access:
    def __init__(
        self,
        keyring: Keyring,
        shares: Shares,
        keys: Sequence[str],
        demands_keys: bool,
        open_metrics: bool,
        pages: WebPages,
    ) -> None:
        self._keyring = keyring
        self._shares = shares
        self.demands_keys = demands_keys
        self.pages = pages
        self.list_keys(keys)
        self._open_paths = OPEN_PATHS | ({"/metrics"} if open_metrics else set())

    def list_keys(self, keys: Sequence[str]) -> None:
        """Let these keys in, and no longer those that were listed before.

        Once a key was listed, keys are demanded for good: a list that lost its last one, as that of
        a file which is half written, opens the door to nobody.
        """
        self._digests = [_digest(key) for key in keys]
        self.demands_keys = self.demands_keys or bool(keys)

    async def caller(self, head: RequestHead) -> Caller:
        """Return the caller of a request.

        Raises Unauthorized, OutOfScope, ForeignHost, ForeignPage, and QueueUnreachable when keys
        cannot be checked.
        """
        headers, path = head.headers, head.path
        traceparent = headers.get("traceparent", "")
        trace = traceparent if re.fullmatch(TRACEPARENT, traceparent) else None
        if path in self._open_paths:
            return Caller(traceparent=trace)
        scheme, _, credentials = headers.get("authorization", "").partition(" ")
        bearer = credentials.strip() if scheme.lower() == "bearer" else ""
        text = bearer or headers.get("x-api-key", "")  # the latter is Anthropic's
        text = text if len(text) <= MAX_CHARS else ""
        token = text if text.startswith(TOKEN_HEAD) else _shared(head.query)
        if token:
            tenant = await self._shares.tenant(token, head.method, path)
            return Caller(tenant, trace, is_guest=True)
        if self._is_listed(text):
            return Caller(traceparent=trace)
        await self._keyring.refresh()
        key = await self._keyring.find(text)
        if key is not None:
            _refuse_out_of_scope(path, key)
            over_limit = headers.get(OVER_LIMIT)
            return Caller(key.tenant, trace, key, over_limit, key_end=self._keyring.end(key.key_id))
        if self.demands_keys or self._keyring.has_keys:
            raise Unauthorized("give a valid API key as a bearer token")
        if path.startswith(ADMIN):
            sentence = "`penstock keys create --scopes admin` makes one"
            raise Unauthorized(f"{ADMIN} needs an API key, and none was made; {sentence}")
        self.pages.check(head.method, headers)
        return Caller(traceparent=trace)

    def _is_listed(self, text: str) -> bool:
        """Return whether this is one of the configured keys.

        Every key is compared, each in constant time, so how long it takes tells nothing.
        """
        text_digest = _digest(text)
        matches = [hmac.compare_digest(text_digest, digest) for digest in self._digests]
        return any(matches)


def _refuse_out_of_scope(path: str, key: ApiKey) -> None:
    for start, scope in PATH_SCOPES:
        if path.startswith(start) and not key.allows(scope):
            scopes = ", ".join(key.scopes) or "nothing"
            raise OutOfScope(f"{path} needs a key with the scope {scope}; yours allows {scopes}")


def _shared(query: bytes) -> str:
    """Return the share token in a URL's query, or "".

    It may stand there because a browser's EventSource cannot send headers of one's own.
    """
    return parse_qs(query.decode("latin-1")).get("share", [""])[0] if b"share=" in query else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
