"""quantize{scheme=int8_static,method=gptq}: weights that calibration data have chosen, in chains and alone."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cpus import needs_static_int8
from support.static_int8 import with_method
from torch import Tensor, nn

import fxopt
from fxopt.errors import PlanError

pytestmark = needs_static_int8
_MIXING = torch.randn(6, 48, generator=torch.Generator().manual_seed(7))  # 48 inputs that follow from 6
SEEN = [torch.randn(64, 6, generator=torch.Generator().manual_seed(seed)) @ _MIXING for seed in range(6)]
X = torch.randn(64, 6, generator=torch.Generator().manual_seed(99)) @ _MIXING


class Net(nn.Module):
    """Two layers with a ReLU between, a chain, and one behind a tanh."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.head = nn.Linear(48, 64), nn.Linear(64, 32, bias=False), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.down(torch.relu(self.up(x)))))


def optimized(model: nn.Module, method: Any = "gptq", **options: Any) -> Any:
    return with_method(model, method, SEEN, **options)


@pytest.fixture(scope="module")
def fast() -> Any:
    return optimized(Net().eval())


def run(model: nn.Module, x: Tensor = X) -> Tensor:
    with torch.no_grad():
        return model(x)


def error_of_weight(layer: Any, own: Any, rows: Tensor) -> float:
    """Return by how much the results of a layer are off with its rounded weight alone."""
    return float((rows @ (layer.weight - own.weight).detach().T).norm())


def test_weights_err_less_on_inputs_like_those_that_were_seen(fast: Any):
    model: Any = Net().eval()
    plain, hidden = optimized(model, "rtn"), run(nn.Sequential(model.up, nn.ReLU()))
    for name, rows in (("up", X), ("down", hidden)):
        found, other, own = (each.get_submodule(name) for each in (fast, plain, model))
        assert type(found).__name__ == "StaticLinear"
        assert error_of_weight(found, own, rows) < 0.8 * error_of_weight(other, own, rows)


def test_the_first_layer_passes_numbers_on(fast: Any):
    layers = [
        decision.site["data"]["layers"] for decision in fxopt.plan(fast).decisions if decision.status == "applied"
    ]
    assert [[layer["name"] for layer in group] for group in layers] == [["up", "down"], ["head"]]
    assert all(layer["by_data"] for group in layers for layer in group)


def test_state_comes_back_bit_by_bit(fast: Any, tmp_path: Path):
    expected, saved = run(fast), fast.state_dict()
    fxopt.save(fast, tmp_path / "model.fxopt")
    loaded = fxopt.load(tmp_path / "model.fxopt", model=Net().eval())
    again = copy.deepcopy(fast)
    again.load_state_dict(saved)
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)), loaded, again):
        assert torch.equal(run(other), expected)
    assert torch.equal(fxopt.restore(fast).up.weight, saved["up.weight"])


def test_a_plan_is_repeated_on_weights_that_are_rounded_already(fast: Any):
    with pytest.raises(PlanError, match="a plan does not hold them"):
        fxopt.optimize(Net().eval(), plan=fxopt.plan(fast), example_inputs=(X,))
    again = fxopt.optimize(fxopt.restore(fast), plan=fxopt.plan(fast), example_inputs=(X,))
    assert torch.equal(run(again), run(fast))


def pictures(seed: int) -> Tensor:
    """Return smooth images, of which neighbours follow from one another."""
    small = torch.randn(16, 3, 3, 3, generator=torch.Generator().manual_seed(seed))
    return nn.functional.interpolate(small, size=12, mode="bilinear")


def convolution(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, **{"kernel_size": 3, **options})).eval()


@pytest.mark.parametrize(
    "options",
    [{}, {"padding": 1, "stride": 2, "dilation": 2}, {"kernel_size": (1, 5), "padding": (0, 2)}, {"padding": "same"}],
)
def test_convolutions_err_less_on_images_like_those_that_were_seen(options: dict[str, Any]):
    model, seen = convolution(**options), [pictures(seed) for seed in range(4)]
    plain, other = (optimized(model, method, calibration=seen) for method in ("rtn", "gptq"))
    new, errors = pictures(9), list[float]()
    for each in (plain, other):
        assert type(each[0]).__name__ == "StaticConv"
        off = each[0].weight.detach() - model[0].weight.detach()
        errors.append(float(nn.functional.conv2d(new, off, None, *settings_of(model[0])).norm()))
    assert errors[1] < 0.8 * errors[0]


def settings_of(conv: nn.Module) -> Any:
    return conv.stride, conv.padding, conv.dilation, conv.groups


def test_convolutions_along_a_line_and_in_space_have_such_weights_too():
    for kind, shape in ((nn.Conv1d, (8, 4, 20)), (nn.Conv3d, (4, 4, 6, 6, 6))):
        torch.manual_seed(0)
        model, x = nn.Sequential(kind(4, 6, 3, padding=1)).eval(), torch.randn(shape).cumsum(-1)
        (decision,) = fxopt.plan(optimized(model, calibration=[x])).decisions
        assert decision.site is not None and decision.site["data"]["layers"][0]["by_data"]


def test_convolutions_of_several_groups_are_rounded_plainly():
    model, seen = convolution(groups=3), [pictures(seed) for seed in range(4)]
    plain, other = (optimized(model, method, calibration=seen) for method in ("rtn", "gptq"))
    assert torch.equal(run(plain, seen[0]), run(other, seen[0]))


def test_state_of_convolutions_comes_back_bit_by_bit(tmp_path: Path):
    model, seen = convolution(), [pictures(seed) for seed in range(4)]
    fast = optimized(model, calibration=seen)
    fxopt.save(fast, tmp_path / "model.fxopt")
    again = fxopt.optimize(fxopt.restore(fast), plan=fxopt.plan(fast), example_inputs=(seen[0],))
    loaded = fxopt.load(tmp_path / "model.fxopt", model=convolution())
    for other in (copy.deepcopy(fast), loaded, again):
        assert torch.equal(run(other, seen[0]), run(fast, seen[0]))
    with pytest.raises(PlanError, match="a plan does not hold them"):
        fxopt.optimize(model, plan=fxopt.plan(fast), example_inputs=(seen[0],))


def test_layers_that_hold_their_inputs_first_have_such_weights_too():
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    torch.manual_seed(0)
    layer = pytorch_utils.Conv1D(32, 48)
    plain = nn.Linear(48, 32)
    plain.load_state_dict({"weight": layer.weight.detach().t(), "bias": layer.bias.detach()})
    fast, other = (optimized(nn.Sequential(each).eval()) for each in (layer, plain))
    assert torch.equal(run(fast), run(other))
