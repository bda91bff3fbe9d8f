"""What a pruned model is compared with: norms over kept units alone, and routers that leave experts out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["KeptStatistics", "WithoutExperts", "under_mode"]

_MODES = "_fxopt_modes"


def under_mode(module: nn.Module, mode: TorchFunctionMode) -> None:
    """Let the calls of a module run under a mode, too; those in it are not asked."""
    known: tuple[TorchFunctionMode, ...] = vars(module).get(_MODES, ())
    vars(module)[_MODES] = (*known, mode)
    if not known:
        _watch(module)


def _watch(module: nn.Module) -> None:
    base = type(module)
    own = {"__call__": _call, "__deepcopy__": _copied, "__module__": base.__module__}
    object.__setattr__(module, "__class__", type(base.__name__, (base,), own))


def _copied(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy a module as its own class does; the copy runs under copies of the modes."""
    watched = type(self)
    object.__setattr__(self, "__class__", watched.__bases__[0])
    try:
        made = copy.deepcopy(self, memo)
    finally:
        object.__setattr__(self, "__class__", watched)
    _watch(made)
    return made


def _call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with ExitStack() as stack:
        for mode in vars(self)[_MODES]:
            stack.enter_context(mode)
        return nn.Module.__call__(self, *args, **kwargs)


class WithoutExperts(TorchFunctionMode):
    """Put minus infinity where a router of `size` experts gives the logits of those that are gone."""

    def __init__(self, size: int, kept: Sequence[int]) -> None:
        super().__init__()
        self._size, self._kept = size, list(kept)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not F.linear or result.shape[-1] != self._size:
            return result
        gone = torch.ones(self._size, dtype=torch.bool, device=result.device)
        gone[self._kept] = False
        return result.masked_fill(gone, float("-inf"))


class KeptStatistics(TorchFunctionMode):
    """Take statistics over kept units, wherever the values of all others are zeros: these stay zeros."""

    def __init__(self, size: int, kept: Sequence[int]) -> None:
        super().__init__()
        self.size, self.kept = size, list(kept)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        named: dict[str, Any] = {_PARAMETERS.get(name, name): value for name, value in kwargs.items()}
        result = None if rule is None else rule(self, func, *args, **named)
        return func(*args, **kwargs) if result is None else result

    def dim_in(self, x: Tensor, dims: Iterable[int]) -> int | None:
        """Return the one of some dimensions that has the units; None where none has, or others than these are there."""
        gone = [place for place in range(self.size) if place not in self.kept]
        having = (dim for dim in dims if x.shape[dim] == self.size)
        return next((dim for dim in having if not bool(self.of(x, dim, gone).any())), None)

    def of(self, value: Any, dim: int, places: Sequence[int] | None = None) -> Any:
        """Return a tensor with the kept units alone, or with those at other places; what is no tensor as it is."""
        if not isinstance(value, Tensor):
            return value
        chosen = self.kept if places is None else places
        return value.index_select(dim, torch.tensor(chosen, dtype=torch.long, device=value.device))

    def among_zeros(self, kept: Tensor, like: Tensor, dim: int) -> Tensor:
        """Return values of the kept units with zeros in the places of the others."""
        return torch.zeros_like(like, dtype=kept.dtype).index_copy(
            dim, torch.tensor(self.kept, device=like.device), kept
        )


def _norm(mode: KeptStatistics, func: Any, x: Tensor, shape: Sequence[int], *given: Any, **named: Any) -> Tensor | None:
    dim = mode.dim_in(x, range(-len(shape), 0))
    if dim is None:
        return None
    kept = list(shape)
    kept[dim] = len(mode.kept)
    named = {name: mode.of(value, dim) for name, value in named.items()}
    return mode.among_zeros(func(mode.of(x, dim), kept, *(mode.of(each, dim) for each in given), **named), x, dim)


def _group_norm(mode: KeptStatistics, func: Any, x: Tensor, groups: int, *given: Any, **named: Any) -> Tensor | None:
    if mode.dim_in(x, [1]) is None:
        return None
    left = len({place * groups // mode.size for place in mode.kept})
    named = {name: mode.of(value, 0) for name, value in named.items()}
    return mode.among_zeros(func(mode.of(x, 1), left, *(mode.of(each, 0) for each in given), **named), x, 1)


def _mean(mode: KeptStatistics, func: Any, x: Tensor, dim: Any = None, *given: Any, **named: Any) -> Tensor | None:
    found = mode.dim_in(x, [dim] if isinstance(dim, int) else dim or ())
    return None if found is None else func(mode.of(x, found), dim, *given, **named)


_PARAMETERS = {"input": "x", "axis": "dim", "normalized_shape": "shape", "num_groups": "groups"}
"""What rules call the arguments that torch's functions take by name."""

_RULES: dict[Any, Callable[..., Tensor | None]] = {
    **dict.fromkeys((F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm), _norm),
    **dict.fromkeys((F.group_norm, torch.group_norm), _group_norm),
    **dict.fromkeys((torch.mean, Tensor.mean), _mean),
}
