"""What is packed, when packed weights are computed with, and what all packed layers have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...compat import runs_kernels, wants_gradients
from ...operators import Keeping, derived, why_unseen
from .activations import NO_ACTIVATION, Activation

__all__ = ["NOTHING", "BySettings", "Packed", "can_be_packed", "why_not_packed"]

NOTHING = NO_ACTIVATION.post_op

_PLAIN = (Tensor, nn.Parameter)


def why_not_packed(weight: Tensor) -> str:
    """Return why kernels do not take a weight, or miss a change of it; "" where it can be packed."""
    unseen = why_unseen(weight)
    if unseen:
        return f"its weight {unseen}"
    if weight.dtype is not torch.float32:
        return f"its weight is of {str(weight.dtype).removeprefix('torch.')}; only float32 is packed"
    if weight.device.type not in ("cpu", "meta"):
        return f"its weight is on {weight.device}; kernels for packed weights are for CPUs"
    return "" if weight.numel() else "its weight is empty"


def can_be_packed(weight: Tensor) -> bool:
    """Say whether a weight can be packed here and now."""
    return weight.is_cpu and runs_kernels() and not why_not_packed(weight)


def _is_row(bias: Tensor, count: int) -> bool:
    return (
        bias.dtype is torch.float32 and type(bias) in _PLAIN and bias.is_cpu and bias.shape == (count,)
        and bias.is_contiguous()
    )  # fmt: skip


class BySettings(Keeping):
    """Be equal, copied and pickled by `settings`, what it was made with; what it keeps is left out."""

    settings: tuple[Any, ...]

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, BySettings) and self.settings == other.settings

    def __hash__(self) -> int:
        return hash((type(self), self.settings))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(str, self.settings))})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.settings


class Packed(BySettings):
    """Compute a layer on a weight that is packed when it is first needed, and anew where it was changed. A graph calls
    it with the layer's own tensors; copies and pickles begin without what is packed. `settings` tell one from another.
    """

    operator = "packed"

    def __init__(self, settings: tuple[Any, ...], pack: Callable[..., Any], activation: Activation) -> None:
        self.settings, self.activation, self.post_op = settings, activation, activation.post_op
        self.weights = derived(pack, 1)
        self._activates = bool(activation.operator) and not activation.kernel
        self.activate_in_place = activation.in_place

    @staticmethod
    def takes(
        x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None, outputs: int,
        dtypes: tuple[torch.dtype, ...] = (torch.float32,),
    ) -> bool:  # fmt: skip
        """Say whether kernels may compute with these: nobody wants gradients, and they are plain tensors of `dtypes`.
        Kernels read a bias from where it begins: one number for each of the outputs, in order.
        """
        if wants_gradients(x, weight, bias, other):
            return False
        return (
            type(x) is Tensor
            and x.dtype in dtypes
            and x.is_cpu
            and x.layout is torch.strided
            and x.numel() > 0
            and (bias is None or _is_row(bias, outputs))
            and (other is None or (type(other) is Tensor and other.dtype in dtypes and other.is_cpu))
            and runs_kernels()
        )

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, other: Tensor | None = None) -> Tensor:
        """Compute the layer with what stands behind it."""
        raise NotImplementedError

    def computed(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the layer alone as torch does."""
        raise NotImplementedError

    def plainly(self, x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None = None) -> Tensor:
        """Compute everything as torch does."""
        if torch.is_grad_enabled() and weight.requires_grad and not torch.compiler.is_dynamo_compiling():
            # An optimizer may step next, and torch does not count what fused ones write.
            self.weights.forget(id(weight))
        if weight.is_meta and x.is_cpu and not x.numel() and runs_kernels():
            result = self._of_nothing(x, weight, bias, other)
            if result is not None:
                return result
        result = self.computed(x, weight, bias)
        return self.activation(result if other is None else self.joined(result, other))

    def _of_nothing(self, x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None) -> Tensor | None:
        """Return the empty result of an empty input, for which a weight's numbers are not wanted; None: they are."""
        if wants_gradients(x, bias, other):
            return None
        shapes = [None if each is None else torch.empty_like(each, device="meta") for each in (x, bias, other)]
        on_meta, bias, other = shapes
        plain = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        result = self.plainly(cast("Tensor", on_meta), plain, bias, other)
        return None if result.numel() else torch.empty_like(result, device=x.device)

    def joined(self, result: Tensor, other: Tensor) -> Tensor:
        """Return the layer's result with what is added to it."""
        return result + other

    def finished(self, result: Tensor, dtype: torch.dtype, other: Tensor | None) -> Tensor:
        """Return what stands behind the kernel's result, which is new and may be written into."""
        if other is None and self._activates:
            result = self.activate_in_place(result)
        if result.dtype is not dtype:  # asked here: `to` takes longer to find that out
            result = result.to(dtype)
        if other is None:
            return result
        if other.shape != result.shape:
            return self.activation(result + other)
        return self.activate_in_place(result.add_(other))
