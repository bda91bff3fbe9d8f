"""Forwards that compute what nobody reads, the same twice, or what never changes; norms and activations written out."""

from __future__ import annotations

from functools import partial
from random import Random

import torch
import torch.nn.functional as F
from support.samples import Sample, rows
from torch import Tensor, nn

WIDTH = 8


class Forward(nn.Module):
    """One of several forwards over two layers, a norm's weight and a table."""

    def __init__(self, spelling: str, inside: bool) -> None:
        super().__init__()
        self.spelling, self.inside = spelling, inside
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale, self.shift = nn.Parameter(torch.rand(WIDTH) + 0.5), nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("table", torch.randn(WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.inside:
            x = torch.tanh(x)
        return self.second(getattr(self, self.spelling)(x)) + x

    def unread(self, x: Tensor) -> Tensor:
        self.norm(x)
        (x * 2).sum()
        return x.relu()

    def unread_layers(self, x: Tensor) -> Tensor:
        torch.stack([x, x])
        return torch.relu(x + 0 * len(torch.cat([x, x])))

    def same_layer(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.norm(x)) * self.norm(x)

    def same_operations(self, x: Tensor) -> Tensor:
        return (x + self.scale).tanh() * torch.tanh(x + self.scale) + (x.sin() + torch.sin(x))

    def same_products(self, x: Tensor) -> Tensor:
        return F.linear(x, self.scale.diag()).sin() + F.linear(x, torch.diag(self.scale)).cos()

    def constant_table(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.table * 2 + 1) + torch.arange(WIDTH) / WIDTH

    def constant_weight(self, x: Tensor) -> Tensor:
        return x * F.softmax(self.table.exp().neg(), 0).square() + torch.linspace(0, 1, WIDTH).cos()

    def rms_norm(self, x: Tensor) -> Tensor:
        return self.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def wide_rms_norm(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.scale * (wide / torch.sqrt((wide * wide).mean(dim=-1, keepdim=True) + 1e-6)).type_as(x)

    def layer_norm(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,), self.scale, self.shift)

    def module_norm(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def added_norm(self, x: Tensor) -> Tensor:
        total = x + self.shift * x
        return self.norm(total) + total

    def swiglu(self, x: Tensor) -> Tensor:
        return F.silu(x - self.shift) * (x + self.scale)

    def geglu(self, x: Tensor) -> Tensor:
        return F.gelu(x - self.shift, approximate="tanh") * (x + self.scale)

    def biased(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.shift)

    def biased_relu(self, x: Tensor) -> Tensor:
        return F.relu(x + self.shift) + x

    def rotary(self, x: Tensor) -> Tensor:
        return x * self.scale + torch.cat([-x[..., WIDTH // 2 :], x[..., : WIDTH // 2]], -1) * self.shift


SPELLINGS = {
    "eliminate_dead_code": ("unread", "unread_layers"),
    "eliminate_common_subexpressions": ("same_layer", "same_operations", "same_products"),
    "fold_constants": ("constant_table", "constant_weight"),
    "swap_kernels": (
        "rms_norm", "wide_rms_norm", "layer_norm", "module_norm", "added_norm", "swiglu", "geglu", "biased",
        "biased_relu", "rotary",
    ),
}  # fmt: skip


def forwards(name: str, random: Random) -> Sample:
    spelling, inside = random.choice(SPELLINGS[name]), random.random() < 0.5
    training = random.random() < 0.5 and name != "fold_constants"
    make = rows(WIDTH, 3) if random.random() < 0.4 else rows(WIDTH)
    return Sample(name, spelling, partial(Forward, spelling, inside), make, training=training)


class Switches(nn.Module):
    """A forward that opens contexts of torch."""

    def __init__(self, context: str) -> None:
        super().__init__()
        self.context, self.first, self.second = context, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.first(x))
        if self.context == "no_grad":
            with torch.no_grad():
                scale = self.second(x).abs().mean()
            return self.second(hidden) * scale
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.second(hidden)
        return hidden.float() + x
