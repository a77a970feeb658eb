"""Calls in a process of their own: none inherits the memory or the threads of the one before."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def in_a_process(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call in a fresh process; its result."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args, **kwargs).result()
