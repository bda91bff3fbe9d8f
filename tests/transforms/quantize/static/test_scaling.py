"""quantize{scheme=int8_static,method=smoothquant}: scales of inputs in layers that pass on numbers of 8 bits."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cpus import needs_static_int8
from support.static_int8 import with_method
from torch import Tensor, nn

import fxopt

pytestmark = needs_static_int8
SEEN = [torch.randn(64, 32, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
X = torch.randn(64, 32, generator=torch.Generator().manual_seed(9))


class Net(nn.Module):
    """Three layers that read what a norm gives, one of them behind a ReLU passes numbers on to the last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(32)
        self.query, self.key, self.up = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(32, 64)
        self.down = nn.Linear(64, 48, bias=False)
        with torch.no_grad():  # as language models have them: a few channels are much larger
            self.norm.weight[[3, 17]] = 40.0
            self.up.weight[[5, 6, 11]] *= 30.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        hidden = self.down(torch.relu(self.up(x)).unsqueeze(1).flatten(1))
        return hidden + torch.tanh(self.query(x)) * self.key(x)


def optimized(model: nn.Module, method: Any = "smoothquant", **options: Any) -> Any:
    return with_method(model, method, SEEN, **options)


@pytest.fixture(scope="module")
def fast() -> Any:
    return optimized(Net().eval())


def run(model: nn.Module, x: Tensor = X) -> Tensor:
    with torch.no_grad():
        return model(x)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().norm() / expected.detach().norm())


def simulated(fast: Any) -> nn.Module:
    """Return a model that computes in float64 what each layer stands for."""
    model = Net().eval().double()
    for name in ("query", "key", "up", "down"):
        layer, own = fast.get_submodule(name), model.get_submodule(name)
        own.weight.data = layer.weight.double()
        factors = torch.ones(()) if layer.factors is None else layer.factors.double()
        own.register_forward_pre_hook(lambda _, args, of=layer.range, by=factors: (of.rounded(args[0] * by) / by,))
    return model


def test_it_errs_less_beside_outliers_on_rows_that_were_not_seen(fast: Any):
    expected, plain = run(Net().eval()), optimized(Net().eval(), "rtn")
    assert error(run(fast), expected) < 0.6 * error(run(plain), expected)
    assert plain.up.factors is None and plain.state_dict().keys() == fast.state_dict().keys()


def test_layers_that_read_one_value_share_its_numbers_and_scales(fast: Any):
    assert torch.equal(fast.query.factors, fast.key.factors) and torch.equal(fast.query.factors, fast.up.factors)
    nodes = list(fxopt.graphs(fast)[""].nodes)
    (numbers,) = [node for node in nodes if getattr(node.target, "__name__", "") == "to_numbers"]
    assert {str(user.target) for user in numbers.users} == {"query", "key", "up"}


def test_a_layer_scales_what_it_passes_on(fast: Any):
    assert fast.down.factors.unique().numel() > 1
    (up,) = [node for node in fxopt.graphs(fast)[""].nodes if node.target == "up"]
    assert up.kwargs["output"] is not None and up.kwargs["output_factors"].target == "down.factors"
    # One number of an activation may fall on the other side where it is halfway between two.
    assert error(run(fast).double(), run(simulated(fast), X.double())) < 5e-3
    assert error(Net.forward(fast, X), run(fast)) < 5e-3  # with floats between layers


class Pooled(nn.Module):
    """A layer behind pooling and one behind a convolution read what no layer before them can scale."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(2, 4, 3), nn.Linear(36, 16)
        with torch.no_grad():
            self.conv.weight[1] *= 50.0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.conv(x)).flatten(1))


def test_behind_a_convolution_a_layer_scales_its_input_itself():
    images = [torch.rand(64, 2, 5, 5, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    model = Pooled().eval()
    fast, plain = (optimized(model, method, calibration=images[:2]) for method in ("smoothquant", "rtn"))
    (conv,) = [node for node in fxopt.graphs(fast)[""].nodes if node.target == "conv"]
    assert conv.kwargs.get("output") is None and fast.head.factors is not None and fast.conv.factors is None
    expected = run(model, images[2])
    assert error(run(fast, images[2]), expected) < error(run(plain, images[2]), expected)


def test_state_comes_back_bit_by_bit(fast: Any, tmp_path: Path):
    expected, saved, model = run(fast), fast.state_dict(), Net().eval()
    assert list(saved) == list(model.state_dict()) and error(saved["up.weight"], model.up.weight) < 0.04
    other = copy.deepcopy(fast)
    other.up.weight_values.zero_()
    other.load_state_dict(saved)
    assert torch.equal(run(other), expected)
    assert torch.equal(run(pickle.loads(pickle.dumps(fast))), expected)
    fxopt.save(fast, tmp_path / "model.fxopt", factory="torch.nn:Identity")
    assert torch.equal(run(fxopt.load(tmp_path / "model.fxopt", model=model)), expected)
    again = fxopt.optimize(model, plan=fxopt.plan(fast), example_inputs=(SEEN[0],))
    assert torch.equal(run(again), expected)
    back: Any = fxopt.restore(fast)
    assert type(back.up) is nn.Linear and torch.equal(back.norm.weight, model.norm.weight)
    assert error(run(back), run(model)) < 0.02


def test_gradients_flow_as_in_floats(fast: Any):
    x, y = (X.clone().requires_grad_() for _ in range(2))
    fast(x).square().sum().backward()
    simulated(fast)(y.double()).square().sum().backward()
    assert x.grad is not None and y.grad is not None and error(x.grad, y.grad) < 0.02


def test_exporters_get_the_same_function(fast: Any):
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced: Any = torch.jit.trace(fast, X, check_trace=False)
        for found in (torch.export.export(fast, (X,)).module()(X), traced(X)):
            assert error(found, run(fast)) < 5e-3


def test_alpha_is_read_and_batches_of_one_row_do():
    one = optimized(Net().eval(), alpha=0.5, calibration=[X[:1]])
    assert one.up.factors is not None and run(one).isfinite().all()
