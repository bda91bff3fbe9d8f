"""Standardize what is known of graphs, over the graphs of a batch, whose size and number of triples differ widely."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

__all__ = ["Standardized"]

_EPS = 1e-5
_LEAST = 0.1
"""The share of a new batch in the running statistics, once they are of ten batches."""


class Standardized(nn.Module):
    """Subtract the mean of each feature, and divide by its deviation: of the batch in training, else running ones.

    Graphs without triples do not count. A batch with one graph that counts is compared with the running statistics,
    which it changes. The statistics are kept in float32 at least: counts of triples are too large for float16.
    """

    _fxopt_is_operation: ClassVar[bool] = True

    mean: Tensor
    variance: Tensor
    batches: Tensor

    def __init__(self, features: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.features = features
        self.register_buffer("mean", torch.zeros(features, device=device))
        self.register_buffer("variance", torch.ones(features, device=device))
        self.register_buffer("batches", torch.zeros((), device=device))

    def reset_parameters(self) -> None:
        """Forget the running statistics."""
        with torch.no_grad():
            self.mean.zero_()
            self.variance.fill_(1)
            self.batches.zero_()

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Return standardized x [graphs, features]; `counts` [graphs, 1] are true where a graph counts."""
        if not self.training:
            return (x - self.mean) * (self.variance + _EPS).rsqrt()
        own = counts.to(x.dtype)
        number = own.sum()
        mean = (x * own).sum(0) / number.clamp(min=1)
        variance = ((x - mean).square() * own).sum(0) / number.clamp(min=1)
        with torch.no_grad():
            self._update(mean.detach().to(self.mean.dtype), variance.detach().to(self.mean.dtype), number)
        alone = number < 2
        mean = torch.where(alone, self.mean.to(x.dtype), mean)
        variance = torch.where(alone, self.variance.to(x.dtype), variance)
        return (x - mean) * (variance + _EPS).rsqrt()

    def _update(self, mean: Tensor, variance: Tensor, number: Tensor) -> None:
        """Take a batch into the running statistics: all batches count alike at first."""
        counts = (number > 0).to(self.mean.dtype)
        self.batches.add_(counts)
        share = (1 / self.batches.clamp(min=1)).clamp(min=_LEAST) * counts
        apart = mean - self.mean
        self.mean.add_(share * apart)
        self.variance.mul_(1 - share).add_(share * (variance + (1 - share) * apart.square()))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            now = getattr(self, name)
            if now.is_floating_point() and now.dtype.itemsize < 4:
                setattr(self, name, buffer.to(now.device))
        return self

    def extra_repr(self) -> str:
        return str(self.features)
