"""What a pruned model is compared with: norms over kept units alone, and routers that leave experts out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        base = type(module)
        watched = type(base.__name__, (base,), {"__call__": _call, "__module__": base.__module__})
        object.__setattr__(module, "__class__", watched)


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
    """Take statistics over kept units, wherever the values of all others are zeros."""

    def __init__(self, size: int, kept: Sequence[int]) -> None:
        super().__init__()
        self.size, self.kept = size, kept

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        result = None if rule is None else rule(self, *args, **kwargs)
        return func(*args, **kwargs) if result is None else result

    def mask(self, x: Tensor, dims: Sequence[int]) -> Tensor | None:
        """Return ones where units are kept, to be multiplied with x; None where none of these dimensions has them."""
        for dim in dims:
            if x.shape[dim] != self.size:
                continue
            mask = torch.zeros(self.size, dtype=x.dtype, device=x.device)
            mask[list(self.kept)] = 1
            shape = [1] * x.dim()
            shape[dim] = self.size
            if not bool((x * (1 - mask.view(shape))).any()):
                return mask.view(shape)
        return None


def _layer_norm(
    mode: KeptStatistics, x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None,
    bias: Tensor | None = None, eps: float = 1e-5, *_: Any,
) -> Tensor | None:  # fmt: skip
    dims = list(range(-len(normalized_shape), 0))
    mask = mode.mask(x, dims)
    return None if mask is None else _affine(_standardised(x, mask, dims, eps), weight, bias)


def _rms_norm(
    mode: KeptStatistics, x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor | None:  # fmt: skip
    dims = list(range(-len(normalized_shape), 0))
    mask = mode.mask(x, dims)
    if mask is None:
        return None
    mean = _mean(x.square(), mask, dims, keepdim=True)
    return _affine(x * torch.rsqrt(mean + (torch.finfo(x.dtype).eps if eps is None else eps)), weight, None)


def _group_norm(
    mode: KeptStatistics, x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5, *_: Any,
) -> Tensor | None:  # fmt: skip
    mask = mode.mask(x, [1])
    if mask is None:
        return None
    in_groups = x.reshape(x.shape[0], num_groups, -1)
    of_groups = mask.expand_as(x).reshape(in_groups.shape)
    made = _standardised(in_groups, of_groups, [-1], eps).view_as(x)
    shape = [1, -1, *[1] * (x.dim() - 2)]
    return _affine(made, *(None if each is None else each.view(shape) for each in (weight, bias)))


def _plain_mean(
    mode: KeptStatistics, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor | None:
    dims: list[int] = [dim] if isinstance(dim, int) else list(dim or ())
    mask = mode.mask(x, dims)
    if mask is None:
        return None
    return _mean(x if dtype is None else x.to(dtype), mask, dims, keepdim=keepdim)


def _mean(x: Tensor, mask: Tensor, dims: list[int], *, keepdim: bool) -> Tensor:
    return (x * mask).sum(dims, keepdim=keepdim) / mask.expand_as(x).sum(dims, keepdim=keepdim)


def _standardised(x: Tensor, mask: Tensor, dims: list[int], eps: float) -> Tensor:
    centred = (x - _mean(x, mask, dims, keepdim=True)) * mask
    return centred * torch.rsqrt(_mean(centred.square(), mask, dims, keepdim=True) + eps)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    scaled = x if weight is None else x * weight
    return scaled if bias is None else scaled + bias


_RULES: dict[Any, Callable[..., Tensor | None]] = {
    F.layer_norm: _layer_norm, torch.layer_norm: _layer_norm, F.rms_norm: _rms_norm, torch.rms_norm: _rms_norm,
    F.group_norm: _group_norm, torch.group_norm: _group_norm, torch.mean: _plain_mean, Tensor.mean: _plain_mean,
}  # fmt: skip
