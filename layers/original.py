"""A tensor that something else was computed from: it reads like any other, and writing into it computes that anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ..compat import torch_functions_off
from ..passes.tree import flatten, map_tensors
from ..tracing.held_tensors import change_count

__all__ = ["OriginalTensor"]


class OriginalTensor(Tensor):
    """Stand for a plain tensor, and call a function whenever that one was written to, through a view or `.data` too.

    Whatever shares memory with the tensor stands for it as well; everything else that is computed is a plain tensor.
    As a numpy array it is read-only, for writes into that could not be seen.
    """

    plain: Tensor
    written: Callable[[], None]

    @classmethod
    def of(cls, plain: Tensor, written: Callable[[], None]) -> OriginalTensor:
        """Return a stand-in for `plain`; `written` is called after each write into it."""
        stand_in = plain.detach().as_subclass(cls)
        stand_in.plain, stand_in.written = plain, written
        return stand_in

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = flatten([args, kwargs or {}]).values()
        originals = [leaf for leaf in found if isinstance(leaf, OriginalTensor)]
        if func == cast("Any", Tensor.data).__set__:
            # It would give the stand-in other memory, and leave the tensor itself as it is.
            func, args = _assigned, tuple(args)
        before = [change_count(original.plain) for original in originals]
        with torch_functions_off():
            result = func(*map_tensors(args, _plain), **map_tensors(dict(kwargs or {}), _plain))
        for original, count in zip(originals, before, strict=True):
            if count is None or change_count(original.plain) != count:
                original.written()
        return _standing_in(result, originals)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.plain if isinstance(tensor, OriginalTensor) else tensor


def _standing_in(result: Any, originals: Sequence[OriginalTensor]) -> Any:
    """Return a result in which what shares memory with an original stands for it."""
    if isinstance(result, (tuple, list)) and type(cast("object", result)) in (tuple, list):
        return type(cast("Any", result))(_standing_in(item, originals) for item in cast("list[Any]", result))
    if isinstance(result, np.ndarray):
        cast("Any", result).setflags(write=False)
    if not isinstance(result, Tensor):
        return cast("Any", result)
    for original in originals:
        place = original.plain.untyped_storage().data_ptr()
        if place and result.untyped_storage().data_ptr() == place:
            return OriginalTensor.of(result, original.written)
    return result


def _assigned(tensor: Tensor, value: Tensor) -> None:
    if tensor.shape != value.shape:
        raise ValueError(f"a folded tensor keeps its shape {list(tensor.shape)}; it cannot become {list(value.shape)}")
    with torch.no_grad():
        tensor.copy_(value)
