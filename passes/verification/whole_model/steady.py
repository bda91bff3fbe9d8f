"""Random draws that are the same wherever, in whatever order and together with whatever else they are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....compat import DispatchMode, draws_randomly

__all__ = ["SteadyDraws"]

_UNIFORM = 1e-3
"""Every uniform draw: a dropout keeps what it is given, and scales it."""

_NORMAL = 0.7
"""Every normal draw."""


class SteadyDraws(DispatchMode):
    """Serve every random operator one and the same number: members that run as one still draw what they drew alone.

    Attributes:
        is_sure: whether only operators ran that draw the same in any order.
        has_drawn: whether any random operator ran.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_sure, self.has_drawn = True, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not draws_randomly(func, args, kwargs) or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        self.has_drawn = True
        rule = _RULES.get(func.overloadpacket)
        if rule is not None:
            return rule(func, args, kwargs)
        self.is_sure = False
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return func(*args, **kwargs)


def _filled(value: float) -> Callable[[Any, Any, Any], Tensor]:
    return lambda func, args, kwargs: func(*args, **kwargs).fill_(value)


def _dropout(_: Any, args: Any, __: Any) -> tuple[Tensor, Tensor]:
    source, chance = args[0], args[1]
    is_kept = args[2] is False or 1 - chance > _UNIFORM
    factor = 1.0 if args[2] is False else 1 / (1 - chance) if is_kept else 0.0
    return source * factor, torch.full_like(source, is_kept, dtype=torch.bool)


def _bernoulli(func: Any, args: Any, kwargs: Any) -> Tensor:
    is_in_place = func._schema.is_mutable  # then the operand is no probability, and torch leaves out the default one
    chance = args[1] if len(args) > 1 else kwargs.get("p", 0.5 if is_in_place else None)
    target = args[0] if is_in_place else torch.empty_like(args[0])
    drawn = (args[0] if chance is None else torch.as_tensor(chance)) > _UNIFORM
    return target.copy_(drawn)


def _normal(_: Any, args: Any, kwargs: Any) -> Tensor:
    mean, deviation = args[0], args[1] if len(args) > 1 else kwargs.get("std", 1.0)
    return mean + _NORMAL * deviation


def _uniform_in_place(_: Any, args: Any, kwargs: Any) -> Tensor:
    low = args[1] if len(args) > 1 else kwargs.get("from", 0.0)
    high = args[2] if len(args) > 2 else kwargs.get("to", 1.0)
    return args[0].fill_(low + (high - low) * _UNIFORM)


def _normal_in_place(_: Any, args: Any, kwargs: Any) -> Tensor:
    mean = args[1] if len(args) > 1 else kwargs.get("mean", 0.0)
    deviation = args[2] if len(args) > 2 else kwargs.get("std", 1.0)
    return args[0].fill_(mean + _NORMAL * deviation)


_aten = torch.ops.aten
_RULES: dict[Any, Callable[[Any, Any, Any], Any]] = {
    _aten.bernoulli: _bernoulli,
    _aten.bernoulli_: _bernoulli,
    _aten.exponential_: _filled(1.0),
    _aten.native_dropout: _dropout,
    _aten.normal: _normal,
    _aten.normal_: _normal_in_place,
    _aten.rand: _filled(_UNIFORM),
    _aten.rand_like: _filled(_UNIFORM),
    _aten.randn: _filled(_NORMAL),
    _aten.randn_like: _filled(_NORMAL),
    _aten.uniform_: _uniform_in_place,
}
