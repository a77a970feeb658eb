"""Calls in processes of their own, so that none inherits an earlier one's memory or threads."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def in_a_process(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call the function in a fresh process, and return its result."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args, **kwargs).result()
