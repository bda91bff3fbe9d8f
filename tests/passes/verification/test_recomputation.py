"""What is computed again for the backward pass is checked as it happens: the same draws, and buffers counted once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxopt
from fxopt.passes.contract import Pass
from fxopt.passes.rewriting import Edit
from fxopt.passes.sites import Goal, Numerics, Site
from fxopt.passes.verification import Tape
from fxopt.runtime.graphs import Context
from fxopt.tracing.program import Program


@dataclasses.dataclass(frozen=True)
class Checkpointed(Pass):
    """Compute the blocks of a model again in the backward pass.

    Before: block(x)        After: checkpoint(block, x)
    Refuses: nothing.
    """

    preserve_rng_state: bool = True
    whole: bool = True

    goal: ClassVar[Goal] = Goal.MEMORY
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def find(self, program: Program) -> Iterator[Site]:
        yield Site(program, "", {})

    def rewrite(self, site: Site, edit: Edit) -> None:
        context = Context("checkpoint", {} if self.preserve_rng_state else {"preserve_rng_state": False})
        nodes = [node for node in edit.graph.nodes if node.op not in ("placeholder", "output")]
        edit.outline(nodes if self.whole else nodes[1:], name="again", context=context)


@dataclasses.dataclass(frozen=True)
class Reseeded:
    """Run a region from a seed of its own."""

    seed: int

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        torch.manual_seed(self.seed)
        return function(*args)


@dataclasses.dataclass(frozen=True)
class Reseeding(Checkpointed):
    """Run a model, or all but its first node, from a seed of its own."""

    seed: int = 0

    def rewrite(self, site: Site, edit: Edit) -> None:
        nodes = [node for node in edit.graph.nodes if node.op not in ("placeholder", "output")]
        edit.outline(nodes if self.whole else nodes[1:], name="again", context=Reseeded(self.seed))


class Noisy(nn.Module):
    """Two dropouts, one of them in a child."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Sequential(nn.Dropout(0.3), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.second(torch.tanh(self.first(x))), 0.4, self.training)


class Normed(Noisy):
    """A batch norm beside the dropouts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


def decision(model: nn.Module, pass_: Pass) -> Any:
    torch.manual_seed(0)
    fast = fxopt.optimize(model, passes=[pass_], example_inputs=(torch.randn(6, 4),), measure=False)
    return fxopt.plan(fast).decisions[0]


def test_a_region_with_dropouts_may_be_computed_again() -> None:
    found = decision(Noisy(), Checkpointed())
    assert found.status == "applied", found.reason


def test_other_draws_the_second_time_are_found() -> None:
    found = decision(Noisy(), Checkpointed(preserve_rng_state=False))
    assert found.status == "undone"
    assert "gradient" in found.reason


@pytest.mark.parametrize("seed", [0, 1, 1234])
@pytest.mark.parametrize("whole", [True, False])
def test_a_region_that_sets_the_seed_is_found(seed: int, whole: bool) -> None:
    found = decision(Noisy(), Reseeding(seed=seed, whole=whole))
    assert found.status == "undone"
    assert "bitwise" in found.reason or "random stream" in found.reason


def test_statistics_counted_twice_are_found_beside_dropouts() -> None:
    found = decision(Normed(), Checkpointed())
    assert found.status == "undone"
    assert "norm." in found.reason
    left_out = decision(Normed(), Checkpointed(whole=False))
    assert left_out.status == "applied", left_out.reason


def test_a_tape_goes_back_with_the_generator() -> None:
    torch.manual_seed(1)
    outside = torch.get_rng_state()
    with Tape(0) as tape:
        tape.at("a")
        start = torch.get_rng_state()
        first = torch.rand(3)
        second = torch.rand(3)
        torch.set_rng_state(start)
        assert torch.equal(torch.rand(3), first)
        assert torch.equal(torch.rand(3), second)
    with tape:
        assert not torch.equal(torch.rand(3), second)
    assert torch.equal(torch.get_rng_state(), outside)
