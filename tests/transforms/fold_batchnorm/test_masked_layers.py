"""Layers that `prune` has masked are folded as others are: with their zeros, which stay where they are."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cpus import needs_static_int8
from torch import Tensor, nn

import fxopt
from fxopt.transforms.prune import masks, remove_masks, set_masks

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
BOTH = "prune{amount=0.6},fold_batchnorm"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.second, self.norm2 = nn.ConvTranspose2d(8, 8, 3, groups=2, bias=False), nn.BatchNorm2d(8)
        self.last, self.norm3 = nn.Linear(8, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(self.norm2(self.second(x)))
        return self.norm3(self.last(x.mean((2, 3))))


def net() -> nn.Module:
    model = Net()
    for seed in range(3):
        model(torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) * 2)
    return model.eval()


def optimized(passes: str = BOTH, **options: Any) -> Any:
    return fxopt.optimize(net(), passes, example_inputs=X, measure=False, **options)


def statuses(model: nn.Module) -> list[tuple[str, str]]:
    return [(decision.pass_name, decision.status) for decision in fxopt.plan(model).decisions]


def expected(folded: nn.Module) -> Tensor:
    """Return what the original computes with the weights that the state dict shows."""
    model = net()
    model.load_state_dict(folded.state_dict())
    model.train(folded.training)
    return model(X)


def same(folded: nn.Module) -> None:
    with torch.no_grad():
        torch.testing.assert_close(folded(X), expected(folded), rtol=1e-4, atol=1e-5)
    for name, kept in masks(folded).items():
        assert not folded.get_parameter(name)[~kept].any()


def folds(model: nn.Module) -> int:
    return sum("Fold" in str(node.target) for graph in fxopt.graphs(model).values() for node in graph.nodes)


def test_masked_layers_are_folded():
    fast = optimized()
    assert statuses(fast) == [("prune", "applied")] * 3 + [("fold_batchnorm", "applied")]
    assert folds(fast) == 3 and len(masks(fast)) == 3
    same(fast)


def test_zeros_stay_whatever_is_written():
    fast = optimized()
    with torch.no_grad():
        fast.first.weight.add_(1.0)
        fast.second.weight.copy_(torch.ones_like(fast.second.weight))
    same(fast)
    fast.load_state_dict(net().state_dict())
    same(fast)
    state = {name: torch.ones_like(tensor) for name, tensor in fast.named_parameters()}
    zeroed = {name: t.masked_fill(~masks(fast)[name], 0) if name in masks(fast) else t for name, t in state.items()}
    found, wanted = (torch.func.functional_call(fast, each, (X,)) for each in (state, zeroed))
    torch.testing.assert_close(found, wanted)


def test_training_keeps_the_zeros_and_what_is_folded_follows():
    fast = optimized()
    same(fast)
    optimizer = torch.optim.Adam(fast.train().parameters(), 0.05)
    for _ in range(3):
        optimizer.zero_grad()
        fast(X).square().sum().backward()
        optimizer.step()
    same(fast.eval())


def test_gradients_of_what_is_masked_are_zero_in_evaluation():
    fast, pruned = optimized(), optimized("prune{amount=0.6}")
    for model in (fast, pruned):
        model(X).square().sum().backward()
    for name, kept in masks(fast).items():
        found, wanted = fast.get_parameter(name).grad, pruned.get_parameter(name).grad
        assert not found[~kept].any()
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_other_masks_are_folded_at_once():
    fast = optimized()
    same(fast)
    set_masks(fast, {"first.weight": torch.zeros(8, 3, 3, 3, dtype=torch.bool)})
    assert not fast.first.weight.any()
    same(fast)


def test_without_masks_the_fold_stays():
    fast = optimized()
    same(fast)
    remove_masks(fast)
    assert not masks(fast)
    same(fast)
    with torch.no_grad():
        fast.first.weight.add_(0.5)
    same(fast)
    assert folds(fast) == 3
    with pytest.raises(fxopt.FxoptError):
        fast.first.stride = (2, 2)  # the graph holds the old one
    same(pickle.loads(pickle.dumps(fast)))


def test_copies_pickles_archives_and_the_way_back(tmp_path: Path):
    fast = optimized()
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        same(other)
        assert len(masks(other)) == 3
    fxopt.save(fast, tmp_path / "model.fxopt", factory="torch.nn:Identity")
    loaded = fxopt.load(tmp_path / "model.fxopt", model=net(), example_inputs=X)
    torch.testing.assert_close(loaded(X), fast(X))
    assert folds(loaded) == 3
    original = fxopt.restore(fast)
    torch.testing.assert_close(original(X), fast(X), rtol=1e-4, atol=1e-5)
    assert type(original.first) is nn.Conv2d


@needs_static_int8
def test_norms_of_masked_layers_fold_into_what_is_quantized():
    fast = optimized("prune{amount=0.6},fold_batchnorm,quantize{scheme=int8_static,aim=size}")
    assert {status for _, status in statuses(fast)} == {"applied"}
    pruned = optimized("prune{amount=0.6}")
    with torch.no_grad():
        assert float((fast(X) - pruned(X)).abs().max()) < 0.1 * float(pruned(X).abs().max())
    for name, kept in masks(pruned).items():
        assert not fast.state_dict()[name][~kept].any()


def test_they_fold_before_they_are_quantized():
    fast = optimized("prune,fold_batchnorm,quantize")
    assert folds(fast) == 3
    pruned = optimized("prune")
    for name, kept in masks(pruned).items():
        assert not fast.state_dict()[name][~kept].any()


class Members(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        made = (nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(4))
        self.members = nn.ModuleList(made)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([member(x) for member in self.members])


def test_members_with_masks_stay_right_behind_a_fold():
    model = Members().eval()
    fast = fxopt.optimize(model, f"{BOTH},fuse_ensembles", example_inputs=X, measure=False)
    assert len(masks(fast)) == 4
    with torch.no_grad():
        fast.members[0][0].weight.add_(1.0)
        plain = Members().eval()
        plain.load_state_dict(fast.state_dict())
        torch.testing.assert_close(fast(X), plain(X), rtol=1e-4, atol=1e-5)
    for name, kept in masks(fast).items():
        assert not fast.state_dict()[name][~kept].any()
