"""Each way in which layers hang together, on a small net; every group is cut by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxopt.transforms.prune.dependency_groups import Coupling

CheckCuts = Callable[..., Coupling]
Made = tuple[nn.Module, tuple[Any, ...], dict[str, tuple[str, int]]]


class Code(nn.Module):
    """A module with a forward of one function, which is traced like any other."""

    def __init__(self, function: Callable[..., Any], **children: Any) -> None:
        super().__init__()
        self.function = function
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


class Dense(nn.Module):
    """Two layers whose inputs are all that was made before, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 5, 3, padding=1), nn.Conv2d(9, 6, 1)
        self.norm, self.last, self.head = nn.BatchNorm2d(9), nn.BatchNorm2d(15), nn.Linear(15, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.cat([x, self.one(x)], 1)
        x = torch.cat([x, self.two(torch.relu(self.norm(x)))], 1)
        return self.head(F.adaptive_avg_pool2d(torch.relu(self.last(x)), 1).flatten(1))


class UNet(nn.Module):
    """A skip connection beside a way down and up again."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.bottom = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.up, self.mix, self.norm = nn.ConvTranspose2d(6, 4, 2, stride=2), nn.Conv2d(8, 5, 1), nn.GroupNorm(1, 5)
        self.head = nn.Conv2d(5, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.down(x))
        return self.head(self.norm(self.mix(torch.cat([x, self.up(torch.relu(self.bottom(x)))], 1))))


class WrittenOutAttention(nn.Module):
    """The attention of many small decoders: the width of a head is that of the input over the number of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.n_embd = 4, 16
        self.attn, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = (
            each.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
            for each in self.attn(x).split(self.n_embd, dim=2)
        )
        y = (q @ k.transpose(-2, -1) * 0.5).softmax(-1) @ v
        return self.proj(y.transpose(1, 2).contiguous().view(b, t, c))


class PackedAttention(nn.Module):
    """The attention of many vision transformers: queries, keys and values in one, unbound."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 4, 4
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))


class GroupedQueries(nn.Module):
    """Four heads of queries over two of keys and values, repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(16, n) for n in (16, 8, 8, 16))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, 4)).transpose(1, 2) for each in (self.query, self.key, self.value))
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        return self.out(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


def _tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 9, bias=False))
    model[3].weight = model[0].weight
    return model


def _between(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), *layers, nn.Linear(16, 3))


def _squeeze_and_excite(self: Any, x: Tensor) -> Tensor:
    return x * torch.sigmoid(self.up(torch.relu(self.down(x.mean((2, 3), keepdim=True)))))


def _shuffled(_: Any, x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    return x.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)


_IMAGE, _ROWS, _TOKENS = torch.randn(2, 3, 8, 8), torch.randn(2, 5, 6), torch.arange(6).view(2, 3)

