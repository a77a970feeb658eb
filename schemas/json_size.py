"""How much a JSON text holds, told without parsing it: each value costs whoever reads it."""

MAX_VALUES = 2**17  # microseconds each, in the one thread that serves everybody
MAX_GROUPS = 2**14  # lists and objects, which cost ten times as much
MAX_NAMES = 2**15  # of fields: twice a value


def too_much(text: bytes) -> str | None:
    """What a text holds too much of; none where it may be parsed.

    Of a text that is no JSON all is counted that a parser reads before it finds that out.
    """
    if _excess(text) is None:
        return None
    bare = text.replace(rb"\\", b"").replace(rb"\"", b"")  # a backslash stands in strings alone
    if bare.count(b'"') > 4 * MAX_VALUES:  # a value has a name at most: two strings
        return f"more than {MAX_VALUES} values"
    return _excess(b"".join(bare.split(b'"')[::2]))


def _excess(text: bytes) -> str | None:
    """Of a text without strings; of another, at most."""
    if text.count(b",") > MAX_VALUES:
        return f"more than {MAX_VALUES} values"
    if text.count(b"[") + text.count(b"{") > MAX_GROUPS:
        return f"more than {MAX_GROUPS} lists and objects"
    if text.count(b":") > MAX_NAMES:
        return f"more than {MAX_NAMES} fields"
    return None
