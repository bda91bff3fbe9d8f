"""Decisions that are kept between processes: what they rest on, and the files that hold them."""

from __future__ import annotations

from .entries import Cache, Entry
from .key import key_of, key_of_numbers

__all__ = ["Cache", "Entry", "key_of", "key_of_numbers"]