_NETS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "concatenation": lambda: (
        Dense(), _IMAGE, {"stem": ("channels", 4), "one": ("channels", 5), "two": ("channels", 6)},
    ),
    "skips and transposed convolutions": lambda: (
        UNet(), _IMAGE,
        {"down": ("channels", 4), "bottom": ("channels", 6), "up": ("channels", 4), "mix": ("channels", 5)},
    ),
    "flatten before a linear": lambda: (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)), _IMAGE, {"0": ("channels", 4)},
    ),
    "a depthwise convolution with a multiplier": lambda: (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 8, 3, groups=4), nn.Conv2d(8, 2, 1)), _IMAGE,
        {"0": ("channels", 4)},
    ),
    "a grouped convolution": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 12, 3, groups=4), nn.Conv2d(12, 2, 1)),
        _IMAGE,
        {"0": ("channels", 2), "2": ("channels", 3)},
    ),
    "group norm": lambda: (
        nn.Sequential(nn.Conv2d(3, 12, 3), nn.GroupNorm(3, 12), nn.Conv2d(12, 2, 1)), _IMAGE, {"0": ("channels", 3)},
    ),
    "squeeze and excite": lambda: (
        nn.Sequential(
            nn.Conv2d(3, 8, 1), Code(_squeeze_and_excite, down=nn.Conv2d(8, 4, 1), up=nn.Conv2d(4, 8, 1)),
            nn.Conv2d(8, 2, 1),
        ), _IMAGE, {"0": ("channels", 8), "1.down": ("channels", 4)},
    ),
    "pixel shuffle": lambda: (
        nn.Sequential(nn.Conv2d(3, 16, 1), nn.PixelShuffle(2), nn.Conv2d(4, 2, 1)), _IMAGE, {"0": ("channels", 4)},
    ),
    "pixel unshuffle": lambda: (
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.PixelUnshuffle(2), nn.Conv2d(16, 2, 1)), _IMAGE, {"0": ("channels", 4)},
    ),
    "channel shuffle": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 1), nn.ChannelShuffle(2), nn.Conv2d(8, 2, 1)), _IMAGE, {"0": ("channels", 4)},
    ),
    "channel shuffle by views": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 1), Code(_shuffled), nn.Conv2d(8, 2, 1)), _IMAGE, {"0": ("channels", 4)},
    ),
    "a gated pair in one": lambda: (
        nn.Sequential(nn.Linear(6, 12), nn.GLU(), nn.Linear(6, 2)), _ROWS, {"0": ("hidden", 6)},
    ),
    "a gated pair by chunk": lambda: (
        nn.Sequential(
            nn.Linear(6, 12), Code(lambda _, x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]), nn.Linear(6, 2)
        ), _ROWS, {"0": ("hidden", 6)},
    ),
    "a split into parts of their own": lambda: (
        nn.Sequential(
            nn.Linear(6, 12),
            Code(
                lambda s, x: s.one(x.split([4, 8], -1)[0]) + s.two(x[..., 4:12]),
                one=nn.Linear(4, 3), two=nn.Linear(8, 3),
            ),
        ), _ROWS, {"0.weight[0:4]": ("hidden", 4), "0.weight[4:12]": ("hidden", 8)},
    ),
    "a roll of rows and columns": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 1), Code(lambda _, x: x.roll((1, 2), (2, 3))), nn.Conv2d(8, 2, 1)), _IMAGE,
        {"0": ("channels", 8)},
    ),
    "division by the norm of all channels": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), Code(lambda _, x: F.normalize(x)), nn.Conv2d(8, 2, 1)), _IMAGE,
        {"0": ("channels", 8)},
    ),
    "windows as columns": lambda: (
        nn.Sequential(
            nn.Conv2d(3, 8, 1), Code(lambda _, x: F.unfold(x, 3, padding=1).transpose(1, 2)), nn.Linear(72, 2)
        ), _IMAGE, {"0": ("channels", 8)},
    ),
    "windows in a dimension of their own": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 1), Code(lambda _, x: x.unfold(2, 2, 1).amax(-1)), nn.Conv2d(8, 2, 1)), _IMAGE,
        {"0": ("channels", 8)},
    ),
    "an image of columns": lambda: (
        nn.Sequential(
            nn.Conv2d(3, 16, 1), nn.Flatten(2), Code(lambda _, x: F.fold(x, (12, 12), 2, stride=2)), nn.Conv2d(4, 2, 1)
        ), torch.randn(2, 3, 6, 6), {"0": ("channels", 4)},
    ),
    "the largest of two channels": lambda: (
        nn.Sequential(
            nn.Conv2d(3, 8, 1), Code(lambda _, x: x.view(x.shape[0], x.shape[1] // 2, 2, *x.shape[2:]).amax(2)),
            nn.Conv2d(4, 2, 1),
        ), _IMAGE, {"0": ("channels", 4)},
    ),
    "maxout over parts": lambda: (
        nn.Sequential(nn.Linear(6, 24), Code(lambda _, x: x.view(*x.shape[:2], 4, 6).max(2).values), nn.Linear(6, 2)),
        _ROWS, {"0": ("hidden", 6)},
    ),
    "maxout of two halves, behind a norm": lambda: (
        nn.Sequential(
            nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), Code(lambda _, x: torch.max(*x.chunk(2, 1))), nn.Conv2d(4, 2, 1)
        ), _IMAGE, {"0": ("channels", 4)},
    ),
    "tied embeddings": lambda: (_tied(), _TOKENS, {"0": ("hidden", 8)}),
    "products of plain parameters": lambda: (
        Code(
            lambda s, x: torch.einsum("bth,ho->bto", torch.relu(x @ s.one), s.two),
            one=nn.Parameter(torch.randn(6, 8)), two=nn.Parameter(torch.randn(8, 2)),
        ), _ROWS, {"": ("hidden", 8)},
    ),
    "attention with a computed width of heads": lambda: (
        _between(WrittenOutAttention()), _ROWS,
        {"0": ("hidden", 16), "1.attn": ("heads", 4), "1.proj": ("hidden", 16)},
    ),
    "attention unbound from one projection": lambda: (
        _between(PackedAttention()), _ROWS, {"0": ("hidden", 16), "1.qkv": ("heads", 4), "1.proj": ("hidden", 16)},
    ),
    "attention with grouped queries": lambda: (
        _between(GroupedQueries()), _ROWS, {"0": ("hidden", 16), "1.query": ("heads", 2), "1.out": ("hidden", 16)},
    ),
    "torch's attention": lambda: (
        _between(Code(lambda s, x: s.attn(x, x, x)[0], attn=nn.MultiheadAttention(16, 4, batch_first=True))), _ROWS,
        {"0": ("hidden", 16), "1.attn": ("heads", 4), "1.attn.out_proj": ("hidden", 16)},
    ),
    "torch's transformer layer": lambda: (
        _between(nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)), _ROWS,
        {"0": ("hidden", 16), "1.self_attn": ("heads", 4), "1.linear1": ("hidden", 24)},
    ),
    "an LSTM": lambda: (
        Code(
            lambda s, x: s.head(s.cell(s.words(x))[0]),
            words=nn.Embedding(9, 6), cell=nn.LSTM(6, 8), head=nn.Linear(8, 3),
        ), _TOKENS, {"words": ("hidden", 6), "cell": ("hidden", 8)},
    ),
    "a GRU of two layers and directions": lambda: (
        Code(
            lambda s, x: s.head(s.cell(s.words(x))[0]), words=nn.Embedding(9, 6),
            cell=nn.GRU(6, 8, 2, batch_first=True, bidirectional=True), head=nn.Linear(16, 3),
        ), _TOKENS, {"words": ("hidden", 6), "cell": ("hidden", 8)},
    ),
    "an LSTM with a projection": lambda: (
        Code(lambda s, x: s.head(s.cell(x)[0]), cell=nn.LSTM(6, 8, proj_size=5), head=nn.Linear(5, 3)), _ROWS,
        {"cell.weight_ih_l0": ("hidden", 8), "cell.weight_hr_l0": ("hidden", 5)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", _NETS)
def test_what_belongs_together_is_cut_together(name: str, check_cuts: CheckCuts) -> None:
    model, inputs, groups = _NETS[name]()
    found = check_cuts(model.eval(), inputs)
    assert {group.name: (group.kind, group.size) for group in found.groups} == groups
    assert all(each.by_design for each in found.refused)


def _edges() -> Tensor:
    return torch.tensor([[0, 1, 2, 3, 0, 2], [1, 2, 3, 0, 2, 1]])


def _graph_net(make: Callable[[int, int], nn.Module], hidden: int) -> nn.Module:
    return Code(
        lambda s, x, edges: s.two(torch.relu(s.one(x, edges)), edges), one=make(5, 8), two=make(hidden, 3)
    )  # fmt: skip


def _mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 6), nn.ReLU(), nn.Linear(6, outputs))


