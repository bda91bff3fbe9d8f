"""quantize{scheme=int8_static}: shifts of biases make up for errors in the mean, where held-out data confirm them."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.cpus import needs_static_int8
from torch import Tensor, nn

import fxopt
from fxopt.compat.quantized import simulating
from fxopt.transforms.quantize import Quantize

pytestmark = needs_static_int8


def images(seed: int) -> Tensor:
    """Return images that are far from zero: what weights are off by adds up to an error in the mean."""
    return 2 + 0.3 * torch.randn(8, 16, 8, 8, generator=torch.Generator().manual_seed(seed))


SEEN, X = [images(seed) for seed in range(6)], images(99)


class Net(nn.Module):
    """A chain: a convolution without a bias, with a batch norm and a ReLU; a linear layer with one; one without."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv, self.norm = nn.Conv2d(16, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.up, self.down = nn.Linear(8 * 36, 24), nn.Linear(24, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x))).flatten(1)
        return self.down(torch.tanh(self.up(x)))


def net() -> nn.Module:
    model = Net()
    with torch.no_grad():
        for each in SEEN:
            model(each)
    return model.eval()


def optimized(model: nn.Module, **options: Any) -> Any:
    options = {"calibration": SEEN, "aim": "size", "budget": 0.9, "per_channel": False, **options}
    return fxopt.optimize(model, Quantize("int8_static", **options), example_inputs=(SEEN[0],))


@pytest.fixture(scope="module")
def fast() -> Any:
    return optimized(net())


def run(model: nn.Module, x: Tensor = X) -> Tensor:
    with torch.no_grad():
        return model(x)


def shifts(model: Any) -> dict[str, str]:
    decisions = [each for each in fxopt.plan(model).decisions if each.status == "applied"]
    return {layer["name"]: layer.get("shift", "") for each in decisions for layer in each.site["data"]["layers"]}


def unshifted(fast: Any) -> Any:
    """Return the same without shifts."""
    model = copy.deepcopy(fast)
    for module in model.modules():
        if getattr(module, "shift", None) is not None:
            module.shift.zero_()
    return model


def off(model: nn.Module) -> float:
    """Return by how much the results are off on data that nobody has seen."""
    expected = run(net())
    return float((run(model) - expected).norm() / expected.norm())


def test_layers_are_shifted_and_err_less_on_data_that_nobody_saw(fast: Any):
    assert shifts(fast)["conv"] and type(fast.conv).__name__ == "StaticConv"
    assert off(fast) < 0.8 * off(unshifted(fast))


def test_a_mean_that_is_put_right_is_that_of_the_floats():
    alone = nn.Sequential(net().conv, nn.Tanh()).eval()
    small = optimized(alone)
    expected, plain, found = (run(each[0]).mean((0, 2, 3)) for each in (alone, unshifted(small), small))
    assert float((found - expected).norm()) < 0.3 * float((plain - expected).norm())


def test_few_batches_leave_none_to_confirm_a_shift():
    assert not any(shifts(optimized(net(), calibration=SEEN[:3])).values())


def test_the_original_biases_stay_and_come_back(fast: Any):
    model = net()
    assert torch.equal(fast.up.bias, model.up.bias)
    assert list(fast.state_dict()) == list(model.state_dict())
    restored = fxopt.restore(fast)
    assert torch.equal(restored.up.bias, model.up.bias) and restored.conv.bias is None


def test_copies_archives_and_plans_keep_the_shifts(fast: Any, tmp_path: Path):
    fxopt.save(fast, tmp_path / "model.fxopt")
    loaded = fxopt.load(tmp_path / "model.fxopt", model=net())
    again = copy.deepcopy(fast)
    again.load_state_dict(fast.state_dict())
    planned = fxopt.optimize(net(), plan=fxopt.plan(fast), example_inputs=(SEEN[0],))
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)), loaded, again, planned):
        assert torch.equal(run(other), run(fast))


def test_kernels_compute_what_compilers_get(fast: Any):
    with simulating():
        expected = run(fast)
    assert float((run(fast) - expected).abs().max() / expected.abs().max()) < 0.02


def test_gradients_reach_the_original_bias(fast: Any):
    model = copy.deepcopy(fast)
    model.up(torch.randn(4, 288)).sum().backward()
    torch.testing.assert_close(model.up.bias.grad, torch.full((24,), 4.0))
