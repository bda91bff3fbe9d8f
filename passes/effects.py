"""Which nodes do more than give a value: what may be removed, merged or computed early, and what may not."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from ..compat import has_hooks, native_functions
from ..tracing.captured import capture_of
from ..tracing.dynamic import user_class
from ..tracing.guards import require
from .operators import is_random, mutates

if TYPE_CHECKING:
    from ..tracing.program import Program

__all__ = ["has_effects", "is_written_to", "reaches_output", "writes"]

_PURE_MODULES: tuple[type[nn.Module], ...] = (
    nn.Linear, nn.Bilinear, nn.Identity, nn.Embedding, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.Flatten,
    nn.Unflatten, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid,
    nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid, nn.Tanhshrink, nn.Softshrink,
    nn.Hardshrink, nn.Softmax, nn.LogSoftmax, nn.PReLU, nn.GLU, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
)  # fmt: skip
_MODE_MODULES: tuple[type[nn.Module], ...] = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
)  # fmt: skip
_EFFECTFUL = frozenset("manual_seed seed set_rng_state set_default_dtype set_grad_enabled _assert save load".split())


def has_effects(node: fx.Node, program: Program, home: str) -> bool:
    """Say whether running a node may do more than give its value: write, draw randomly, check, call unknown code."""
    match node.op:
        case "placeholder" | "output":
            return True
        case "get_attr":
            return False
        case "call_module":
            return _module_has_effects(program.callee(home, node), program)
        case "call_method":
            return mutates(node) or is_random(node) or not hasattr(torch.Tensor, str(node.target))
        case _:
            return mutates(node) or is_random(node) or not _is_pure_function(node.target)


def _module_has_effects(module: nn.Module, program: Program) -> bool:
    if has_hooks(module):
        return True
    capture = capture_of(module)
    if capture is None:
        return _leaf_has_effects(module)
    name = program.name_of(module)
    return any(
        has_effects(node, program, name)
        for variant in capture.variants
        for node in variant.graph.nodes
        if node.op not in ("placeholder", "output")
    )


def _leaf_has_effects(module: nn.Module) -> bool:
    if getattr(module, "inplace", False):
        return True
    kind = user_class(type(module))
    if kind in _MODE_MODULES:
        return module.training
    return kind not in _PURE_MODULES


def _is_pure_function(function: Any) -> bool:
    """Say whether a function comes from a place whose functions only compute."""
    name = getattr(function, "__name__", "")
    if name in _EFFECTFUL:
        return False
    homes: Sequence[ModuleType | type] = (
        torch, torch.nn.functional, torch.special, torch.linalg, torch.fft, torch.Tensor, operator, math,
    )  # fmt: skip
    if any(getattr(home, name, None) is function for home in homes):
        return True
    return getattr(native_functions(), name, None) is function or function in (
        getattr,
        len,
        max,
        min,
        abs,
        int,
        float,
        round,
        tuple,
        list,
    )


def writes(node: fx.Node, program: Program, home: str) -> bool:
    """Say whether a node may write into memory that other nodes read."""
    if node.op == "call_module":
        return has_effects(node, program, home)
    if node.target is require:
        return False
    return node.op in ("call_function", "call_method") and (mutates(node) or has_effects(node, program, home))


def is_written_to(node: fx.Node, program: Program, home: str) -> bool:
    """Say whether a value, or anything computed from it (which may be a view), is written to."""
    return any(writes(user, program, home) for user in _downstream(node))


def reaches_output(node: fx.Node) -> bool:
    """Say whether the module hands this very value to its caller."""
    return any(user.op == "output" for user in node.users)


def _downstream(node: fx.Node) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    pending = list(node.users)
    while pending:
        user = pending.pop()
        if user not in seen and user.op != "output":
            seen.add(user)
            pending.extend(user.users)
    return seen
