"""Noise moves what can move, and keeps what stands for something else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fxopt
from fxopt.passes.verification import jittered, perturbed_inputs, perturbed_state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64])
@pytest.mark.parametrize("start", [torch.zeros, torch.ones, torch.rand])
def test_parameters_move_by_a_part_of_their_scale(start: object, dtype: torch.dtype) -> None:
    weight = nn.Parameter((start(40, 40) * 3).to(dtype))
    moved = perturbed_state({"weight": weight}, 0)["weight"]
    gap = (moved - weight).detach().abs().double()
    scale = float(weight.detach().abs().double().square().mean().sqrt()) or 1.0
    assert (moved.dtype, moved.shape) == (dtype, weight.shape)
    assert float(gap.mean()) == pytest.approx(0.2 * scale, rel=0.1)
    assert float((gap > 0).double().mean()) > 0.9


def test_buffers_keep_their_sign_and_their_zeros() -> None:
    variance, mask, mean = torch.rand(50) + 0.1, torch.tensor([0.0, 1.0, 0.0, 1.0]), torch.zeros(50)
    moved = perturbed_state({"variance": variance, "mask": mask, "mean": mean}, 0)
    assert bool((moved["variance"] > 0).all())
    assert not torch.equal(moved["variance"], variance)
    assert moved["mask"].eq(0).tolist() == [True, False, True, False]
    assert bool((moved["mean"] > 0).any())


def test_tied_tensors_stay_tied_and_integers_stay() -> None:
    weight, steps = nn.Parameter(torch.ones(3)), torch.tensor(5)
    moved = perturbed_state({"a": weight, "b": weight, "steps": steps}, 0)
    assert moved["a"] is moved["b"]
    assert moved["steps"] is steps


def test_noise_repeats_and_leaves_the_original_alone() -> None:
    weight = nn.Parameter(torch.ones(3))
    first, again, other = (perturbed_state({"w": weight}, seed)["w"] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert weight.tolist() == [1, 1, 1]


@pytest.mark.parametrize("filling", [-1e4, -1e9, torch.finfo(torch.float32).min, -torch.inf])
def test_what_stands_for_infinity_stays(filling: float) -> None:
    mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), filling)
    moved = perturbed_inputs([mask], 0)[0]
    assert torch.equal(moved == filling, mask == filling)
    assert bool((moved[mask == 0] != 0).all())
    assert moved[mask == 0].abs().max() < 10


def test_inputs_keep_what_they_must() -> None:
    positive, flags, ids = torch.rand(30), torch.tensor([True]), torch.tensor([3])
    given = ((positive, flags), {"ids": ids, "name": "x", "empty": torch.zeros(0)})
    (moved, moved_flags), rest = perturbed_inputs(given, 0)
    assert bool((moved >= 0).all())
    assert not torch.equal(moved, positive)
    assert (moved_flags, rest["ids"], rest["name"]) == (flags, ids, "x")


@pytest.mark.parametrize("wide", [torch.float64, torch.float32, None])
def test_jitter_is_as_small_as_asked(wide: torch.dtype | None) -> None:
    x = torch.rand(1000) + 1
    moved = jittered([x], 1e-3, wide, 0)[0]
    assert moved.dtype is (wide or torch.float32)
    assert float((moved / x - 1).abs().mean()) == pytest.approx(0.8e-3, rel=0.1)


class Routed(nn.Module):
    """Sends each row to one of three linears; its bias sends all to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 3), nn.ModuleList(nn.Linear(4, 2) for _ in range(3))
        with torch.no_grad():
            self.gate.bias.copy_(torch.tensor([1e3, 0, 0]))

    def forward(self, x: Tensor) -> Tensor:
        shares = F.one_hot(self.gate(x).argmax(-1), 3).to(x.dtype)
        return (shares.unsqueeze(-1) * torch.stack([expert(x) for expert in self.experts], 1)).sum(1)


def takes_the_first(module: fx.GraphModule) -> fx.GraphModule:
    stacked = next((node for node in module.graph.nodes if node.target is torch.stack), None)
    if stacked is not None:
        with module.graph.inserting_after(stacked):
            module.graph.output_node().args = (module.graph.call_method("select", (stacked, 1, 0)),)
        module.graph.eliminate_dead_code()
    return module


def test_a_rewrite_that_holds_for_one_routing_is_undone():
    fast = fxopt.optimize(Routed(), [takes_the_first], example_inputs=torch.randn(5, 4), measure=False)
    assert [decision.status for decision in fxopt.plan(fast).decisions] == ["undone"]
