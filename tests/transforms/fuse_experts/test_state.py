"""fuse_experts and state: checkpoints both ways, live views, optimizers, plans, copies and pickles."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mixtures import Block, Named, Where
from torch import Tensor, nn

import fxopt

FUSE = "fuse_experts{lowering=padded}"


def x_of(*shape: int) -> Tensor:
    return torch.randn(*shape, 16, generator=torch.Generator().manual_seed(7))


@pytest.fixture(params=[Where, Block])
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(3)
    return request.param().eval()


def fused(model: nn.Module, **options: object) -> nn.Module:
    fast = fxopt.optimize(model, FUSE, example_inputs=(x_of(3, 12),), measure=False, **options)
    assert [d.status for d in fxopt.plan(fast).decisions] == ["applied"]
    return fast


def test_checkpoints_go_both_ways(model: nn.Module) -> None:
    fast, other, x = fused(model), type(model)(), x_of(2, 5)
    assert list(fast.state_dict()) == list(model.state_dict())
    fast.load_state_dict(other.state_dict())
    torch.testing.assert_close(fast(x), other(x))
    model.load_state_dict(fast.state_dict())
    torch.testing.assert_close(model(x), other(x))


def test_what_is_written_into_an_expert_counts() -> None:
    torch.manual_seed(3)
    model = Named().eval()
    fast = fused(model)
    assert len(fast.experts) == 4 and type(fast.experts["expert_1"]).__name__ == "Plain"
    for each in (model, fast):
        with torch.no_grad():
            each.experts["expert_1"].up.weight.mul_(3)
            each.experts["expert_2"].down.bias.add_(1)
    torch.testing.assert_close(fast(x_of(2, 5)), model(x_of(2, 5)))


def test_an_optimizer_goes_along(step: Callable[..., Tensor]) -> None:
    torch.manual_seed(3)
    model = Where().train()
    twin = copy.deepcopy(model)
    ours, theirs = (torch.optim.Adam(each.parameters(), 1e-2) for each in (model, twin))
    for each, optimizer in ((model, ours), (twin, theirs)):
        step(each, optimizer, x_of(3, 12))
    fast = fused(model, optimizer=ours)
    for number in range(3):
        torch.testing.assert_close(step(fast, ours, x_of(3, 12) + number), step(twin, theirs, x_of(3, 12) + number))


def test_the_original_comes_back(model: nn.Module) -> None:
    fast = fused(model)
    back = fxopt.restore(fast)
    assert [name for name, _ in back.named_parameters()] == [name for name, _ in model.named_parameters()]
    torch.testing.assert_close(back(x_of(2, 5)), model(x_of(2, 5)))


def test_copies_and_pickles(model: nn.Module) -> None:
    fast, x = fused(model), x_of(2, 5)
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        torch.testing.assert_close(other(x), model(x))


def test_a_plan_is_replayed_on_other_weights(model: nn.Module, tmp_path: Path) -> None:
    fxopt.plan(fused(model)).save(tmp_path / "plan.json")
    other = type(model)().eval()
    fast = fxopt.optimize(other, FUSE, example_inputs=(x_of(3, 12),), plan=tmp_path / "plan.json")
    assert [d.status for d in fxopt.plan(fast).decisions] == ["applied"]
    torch.testing.assert_close(fast(x_of(2, 5)), other(x_of(2, 5)))


def test_archives(model: nn.Module, tmp_path: Path) -> None:
    fxopt.save(fused(model), tmp_path / "model.fxopt")
    loaded = fxopt.load(tmp_path / "model.fxopt", model=type(model)().eval(), example_inputs=(x_of(3, 12),))
    torch.testing.assert_close(loaded(x_of(2, 5)), model(x_of(2, 5)))


def test_what_is_undone_leaves_nothing_behind(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxopt.transforms.fuse_experts.write.FusedExperts.forward", lambda self, hidden, *_: hidden * 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    call = {"example_inputs": (x_of(3, 12),), "measure": False, "inplace": True, "optimizer": optimizer}
    before = {name: (id(parameter), parameter.clone()) for name, parameter in model.named_parameters()}
    modules = [(name, type(module)) for name, module in model.named_modules()]
    undone = fxopt.optimize(model, FUSE, **call)
    assert [d.status for d in fxopt.plan(undone).decisions] == ["undone"]
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [held for held, _ in before.values()]
    assert [name for name, _ in undone.named_parameters()] == list(before)
    for name, parameter in undone.named_parameters():
        assert id(parameter) == before[name][0] and torch.equal(parameter, before[name][1])
    back = fxopt.restore(undone)
    assert [(name, type(module)) for name, module in back.named_modules()] == modules
