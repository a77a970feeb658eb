"""The reads that callers have open: streams and answers of jobs that other requests submitted."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.gateway.auth.access import Caller
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

    @contextmanager
    def another(self, caller: Caller) -> Iterator[None]:
        """Count a caller's read for the block. Raises TooManyReads."""
        name = caller.key.key_id if caller.key else caller.tenant
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
