"""The reads that callers have open: streams and answers of jobs that other requests submitted."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from penstock.gateway.http.middleware import caller_of
from penstock.schemas.errors import Unavailable

RETRY_AFTER_MS = 1000


class TooManyReads(Unavailable):
    """Raised where a key has as many reads open as it may have."""

    code, status = "too_many_reads", 429


class OpenReads:
    """Counts open reads by key, or by tenant where there is no key, and bounds them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: Counter[str] = Counter()

    def bounded(self, request: Request, response: Response) -> Response:
        """Return the response as one that counts while it is sent, or is refused."""
        caller = caller_of(request)
        return _Bounded(self, caller.key.key_id if caller.key else caller.tenant, response)

    @contextmanager
    def another(self, name: str) -> Iterator[None]:
        """Count a read for the block. Raises TooManyReads."""
        if self._open[name] >= self._most:
            sentence = (
                f"{self._most} reads of jobs are open with this key on this gateway, which is the"
                " most; close one, or await an end (--max-open-reads is the operator's)"
            )
            raise TooManyReads(sentence, retry_after_ms=RETRY_AFTER_MS)
        self._open[name] += 1
        try:
            yield
        finally:
            self._open[name] -= 1
            if not self._open[name]:
                del self._open[name]


class _Bounded(Response):
    def __init__(self, reads: OpenReads, name: str, response: Response) -> None:
        super().__init__()
        self._reads = reads
        self._name = name
        self._response = response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._reads.another(self._name):
            await self._response(scope, receive, send)
