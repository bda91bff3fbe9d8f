"""Say what a benchmark ran on, for the head of its results, what memory its process holds, and what it asks for."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import resource
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("FXOPT_CACHE", "0")  # what preparation takes is measured: nothing may be known of earlier runs

__all__ = ["described", "forget_peak", "memory", "page_faults"]


def described() -> dict[str, Any]:
    """Return the versions and the kind of processor, and that one thread was used, as all benchmarks do."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": 1,
    }


def memory(kind: str) -> int:
    """Return the bytes that this process holds ("VmRSS"), or the most it has held since `forget_peak` ("VmHWM")."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{kind}:"))


def forget_peak() -> None:
    """Give back what is free, and let the peak begin anew."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def page_faults(call: Callable[[], object], calls: int = 5) -> int:
    """Return how many pages a call asks the system for, at the median: those that the allocator gave back before."""
    counts: list[int] = []
    for _ in range(calls + 1):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        call()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return round(statistics.median(counts[1:]))
