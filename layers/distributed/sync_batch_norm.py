"""Batch norms whose statistics are those of the batches of all processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, distributed, nn

from ...compat.distributed import BatchNorm, sync_batch_norm
from ...runtime.graphs import rank_local

__all__ = ["BATCH_NORMS", "SYNCHRONIZED", "SyncBatchNorm", "SyncBatchNorm1d", "SyncBatchNorm2d", "SyncBatchNorm3d"]


class SyncBatchNorm(BatchNorm):
    """Normalize, in training, by the statistics of the batches of all processes; they may be of different sizes.
    In evaluation, and where there is one process, it is the batch norm that it inherits from. On GPUs torch's own
    kernels run (`nn.SyncBatchNorm`), on CPUs what is in this file.
    """

    _fxopt_is_operation: ClassVar[bool] = True

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  its name in torch
        if not self.training or not _spans_processes():
            return super().forward(input)
        if input.device.type == "cpu":
            return self._on_cpu(input)
        return super().forward(input) if rank_local else self._on_gpu(input)

    def _on_cpu(self, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        statistics = _over_all_processes(_own_statistics(x))
        if self.track_running_stats:
            self._track(statistics)
        return _normalized(x, statistics, self.weight, self.bias, self.eps)

    def _on_gpu(self, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        running = (self.running_mean, self.running_var) if self.track_running_stats else (None, None)
        momentum = self._next_momentum() if self.track_running_stats else 0.0
        return sync_batch_norm(x, (self.weight, self.bias), running, self.eps, momentum)

    def _next_momentum(self) -> float:
        """Count the batch, and return its share in the running statistics."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if self.momentum is not None:
            return self.momentum
        return 0.0 if self.num_batches_tracked is None else 1.0 / float(self.num_batches_tracked)

    @torch.no_grad()
    def _track(self, statistics: _Statistics) -> None:
        momentum = self._next_momentum()
        unbiased = statistics.variance * (statistics.values / (statistics.values - 1).clamp(min=1))
        for running, new in ((self.running_mean, statistics.mean), (self.running_var, unbiased)):
            if running is not None:
                running.mul_(1 - momentum).add_(new, alpha=momentum)


class SyncBatchNorm1d(SyncBatchNorm, nn.BatchNorm1d):
    """`nn.BatchNorm1d` over the batches of all processes."""


class SyncBatchNorm2d(SyncBatchNorm, nn.BatchNorm2d):
    """`nn.BatchNorm2d` over the batches of all processes."""


class SyncBatchNorm3d(SyncBatchNorm, nn.BatchNorm3d):
    """`nn.BatchNorm3d` over the batches of all processes."""


SYNCHRONIZED: Mapping[type[nn.Module], type[SyncBatchNorm]] = {
    nn.BatchNorm1d: SyncBatchNorm1d,
    nn.BatchNorm2d: SyncBatchNorm2d,
    nn.BatchNorm3d: SyncBatchNorm3d,
}
"""Each batch norm of torch, and what it becomes."""

BATCH_NORMS = (*SYNCHRONIZED, nn.SyncBatchNorm)
"""All kinds of batch norms; what `SYNCHRONIZED` gives is among them."""


class _Statistics(NamedTuple):
    """Of one or more batches: how many values each channel has [1], their mean and variance [channels]."""

    values: Tensor
    mean: Tensor
    variance: Tensor


def _spans_processes() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _own_statistics(x: Tensor) -> _Statistics:
    """Return those of this process's batch, [batch, channels, ...], which may be empty; half types in float32."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    dims = [0, *range(2, x.dim())]
    count = x.numel() // x.shape[1]
    if not count:
        zero = wide.sum(dims)
        return _Statistics(zero.new_zeros(1), zero, zero)
    variance, mean = torch.var_mean(wide, dims, correction=0)
    return _Statistics(mean.new_tensor([count]), mean, variance)


def _over_all_processes(own: _Statistics) -> _Statistics:
    """Return the statistics of all batches together, from those of each; a row for each process is summed.
    Sums of squares lose digits: this is the parallel form of Chan, Golub and LeVeque, "Updating formulae and a pairwise
    algorithm for computing sample variances" (1979).
    """
    row = torch.cat(own)
    table, channels = _table(row), len(own.mean)
    counts, means, variances = table[:, :1], table[:, 1 : 1 + channels], table[:, 1 + channels :]
    total = counts.sum(0).clamp(min=1)
    shares = counts / total
    mean = (shares * means).sum(0)
    return _Statistics(total, mean, (shares * (variances + (means - mean).square())).sum(0))


def _table(row: Tensor) -> Tensor:
    """Return the rows of all processes; of this one alone while a model is checked or timed."""
    if rank_local:
        return row[None]
    nothing, rank = torch.zeros_like(row), distributed.get_rank()
    rows = [row if number == rank else nothing for number in range(distributed.get_world_size())]
    return cast("Tensor", _Sum.apply(torch.stack(rows)))


class _Sum(torch.autograd.Function):
    """The sum of a tensor over all processes; so is its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return cast("Tensor", _Sum.apply(gradients[0]))


def _normalized(x: Tensor, statistics: _Statistics, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    scale = (statistics.variance + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    shift = -statistics.mean * scale if bias is None else bias - statistics.mean * scale
    shape = [1, -1, *[1] * (x.dim() - 2)]
    return (x * scale.view(shape) + shift.view(shape)).to(x.dtype)
