"""Limits on how much a JSON text holds, checked without parsing it.

Each value costs time to the process that parses it.
"""

from collections.abc import Sequence

MAX_VALUES = 2**17  # each takes microseconds, in the one thread that serves all callers
MAX_GROUPS = 2**14  # lists and objects, which cost ten times as much
MAX_NAMES = 2**15  # names of fields, which cost twice as much as a value


def too_much(*texts: bytes) -> str | None:
    """Return what texts hold too much of together, or None where they may be parsed.

    In a text that is no JSON, all is counted that a parser reads before it finds that out.
    """
    if _excess(texts) is None:
        return None
    # Only strings hold a backslash.
    bare = [text.replace(rb"\\", b"").replace(rb"\"", b"") for text in texts]
    if (
        _count(bare, b'"') > 4 * MAX_VALUES
    ):  # a value takes two strings at most, its name and itself
        return f"more than {MAX_VALUES} values"
    return _excess([b"".join(text.split(b'"')[::2]) for text in bare])


def _excess(texts: Sequence[bytes]) -> str | None:
    """Return what texts hold too much of. Where they have strings, the counts may be too high."""
    if _count(texts, b",") > MAX_VALUES:
        return f"more than {MAX_VALUES} values"
    if _count(texts, b"[") + _count(texts, b"{") > MAX_GROUPS:
        return f"more than {MAX_GROUPS} lists and objects"
    if _count(texts, b":") > MAX_NAMES:
        return f"more than {MAX_NAMES} fields"
    return None


def _count(texts: Sequence[bytes], mark: bytes) -> int:
    return sum(text.count(mark) for text in texts)
