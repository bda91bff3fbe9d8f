"""Which layers with two of four weights zero the kernels for sparse tensor cores compute faster: each is timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ....layers.masked import packed_weight, reason_against_sparse
from ....passes.timing import time_candidates
from ....tracing.program import Program
from ..options import Options
from .targets import Target

__all__ = ["kernel_for"]

_SECONDS = 0.1
"""So long a layer and the kernel are timed beside each other."""

_PAYS = 1.02
"""What is not clearly faster by this stays dense."""


def kernel_for(program: Program, target: Target, gone: Tensor, options: Options) -> tuple[bool, str]:
    """Say whether a layer with zeros where `gone` says is computed by the kernel, and how the report says so."""
    module = program.module(target.owner)
    reason = _obstacle(program, module, target, options)
    if reason is not None:
        return False, f"computed dense: {reason}"
    x = _received(program, module)
    if x is None:
        return False, "computed dense: no call of it is known to time the kernel on"
    ratio = _times_faster(module, target.weight.detach().masked_fill(gone, 0), x)
    if ratio < _PAYS:
        return False, f"computed dense: the sparse kernel takes {1 / ratio:.2f} times as long"
    return True, f"computed by the sparse kernel in evaluation, {ratio:.2f} times as fast"


def _obstacle(program: Program, module: nn.Module, target: Target, options: Options) -> str | None:
    found = reason_against_sparse(module, target.weight)
    if found is None and options.kept_of != (2, 4):
        return "the sparse kernel is for 2:4"
    if found is None and options.permute:
        return "its inputs are grouped in another order"
    return "the sparse kernel is for evaluation" if found is None and program.training else found


def _received(program: Program, module: nn.Module) -> Tensor | None:
    """Return what a layer is called with on the example inputs."""
    if not program.inputs:
        return None
    calls = program.recording([module]).calls.get(module, [])
    given = [call.args[0] for call in calls if len(call.args) == 1]
    return next((x for x in given if isinstance(x, Tensor) and x.dtype == module.weight.dtype), None)


def _times_faster(module: nn.Module, weight: Tensor, x: Tensor) -> float:
    """Return how many times faster the kernel is than the dense layer, at the lower end of what was measured."""
    bias: Any = getattr(module, "bias", None)

    def call(of: Tensor) -> Callable[[], object]:
        def run() -> None:
            with torch.no_grad():
                torch.nn.functional.linear(x, of, bias)
            if x.is_cuda:
                torch.cuda.synchronize(x.device)

        return run

    timings = time_candidates({"dense": call(weight), "sparse": call(packed_weight(weight))}, seconds=_SECONDS)
    return timings.ratio("dense", "sparse").low
