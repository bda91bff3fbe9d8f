"""Parallel heads: members of several kinds, held and joined in the ways that people write."""

from __future__ import annotations

from functools import partial
from random import Random

import torch
import torch.nn.functional as F
from support.samples import Sample, images, rows
from torch import Tensor, nn

WIDTH = 6


class Member(nn.Module):
    """A head with a forward of its own."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(WIDTH, hidden), nn.LayerNorm(hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.norm(self.first(x)))) + x


def member(kind: str, hidden: int) -> nn.Module:
    if kind == "linear":
        return nn.Linear(WIDTH, hidden)
    if kind == "mlp":
        return nn.Sequential(nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, 2))
    if kind == "deep":
        return nn.Sequential(
            nn.Linear(WIDTH, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )
    if kind == "convolution":
        return nn.Sequential(nn.Conv2d(2, hidden, 3, padding=1), nn.ReLU(), nn.Conv2d(hidden, 2, 1))
    return Member(hidden)


class Heads(nn.Module):
    """Members in some container, called in some spelling, their results joined in some way."""

    def __init__(self, kind: str, holder: str, loop: str, join: str, count: int, hidden: int) -> None:
        super().__init__()
        members = [member(kind, hidden) for _ in range(count)]
        self.holder, self.loop, self.join, self.count = holder, loop, join, count
        if holder == "list":
            self.heads = nn.ModuleList(members)
        elif holder == "dict":
            self.heads = nn.ModuleDict({f"head_{i}": each for i, each in enumerate(members)})
        else:
            for i, each in enumerate(members):
                setattr(self, f"head_{i}", each)

    def members(self) -> list[nn.Module]:
        if self.holder == "list":
            return [self.heads[i] for i in range(self.count)]
        if self.holder == "dict":
            return list(self.heads.values())
        return [getattr(self, f"head_{i}") for i in range(self.count)]

    def results(self, x: Tensor) -> list[Tensor]:
        if self.loop == "comprehension":
            return [head(x) for head in self.members()]
        if self.loop == "map":
            return list(map(lambda head: head(x), self.members()))  # noqa: C417 - one spelling among others
        found = []
        for i, head in enumerate(self.members()):
            given = x * (i + 1) if self.loop == "own inputs" else x
            found.append(head(given))
        return found

    def forward(self, x: Tensor) -> Tensor | dict[str, Tensor]:
        found = self.results(x)
        if self.join == "stack":
            return torch.stack(found)
        if self.join == "stack last":
            return torch.stack(found, -1)
        if self.join == "cat":
            return torch.cat(found, dim=-1)
        if self.join == "mean":
            return torch.stack(found, dim=1).mean(1)
        if self.join == "sum":
            return sum(found[1:], found[0])
        return {"all": torch.stack(found), "mean": torch.stack(found, dim=0).mean(0)}


def ensembles(random: Random) -> Sample:
    kind = random.choice(["linear", "mlp", "deep", "member", "convolution"])
    holder = random.choice(["list", "dict", "names"])
    loop = random.choice(["comprehension", "map", "loop", "own inputs"])
    join = random.choice(["stack", "stack last", "cat", "mean", "sum", "dict of stacks"])
    build = partial(Heads, kind, holder, loop, join, random.randint(2, 4), random.randint(3, 5))
    make = images(2) if kind == "convolution" else rows(WIDTH)
    return Sample("fuse_ensembles", f"{kind}, {holder}, {loop}, {join}", build, make, training=random.random() < 0.6)
