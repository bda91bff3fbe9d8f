"""From goals to pipelines: points that are tried, measured and kept where no other beats them."""

from __future__ import annotations

from .front import Front
from .points import Point
from .search import search

__all__ = ["Front", "Point", "search"]
