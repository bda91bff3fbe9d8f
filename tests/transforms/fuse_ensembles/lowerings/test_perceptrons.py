"""The lowering `mlp`: which chains become one operator, and what is written beside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.testing import assert_equivalent
from fxopt.transforms.fuse_ensembles import FuseEnsembles
from fxopt.transforms.fuse_ensembles.lowerings import lowerings_for
from fxopt.transforms.fuse_ensembles.search import find_ensembles

N = 3


class Ensemble(nn.Module):
    def __init__(self, member: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(member() for _ in range(N))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([member(x) for member in self.members])


class Reading(nn.Module):
    """Its hidden layer is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        return self.last(hidden) + hidden


def layers(*between: Callable[[], nn.Module], bias: bool = True) -> Callable[[], nn.Module]:
    def member() -> nn.Module:
        parts = [part for make in between for part in (nn.Linear(4, 4, bias), make())]
        return nn.Sequential(*parts, nn.Linear(4, 4))

    return member


approximate = partial(nn.GELU, "tanh")
CHAINS: dict[str, tuple[Callable[[], nn.Module], list[tuple[int, str]], int]] = {
    "two": (layers(nn.Tanh), [(2, "tanh")], 0),
    "three": (layers(approximate, approximate, bias=False), [(3, "gelu_tanh")], 0),
    "in place": (layers(partial(nn.ReLU, inplace=True)), [(2, "relu")], 0),
    "two activations": (layers(nn.ReLU, nn.SiLU, nn.SiLU), [(2, "relu"), (2, "silu")], 0),
    "norm": (layers(partial(nn.LayerNorm, 4), nn.GELU), [(2, "gelu")], 1),
    "one in two": (lambda: nn.Sequential(nn.Linear(4, 4), nn.ELU(), nn.Linear(4, 4)), [], 2),
    "read twice": (Reading, [], 2),
}
"""Members, the layers and activation of each perceptron in them, and the linears beside these."""


@pytest.mark.parametrize("name", CHAINS)
def test_chains_become_one_operator(name: str) -> None:
    torch.manual_seed(0)
    member, expected, linears = CHAINS[name]
    model, x = Ensemble(member), torch.randn(2, 4)
    fast = fxopt.optimize(model, "fuse_ensembles{lowering=mlp}", example_inputs=(x,), measure=False)
    nodes = [node for node in fxopt.graphs(fast)[""].nodes if node.op == "call_function"]
    found = [node.args for node in nodes if node.target.__name__ == "ensemble_mlp"]
    assert [(len(weights), activation) for _, weights, _, activation in found] == expected
    assert sum("linear" in node.target.__name__ for node in nodes) == linears
    assert_equivalent(model, fast, [(x,)], map_state=fxopt.runtime.record.record_of(fast).state_map.forward)
    assert fxopt.state_dict(fast).keys() == model.state_dict().keys()


@pytest.mark.parametrize("shape", [(4,), (2, 4), (5, 2, 4), (0, 4)])
def test_any_leading_dimensions(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = Ensemble(layers(nn.Tanh))
    fast = fxopt.optimize(model, "fuse_ensembles{lowering=mlp}", example_inputs=(torch.randn(2, 4),), measure=False)
    x = torch.randn(shape)
    torch.testing.assert_close(fast(x), model(x))


def test_it_is_offered_where_kernels_compute_and_chains_are() -> None:
    for member, offered in ((layers(nn.Tanh), True), (layers(nn.ELU), False)):
        program = fxopt.capture(Ensemble(member), (torch.randn(2, 4),))
        (site,) = FuseEnsembles().find(program)
        (ensemble,) = find_ensembles(program, "", 0)
        assert "mlp" not in site.choices
        assert ("mlp" in lowerings_for(ensemble, autocast=False, kernels=True)) == offered


@pytest.mark.gpu
def test_it_is_offered_on_a_gpu() -> None:
    program = fxopt.capture(Ensemble(layers(nn.Tanh)).cuda(), (torch.randn(2, 4, device="cuda"),))
    (site,) = FuseEnsembles().find(program)
    assert "mlp" in site.choices
