"""Norms that stay, each with its reason."""

from __future__ import annotations

import pytest
import torch
from norms import IMAGE, Block, applied, block, folded, shaken
from torch import Tensor, nn

import fxopt
from fxopt.testing import assert_equivalent
from fxopt.transforms.fold_batchnorm import FoldBatchnorm


def reasons(model: nn.Module, *inputs: Tensor, **options: object) -> list[str]:
    """Return the reasons of the refusals; nothing may have been folded, and nothing may compute otherwise."""
    inputs = inputs or (torch.randn(IMAGE),)
    fast = folded(model, *inputs, **options)
    assert not applied(fast)
    if not model.training:
        torch.testing.assert_close(fast(*inputs), model(*inputs))
    return [d.reason for d in fxopt.plan(fast).decisions]


class Twice(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)) + self.layer(x)


class TwoNorms(Block):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6))
        self.other = nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)) + self.other(self.layer(x))


class NormTwice(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.norm(self.layer(x)))


class ReadTwice(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return self.norm(y) + y


class WrittenTo(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        z = self.norm(y)
        y.add_(1)
        return z + y


class Elsewhere(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6))
        self.tail = nn.Sequential(self.block.layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + self.tail(x)


class ReadsWeight(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)) * self.layer.weight.sum()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Twice(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)), "the convolution is called elsewhere too"),
        (TwoNorms(), "the convolution is called elsewhere too"),
        (NormTwice(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)), "the batch norm is called elsewhere too"),
        (ReadTwice(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)), "the convolution's output is read elsewhere too"),
        (WrittenTo(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)), "the convolution's output is read elsewhere too"),
        (Elsewhere(), "the convolution is called elsewhere too"),
        (ReadsWeight(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)), "'layer.weight' is read in the graph of '(root)'"),
        (
            Block(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, track_running_stats=False)),
            "the batch norm has no running statistics",
        ),
    ],
)
def test_refuses_what_is_used_elsewhere(model: nn.Module, reason: str) -> None:
    found = reasons(shaken(model))
    assert found and set(found) == {reason}


def test_refuses_training_mode() -> None:
    assert reasons(block().train()) == [
        "the model is in training, where weights change at every step; call model.eval() first"
    ]
    model = block()
    model.norm.train()
    fast = folded(model)
    assert [d.reason for d in fxopt.plan(fast).decisions] == ["the batch norm is in training mode"]


def test_refuses_frozen_norms_in_a_model_in_training() -> None:
    model = block().train()
    model.norm.eval()
    (reason,) = reasons(model)
    assert reason == "the model is in training, where weights change at every step; call model.eval() first"


def test_a_model_in_training_is_not_folded_for_evaluation_either() -> None:
    model = block().train()
    fast = folded(model, phase="eval")
    assert fast.training and model.training
    (decision,) = fxopt.plan(fast).decisions
    assert (decision.status, decision.reason.partition("; ")[2]) == ("refused", "call model.eval() first")


@pytest.mark.parametrize("name", ["layer", "norm"])
def test_refuses_hooks_and_parametrizations(name: str) -> None:
    model = block()
    what = "convolution" if name == "layer" else "batch norm"
    model.get_submodule(name).register_forward_hook(lambda module, args, output: output * 2)
    assert reasons(model) == [f"the {what} cannot be folded: it has hooks"]
    model = block()
    nn.utils.parametrize.register_parametrization(model.get_submodule(name), "weight", nn.Tanh())
    assert reasons(model) == [f"the {what} cannot be folded: it has parametrizations"]


class Shouting(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Doubling(nn.Conv2d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight, bias) * 2


class Depthwise(nn.Conv2d):
    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, 3, groups=channels)


def test_subclasses_are_folded_unless_they_compute_something_else() -> None:
    for kind in (Shouting, Doubling):
        model = shaken(Block(kind(3, 6, 3), nn.BatchNorm2d(6)))
        assert reasons(model) == [f"the convolution is a {kind.__name__}, which has its original forward"]
    model = shaken(Block(Depthwise(3), nn.BatchNorm2d(3)))
    fast = folded(model)
    assert applied(fast) == 1 and isinstance(fast.layer, Depthwise)
    assert_equivalent(model, fast, (torch.randn(IMAGE),))
    assert type(fxopt.restore(fast).layer) is Depthwise


def test_refuses_tied_parameters() -> None:
    model = nn.Sequential(block(), Block(nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6)))
    model[1].norm.weight = model[0].norm.weight
    assert set(reasons(shaken(model))) == {"'0.norm.weight' is tied to '1.norm.weight'"}


def test_refuses_mixed_types() -> None:
    model = block()
    model.norm.double()
    model.layer.double()
    model.norm.running_mean = model.norm.running_mean.float()
    found = fxopt.optimize(model, FoldBatchnorm())
    assert [d.reason for d in fxopt.plan(found).decisions] == [
        "the convolution and the batch norm have tensors of dtype float64 and float32"
    ]


def test_refuses_a_linear_on_more_dimensions() -> None:
    model = shaken(Block(nn.Linear(5, 6), nn.BatchNorm1d(6)))
    assert reasons(model, torch.randn(2, 6, 5)) == [
        "the linear gives 3 dimensions, so the batch norm acts on another one"
    ]
    unbatched = shaken(Block(nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6)))
    assert reasons(unbatched, torch.randn(4, 8)) == [
        "the convolution gives 2 dimensions, so the batch norm acts on another one"
    ]


class DependsOnData(nn.Module):
    """A root that cannot be captured, around a block that can; it may call the convolution by itself."""

    def __init__(self, direct: bool) -> None:
        super().__init__()
        self.block = Block(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6))
        self.direct = direct

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x)
        if x.sum() > 1e9:
            return y
        return y + self.block.layer(x) if self.direct else y


def test_calls_that_no_graph_shows() -> None:
    assert reasons(shaken(DependsOnData(True))) == ["'(root)' could not be captured and calls it, too"]
    fast = folded(shaken(DependsOnData(False)))
    assert applied(fast) == 1
    blind = fxopt.optimize(shaken(DependsOnData(False)), FoldBatchnorm())
    assert not applied(blind)


class PreActivation(nn.Module):
    """DenseNet's order: the norm comes before the convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(3 + 2 * i), nn.ReLU(), nn.Conv2d(3 + 2 * i, 2, 3, padding=1)) for i in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


def test_a_norm_before_an_activation_is_left_alone() -> None:
    assert reasons(shaken(PreActivation())) == []
