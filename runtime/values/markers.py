"""Marks of classes, by which those who compare modules know what an object in an attribute is."""

from __future__ import annotations

__all__ = ["Cache", "Factors"]


class Cache:
    """What was made of the tensors beside it, and is made again where it is missing: modules are alike all the same."""

    __slots__ = ()


class Factors:
    """Numbers to compute with: whatever they are, it takes as long."""

    __slots__ = ()
