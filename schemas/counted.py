"""A number of things, as sentences have it."""


def counted(number: int, noun: str, form: str = "") -> str:
    """Return a number, in the form of a format specification, with its noun: "1 worker"."""
    return f"{number:{form}} {noun}" if number == 1 else f"{number:{form}} {noun}s"
