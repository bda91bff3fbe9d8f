"""Mixtures of experts as people write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPERTS, WIDTH, HIDDEN = 4, 16, 8


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Plain(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), nn.Dropout(dropout)
        self.act: nn.Module = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(self.act(self.up(x))))


class Mixture(nn.Module):
    """A router and experts; how they meet is up to who derives from it."""

    def __init__(self, expert: type[nn.Module] = Gated, k: int = 2) -> None:
        super().__init__()
        self.k, self.gate = k, nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts: nn.Module = nn.ModuleList(expert() for _ in range(EXPERTS))

    def routed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = F.softmax(self.gate(x), -1).topk(self.k, -1)
        return weights / weights.sum(-1, keepdim=True), chosen


class Where(Mixture):
    """For each expert `where` it was chosen; results are added by item."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        weights, chosen = self.routed(flat)
        results = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows, nth = torch.where(chosen == i)
            results[rows] += weights[rows, nth, None] * expert(flat[rows])
        return results.view_as(x)


class IndexAdd(Mixture):
    """One-hot masks, and experts without tokens are left out."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, width = x.shape
        x = x.view(-1, width)
        weights, chosen = self.routed(x)
        final = torch.zeros((batch * length, width), dtype=x.dtype, device=x.device)
        mask = F.one_hot(chosen, num_classes=EXPERTS).permute(2, 1, 0)
        for number in range(EXPERTS):
            nth, rows = torch.where(mask[number])
            if rows.numel() == 0:
                continue
            given = x[None, rows].reshape(-1, width)
            given = self.experts[number](given) * weights[rows, nth, None]
            final.index_add_(0, rows, given.to(x.dtype))
        return final.reshape(batch, length, width), weights


class MaskAny(Mixture):
    """Scores of all experts, boolean masks, `if mask.any()`."""

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x)
        best, chosen = logits.topk(self.k, dim=-1)
        scores = F.softmax(torch.full_like(logits, float("-inf")).scatter(-1, chosen, best), dim=-1)
        final, flat, flat_scores = torch.zeros_like(x), x.view(-1, x.size(-1)), scores.view(-1, scores.size(-1))
        for i, expert in enumerate(self.experts):
            mask = (chosen == i).any(dim=-1)
            flat_mask = mask.view(-1)
            if flat_mask.any():
                given = expert(flat[flat_mask]) * flat_scores[flat_mask, i].unsqueeze(1)
                final[mask] += given.squeeze(1)
        return final


class Named(Mixture):
    """A dictionary of experts, one choice after another."""

    def __init__(self, expert: type[nn.Module] = Plain, k: int = 2) -> None:
        super().__init__(expert, k)
        self.experts = nn.ModuleDict({f"expert_{i}": expert() for i in range(EXPERTS)})

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.routed(flat)
        out = torch.zeros_like(flat)
        for j in range(self.k):
            for i, expert in enumerate(self.experts.values()):
                mask = chosen[:, j] == i
                if mask.any():
                    out[mask] += weights[mask, j].unsqueeze(-1) * expert(flat[mask])
        return out.view_as(x)


class Stacked(nn.Module):
    """A loop over stacked parameters, with routing from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN, WIDTH) / 4)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 4)
        self.act_fn = nn.SiLU()

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        final = torch.zeros_like(hidden)
        with torch.no_grad():
            mask = F.one_hot(chosen, num_classes=EXPERTS + 1).permute(2, 1, 0)
            hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert in hit:
            expert = expert[0]
            if expert == EXPERTS:
                continue
            nth, rows = torch.where(mask[expert])
            gate, up = F.linear(hidden[rows], self.gate_up_proj[expert]).chunk(2, dim=-1)
            given = F.linear(self.act_fn(gate) * up, self.down_proj[expert]) * weights[rows, nth, None]
            final.index_add_(0, rows, given.to(final.dtype))
        return final


class Block(Mixture):
    """A layer of a model whose experts are stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Stacked()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        weights, chosen = self.routed(flat)
        return x + self.experts(flat, chosen, weights).view_as(x)


class Dense(Mixture):
    """Every token goes to every expert."""

    def forward(self, x: Tensor) -> Tensor:
        scores = F.softmax(self.gate(x), -1)
        return sum((scores[..., i, None] * expert(x) for i, expert in enumerate(self.experts)), torch.zeros(()))


SPELLINGS: dict[str, type[nn.Module]] = {
    "where": Where, "index_add": IndexAdd, "mask_any": MaskAny, "dictionary": Named, "stacked": Block,
}  # fmt: skip
