"""Folded layers in shared blocks, in both modes, and with hooks outside."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from norms import IMAGE, Block, applied, block, folded, same_state, shaken, trained
from torch import Tensor, nn

import fxopt
from fxopt.testing import assert_equivalent
from fxopt.transforms.fold_batchnorm import FoldBatchnorm


class SharedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(x))


def test_a_block_called_twice_is_folded_once() -> None:
    model = shaken(SharedBlock())
    fast = folded(model)
    assert applied(fast) == 1
    assert_equivalent(model, fast, (torch.randn(IMAGE),))


class Switched(Block):
    """Train and evaluation have graphs of their own."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.norm(self.layer(x)) * 2
        return self.norm(self.layer(x))


class Ranked(Block):
    """Two graphs in evaluation, for one convolution."""

    def forward(self, x: Tensor, double: bool = False) -> Tensor:
        y = self.norm(self.layer(x))
        return y * 2 if double else y


def test_one_graph_for_each_mode() -> None:
    model = shaken(Switched(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)))
    fast = folded(model)
    assert applied(fast) == 1
    assert_equivalent(model, fast, (torch.randn(IMAGE),), training=False)


def test_two_graphs_share_one_fold() -> None:
    model = shaken(Ranked(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)))
    x = torch.randn(IMAGE)
    calls = [fxopt.Inputs(x), fxopt.Inputs(x, double=True)]
    fast = fxopt.optimize(model, FoldBatchnorm(), example_inputs=calls, measure=False)
    assert_equivalent(model, fast, calls)
    assert not any("call_module[target=norm]" in str(graph) for graph in fxopt.graphs(fast).values())
    assert same_state(model, fast)


class OnlySometimes(Block):
    def forward(self, x: Tensor, bare: bool = False) -> Tensor:
        y = self.layer(x)
        return y if bare else self.norm(y)


def test_refuses_a_convolution_that_another_graph_uses_by_itself() -> None:
    model = shaken(OnlySometimes(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)))
    calls = [fxopt.Inputs(torch.randn(IMAGE)), fxopt.Inputs(torch.randn(IMAGE), bare=True)]
    fast = fxopt.optimize(model, FoldBatchnorm(), example_inputs=calls, measure=False)
    assert [d.reason for d in fxopt.plan(fast).decisions] == [
        "the convolution is called in another way by another graph of the same module"
    ]


@pytest.mark.filterwarnings("ignore:.*")
def test_training_runs_the_original_forward_and_evaluation_then_the_new_weights() -> None:
    model = nn.Sequential(block(), nn.ReLU()).eval()
    fast, x = folded(model), torch.randn(IMAGE)
    for each in (model, fast):
        each.train()
        torch.manual_seed(0)
        trained(each, torch.optim.Adam(each.parameters(), 0.1), x)
        trained(each, torch.optim.Adam(each.parameters(), 0.1, fused=True), x)
        each.eval()
    torch.testing.assert_close(fast(x), model(x))
    assert same_state(model, fast)


@pytest.mark.filterwarnings("ignore:.*")
def test_statistics_that_one_norm_gathers_are_seen() -> None:
    model = nn.Sequential(block(), nn.ReLU()).eval()
    fast, x = folded(model), torch.randn(IMAGE)
    before = fast(x)
    for each in (model, fast):
        each[0].norm.train()
        with torch.no_grad():
            each(x)
        each[0].norm.eval()
    assert not torch.allclose(fast(x), before)
    torch.testing.assert_close(fast(x), model(x))


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("name", ["", "0", "0.norm"])
def test_the_flag_itself_decides(name: str) -> None:
    model = nn.Sequential(block(), nn.ReLU()).eval()
    fast, x = folded(model), torch.randn(IMAGE)
    for one in (fast, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        twin = copy.deepcopy(model)
        for each in (one, twin):
            each.get_submodule(name).training = True
        torch.testing.assert_close(one(x), twin(x))
        for each in (one, twin):
            each.get_submodule(name).training = False
        torch.testing.assert_close(one(x), twin(x))


@pytest.mark.filterwarnings("ignore:.*")
def test_frozen_norms_train_the_original_weights() -> None:
    model = block()
    fast, x = folded(model), torch.randn(IMAGE)
    for fused in (False, True):
        for each in (model, fast):
            with torch.no_grad():
                each(x)
            trained(each, torch.optim.Adam(each.parameters(), 0.1, fused=fused), x)
        for (name, expected), found in zip(model.named_parameters(), fast.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-3, atol=1e-6, msg=name)
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)


def test_a_model_for_evaluation_can_be_optimized_for_training() -> None:
    model = nn.Sequential(block(), nn.ReLU()).eval()
    fast, x = folded(model), torch.randn(IMAGE)
    again = fxopt.optimize(fast, "eliminate_dead_code", example_inputs=(x,), phase="train", measure=False)
    torch.testing.assert_close(again.train()(x), model.train()(x))


def test_hooks_around_a_fold_still_run() -> None:
    model, seen = block(), list[int]()
    model.register_forward_hook(lambda module, args, output: seen.append(1))
    fast = folded(model)
    seen.clear()
    fast(torch.randn(IMAGE))
    assert seen == [1]


def test_a_forward_that_falls_back_still_computes_the_same() -> None:
    model = shaken(Ranked(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)))
    fast = folded(model)
    x = torch.randn(IMAGE)
    torch.testing.assert_close(fast(x, double=True), model(x, double=True))


@pytest.mark.parametrize("write", [lambda m: m.layer, lambda m: m.norm])
def test_replacing_or_hooking_what_was_folded_fails(write: Callable[[nn.Module], nn.Module]) -> None:
    fast = folded(block())
    for change in (
        lambda: setattr(fast, "norm", nn.Identity()),
        lambda: setattr(fast, "layer", nn.Conv2d(3, 6, 3)),
        lambda: write(fast).register_forward_hook(print),
    ):
        with pytest.raises(fxopt.FusedMemberError, match="restore"):
            change()


def test_settings_of_what_was_folded_cannot_be_changed() -> None:
    fast = folded(block())
    for name, value in (("stride", (2, 2)), ("padding_mode", "circular"), ("forward", F.relu)):
        with pytest.raises(fxopt.FusedMemberError, match="cannot be replaced"):
            setattr(fast.layer, name, value)
    with pytest.raises(fxopt.FusedMemberError, match="cannot be replaced"):
        fast.norm.eps = 0.5
