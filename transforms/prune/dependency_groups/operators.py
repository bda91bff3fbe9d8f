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
        tracker = self._tracker
        if tracker.silent or not any(map(tracker.knows, _tensors((args, given)))):
            return func(*args, **given)
        out = func(*args, **given)
        name = str(func._schema.name).partition("::")[2]
        if name not in _IGNORED:
            _follow(tracker, name, args, given, out)
        return out


def _follow(tracker: DimensionTracker, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    tracker.operator = name
    rule, in_place = RULES.get(name), False
    if rule is None and name.endswith("_"):
        rule, in_place = RULES.get(name[:-1]), True
    if rule is None or "out" in kwargs:
        _give_up(tracker, args, kwargs)
        return
    labels = rule(tracker, args, kwargs, out)
    found: Sequence[Labels | None] = results_of(labels)
    for result, each in zip(results_of(out), found, strict=False):
        if isinstance(result, Tensor) and each is not None:
            tracker.set(result, each)
            if in_place:
                _written(tracker, result, each)


def _written(tracker: DimensionTracker, tensor: Tensor, labels: Labels) -> None:
    """Note for the tensor that a view is of, that what was written may be other than zero."""
    base = tensor._base  # pyright: ignore[reportPrivateUsage]
    if base is not None and any(not block.zero for block in labels.blocks):
        tracker.set(base, tracker.get(base).with_zero(False))


def _give_up(tracker: DimensionTracker, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let whatever goes into an operator without a rule stay as it is."""
    for tensor in _tensors((args, kwargs)):
        tracker.keep_whole(tracker.get(tensor))


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors among arguments."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in cast("Sequence[Any]", value) for tensor in _tensors(item)]
    if isinstance(value, dict):
        return [tensor for item in cast("dict[Any, Any]", value).values() for tensor in _tensors(item)]
    return []
