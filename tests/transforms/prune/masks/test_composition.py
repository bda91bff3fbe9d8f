"""Masks and what other passes make of the layers behind them."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator

import pytest
import torch
from support.cpus import needs_static_int8
from torch import distributed, nn

import fxopt
from fxopt.errors import OrderError
from fxopt.transforms.prune import masks

X = torch.randn(16, 16, generator=torch.Generator().manual_seed(1))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))


def statuses(model: nn.Module) -> set[tuple[str, str]]:
    return {(decision.pass_name, decision.status) for decision in fxopt.plan(model).decisions}


@pytest.fixture
def group() -> Iterator[None]:
    store = f"file://{tempfile.mkdtemp()}/store"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("how", ["ddp", "fsdp", "tensor_parallel"])
@pytest.mark.usefixtures("group")
def test_masks_hold_in_models_that_are_sharded_afterwards(how: str):
    fast = fxopt.optimize(network(), f"prune{{amount=0.7}},{how}", example_inputs=X)
    assert statuses(fast) == {("prune", "applied"), (how, "applied")}
    kept, before = masks(fast), copy.deepcopy(fxopt.state_dict(fast))
    optimizer = torch.optim.Adam(fast.parameters(), 0.01)
    for _ in range(3):
        optimizer.zero_grad()
        fast(X).square().sum().backward()
        optimizer.step()
    state = fxopt.state_dict(fast)
    assert set(kept) == {"0.weight", "2.weight", "4.weight"}
    assert all(not bool(state[name][~flags].any()) for name, flags in kept.items())
    assert not any(torch.equal(state[name], before[name]) for name in kept)
    plain = network()
    plain.load_state_dict(state)
    torch.testing.assert_close(fast(X), plain(X))


def test_zeros_are_quantized_as_zeros():
    both = fxopt.optimize(
        network().eval(), "prune{amount=0.7},quantize{scheme=int8_weight}", example_inputs=X, measure=False
    )
    assert statuses(both) == {("prune", "applied"), ("quantize", "applied")}
    pruned = fxopt.optimize(network().eval(), "prune{amount=0.7}", example_inputs=X)
    for name, flags in masks(pruned).items():
        assert not bool(both.state_dict()[name][~flags].any())


@needs_static_int8
def test_convolutions_with_masks_are_calibrated():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)).eval()
    x = torch.randn(4, 3, 8, 8)
    fast = fxopt.optimize(model, "prune,quantize{scheme=int8_static,aim=size}", example_inputs=x)
    assert {decision.status for decision in fxopt.plan(fast).decisions} == {"applied"}
    assert ((fast.state_dict()["0.weight"] == 0).sum() + (fast.state_dict()["3.weight"] == 0).sum()) >= (216 + 1152) / 2


def test_members_with_masks_are_not_fused():
    class Members(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.members = nn.ModuleList(nn.Sequential(nn.Linear(16, 8), nn.Tanh()) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([member(x) for member in self.members])

    fast = fxopt.optimize(Members(), "prune{amount=0.5},fuse_ensembles", example_inputs=X, measure=False)
    assert ("prune", "applied") in statuses(fast) and ("fuse_ensembles", "applied") not in statuses(fast)
    assert len(masks(fast)) == 4


def test_regions_run_layers_with_masks():
    passes = "prune{amount=0.5},autocast,checkpoint{budget=0}"
    for order in (passes, "autocast,checkpoint{budget=0},prune{amount=0.5}"):
        fast = fxopt.optimize(network(), order, example_inputs=X, measure=False)
        assert len(masks(fast)) == 3 and ("prune", "applied") in statuses(fast)
        fast(X).square().sum().backward()
        for name, flags in masks(fast).items():
            assert not bool(fast.get_parameter(name).grad[~flags].any())


def test_what_comes_too_late_is_refused():
    with pytest.raises(OrderError, match="once 'quantize' has run, 'prune' no longer can"):
        fxopt.optimize(network().eval(), "quantize{scheme=int8_weight},prune", example_inputs=X)
    with pytest.raises(OrderError, match="'prune' must run before 'fuse_ensembles'"):
        fxopt.optimize(network(), "fuse_ensembles,prune", example_inputs=X)
