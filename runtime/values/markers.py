"""Marks of classes, by which those who compare modules know what an object in an attribute is."""

from __future__ import annotations

__all__ = ["Factors"]


class Factors:
    """Numbers to compute with: whatever they are, it takes as long."""

    __slots__ = ()
