"""Random networks: whatever is pruned either is refused by name or runs, and equals the original with zeros."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_networks import number_of_examples
from torch import Tensor, nn

import fxopt
from fxopt.transforms.prune import Prune

SETTINGS = settings(
    max_examples=number_of_examples(8),
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],  # making an example smaller takes minutes
)
LAYERS = st.lists(
    st.tuples(
        st.sampled_from(
            ["conv", "grouped", "depthwise", "transposed", "residual", "dense", "gated", "shuffle", "squeeze", "halves"]
        ),
        st.sampled_from([4, 8, 12]),
        st.sampled_from(["batch", "group", "none"]),
    ),
    min_size=1,
    max_size=5,
)


class Layer(nn.Module):
    """One step of a convolutional network."""

    def __init__(self, kind: str, width: int, out: int, norm: str) -> None:
        super().__init__()
        self.kind, self.out = kind, width if kind in ("residual", "depthwise", "squeeze", "halves") else out
        groups = {"grouped": 2, "depthwise": width}.get(kind, 1)
        made = {"gated": 2 * self.out, "shuffle": 4 * self.out}.get(kind, self.out)
        if kind == "transposed":
            self.conv: nn.Module = nn.ConvTranspose2d(width, made, 3, padding=1)
        else:
            self.conv = nn.Conv2d(width, made, 3, padding=1, groups=groups)
        norms = {"batch": nn.BatchNorm2d, "none": lambda _: nn.Identity(), "group": lambda n: nn.GroupNorm(2, n)}
        self.norm = norms[norm](made)
        if kind == "squeeze":
            self.down, self.up = nn.Linear(width, 4), nn.Linear(4, width)
        if kind == "dense":
            self.out = width + made

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "halves":
            one, two = x.split([x.shape[1] // 2, x.shape[1] - x.shape[1] // 2], 1)
            return self.norm(self.conv(torch.cat([two, F.relu(one)], 1)))
        y = self.norm(self.conv(x))
        if self.kind == "residual":
            return F.relu(x + y)
        if self.kind == "dense":
            return torch.cat([x, F.silu(y)], 1)
        if self.kind == "gated":
            return F.glu(y, 1)
        if self.kind == "shuffle":
            return F.avg_pool2d(F.pixel_shuffle(y, 2), 2)
        if self.kind == "squeeze":
            gate = self.up(F.relu(self.down(y.mean((2, 3)))))
            return y * gate.sigmoid()[:, :, None, None]
        return F.relu(y)


class Convolutions(nn.Module):
    def __init__(self, layers: list[tuple[str, int, str]], flatten: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.body = nn.Sequential()
        width = 8
        for kind, out, norm in layers:
            layer = Layer(kind, width, out, norm)
            self.body.append(layer)
            width = layer.out
        self.flatten = flatten
        self.head = nn.Linear(width * (4 if flatten else 1), 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        x = F.adaptive_avg_pool2d(x, 2).flatten(1) if self.flatten else x.mean((2, 3))
        return self.head(x)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, shared: int, fused: bool) -> None:
        super().__init__()
        self.heads, self.shared, self.size = heads, heads // shared, width // heads
        if fused:
            self.qkv = nn.Linear(width, (heads + 2 * self.shared) * self.size)
        else:
            self.q = nn.Linear(width, width)
            self.k, self.v = (nn.Linear(width, self.shared * self.size) for _ in range(2))
        self.fused, self.out = fused, nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        if self.fused:
            sizes = [self.heads * self.size, self.shared * self.size, self.shared * self.size]
            q, k, v = self.qkv(x).split(sizes, -1)
        else:
            q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (part.reshape(rows, length, -1, self.size).transpose(1, 2) for part in (q, k, v))
        if self.heads != self.shared:
            k, v = (part.repeat_interleave(self.heads // self.shared, 1) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(rows, length, -1))


class Transformer(nn.Module):
    def __init__(self, heads: int, shared: int, fused: bool, gated: bool, rms: bool, tied: bool, blocks: int) -> None:
        super().__init__()
        width = 16
        norm = nn.RMSNorm if rms else nn.LayerNorm
        self.embed, self.head = nn.Embedding(11, width), nn.Linear(width, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.gated, names = gated, range(blocks)
        self.attention = nn.ModuleList(Attention(width, heads, shared, fused) for _ in names)
        self.norms = nn.ModuleList(norm(width) for _ in range(2 * blocks + 1))
        self.up = nn.ModuleList(nn.Linear(width, 24 if gated else 12) for _ in names)
        self.down = nn.ModuleList(nn.Linear(12, width) for _ in names)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for number, attention in enumerate(self.attention):
            x = x + attention(self.norms[2 * number](x))
            y = self.up[number](self.norms[2 * number + 1](x))
            if self.gated:
                gate, value = y.chunk(2, -1)
                y = F.silu(gate) * value
            x = x + F.dropout(self.down[number](y), 0.1, self.training)
        return self.head(self.norms[-1](x))


def check(model: nn.Module, x: Tensor, more: Tensor, options: dict[str, Any]) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-1, 1)
            module.running_var.uniform_(0.5, 2)
    count = sum(parameter.numel() for parameter in model.parameters())
    fast = fxopt.optimize(model, Prune(method="structured", **options), example_inputs=(x,))
    decisions = fxopt.plan(fast).decisions
    for decision in decisions:
        assert decision.status in ("applied", "refused"), decision.reason  # nothing that was found is wrong
        assert decision.status == "applied" or (decision.label and decision.reason)
        assert decision.status != "applied" or decision.figures["checked"] == "float64"
    applied = [decision for decision in decisions if decision.status == "applied"]
    assert (sum(parameter.numel() for parameter in fast.parameters()) < count) == bool(applied)
    for mode in (True, False):
        assert fast.train(mode)(more).shape == model.train(mode)(more).shape


@SETTINGS
@given(LAYERS, st.booleans(), st.sampled_from(["layer", "global"]), st.sampled_from([0.25, 0.5]), st.booleans())
def test_convolutions(layers: Any, flatten: bool, scope: Any, amount: float, training: bool):
    torch.manual_seed(0)
    model = Convolutions(layers, flatten).train(training)
    options = {"scope": scope, "amount": amount}
    check(model, torch.randn(3, 3, 4, 4), torch.randn(2, 3, 4, 4), options)


@SETTINGS
@given(
    st.sampled_from([(4, 1), (4, 2), (2, 1), (4, 4)]), st.booleans(), st.booleans(), st.booleans(), st.booleans(),
    st.integers(1, 2), st.sampled_from(["layer", "global"]), st.booleans(),
)  # fmt: skip
def test_transformers(
    heads: Any, fused: bool, gated: bool, rms: bool, tied: bool, blocks: int, scope: Any, training: bool
):
    torch.manual_seed(0)
    model = Transformer(*heads, fused, gated, rms, tied, blocks).train(training)
    ids = torch.randint(0, 11, (3, 6))
    check(model, ids, ids[:2], {"scope": scope, "amount": 0.25})
