"""Batch norms as graphs compute them: folded into a layer, with a check on how many dimensions an input has."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..errors import GuardError
from ..runtime.guards import require

__all__ = ["CHECKS", "Fold", "Folds", "expect_dimensions", "expect_one_of"]


@dataclass(frozen=True)
class Fold:
    """Compute weight and bias of a layer that does what a layer and a batch norm in evaluation do, in float64."""

    eps: float
    biased: bool  # the layer has a bias
    scaled: bool  # the norm has a weight
    shifted: bool  # the norm has a bias
    transposed: bool = False  # the layer's weight is [in, out / groups, ...]
    groups: int = 1  # of a convolution; they matter where it is transposed, and behind the norm
    masked: tuple[str, ...] = ()  # the layer's tensors of which elements are zero, whatever is written there
    before: bool = False  # the norm stands before the layer: w' = w * scale, b' = b + w @ shift
    counted: bool = True  # the norm has the number of batches

    def __call__(self, weight: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        """Return weight and bias.
        `rest` is the layer's bias, the norm's weight, bias, mean and variance [channels], the number of batches (torch
        counts that as written to in training, not the statistics), and of each that is masked, which elements are zero.
        """
        wide = iter([tensor.double() for tensor in self._zeroed((weight, *rest))])
        own, absent = next(wide), ((self.biased, 0.0), (self.scaled, 1.0), (self.shifted, 0.0))
        bias, gamma, beta = (next(wide) if is_there else neutral for is_there, neutral in absent)
        mean, variance = next(wide), next(wide)
        scale = gamma / (variance + self.eps).sqrt()
        if self.before:
            made = bias + (own * self._spread(beta - mean * scale, own)).flatten(1).sum(1)
        else:
            made = (bias - mean) * scale + beta
        return (own * self._spread(scale, own)).to(weight.dtype), made.to(weight.dtype)

    @property
    def layer_tensors(self) -> tuple[str, ...]:
        """Return what the layer's own tensors are called in it, in the order of the call."""
        return ("weight", "bias") if self.biased else ("weight",)

    @property
    def norm_tensors(self) -> tuple[str, ...]:
        """Return what the tensors that the norm computes with are called in it."""
        counts = ["num_batches_tracked"] * self.counted
        return (*["weight"] * self.scaled, *["bias"] * self.shifted, "running_mean", "running_var", *counts)

    def _zeroed(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the tensors with zeros where masks want them, without the masks."""
        count = len(tensors) - len(self.masked)
        gone = dict(zip(self.masked, tensors[count:], strict=True))
        own = [
            tensor.masked_fill(gone[name].to(tensor.device), 0) if name in gone else tensor
            for name, tensor in zip(self.layer_tensors, tensors, strict=False)
        ]
        return (*own, *tensors[len(own) : count])

    def _spread(self, values: Tensor, weight: Tensor) -> Tensor:
        """Return one value for each channel that the norm is for, in a shape that multiplies the weight."""
        if not (self.transposed or self.before):
            return values.reshape(-1, *[1] * (weight.ndim - 1))
        rows = values.view(self.groups, -1).repeat_interleave(weight.shape[0] // self.groups, 0)
        return rows.reshape(*rows.shape, *[1] * (weight.ndim - 2))


@dataclass(frozen=True)
class Folds:
    """Compute the weight and bias of a layer that does what a norm `before`, the layer and a norm `behind` do."""

    before: Fold
    behind: Fold

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Return weight and bias; what `before` is called with, then what `behind` wants of its norm."""
        count = len(tensors) - len(self.behind.norm_tensors)
        weight, bias = self.before(tensors[0].double(), *tensors[1:count])
        weight, bias = self.behind(weight, bias, *tensors[count:])
        return weight.to(tensors[0].dtype), bias.to(tensors[0].dtype)


def expect_dimensions(found: int, count: int) -> None:
    """Raise a GuardError where an input has more or fewer dimensions than a batch norm was folded for."""
    if found != count:
        # Two dimensions may be a batch without positions, which BatchNorm1d takes, and need not lack that of the batch.
        unbatched = found == count - 1 and found > 2
        advice = "add that of the batch" if unbatched else "give fxopt.optimize example_inputs with as many"
        raise GuardError(
            f"a batch norm was folded for inputs of {count} dimensions, but this input has {found}; {advice}"
        )


def expect_one_of(found: int, *dimensions: int) -> None:
    """Raise a ValueError where a batch norm's input has `found` dimensions, and none of those that it takes."""
    if found not in dimensions:
        raise ValueError(f"expected {' or '.join(f'{each}D' for each in dimensions)} input (got {found}D input)")


CHECKS = (require, expect_dimensions, expect_one_of)
"""What graphs call to raise, or do nothing."""
