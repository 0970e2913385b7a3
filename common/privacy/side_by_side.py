"""Computes several parts side by side, on the cores that a party may use once it has trained."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_PartT = TypeVar("_PartT")
_ResultT = TypeVar("_ResultT")


def each(function: Callable[[_PartT], _ResultT], parts: Iterable[_PartT]) -> list[_ResultT]:
    """Call a function for each part, and return the results in the same order.

    The calls gain from it where they compute without the interpreter, as arrays do.
    """
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as executor:
        return list(executor.map(function, parts))
