"""Answers about classes, remembered for as long as the classes live."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["cached_by_class"]

T = TypeVar("T")


def cached_by_class(function: Callable[[type[Any]], T]) -> Callable[[type[Any]], T]:
    """Let a function of one class be computed once for each class; unlike `lru_cache` it keeps no class alive.

    Args:
        function: its result must not refer to the class.
    """
    known: weakref.WeakKeyDictionary[type[Any], T] = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def cached(cls: type[Any]) -> T:
        try:
            return known[cls]
        except KeyError:
            answer = known[cls] = function(cls)
            return answer

    return cached
