"""Experts and members of ensembles on several processes: by torch's collectives by hand, and the pass `parallel`."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn import functional as collectives

from fxopt.layers import MixtureOfExperts

from .collectives import given_to_all, summed_over_all
from .models import Made
from .steps import by_pass, training_step
from .way import Step, Way

WIDTH, HIDDEN, BLOCKS, EXPERTS, CHOSEN, MEMBERS = 256, 512, 4, 8, 2, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.mixture: nn.Module = MixtureOfExperts(WIDTH, HIDDEN, EXPERTS, CHOSEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.first(x))
        return x + self.mixture(x)


class Heads(nn.Module):
    """Members of one input behind layers that are split, too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH)) for _ in range(MEMBERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.relu(self.up(x)))
        return torch.stack([head(x) for head in self.heads]).mean(0)


def mixtures() -> Made:
    """Return a model of 13 million parameters, most of them in experts."""
    torch.manual_seed(0)
    x = torch.randn(4, 64, WIDTH)
    return nn.Sequential(*(Block() for _ in range(BLOCKS))), lambda model: model(x).square().mean(), {"input": x}


def heads() -> Made:
    """Return a model of 2.6 million parameters, most of them in members."""
    torch.manual_seed(0)
    x = torch.randn(8, 32, WIDTH)
    return Heads(), lambda model: model(x).square().mean(), {"x": x}


class Exchanging(nn.Module):
    """A mixture of which each process has some experts; every pair of a token and an expert is sent."""

    def __init__(self, layer: MixtureOfExperts) -> None:
        super().__init__()
        rank, self.processes = distributed.get_rank(), distributed.get_world_size()
        own = slice(rank * EXPERTS // self.processes, (rank + 1) * EXPERTS // self.processes)
        self.router = layer.router
        self.first, self.down = (nn.Parameter(t[own].detach().clone()) for t in (layer.gate_up_proj, layer.down_proj))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        _, indices, weights = self.router(tokens)
        order = indices.flatten().argsort(stable=True)
        counts = torch.bincount(indices.flatten(), minlength=EXPERTS)
        theirs = torch.empty_like(counts)
        distributed.all_to_all_single(theirs, counts)
        sent, received = (c.view(self.processes, -1).sum(1).tolist() for c in (counts, theirs))
        rows = _exchange(tokens[order // CHOSEN], sent, received)
        number = torch.arange(len(self.first)).repeat(self.processes).repeat_interleave(theirs)
        by_expert = number.argsort(stable=True)
        ends = torch.bincount(number, minlength=len(self.first)).cumsum(0).int()
        gate, up = F.grouped_mm(rows[by_expert], self.first.transpose(1, 2), offs=ends).chunk(2, -1)
        found = F.grouped_mm(F.silu(gate) * up, self.down.transpose(1, 2), offs=ends)
        back = _exchange(found[by_expert.argsort()], received, sent)[order.argsort()]
        return (back.view(-1, CHOSEN, WIDTH) * weights.unsqueeze(-1)).sum(1).view(x.shape)


def _exchange(rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
    output = rows.new_empty(sum(received), rows.shape[-1])
    return cast("Tensor", collectives.all_to_all_single(output, rows.contiguous(), received, sent))


def mixtures_by_hand() -> Step:
    """Deal the experts, shard each block without them, and average what their gradients add up."""
    made, loss, _ = mixtures()
    model = cast("Any", made)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in model:
        block.mixture = Exchanging(block.mixture)
    dealt = {p for block in model for p in (block.mixture.first, block.mixture.down)}
    for parameter in dealt:
        parameter.register_hook(lambda gradient: gradient / distributed.get_world_size())
    for block in model:
        fully_shard(block, mesh=mesh, ignored_params=dealt)
    fully_shard(model, mesh=mesh, ignored_params=dealt)
    return training_step(model.train(), loss)


class SomeHeads(nn.Module):
    """This process's columns and rows of the two layers, and its members, one after another."""

    def __init__(self, model: Heads) -> None:
        super().__init__()
        rank, processes = distributed.get_rank(), distributed.get_world_size()
        part = slice(rank * 4 * WIDTH // processes, (rank + 1) * 4 * WIDTH // processes)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH // processes), nn.Linear(4 * WIDTH // processes, WIDTH, False)
        self.bias = nn.Parameter(model.down.bias.detach().clone())
        with torch.no_grad():
            self.up.weight.copy_(model.up.weight[part]), self.up.bias.copy_(model.up.bias[part])
            self.down.weight.copy_(model.down.weight[:, part])
        self.heads = model.heads[rank * MEMBERS // processes : (rank + 1) * MEMBERS // processes]

    def forward(self, x: Tensor) -> Tensor:
        x = x + summed_over_all(self.down(torch.relu(self.up(given_to_all(x))))) + self.bias
        x = given_to_all(x)
        return summed_over_all(torch.stack([head(x) for head in self.heads]).sum(0)) / MEMBERS


def heads_by_hand() -> Step:
    """Split the layers, and let each process call its members."""
    model, loss, _ = heads()
    return training_step(SomeHeads(cast("Heads", model)).train(), loss)


WAYS = [
    Way("experts by all-to-all", mixtures_by_hand, lambda: by_pass(mixtures, "parallel{shard=2,experts=true}")),
    Way("members and layers", heads_by_hand, lambda: by_pass(heads, "fuse_ensembles{lowering=bmm},parallel{tensor=2}")),
]
