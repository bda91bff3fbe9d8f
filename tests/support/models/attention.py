"""Attention that forwards write out, in many decompositions."""

from __future__ import annotations

import math
from functools import partial
from random import Random

import torch
import torch.nn.functional as F
from support.samples import Sample, rows
from torch import Tensor, nn

WIDTH, HEADS = 8, 2


class Attends(nn.Module):
    """Queries, keys and values of an input, scores, weights and results."""

    def __init__(self, projected: str, scores: str, mask: str, product: str) -> None:
        super().__init__()
        self.projected, self.scores, self.mask, self.product = projected, scores, mask, product
        if projected == "one":
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.tril(torch.ones(1, 1, 48, 48)))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1) if self.projected == "one" else (self.q(x), self.k(x), self.v(x))
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in parts)
        weights = self.hidden(self.scored(q, k), q.size(-2)).softmax(-1)
        attended = torch.einsum("bhij,bhjd->bhid", weights, v) if self.product == "einsum" else weights @ v
        return self.out(attended.transpose(1, 2).flatten(2))

    def scored(self, q: Tensor, k: Tensor) -> Tensor:
        if self.scores == "divided":
            return q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        if self.scores == "queries":
            return torch.matmul(q * 0.5, k.mT)
        if self.scores == "einsum":
            return torch.einsum("bhid,bhjd->bhij", q, k) * 0.5
        return q @ k.transpose(2, 3)

    def hidden(self, scores: Tensor, size: int) -> Tensor:
        if self.mask == "buffer":
            return scores.masked_fill(self.seen[:, :, :size, :size] == 0, float("-inf"))
        if self.mask == "where":
            return torch.where(self.seen[:, :, :size, :size].bool(), scores, -1e9)
        if self.mask == "causal":
            later = torch.triu(torch.ones(size, size, dtype=torch.bool), diagonal=1)
            return scores.masked_fill(later, -torch.inf)
        if self.mask == "added":
            return scores + torch.triu(torch.full((size, size), -1e9), 1)
        return scores


class Block(nn.Module):
    """Attention in a block of a transformer."""

    def __init__(self, *options: str) -> None:
        super().__init__()
        self.norm, self.attends, self.mlp = nn.LayerNorm(WIDTH), Attends(*options), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attends(self.norm(x))
        return x + F.gelu(self.mlp(x))


def attention(random: Random) -> Sample:
    options = (
        random.choice(["one", "three"]),
        random.choice(["divided", "queries", "einsum", "plain"]),
        random.choice(["buffer", "where", "causal", "added", "none"]),
        random.choice(["einsum", "product"]),
    )
    holder, length = random.choice([Attends, Block]), random.choice([5, 20])
    training = random.random() < 0.5
    return Sample(
        "attention",
        f"{', '.join(options)}, {length}",
        partial(holder, *options),
        rows(WIDTH, length),
        training=training,
    )
