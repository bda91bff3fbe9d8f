"""Routers: which experts each token goes to, and what each of them counts."""

from __future__ import annotations

from contextlib import nullcontext
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...compat import is_autocast
from ...errors import UsageError

__all__ = ["GATES", "Gate", "Router", "RouterOutput", "load_balancing_loss", "over_capacity", "router_z_loss"]

Gate = Literal["softmax", "sigmoid", "noisy_topk"]
GATES: tuple[Gate, ...] = ("softmax", "sigmoid", "noisy_topk")


class RouterOutput(NamedTuple):
    """What a router decided, and its losses; leading dimensions of the input are one here, `tokens`.

    Attributes:
        logits: [tokens, experts], with the noise that was drawn.
        probabilities: what the losses take for the chance of each expert [tokens, experts]; rows sum to one.
        indices: the experts of each token, the best first [tokens, k], int64.
        weights: what the output of each counts [tokens, k]; zero where an expert was full.
        load_balancing_loss: one number, see `load_balancing_loss`.
        z_loss: one number, see `router_z_loss`.
    """

    logits: Tensor
    probabilities: Tensor
    indices: Tensor
    weights: Tensor
    load_balancing_loss: Tensor
    z_loss: Tensor


class Router(nn.Module):
    """Choose `top_k` experts for each token by a linear layer without bias.

    It computes in float32 at least, whatever the dtype of the tokens and under autocast, too (Switch Transformers,
    section 2.4).

    - `softmax`: the chosen experts count with their probabilities (Shazeer et al. 2017; Fedus et al. 2021). With
      `normalize` those of the chosen sum to one: a softmax after the choice, over their logits alone (Mixtral).
      Without, it is one before the choice, over all experts (Switch).
    - `sigmoid`: each expert has a score of its own between 0 and 1; with `normalize` those of the chosen sum to one
      (DeepSeek-V3, 2024, eq. 12 to 15, without groups of experts and without the bias for the choice).
    - `noisy_topk`: `softmax`, where in training each logit gets normal noise whose scale is learned for each expert,
      softplus of a second linear layer (Shazeer et al. 2017, eq. 3 to 5).

    Args:
        dim: features of a token.
        num_experts: experts to choose from.
        top_k: experts that each token gets.
        gate: how logits become weights.
        normalize: the weights of a token sum to one.
        capacity_factor: see `MixtureOfExperts`.
    """

    _fxopt_is_operation: ClassVar[bool] = True

    noise_weight: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        gate: Gate = "softmax",
        *,
        normalize: bool = True,
        capacity_factor: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.top_k, self.gate, self.normalize, self.capacity_factor = top_k, gate, normalize, capacity_factor
        self.weight = nn.Parameter(torch.empty(num_experts, dim, device=device, dtype=dtype))
        noise = torch.empty(num_experts, dim, device=device, dtype=dtype) if gate == "noisy_topk" else None
        self.register_parameter("noise_weight", None if noise is None else nn.Parameter(noise))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight as `nn.Linear` does; the scale of the noise starts the same for all experts, softplus(0)."""
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.noise_weight is not None:
            nn.init.zeros_(self.noise_weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits [tokens, experts], chosen experts [tokens, top_k] and their weights, for x [tokens, dim]."""
        if self.top_k > self.weight.shape[0]:  # it was set later, or experts were pruned
            raise UsageError(f"top_k={self.top_k} of {self.weight.shape[0]} experts; give at most so many")
        logits = self._logits(x)
        if self.gate == "sigmoid":
            kept, indices = logits.topk(self.top_k)
            weights = _normalized(kept) if self.normalize else kept.sigmoid()
        elif self.normalize:
            kept, indices = logits.topk(self.top_k)
            weights = kept.softmax(-1)
        else:
            weights, indices = logits.softmax(-1).topk(self.top_k)
        return logits, indices, weights if self.capacity_factor is None else self._limited(indices, weights)

    def output(self, logits: Tensor, indices: Tensor, weights: Tensor) -> RouterOutput:
        """Return what `forward` gave with probabilities and losses."""
        probabilities = _normalized(logits) if self.gate == "sigmoid" else logits.softmax(-1)
        balance = load_balancing_loss(probabilities, indices, self.weight.shape[0])
        return RouterOutput(logits, probabilities, indices, weights, balance, router_z_loss(logits))

    def _logits(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        x = x.to(dtype)
        with torch.autocast(x.device.type, enabled=False) if is_autocast(x) else nullcontext():
            logits = F.linear(x, self.weight.to(dtype))
            if self.noise_weight is None or not self.training:
                return logits
            return logits + torch.randn_like(logits) * F.softplus(F.linear(x, self.noise_weight.to(dtype)))

    def _limited(self, indices: Tensor, weights: Tensor) -> Tensor:
        """Return the weights, zero where an expert is full already.
        All first choices come before all second ones, and earlier tokens before later ones (GShard, algorithm 1).
        """
        tokens, experts = indices.shape[0], self.weight.shape[0]
        limit = -(-tokens * self.top_k * (self.capacity_factor or 0.0) // experts)
        return weights.masked_fill(over_capacity(indices.t(), experts, limit).t(), 0)

    def extra_repr(self) -> str:
        """Return what `repr` shows between the brackets."""
        experts, dim = self.weight.shape
        limit = "" if self.capacity_factor is None else f", capacity_factor={self.capacity_factor}"
        return f"{dim}, num_experts={experts}, top_k={self.top_k}, gate={self.gate}, normalize={self.normalize}{limit}"


def _normalized(logits: Tensor) -> Tensor:
    """Return sigmoids over their sum, where all of them may be too small for their dtype, too."""
    return F.logsigmoid(logits).softmax(-1)


def over_capacity(indices: Tensor, num_experts: int, limit: float) -> Tensor:
    """Return which choices [rows, columns] come after the first `limit` of their expert, row by row."""
    choices, order = indices.reshape(-1).sort(stable=True)
    starts = torch.searchsorted(choices, torch.arange(num_experts, device=choices.device))
    places = torch.arange(choices.shape[0], device=choices.device) - starts.index_select(0, choices)
    return torch.zeros_like(places, dtype=torch.bool).scatter(0, order, places >= limit).view(indices.shape)


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
    """Return the mean over tokens of the squared log-sum-exp of logits [tokens, experts]; 0 without tokens.

    It keeps logits small, where rounding hurts less (ST-MoE, Zoph et al. 2022, eq. 5).
    """
    return _mean(torch.logsumexp(logits, -1).square())


def _mean(values: Tensor) -> Tensor:
    """Return the mean over tokens, the first dimension; 0 where there are none."""
    return values.sum(0) / max(values.shape[0], 1)
