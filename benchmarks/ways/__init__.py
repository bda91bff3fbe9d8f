"""Ways to train a model on several processes: what a pass makes of it, beside the same written by hand.

Each file here with `WAYS` is about one pass; `benchmarks/parallel.py` runs them all.
"""

from __future__ import annotations

import importlib
import pkgutil

from .way import Step, Way

__all__ = ["Step", "Way", "all_ways"]


def all_ways() -> dict[str, Way]:
    """Return the ways of all files, by name."""
    modules = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
    return {way.name: way for module in modules for way in getattr(module, "WAYS", ())}
