"""Say what a benchmark ran on, for the head of its results."""

from __future__ import annotations

import platform
from typing import Any

import torch

__all__ = ["described"]


def described() -> dict[str, Any]:
    """Return the versions and the kind of processor, and that one thread was used, as all benchmarks do."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": 1,
    }
