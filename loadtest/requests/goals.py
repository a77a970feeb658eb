"""Service level objectives (SLO) for goodput: the milliseconds that a good request keeps."""

from typing import Annotated, get_args

from pydantic import BeforeValidator
from pydantic_settings import NoDecode

from penstock.loadtest.requests.measurement import Metric


def slos_of(given: object) -> object:
    """Return milliseconds by metric, which may be given as words `ttft:200 tpot:50`."""
    if isinstance(given, dict):
        return given
    words = " ".join(map(str, given if isinstance(given, list) else [given]))
    found: dict[str, float] = {}
    for word in words.replace(",", " ").split():
        metric, _, most_ms = word.partition(":")
        try:
            found[metric] = float(most_ms)
        except ValueError:
            found[metric] = 0.0
        if metric not in get_args(Metric) or not found[metric] > 0:
            known = ", ".join(get_args(Metric))
            raise ValueError(f"{word!r} is not like ttft:200, milliseconds of one of {known}")
    return found


Slos = Annotated[dict[Metric, float], NoDecode, BeforeValidator(slos_of)]
