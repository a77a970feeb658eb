"""What ends a measurement with one line."""


class BadOption(Exception):
    """The message names the option and what is wrong with it."""


class CannotMeasure(RuntimeError):
    """Something that was to be measured did not start, or answers nothing."""
