"""What a training adds to its loss so that routers use all experts and their logits stay small."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["load_balancing_loss", "router_z_loss"]


def load_balancing_loss(probabilities: Tensor, indices: Tensor, num_experts: int) -> Tensor:
    """Return the load-balancing loss: 1 where all experts are used alike, up to `num_experts` where one is.

    It is the sum over experts of the share of choices that fell on an expert, times its mean probability, times their
    number (Switch Transformers, Fedus et al. 2021, eq. 4 to 6; GShard, Lepikhin et al. 2020, section 2.2). With several
    choices a token the shares are of all choices, as in Megablocks and DeepSeek: `transformers` does not divide by k.

    Args:
        probabilities: of all experts for each token [tokens, experts]; the gradient flows through these.
        indices: the experts that each token chose [tokens, k], int64.
        num_experts: how many experts there are.

    Returns:
        One number; 0 where there are no tokens.
    """
    choices = indices.reshape(-1)
    counts = probabilities.new_zeros(num_experts).scatter_add(0, choices, probabilities.new_ones(choices.shape))
    shares = counts / counts.sum().clamp(min=1)
    return num_experts * (shares * _mean(probabilities)).sum()


def router_z_loss(logits: Tensor) -> Tensor:
    """Return the mean over tokens of the squared log-sum-exp of their logits [tokens, experts].

    It keeps logits small, where rounding hurts less (ST-MoE, Zoph et al. 2022, eq. 5). Without tokens it is 0.
    """
    return _mean(torch.logsumexp(logits, -1).square())


def _mean(values: Tensor) -> Tensor:
    """Return the mean over tokens, the first dimension; 0 where there are none."""
    return values.sum(0) / max(values.shape[0], 1)
