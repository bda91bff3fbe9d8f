"""What objects keep so as not to make it twice."""

from __future__ import annotations

__all__ = ["Cache"]


class Cache:
    """What was made of the tensors beside it, and is made again where it is missing: a module is the same without it."""

    __slots__ = ()
