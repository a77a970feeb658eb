"""Service level objectives (SLO) for goodput: the milliseconds that a good request keeps."""

from typing import Annotated, get_args

from pydantic import BeforeValidator
from pydantic_settings import NoDecode

from penstock.loadtest.requests.measurement import Metric


def slos_of(value: object) -> object:
    """Return milliseconds by metric, which may be given as words `ttft:200 tpot:50`."""
    if isinstance(value, dict):
        return value
    words = " ".join(map(str, value if isinstance(value, list) else [value]))
    slos: dict[str, float] = {}
    for word in words.replace(",", " ").split():
        metric, _, most_ms = word.partition(":")
        try:
            slos[metric] = float(most_ms)
        except ValueError:
            slos[metric] = 0.0
        if metric not in get_args(Metric) or not slos[metric] > 0:
            metrics = ", ".join(get_args(Metric))
            raise ValueError(f"{word!r} is not like ttft:200, milliseconds of one of {metrics}")
    return slos


Slos = Annotated[dict[Metric, float], NoDecode, BeforeValidator(slos_of)]
