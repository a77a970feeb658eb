"""Limits on how much a JSON text holds, checked without parsing it.

Each value costs time to the process that parses it.
"""

MAX_VALUES = 2**17  # each takes microseconds, in the one thread that serves all callers
MAX_GROUPS = 2**14  # lists and objects, which cost ten times as much
MAX_NAMES = 2**15  # of fields, which cost twice as much as a value


def too_much(text: bytes) -> str | None:
    """Return what a text holds too much of, or None where it may be parsed.

    In a text that is no JSON, all is counted that a parser reads before it finds that out.
    """
    if _excess(text) is None:
        return None
    bare = text.replace(rb"\\", b"").replace(rb"\"", b"")  # only strings hold a backslash
    if bare.count(b'"') > 4 * MAX_VALUES:  # a value takes two strings at most, its name and itself
        return f"more than {MAX_VALUES} values"
    return _excess(b"".join(bare.split(b'"')[::2]))


def _excess(text: bytes) -> str | None:
    """Return what a text holds too much of. Where it has strings, the counts may be too high."""
    if text.count(b",") > MAX_VALUES:
        return f"more than {MAX_VALUES} values"
    if text.count(b"[") + text.count(b"{") > MAX_GROUPS:
        return f"more than {MAX_GROUPS} lists and objects"
    if text.count(b":") > MAX_NAMES:
        return f"more than {MAX_NAMES} fields"
    return None
