"""From goals to pipelines: points that are tried, measured and kept where no other beats them."""

from __future__ import annotations

from .demands import Demands
from .front import Front
from .points import Point
from .search import search
from .trials import check_optuna

__all__ = ["Demands", "Front", "Point", "check_optuna", "search"]
