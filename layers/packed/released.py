"""Weights whose numbers are held in packed form alone, for models that only serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...errors import StateError
from ...operators import Derived
from .weights import Packed

__all__ = ["ReleasedWeight", "release_weight"]

_ASKING = frozenset(
    "__hash__ __len__ dim element_size is_complex is_conj is_contiguous is_floating_point is_inference is_neg nelement "
    "numel requires_grad_ size stride".split()
)
_GIVES_NUMBERS = frozenset((Tensor.data, Tensor.T, Tensor.H, Tensor.mT, Tensor.mH, Tensor.real, Tensor.imag))
"""Properties that give a tensor's numbers; all others only describe it."""


class ReleasedWeight(nn.Parameter):
    """Stand for a parameter that was packed and then freed: it has shape and dtype, and lies on the meta device.

    Whatever wants its numbers raises StateError: `state_dict()`, `.to()`, copies, pickles, other forwards, gradients.

    Attributes:
        name: what it is called in the model.
    """

    name: str = ""
    requires_grad = False  # this and the shape are read at each call: as torch has them they take microseconds
    _sizes: torch.Size

    @property
    def shape(self) -> torch.Size:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the shape of the weight."""
        return self._sizes

    @staticmethod
    def of(weight: Tensor, name: str) -> ReleasedWeight:
        """Return what stands for a weight."""
        released = ReleasedWeight(torch.empty_like(weight, device="meta"), requires_grad=False)
        released.name, released._sizes = name, weight.shape
        return released

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        what = getattr(func, "__name__", str(func))
        describes = what == "__get__" and getattr(func, "__self__", None) not in _GIVES_NUMBERS
        if describes or what in _ASKING:
            return cast("Any", super()).__torch_function__(func, types, args, kwargs or {})
        own = next((each for each in (*args, *(kwargs or {}).values()) if isinstance(each, ReleasedWeight)), None)
        raise StateError(
            f"'{'a weight' if own is None else own.name}' was released after it was packed, and '{what}' wants its "
            "numbers; load the checkpoint into a fresh model for that, or optimize it without the pass 'release'"
        )


class _Held(Derived):
    """Give what was made of weights that were released, and of others as before."""

    def __init__(self, before: Derived) -> None:
        super().__init__(before.function)
        self._before = before
        self._held: dict[int, tuple[Tensor, Any]] = {}

    def hold(self, weight: Tensor, released: Tensor) -> None:
        """Keep what is made of a weight for what stands in its place."""
        if id(released) in self._held:
            return
        self._held[id(released)] = released, self._before(weight)
        self._before.forget_all()  # what is noted of a weight holds its memory

    def __call__(self, *originals: Tensor) -> Any:
        held = self._held.get(id(originals[0]))
        return self._before(*originals) if held is None else held[1]

    def forget(self, first: int) -> None:
        self._before.forget(first)

    def forget_all(self) -> None:
        self._before.forget_all()


def release_weight(module: nn.Module, own_name: str, name: str, layers: Sequence[Packed]) -> None:
    """Put what stands for a weight in its place, of which these packed layers hold what they made.

    Args:
        module: that has the weight.
        own_name: the weight's in it.
        name: the weight's in the model.
        layers: all that compute with it.
    """
    weight = module.get_parameter(own_name)
    released = ReleasedWeight.of(weight, name)
    made: dict[int, _Held] = {}  # several layers may share what they make
    for layer in layers:
        before = layer.weights
        held = before if isinstance(before, _Held) else made.setdefault(id(before), _Held(before))
        held.hold(weight, released)
        layer.weights = held
    setattr(module, own_name, released)
