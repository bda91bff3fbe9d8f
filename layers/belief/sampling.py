"""Draws of binary units, in two forms: each by itself, and from noise that is drawn for many steps at once."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["bernoulli_sigmoid", "logistic_"]


def bernoulli_sigmoid(logits: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Return the probabilities of binary units, and a sample, 0 or 1; both in the shape and dtype of the logits.

    They are compared in float32 at least: in narrow dtypes, uniform numbers are 0 far too often.
    `fxopt.cuda_ops.bernoulli_sigmoid` draws alike on every device, from a key; on a CPU it takes ten times as long for
    the few hundred units of a small batch, and as long for a million.
    """
    probability = torch.sigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32)))
    uniform = torch.empty_like(probability).uniform_(generator=generator)
    return probability.to(logits.dtype), (uniform < probability).to(logits.dtype)


def logistic_(noise: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fill a tensor, in place, with logistic noise: `noise < logits` is 1 with the probability `sigmoid(logits)`.

    Drawn for many steps at once, it leaves one comparison for each step, without a sigmoid.
    """
    return noise.uniform_(generator=generator).logit_()
