"""The numbers of small tensors on the meta device, such as positions and masks: forwards decide by them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ...compat import DispatchMode, draws_randomly, operator_name
from ...runtime.values import change_count

__all__ = ["KnownNumbers", "moved_to_meta"]

_MOST = 1 << 20
"""Of larger tensors the numbers are not kept: it would take time, and no forward decides by so many."""
_NUMBERS = "_fxopt_numbers"
_UNKNOWN = (
    "it decides by numbers that a model on the meta device does not have; give example inputs with data, on the CPU; "
    "if the numbers come from weights, use a smaller model of the same class that has its weights; of a mixture of "
    "transformers, keep experts_implementation=grouped_mm, which decides by none"
)
_ASKS = ("aten::_local_scalar_dense", "aten::nonzero")
_META, _CPU = torch.device("meta"), torch.device("cpu")


def moved_to_meta(tensor: Tensor) -> Tensor:
    """Return a tensor on the meta device; its numbers stay known if they are few."""
    moved = tensor.detach().to(_META).requires_grad_(tensor.requires_grad)
    if not tensor.is_meta:
        _keep(moved, tensor.detach().cpu())
    return moved


class KnownNumbers(DispatchMode):
    """Compute on the CPU, too, what depends only on tensors whose numbers are known; answer forwards that ask."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        known = _known(func, args, kwargs)
        if known is None:
            return _without_numbers(func, args, kwargs)
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError):  # the result is read from the numbers, or its shape depends on them
            numbers = _on_cpu(func, args, kwargs, known)
            return numbers if kwargs.get("device") == _CPU else _mapped(numbers, moved_to_meta)
        made = list(_tensors([result]))
        if all(tensor.numel() <= _MOST for tensor in made):
            for tensor, numbers in zip(made, _tensors([_on_cpu(func, args, kwargs, known)]), strict=True):
                _keep(tensor, numbers)
        return result


def _without_numbers(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    name = operator_name(func)
    if name in _ASKS and args[0].is_meta:
        raise RuntimeError(_UNKNOWN)
    if name == "aten::_grouped_mm" and args[0].is_meta:
        return _grouped_product(*args, **kwargs)
    return func(*args, **kwargs)


def _grouped_product(one: Tensor, other: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Return a product of groups without numbers: torch's own is for bfloat16 alone on the meta device."""
    groups = (offs.shape[0],) if offs is not None and one.ndim == other.ndim == 2 else one.shape[: one.ndim - 2]
    return one.new_empty((*groups, one.shape[-2], other.shape[-1]))


def _known(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[int, Tensor] | None:
    """Return by its id the numbers of each tensor that an operator is given; None where it needs others, or draws."""
    found: dict[int, Tensor] = {}
    is_meta = kwargs.get("device") == _META
    for tensor in _tensors([*args, *kwargs.values()]):
        numbers = _numbers(tensor)
        if numbers is None:
            return None
        is_meta = is_meta or tensor.is_meta
        found[id(tensor)] = numbers
    is_unset = "empty" in (operator_name(func) or "")  # it holds any numbers
    return None if not is_meta or is_unset or draws_randomly(func, args, kwargs) else found


def _on_cpu(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], known: dict[int, Tensor]) -> Any:
    args, kwargs = _mapped((args, kwargs), lambda tensor: known[id(tensor)])
    return func(*args, **{key: _CPU if value == _META else value for key, value in kwargs.items()})


def _numbers(tensor: Tensor) -> Tensor | None:
    if not tensor.is_meta:
        return tensor
    numbers, count = tensor.__dict__.get(_NUMBERS, (None, None))
    return numbers if count == change_count(tensor) else None


def _keep(tensor: Tensor, numbers: Tensor) -> None:
    if tensor.is_meta and tensor.numel() <= _MOST:
        cast("Any", tensor).__dict__[_NUMBERS] = numbers, change_count(tensor)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(cast("Sequence[Any]", value))


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        items = [_mapped(item, change) for item in cast("Sequence[Any]", value)]
        return items if isinstance(value, list) else tuple(items)
    return value
