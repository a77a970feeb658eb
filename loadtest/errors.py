"""The errors that end a measurement with one line."""


class BadOption(Exception):
    """Raised for a bad option; the message names it and says what is wrong with it."""


class CannotMeasure(RuntimeError):
    """Raised when something to be measured does not start, or does not answer."""
