"""Prefix caching for SSM layers: states at the ends of prefixes, for others that begin alike."""

from collections import OrderedDict
from collections.abc import Callable


class StatePool:
    """States by the digest of every token up to them; the least recently used one is forgotten.

    rows  the rows that may be used
    copy  copies a state from one row to another
    """

    def __init__(self, rows: range, copy: Callable[[int, int], None]) -> None:
        self._copy = copy
        self._free_rows = list(rows)
        self._rows: OrderedDict[bytes, int] = OrderedDict()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._rows

    def keep(self, digest: bytes, row: int) -> None:
        """Keep the state that a sequence has in its row now."""
        if digest in self._rows:
            self._rows.move_to_end(digest)
            return
        if not self._free_rows:
            self._free_rows.append(self._rows.popitem(last=False)[1])
        self._rows[digest] = self._free_rows.pop()
        self._copy(row, self._rows[digest])

    def restore(self, digest: bytes, row: int) -> None:
        """Give a kept state to a sequence's row."""
        self._rows.move_to_end(digest)
        self._copy(self._rows[digest], row)

    def forget(self, digest: bytes) -> None:
        """Forget a state, if it is kept."""
        if (row := self._rows.pop(digest, None)) is not None:
            self._free_rows.append(row)
