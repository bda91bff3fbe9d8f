"""Checkpoints where a pass moved tensors that no member reads: the innermost module around them translates."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Iterator, Mapping
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.passes.contract import Pass
from fxopt.passes.rewriting import Edit
from fxopt.passes.sites import Goal, Numerics, Refusal, Site
from fxopt.runtime.state import Select
from fxopt.tracing.program import Program

pytestmark = pytest.mark.filterwarnings("ignore::fxopt.StateWarning")

KEPT = (0, 2, 5)
X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Block(nn.Module):
    """Two layers of which a pass cuts the hidden units, and three more."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 4)
        self.parts = nn.ModuleList(nn.Linear(4, 2 + i) for i in range(3))
        self.scale = nn.Parameter(torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.first(x).relu())
        return torch.cat([part(x) for part in self.parts], -1) * self.scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 4), Block())
        self.after = nn.Linear(9, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.blocks(x))


class OfBlocks(Pass):
    """Rewrite every block by hand."""

    goal: ClassVar[Goal] = Goal.SIZE
    numerics: ClassVar[Numerics] = Numerics.SEMANTIC

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        yield Site(program, "blocks.1", {})


@dataclasses.dataclass(frozen=True)
class Cut(OfBlocks):
    """Keep three hidden units."""

    def rewrite(self, site: Site, edit: Edit) -> None:
        for name, dim in (("first", 0), ("last", 1)):
            old = edit.owner.get_submodule(name)
            new = nn.Linear(4, 3) if dim == 0 else nn.Linear(3, 4)
            new.bias = old.bias
            for tensor in ("weight", "bias") if dim == 0 else ("weight",):
                step = Select(f"{name}.{tensor}", f"{name}.{tensor}", dim, KEPT, 6)
                setattr(new, tensor, nn.Parameter(step.forward([getattr(old, tensor)])[0]))
                edit.record_state(step)
            edit.replace_module(name, new)


def optimized(model: nn.Module, *passes: Pass) -> nn.Module:
    fast = fxopt.optimize(model, list(passes), example_inputs=(X,), measure=False, verify=False)
    assert [d.status for d in fxopt.plan(fast).decisions] == ["applied"] * len(fxopt.plan(fast).pipeline), fxopt.plan(
        fast
    )
    return fast


def cut(model: Net) -> Net:
    """Return a copy of the model with the hidden units at zero that `Cut` does not keep."""
    model = copy.deepcopy(model)
    gone = [unit for unit in range(6) if unit not in KEPT]
    with torch.no_grad():
        model.blocks[1].first.weight[gone] = 0
        model.blocks[1].first.bias[gone] = 0
        model.blocks[1].last.weight[:, gone] = 0
    return model


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert list(one) == list(other)
    for name, tensor in one.items():
        assert tensor.shape == other[name].shape and torch.equal(tensor, other[name]), name


def test_state_dicts_are_the_originals() -> None:
    torch.manual_seed(0)
    model, other = Net(), Net()
    fast = optimized(model, Cut())
    model, other = cut(model), cut(other)
    assert fast.blocks[1].first.weight.shape == (3, 4)
    for place in ("", "blocks", "blocks.1", "blocks.1.first", "after"):
        assert_same(fast.get_submodule(place).state_dict(), model.get_submodule(place).state_dict())
    assert_same(fxopt.state_dict(fast), model.state_dict())
    torch.testing.assert_close(fast(X), model(X))
    for target in (fast, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        for whole, given in ((target, other), (nn.Sequential(target), nn.Sequential(other))):
            target.load_state_dict(model.state_dict())
            assert whole.load_state_dict(given.state_dict()) == ([], [])
            assert_same(target.state_dict(), other.state_dict())
            torch.testing.assert_close(target(X), other(X))
    assert_same(fxopt.restore(fast).state_dict(), other.state_dict())


def test_tensors_under_today_s_names_load_too() -> None:
    """Where a name stays, the shape tells which kind it is."""
    torch.manual_seed(0)
    fast, other = (optimized(Net(), Cut()) for _ in range(2))
    given = {name: tensor.detach().clone() for name, tensor in other.named_parameters()}
    assert fast.load_state_dict(given) == ([], [])
    torch.testing.assert_close(fast(X), other(X))


def test_a_block_loads_by_itself_and_reports_original_names() -> None:
    torch.manual_seed(0)
    fast, other = optimized(Net(), Cut()), cut(Net())
    assert fast.blocks[1].load_state_dict(other.blocks[1].state_dict()) == ([], [])
    assert_same(fast.blocks[1].state_dict(), other.blocks[1].state_dict())
    part = {name: tensor for name, tensor in other.state_dict().items() if name != "blocks.1.first.bias"}
    assert fast.load_state_dict(part, strict=False).missing_keys == ["blocks.1.first.bias"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"blocks.1.first.bias"'):
        fast.load_state_dict(part)
    with pytest.raises(RuntimeError, match=r"size mismatch for blocks.1.first.bias.*\[7\]"):
        fast.load_state_dict({**part, "blocks.1.first.bias": torch.zeros(7)})


def test_optimizing_again_keeps_the_names() -> None:
    torch.manual_seed(0)
    model = Net()
    fast = fxopt.optimize(optimized(model, Cut()), "eliminate_dead_code", example_inputs=(X,), verify=False)
    assert_same(fast.state_dict(), cut(model).state_dict())
