"""See every operator that runs, and let its rule say what it does with dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor

from ....compat import DispatchMode
from .dimension_tracker import DimensionTracker
from .labels import Labels
from .rules import RULES, results_of

__all__ = ["Operators"]

_IGNORED = frozenset(
    "new_zeros new_ones new_full new_empty new_empty_strided empty_strided zeros ones full empty arange rand randn "
    "randint randperm linspace scalar_tensor _local_scalar_dense is_same_size sym_size sym_stride sym_numel size "
    "is_nonzero equal item record_stream set_ detach_ requires_grad_ _has_compatible_shallow_copy_type".split()
)
"""Operators whose result says nothing of the dimensions of their operands."""


class Operators(DispatchMode):
    """Follow the operators that run under this mode."""

    def __init__(self, tracker: DimensionTracker) -> None:
        super().__init__()
        self._tracker = tracker

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        out = func(*args, **given)
        name = str(func._schema.name).partition("::")[2]
        tensors = [] if self._tracker.silent or name in _IGNORED else _tensors((args, given))
        if any(map(self._tracker.knows, tensors)):
            _follow(self._tracker, name, args, given, tensors, out)
        return out


def _follow(
    tracker: DimensionTracker, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], out: Any
) -> None:
    tracker.operator, tracker.named = name, kwargs
    in_place = name not in RULES and name.endswith("_")
    rule = RULES.get(name[:-1] if in_place else name)
    if rule is None or "out" in kwargs:
        for tensor in tensors:
            tracker.keep_whole(tracker.get(tensor))
        return
    found: Sequence[Labels | None] = results_of(rule(tracker, out, *args))
    for result, each in zip(results_of(out), found, strict=False):
        if isinstance(result, Tensor) and each is not None:
            tracker.set(result, each)
            base = result._base if in_place else None  # pyright: ignore[reportPrivateUsage]
            if base is not None and any(not block.zero for block in each.blocks):
                tracker.set(base, tracker.get(base).with_zero(False))


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors among arguments."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in cast("Sequence[Any]", value) for tensor in _tensors(item)]
    return _tensors(list(cast("dict[Any, Any]", value).values())) if isinstance(value, dict) else []
