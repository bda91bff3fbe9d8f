"""What benchmarks ask of the machine: its description, memory and page faults of a process, a process of their own."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import os
import platform
import resource
import statistics
import warnings
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("FXOPT_CACHE", "0")  # what preparation takes is measured: nothing may be known of earlier runs

__all__ = ["begun", "described", "forget_peak", "forked", "memory", "page_faults"]


def described() -> dict[str, Any]:
    """Return the versions, the processor and its widest instructions, and that one thread was used, as mostly."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": 1,
        "capability": torch.backends.cpu.get_cpu_capability(),
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


def forked(work: Callable[[], dict[str, Any]], limit: float) -> dict[str, Any]:
    """Return what a forked process finds; an `error` where that takes more seconds than `limit`, or it dies."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(there, work))
    process.start()
    there.close()
    try:
        if not here.poll(limit):
            return {"error": f"not done in {limit} s"}
        return here.recv()
    except EOFError:
        return {"error": "the process died"}
    finally:
        process.kill()
        process.join()


def _send(pipe: Connection, work: Callable[[], dict[str, Any]]) -> None:
    warnings.simplefilter("ignore")
    pipe.send(work())


def begun(
    parser: argparse.ArgumentParser, table: Callable[[dict[str, Any]], Iterable[str]]
) -> tuple[argparse.Namespace, dict[str, Any], Callable[[], None]]:
    """Return the options of a benchmark, the models in its file of results, and what writes them there.

    With --table it measures nothing: it prints the table of what the file has, and ends.
    """
    parser.add_argument("--json", type=Path, required=True, help="file to add measurements to")
    parser.add_argument("--table", action="store_true", help="measure nothing: print what the file has, in Markdown")
    of = parser.parse_args()
    found: dict[str, Any] = json.loads(of.json.read_text(encoding="utf-8")) if of.json.exists() else {"models": {}}
    if of.table:
        print(*table(found["models"]), sep="\n")
        raise SystemExit
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")

    def write() -> None:
        of.json.write_text(json.dumps(described() | found, indent=1) + "\n", encoding="utf-8")

    return of, found["models"], write
