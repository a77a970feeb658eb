"""A number of things, as sentences have it."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, as in "1 worker" and "0 workers"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
