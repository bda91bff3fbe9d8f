"""The loss and its gradients a chunk of rows at a time: only the logits of one chunk are there at once.
After Liger Kernel's `FusedLinearCrossEntropy` (Hsu et al., Efficient Triton Kernels for LLM Training, 2024).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ...errors import UsageError

__all__ = ["ARGUMENTS", "Head", "Rows", "gradients", "losses", "rows_in_torch"]

_LOGITS = 2**22
"""In a chunk, by default: 16 MiB of float32, which is enough rows for the products to be fast."""


ARGUMENTS = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight, SymInt ignore_index, "
    "float label_smoothing, float softcap, float z_loss, SymInt chunk"
)
"""Those of a head, as all the operators take them."""


@dataclass(frozen=True)
class Head:
    """A linear head with its targets, and how the loss is told to take them."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    class_weight: Tensor | None
    ignore_index: int
    label_smoothing: float
    softcap: float
    z_loss: float
    chunk: int

    @property
    def starts(self) -> range:
        """Return where chunks begin."""
        return range(0, self.x.shape[0], self.step)

    @property
    def step(self) -> int:
        """Return how many rows a chunk has."""
        return self.chunk or max(16, _LOGITS // max(1, self.weight.shape[0]))

    def rows(self, start: int, kept: Tensor) -> Tensor:
        """Return a chunk of x, zero where rows are ignored: what they hold, infinities too, counts nowhere."""
        return self.x[start : start + self.step].where(kept[:, None], 0)

    def logits(self, rows: Tensor) -> Tensor:
        """Return the logits of a chunk before the softcap, in float32 at the least."""
        found = torch.nn.functional.linear(rows, self.weight, self.bias)
        return found.to(wide(found.dtype))

    def kept(self, start: int) -> Tensor:
        """Return which rows of a chunk count, or raise a UsageError for no class; on GPUs that gives nan."""
        target, classes = self.target[start : start + self.step], self.weight.shape[0]
        kept = target != self.ignore_index
        wrong = target[kept & ((target < 0) | (target >= classes))] if target.is_cpu else target[:0]
        if wrong.numel():
            raise UsageError(
                f"linear_cross_entropy: target holds {int(wrong[0])}; pass 0 to {classes - 1}, or {self.ignore_index}"
            )
        return kept


Rows: TypeAlias = Callable[[Tensor, Tensor, Tensor, Head, bool], Tensor]
"""Take logits, targets that are in range, a scale for each row, the head, and whether gradients are wanted; return
losses, not scaled, and write the scaled gradients into the logits.
"""


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sums are taken in."""
    return torch.promote_types(dtype, torch.float32)


def rows_in_torch(logits: Tensor, target: Tensor, scale: Tensor, head: Head, wants_gradients: bool) -> Tensor:
    """Compute losses of rows, and gradients in the place of the logits."""
    slope, smoothing, weights = None, head.label_smoothing, head.class_weight
    if head.softcap:
        logits.div_(head.softcap).tanh_()
        slope = 1 - logits.square() if wants_gradients else None
        logits.mul_(head.softcap)
    index = target[:, None]
    picked, shares = logits.gather(1, index), logits.new_full((), 1 - smoothing)
    if weights is not None:
        weights = weights.to(logits.dtype)
        shares = shares * weights[target][:, None]
    expected, whole = shares * picked, shares
    if smoothing:
        of_all = logits.mean(1, keepdim=True) if weights is None else logits @ weights[:, None] / len(weights)
        expected = expected + smoothing * of_all
        whole = shares + (smoothing if weights is None else smoothing * weights.mean())
    largest = logits.amax(1, keepdim=True)
    total = logits.sub_(largest).exp_().sum(1, keepdim=True)
    log_total = total.log() + largest
    if wants_gradients:
        logits.mul_(scale[:, None] * (whole + 2 * head.z_loss * log_total) / total)
        if smoothing:
            logits.sub_(scale[:, None] * smoothing * (1 if weights is None else weights) / logits.shape[1])
        logits.scatter_add_(1, index, (-shares * scale[:, None]).to(logits.dtype))
        if slope is not None:
            logits.mul_(slope)
    return (whole * log_total - expected + head.z_loss * log_total.square()).squeeze(1)


def losses(head: Head, rows: Rows = rows_in_torch) -> Tensor:
    """Return the loss of each row, zero for those that are ignored."""
    found = head.x.new_empty(head.x.shape[0], dtype=wide(head.x.dtype))
    for start in head.starts:
        kept = head.kept(start)
        target = head.target[start : start + head.step].where(kept, 0)
        logits, scale = head.logits(head.rows(start, kept)), kept.to(found.dtype)
        found[start : start + head.step] = rows(logits, target, scale, head, False).where(kept, 0)
    return found


def gradients(head: Head, upstream: Tensor | None, rows: Rows = rows_in_torch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the sum of the losses and its gradients for x, weight and bias, the latter float32 at the least.
    `upstream` is a factor for the gradient of each row; the gradient of no bias is empty.
    """
    x, weight, bias = head.x, head.weight, head.bias
    total = x.new_zeros((), dtype=wide(x.dtype))
    of_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    of_weight = weight.new_zeros(weight.shape, dtype=total.dtype)
    of_bias = weight.new_zeros(0 if bias is None else weight.shape[0], dtype=total.dtype)
    for start in head.starts:
        end = start + head.step
        kept = head.kept(start)
        scale = kept.to(total.dtype) if upstream is None else upstream[start:end].where(kept, 0)
        chunk = head.rows(start, kept)
        logits = head.logits(chunk)
        target = head.target[start:end].where(kept, 0)
        total += rows(logits, target, scale, head, True).where(kept, 0).sum()
        narrow = logits.to(x.dtype)
        torch.mm(narrow, weight, out=of_x[start:end])
        _accumulate(of_weight, narrow, chunk)
        if bias is not None:
            of_bias += logits.sum(0)
        del logits, narrow, chunk
    return total, of_x, of_weight, of_bias


def _accumulate(of_weight: Tensor, of_logits: Tensor, x: Tensor) -> None:
    if of_weight.dtype == x.dtype:
        of_weight.addmm_(of_logits.t(), x)
    elif x.dtype == torch.float16:  # a product of many rows overflows, and a mean divides only later
        of_weight.addmm_(of_logits.t().to(of_weight.dtype), x.to(of_weight.dtype))
    else:
        of_weight.add_(of_logits.t() @ x)
