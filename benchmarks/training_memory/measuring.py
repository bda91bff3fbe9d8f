"""Measure one training step by torch's own profiler, which sees every allocation, compiled code's too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

__all__ = ["Use", "step", "used"]

_MARK = "the forward is done"


@dataclass(frozen=True)
class Use:
    """Bytes that a step allocates: alive after the forward (without its result), and at most."""

    live: int
    peak: int


def step(call: Callable[[Tensor], Tensor], example: Tensor) -> Tensor:
    """Make a forward and its backward into gradients that are there already; return the detached result."""
    result = call(example)
    with record_function(_MARK):
        pass
    result.square().mean().backward()
    return result.detach()


def used(call: Callable[[Tensor], Tensor], model: nn.Module, example: Tensor) -> Use:
    """Return what a step takes."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = step(call, example)
        size = result.untyped_storage().nbytes()
        del result
    events = profiled.profiler.kineto_results.events()
    done = next(event.start_ns() for event in events if event.name() == _MARK)
    live = now = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        live = now if event.start_ns() < done else live
        peak = max(peak, now)
    return Use(live - size, peak)
