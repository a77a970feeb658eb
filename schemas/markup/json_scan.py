"""Reads and writes JSON values, and finds the end of one in a text that comes in pieces."""

import json
import re

from pydantic import JsonValue
from pydantic_core import from_json

_OUTSIDE = re.compile(r"[\s,:0-9+\-.eEtrufalsn]*")
_INSIDE = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)
_SCALAR = re.compile(r"[0-9+\-.eEtrufalsn]*")


class JsonScan:
    """The place in one value. Strings and brackets are followed; their order is not checked."""

    def __init__(self) -> None:
        self.is_over = False  # at the value's end, or at what no JSON value goes on with
        self.is_whole = False
        self._depth = 0
        self._in_string = False
        self._is_scalar = False

    def feed(self, text: str) -> int:
        """Return how many characters of the text belong to the value, and are certain to.

        The text begins where the last one's certain characters ended.
        """
        place = 0
        while place < len(text) and not self.is_over:
            if self._in_string:
                match = _INSIDE.match(text, place)
                place = match.end() if match else place
                if text[place : place + 1] != '"':
                    break  # more of the string comes, or the other half of an escape
                place += 1
                self._in_string = False
                self._end_if(self._depth == 0)
            elif self._depth:
                match = _OUTSIDE.match(text, place)
                place = self._structure(text, match.end() if match else place)
            elif self._is_scalar or text[place] not in '"[{':
                place = self._scalar(text, place)
            else:
                place = self._structure(text, place)
        return place

    def _structure(self, text: str, place: int) -> int:
        sign = text[place : place + 1]
        if not sign:
            return place
        if sign == '"':
            self._in_string = True
        elif sign in "[{":
            self._depth += 1
        elif sign in "]}":
            self._depth -= 1
            self._end_if(self._depth == 0)
        else:
            self.is_over = True
            return place
        return place + 1

    def _scalar(self, text: str, place: int) -> int:
        """Read a number or a name, which ends where something else begins."""
        match = _SCALAR.match(text, place)
        end = match.end() if match else place
        self._is_scalar = self._is_scalar or end > place
        if end < len(text):
            self.is_over, self.is_whole = True, self._is_scalar
        return end

    def _end_if(self, is_end: bool) -> None:
        if is_end:
            self.is_over = self.is_whole = True


def parsed(text: str, default: JsonValue = None) -> JsonValue:
    """Return the value of a text; the default where it is no JSON."""
    try:
        value: JsonValue = from_json(text, allow_inf_nan=False)
    except ValueError:
        return default
    return value


def json_of(value: object) -> str:
    """Return a value as JSON. Raises ValueError where it has none."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except TypeError as error:
        raise ValueError(f"no JSON: {error}") from None
