"""Which nodes and modules may draw random numbers; what is not known may."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx, nn

from .guards import require
from .leaves import is_container, is_leaf, is_library, runs_as_sequential
from .rollback import keep

__all__ = ["draws", "module_draws"]

_WORDS = (
    "rand", "drop", "bernoulli", "multinomial", "normal", "poisson", "rrelu", "uniform", "exponential", "geometric",
    "cauchy", "gumbel", "fractional", "attention", "lstm", "gru", "rnn", "binomial",
)  # fmt: skip
_HOMES: tuple[Any, ...] = (
    torch, torch.nn.functional, torch.Tensor, torch.special, torch.linalg, torch.fft, operator, math,
)  # fmt: skip
_BUILTINS = (getattr, len, list, tuple, bool, int, float, max, min, abs, round, slice, setattr, require, keep)


def draws(node: fx.Node) -> bool:
    """Tell whether a node that calls no module may draw random numbers."""
    if node.op not in ("call_function", "call_method"):
        return False
    function: Any = node.target
    name = function if isinstance(function, str) else getattr(function, "__name__", "")
    if any(word in name for word in _WORDS):
        return True
    if node.op == "call_method":
        return not hasattr(torch.Tensor, name)
    return function not in _BUILTINS and not any(getattr(home, name, None) is function for home in _HOMES)


def module_draws(module: nn.Module) -> bool:
    """Tell whether a module itself, and not one inside it, may draw random numbers."""
    if is_container(module) or runs_as_sequential(module):
        return False
    name = type(module).__name__.lower()
    known = is_leaf(module) and is_library(type(module))
    return not known or any(word in name for word in _WORDS) or "transformer" in name
