"""Calls in Python: `[f(x=1), g()]`, which is all there is in an answer."""

import ast
import warnings
from collections.abc import Iterator

from penstock.schemas.markup.form import Form
from penstock.schemas.markup.json_scan import json_of
from penstock.schemas.markup.source import Source, Steps

_MAX_PYTHON = 20_000  # characters that are read as Python


class PythonCalls(Form):
    """A list of calls with named arguments, read when it is whole."""

    def read(self, source: Source) -> Steps[None]:
        if (yield from source.next_sign()) == "[":
            while not (source.is_over or source.text.rstrip().endswith("]")) or not _read(source):
                if source.is_over:
                    break
                yield
        yield from source.rest(source.content)


def _read(source: Source) -> bool:
    """Read the text that is there as calls; return False where it is none, or not whole."""
    brackets = [source.text.count(sign) for sign in "[]()"]
    if not source.is_over and brackets[::2] != brackets[1::2]:
        return False  # to parse it at each bracket would take the square of its length
    try:
        calls = [*_calls(source.text)]
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False
    source.take(len(source.text))
    for name, arguments in calls:
        source.call(name)
        source.arguments(arguments)
    return True


def _calls(text: str) -> Iterator[tuple[str, str]]:
    """Yield names and arguments. Raises ValueError and what Python's parser raises."""
    if len(text) > _MAX_PYTHON:
        raise ValueError("too long")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of escapes that mean nothing
        tree = ast.parse(text.strip(), mode="eval").body
    if not isinstance(tree, ast.List) or not tree.elts:
        raise ValueError("no list of calls")
    for call in tree.elts:
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("no call with named arguments")
        arguments = {pair.arg or "": ast.literal_eval(pair.value) for pair in call.keywords}
        if "" in arguments:
            raise ValueError("no named arguments")
        yield ast.unparse(call.func), json_of(arguments)
