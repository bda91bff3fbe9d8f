"""Time `capture` beside `torch.fx.symbolic_trace`, and beside a run of the model, of which capturing needs two."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import fx

import fxopt

from .subjects import Built

__all__ = ["tracing_times"]

_ROUNDS = 7


def tracing_times(built: Built) -> dict[str, float | None]:
    """Return the processor seconds of each, None where `symbolic_trace` fails, and how many times its capture needs.

    They are medians of rounds, in each of which every one is timed once, Python's garbage collected before it.
    """
    columns: dict[str, Callable[[], object]] = {
        "seconds": lambda: fxopt.capture(built.model, built.inputs),
        "run_seconds": lambda: _run(built),
    }
    if _works(lambda: fx.symbolic_trace(built.model)):
        columns["symbolic_trace_seconds"] = lambda: fx.symbolic_trace(built.model)
    rounds = [{name: _processor_seconds(call) for name, call in columns.items()} for _ in range(_ROUNDS)]
    found: dict[str, float | None] = {"symbolic_trace_seconds": None, "over_symbolic_trace": None}
    found |= {name: median(times[name] for times in rounds) for name in columns}
    if "symbolic_trace_seconds" in columns:
        found["over_symbolic_trace"] = median(times["seconds"] / times["symbolic_trace_seconds"] for times in rounds)
    return found


def _works(call: Callable[[], object]) -> bool:
    try:
        call()
    except Exception:
        return False
    return True


def _run(built: Built) -> object:
    with torch.no_grad():
        return built.model(**built.inputs)


def _processor_seconds(call: Callable[[], object]) -> float:
    gc.collect()
    start = time.process_time()
    call()
    return time.process_time() - start
