"""Batch norms and layers that are calls of functions on tensors of the model fold as modules do."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from norms import reasons
from torch import Tensor, nn

import fxopt
from fxopt.testing import assert_equivalent

IMAGES = torch.randn(2, 3, 7, 7, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Norms by the function, with tensors of its own, behind a convolution that is a module."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.weight, self.bias = (nn.Parameter(torch.randn(6)) for _ in range(2))
        self.register_buffer("running_mean", torch.randn(6))
        self.register_buffer("running_var", torch.rand(6) + 0.3)

    def normed(self, x: Tensor, training: bool = False) -> Tensor:
        mean, var = self.running_mean, self.running_var
        return F.batch_norm(x, mean, var, self.weight, self.bias, training, 0.1, 1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.normed(self.conv(x)))


class OnFunctions(Net):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(6, 3, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.normed(F.conv2d(x, self.kernel, stride=2, padding=1)))


class OnTransposed(OnFunctions):
    def forward(self, x: Tensor) -> Tensor:
        return self.normed(F.conv_transpose2d(x, self.kernel.transpose(0, 1).contiguous(), stride=2))


class ByMode(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.normed(self.conv(x), self.training))


class OfModule(Net):
    """Calls the function with what a module holds that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(6)
        nn.init.normal_(self.norm.running_mean)

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        return F.batch_norm(self.conv(x), norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps)


class Plain(nn.Module):
    """All tensors of the norm are plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.mean, self.variance, self.weight = torch.randn(6), torch.rand(6) + 0.5, torch.randn(6)

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(self.conv(x), self.mean, self.variance, self.weight)


class Before(Net):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.normed(torch.cat([x, x], 1)))


class CalledToo(OfModule):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.norm(x.repeat(1, 2, 1, 1)[:, :, 1:-1, 1:-1])


class ReadToo(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.weight.sum()


class Always(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.normed(self.conv(x), True)


class Computed(Net):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(self.conv(x), self.running_mean + 1, self.running_var)


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().eval()


def folded(model: nn.Module) -> nn.Module:
    return fxopt.optimize(model, "fold_batchnorm", example_inputs=IMAGES, measure=False)


def norms(model: nn.Module) -> int:
    return sum(node.target is F.batch_norm for node in fxopt.graphs(model)[""].nodes)


@pytest.mark.parametrize("kind", [Net, OnFunctions, ByMode, OfModule, Plain, Before])
def test_it_folds(kind: type[nn.Module]) -> None:
    model = made(kind)
    fast = folded(model)
    assert norms(fast) == 0 and reasons(fast) == [""]
    assert_equivalent(model, fast, (IMAGES,))
    assert list(fast.state_dict()) == list(model.state_dict())


REFUSED = [
    (CalledToo, "'norm', whose tensors it reads, is called as well"),
    (ReadToo, "'weight' is read in the graph of '(root)'"),
    (Always, "the batch norm is in training mode"),
    (Computed, "on tensors that are not the model's"),
]


@pytest.mark.parametrize(("kind", "reason"), REFUSED)
def test_it_refuses(kind: type[nn.Module], reason: str) -> None:
    fast = folded(made(kind))
    assert norms(fast) == 1 and reason in reasons(fast)[0]


def test_tied_tensors_stay() -> None:
    model = made(Net)
    model.bias = model.weight
    assert reasons(folded(model)) == ["'weight' is tied to 'bias'"]


def test_a_computed_kernel_stays() -> None:
    fast = folded(made(OnTransposed))
    assert norms(fast) == 1 and reasons(fast) == []


@pytest.mark.parametrize("kind", [Net, ByMode])
def test_training_runs_as_written_and_evaluation_then_the_new_statistics(kind: type[nn.Module]) -> None:
    model, fast = made(kind), folded(made(kind))
    for each in (model, fast):
        each.train()
        each(IMAGES).sum().backward()
        torch.optim.SGD(each.parameters(), 0.01).step()
        each.eval()
    assert_equivalent(model, fast, (IMAGES,))


def test_writes_copies_and_the_way_back() -> None:
    model, fast = made(OnFunctions), folded(made(OnFunctions))
    for each in (model, fast):
        with torch.no_grad():
            each.running_var.mul_(2)
            each.kernel.add_(0.5)
    assert_equivalent(model, fast, (IMAGES,))
    assert_equivalent(model, copy.deepcopy(fast), (IMAGES,))
    assert_equivalent(model, fxopt.restore(fast), (IMAGES,))


def test_one_image_without_a_batch_is_not_normed_by_another_dimension() -> None:
    with pytest.raises(fxopt.GuardError, match="4 dimensions"):
        folded(made(Net))(IMAGES[0])


@pytest.mark.parametrize("name", ["weight", "running_mean"])
def test_a_tensor_that_is_none_now_is_said_and_is_none_in_the_original(name: str) -> None:
    fast = folded(made(Net))
    setattr(fast, name, None)
    with pytest.raises(fxopt.FusedMemberError, match=r"was folded .* is None now"):
        fast(IMAGES)
    assert getattr(fxopt.restore(fast), name) is None


def test_a_weight_that_is_none_now_is_none_in_the_original() -> None:
    model, fast = made(Net), folded(made(Net))
    model.weight = fast.weight = None
    assert_equivalent(model, fxopt.restore(fast), (IMAGES,))
