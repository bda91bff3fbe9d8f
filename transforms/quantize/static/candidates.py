"""The linear layers and convolutions that can be computed with static ranges, and why others stay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import nn

from ....layers.quantized import FakeQuantized, Geometry
from ....passes.contract import word_for
from ....passes.sites import Refusal
from ....runtime.values import user_class
from ....tracing.program import Program
from ..layers import CONVOLUTIONS, Candidate, already_quantized, linear_of, obstacle

__all__ = ["candidates", "is_candidate", "objection"]

_DTYPES = (torch.float32, torch.bfloat16)


def is_candidate(module: nn.Module) -> bool:
    """Say whether a module is a linear layer or a convolution, or one that was trained to be quantized."""
    linear = linear_of(module)
    is_plain = user_class(type(module)) in CONVOLUTIONS or (linear is not None and not linear.inputs_first)
    return is_plain or isinstance(module, FakeQuantized)


def candidates(
    keep: Sequence[str], program: Program, *, runs_here: bool = True
) -> Iterator[tuple[str, nn.Module] | Refusal]:
    """Yield the layers that can be quantized, by name, to run here on the CPU if `runs_here`, and why others cannot."""
    yield from already_quantized(keep, program)
    for module in program.names.distinct:
        name = program.names.name(module)
        if not is_candidate(module) or word_for(keep, name, program) is not None:
            continue
        reason = objection(name, module, program, runs_here=runs_here)
        yield Refusal(reason, name or "(root)") if reason else (name, module)


def objection(name: str, module: nn.Module, program: Program, *, runs_here: bool = True) -> str:
    """Return why a candidate must stay as it is, or ""; see `candidates`."""
    weight = cast("nn.Parameter", cast("nn.Linear", module).weight)
    reason = obstacle(Candidate(name, module, {"weight": weight}), program)
    if reason:
        return reason
    if runs_here and weight.device.type != "cpu":
        return f"it is on {weight.device.type}, and the kernels are for CPUs"
    if weight.dtype not in _DTYPES:
        return f"its weight is of {str(weight.dtype).removeprefix('torch.')}; the kernels take float32 and bfloat16"
    if isinstance(module, CONVOLUTIONS) and Geometry.of(cast("nn.Conv2d", module)) is None:
        return "it pads with something else than as many zeros on both sides"
    return ""