@pytest.mark.parametrize(
    ("convolution", "hidden", "groups"),
    [
        ("GCNConv", 8, {"one.lin": ("hidden", 8)}),
        ("SAGEConv", 8, {"one.lin_l": ("hidden", 8)}),
        ("GATConv", 16, {"one.lin": ("heads", 2)}),
        ("GINConv", 8, {"one.nn.0": ("hidden", 6), "one.nn.2": ("hidden", 8), "two.nn.0": ("hidden", 6)}),
    ],
)
def test_graph_convolutions_are_followed(
    convolution: str, hidden: int, groups: dict[str, tuple[str, int]], check_cuts: CheckCuts
) -> None:
    kinds = pytest.importorskip("torch_geometric.nn")
    kind = getattr(kinds, convolution)

    def make(inputs: int, outputs: int) -> nn.Module:
        if convolution == "GINConv":
            return kind(_mlp(inputs, outputs))
        return (
            kind(inputs, outputs, heads=2 if outputs == 8 else 1) if convolution == "GATConv" else kind(inputs, outputs)
        )

    found = check_cuts(_graph_net(make, hidden).eval(), torch.randn(4, 5), _edges())
    assert {group.name: (group.kind, group.size) for group in found.groups} == groups
    assert all(each.by_design for each in found.refused)


@pytest.mark.parametrize(
    ("middle", "operation"),
    [
        (nn.Softmax(-1), "_softmax"),
        (Code(lambda _, x: x.sort(-1).values), "sort"),
        (Code(lambda _, x: x + x.sigmoid().mean(-1, keepdim=True)), "mean"),
        (Code(lambda _, x: torch.cumsum(x, -1)), "cumsum"),
        (Code(lambda _, x: x + x.clamp_max(-1).sum(-1, keepdim=True)), "sum"),
        (Code(lambda _, x: x + torch.arange(8.0)), "add"),
        (Code(lambda _, x: torch.fft.fft(x).real), "_fft_r2c"),
        (Code(lambda _, x: x.roll(1, -1)), "roll"),
        (Code(lambda _, x: x.roll(1)), "roll"),
        (Code(lambda _, x: F.normalize(x + 1, dim=-1)), "normalize"),
        (Code(lambda _, x: x / x.shape[-1]), "div"),
        (Code(lambda _, x: x[..., torch.tensor([7, 6, 5, 4, 3, 2, 1, 0])]), "index"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_followed_is_refused_by_name(middle: nn.Module, operation: str, analysed: CheckCuts) -> None:
    model = nn.Sequential(nn.Linear(6, 8), middle, nn.Linear(8, 3))
    found = analysed(model.eval(), torch.randn(2, 6))
    assert found.groups == ()
    refused = {each.layer: each for each in found.refused}
    assert refused["0"].reason.startswith(f"{operation} in 1") and not refused["0"].by_design
    assert refused["2"].by_design


def test_a_slice_of_one_index_can_be_reshaped(check_cuts: CheckCuts) -> None:
    """The unit that the slice takes stays; the others go."""
    model = nn.Sequential(nn.Linear(6, 8), Code(lambda _, x: x * x[:, :1].view(-1, 1)), nn.Linear(8, 3))
    found = check_cuts(model.eval(), torch.randn(2, 6))
    assert {group.name: (group.kind, group.size) for group in found.groups} == {"0": ("hidden", 7)}
