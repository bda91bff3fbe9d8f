"""Random networks: every group that is found can be cut, whatever layers there are between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_networks import number_of_examples
from torch import Tensor, nn

from fxopt.transforms.prune.dependency_groups import Coupling

CheckCuts = Callable[..., Coupling]

_EXAMPLES = number_of_examples(15)

_Step = tuple[str, int, int]


class Net(nn.Module):
    """Run steps one after another; each reads the last value, and some an earlier one too.

    Args:
        steps: a kind, which earlier value, and a number to choose by.
        tokens: values are [batch, length, width], and not images.
    """

    def __init__(self, steps: list[_Step], *, tokens: bool) -> None:
        super().__init__()
        self.tokens = tokens
        self.steps = steps
        self.layers = nn.ModuleDict()
        self.meets: list[bool] = []
        widths = [8]
        self.layers["stem"] = nn.Linear(6, 8) if tokens else nn.Conv2d(3, 8, 1)
        for number, (kind, earlier, choice) in enumerate(steps):
            layer, width = self._layer(kind, widths, earlier % len(widths), choice)
            if layer is not None:
                self.layers[str(number)] = layer
            self.meets.append(widths[-1] == widths[earlier % len(widths)])
            widths.append(width)
        self.layers["head"] = nn.Linear(widths[-1] * (1 if tokens else 16), 3)

    def _layer(self, kind: str, widths: list[int], earlier: int, choice: int) -> tuple[nn.Module | None, int]:
        width = widths[-1]
        if kind == "plain":
            out = (4, 6, 8, 12)[choice % 4]
            return (nn.Linear(width, out) if self.tokens else nn.Conv2d(width, out, 3, padding=1)), out
        if kind == "grouped" and not self.tokens:
            groups = 2 if choice % 2 == 0 and width % 2 == 0 else width
            return nn.Conv2d(width, width * (1 + choice % 3 // 2), 1, groups=groups), width * (1 + choice % 3 // 2)
        if kind == "transposed" and not self.tokens:
            return nn.ConvTranspose2d(width, 6, 1), 6
        if kind == "norm":
            if self.tokens:
                return nn.LayerNorm(width), width
            groups = 2 if choice // 2 % 2 and width % 2 == 0 else 1
            return (nn.BatchNorm2d(width) if choice % 2 else nn.GroupNorm(groups, width)), width
        if kind == "attention" and self.tokens and width % 2 == 0:
            return nn.ModuleList(nn.Linear(width, width) for _ in range(4)), width
        if kind == "cat":
            return None, width + widths[earlier]
        return None, width // 2 if kind in ("gate", "slice") else width

    def forward(self, x: Tensor) -> Tensor:
        values = [self.layers["stem"](x)]
        for number, (kind, earlier, choice) in enumerate(self.steps):
            values.append(self._step(str(number), kind, values[-1], values[earlier % len(values)], choice))
        return self.layers["head"](values[-1] if self.tokens else values[-1].flatten(1))

    def _step(self, name: str, kind: str, x: Tensor, other: Tensor, choice: int) -> Tensor:
        dim = 2 if self.tokens else 1
        if kind == "attention" and name in self.layers:
            return self._attention(x, *self.layers[name])
        if name in self.layers:
            return self.layers[name](x)
        if kind == "act":
            return (F.relu, torch.sigmoid, F.silu, F.softplus, torch.tanh)[choice % 5](x)
        if kind == "cat":
            return torch.cat([x, other], dim)
        if kind == "gate":
            first, second = x.chunk(2, dim)
            return first * torch.sigmoid(second)
        if kind == "slice":
            return x.narrow(dim, choice % 2, x.shape[dim] // 2)
        if kind == "reduce":
            return (x * x.softmax(dim), x - x.amax(dim, keepdim=True), x + x.mean(0, keepdim=True))[choice % 3]
        if kind == "shuffle" and x.shape[dim] % 2 == 0:
            moved = x.movedim(dim, -1)
            return moved.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2).movedim(-1, dim)
        if self.meets[int(name)]:
            return x + other if choice % 2 else x * other
        return x

    def _attention(self, x: Tensor, query: nn.Module, key: nn.Module, value: nn.Module, out: nn.Module) -> Tensor:
        b, t, c = x.shape
        q, k, v = (each(x).view(b, t, 2, c // 2).transpose(1, 2) for each in (query, key, value))
        return x + out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c))


_KINDS = "plain plain grouped transposed norm act attention cat gate slice reduce shuffle meet meet".split()
_STEPS = st.lists(st.tuples(st.sampled_from(_KINDS), st.integers(0, 9), st.integers(0, 59)), min_size=2, max_size=7)


@settings(max_examples=_EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(steps=_STEPS, tokens=st.booleans())
def test_whatever_is_found_in_a_random_network_can_be_cut(steps: Any, tokens: bool, check_cuts: CheckCuts) -> None:
    torch.manual_seed(0)
    narrowing = sum(kind in ("gate", "slice") for kind, *_ in steps)
    steps = steps if narrowing < 2 else [each for each in steps if each[0] not in ("gate", "slice")]
    model = Net(steps, tokens=tokens).eval()
    found = check_cuts(model, torch.randn(2, 5, 6) if tokens else torch.randn(2, 3, 4, 4))
    made = {group.name for group in found.groups} | {each.layer for each in found.refused}
    assert "layers.stem" in {name.partition(".weight")[0] for name in made}
    assert all(each.reason for each in found.refused)
