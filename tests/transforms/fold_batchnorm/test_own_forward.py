"""Batch norms with a forward of their own: the norm is folded, and dropout and activation are computed behind it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from norms import reasons
from torch import Tensor, nn

import fxopt
from fxopt.errors import GuardError
from fxopt.testing import assert_equivalent

IMAGES = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(0))


class NormAct(nn.BatchNorm2d):
    """A norm with dropout and an activation inside, as libraries of image models have it."""

    def __init__(self, width: int, act: Callable[[], nn.Module] = nn.ReLU, affine: bool = True) -> None:
        super().__init__(width, affine=affine)
        self.drop, self.act = nn.Dropout(0.3), act()

    def forward(self, input: Tensor) -> Tensor:
        if input.ndim != 4:
            raise ValueError(f"expected four dimensions, not {input.ndim}")
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
        in_batch = True if self.training else self.running_mean is None and self.running_var is None
        normed = F.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, in_batch, self.momentum or 0.0, self.eps
        )
        return self.act(self.drop(normed))


class Functional(NormAct):
    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        normed = F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, self.training)
        return F.dropout(F.leaky_relu(normed, 0.2), 0.1, self.training)


class Residual(NormAct):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + input


class Otherwise(NormAct):
    """It norms with another number than its own `eps`."""

    def forward(self, input: Tensor) -> Tensor:
        return F.relu(F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.1, 0.5))


class BySize(NormAct):
    def forward(self, input: Tensor) -> Tensor:
        normed = F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, False)
        return F.relu(normed) if input.shape[-1] > 5 else normed


class Network(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module] = NormAct) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 6, 3), norm(6), nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.conv(x)))


def network(norm: Callable[[int], nn.Module] = NormAct) -> Network:
    torch.manual_seed(0)
    model = Network(norm)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.3, 3.0)
            for parameter in module.parameters(recurse=False):
                nn.init.normal_(parameter)
    return model.eval()


def folded(model: nn.Module, **options: object) -> nn.Module:
    return fxopt.optimize(model, "fold_batchnorm", example_inputs=IMAGES, measure=False, **options)  # type: ignore[arg-type]


def calls(model: nn.Module) -> list[str]:
    return [str(node.target) for node in fxopt.graphs(model)[""].nodes if node.op == "call_module"]


def test_the_norm_goes_and_the_rest_is_computed_behind_the_convolution() -> None:
    model = network()
    fast = folded(model)
    assert calls(fast) == ["norm.drop", "norm.act", "last"]
    assert reasons(fast) == [""]
    assert_equivalent(model, fast, IMAGES, training=False)


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "in place": lambda width: NormAct(width, lambda: nn.ReLU(inplace=True)),
    "silu": lambda width: NormAct(width, nn.SiLU),
    "none": lambda width: NormAct(width, nn.Identity),
    "not affine": lambda width: NormAct(width, affine=False),
    "functional": Functional,
}


@pytest.mark.parametrize("case", NORMS)
def test_other_norms(case: str) -> None:
    model = network(NORMS[case])
    fast = folded(model)
    assert reasons(fast) == [""]
    assert "norm" not in calls(fast)
    assert_equivalent(model, fast, IMAGES, training=False)


REFUSED: dict[str, tuple[Callable[[int], nn.Module], str]] = {
    "residual": (Residual, "a Residual, does more than norm and compute element by element"),
    "eps": (Otherwise, "a Otherwise, does more than norm"),
    "size": (BySize, "a BySize, decides by its input"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_refuses(case: str) -> None:
    norm, reason = REFUSED[case]
    model = network(norm)
    fast = folded(model)
    (found,) = reasons(fast)
    assert reason in found
    assert "norm" in calls(fast)


def test_training_and_new_statistics_and_checkpoints() -> None:
    model, fast = network(), folded(network())
    for each in (model, fast):
        each.train()
        torch.manual_seed(1)
        each(IMAGES)
        each.eval()
    assert_equivalent(model, fast, IMAGES, training=False)
    assert list(fast.state_dict()) == list(model.state_dict())
    assert_equivalent(model, fxopt.restore(fast), IMAGES, training=False)


def test_one_image_without_a_batch_is_refused_as_the_norm_does() -> None:
    with pytest.raises(GuardError, match="4 dimensions"):
        folded(network())(IMAGES[0])
    with pytest.raises(ValueError, match="four dimensions"):
        network()(IMAGES[0])


class Anything(nn.BatchNorm2d):
    """It norms the second dimension of whatever comes in."""

    def forward(self, input: Tensor) -> Tensor:
        return F.relu(F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias))


def test_one_image_as_high_as_there_are_channels_is_not_normed_by_another_dimension() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 9, 3, padding=1), Anything(9)).eval()
    nn.init.normal_(model[1].running_mean)  # pyright: ignore[reportArgumentType]
    fast = folded(model)
    assert reasons(fast) == [""]
    assert_equivalent(model, fast, IMAGES, training=False)
    assert model(IMAGES[0]).shape == (9, 9, 9)
    with pytest.raises(GuardError, match="4 dimensions"):
        fast(IMAGES[0])


def test_a_second_time_and_a_plan(tmp_path: Path) -> None:
    fast = folded(network())
    again = folded(fast)
    assert calls(again) == calls(fast)
    repeated = fxopt.optimize(network(), plan=fxopt.plan(fast), example_inputs=IMAGES)
    assert calls(repeated) == calls(fast)
    fxopt.save(fast, tmp_path / "model.fxopt", factory=f"{__name__}:network")
    loaded = fxopt.load(tmp_path / "model.fxopt", model=network(), example_inputs=IMAGES)
    assert_equivalent(network(), loaded, IMAGES, training=False)


def test_it_is_packed_with_its_activation() -> None:
    model = network(lambda width: NormAct(width, lambda: nn.ReLU(inplace=True)))
    fast = fxopt.optimize(model, "fold_batchnorm,pack", example_inputs=IMAGES, measure=False)
    with torch.no_grad():
        torch.testing.assert_close(fast(IMAGES), model(IMAGES))
