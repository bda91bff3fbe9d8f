"""quantize: methods that find numbers by calibration data: what they gain, how they come back, what is refused."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.errors import CalibrationError, FxoptError, PlanError, UsageError
from fxopt.runtime.state import dequantized, quantized
from fxopt.transforms.quantize import Quantize, layerwise
from fxopt.transforms.quantize.gptq import gptq
from fxopt.transforms.quantize.methods import treatment
from fxopt.transforms.quantize.statistics import InputStatistics
from fxopt.transforms.quantize.write import instead_of_linear

METHODS = [("smoothquant", "int8_dynamic"), ("awq", "int4_weight"), ("gptq", "int4_weight"), ("gptq", "int8_weight")]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


def with_outliers() -> Net:
    """Return a model whose norm makes a few channels much larger than the others, as those of language models do."""
    model = Net().eval()
    with torch.no_grad():
        model.norm.weight[[3, 17, 40]] = 60.0
    return model


def correlated(seed: int, rows: int = 256) -> Tensor:
    """Return rows whose 64 elements follow from 12, the same way for each seed."""
    mixing = torch.randn(12, 64, generator=torch.Generator().manual_seed(5))
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 12, generator=generator) @ mixing + 0.1 * torch.randn(rows, 64, generator=generator)


SEEN, NEW = [correlated(1), correlated(2)], correlated(3)


def by(model: nn.Module, scheme: str, method: str = "rtn", **options: Any) -> Any:
    if method != "rtn" or options.get("bias_correction"):
        options = {"calibration": SEEN, **options}
    pass_ = Quantize(scheme=scheme, method=method, **{"aim": "size", "budget": 0.9, **options})  # pyright: ignore[reportArgumentType]
    return fxopt.optimize(model, pass_, example_inputs=(NEW,))


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().norm() / expected.detach().norm())


# -- what is gained, on rows that were not seen ----------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["int4_weight", "int8_weight"])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_errs_less_on_correlated_inputs(scheme: str, act_order: bool):
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU()).eval()
    expected = model(NEW)
    plain, better = by(model, scheme), by(model, scheme, "gptq", act_order=act_order)
    weights = [each.state_dict()["0.weight"] for each in (plain, better)]
    in_floats = [error(nn.functional.linear(NEW, each), nn.functional.linear(NEW, model[0].weight)) for each in weights]
    assert in_floats[1] < 0.7 * in_floats[0]
    assert error(better(NEW), expected) < error(plain(NEW), expected)
    assert error(weights[1], model[0].weight) > error(weights[0], model[0].weight)


@pytest.mark.parametrize("large", [1.0, 30.0])
def test_scaled_inputs_stay_in_the_range_of_float16(large: float):
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 32).half(), torch.randn(256, 64).half()
    with torch.no_grad():
        x[:, 3], layer.weight[:, 3] = 1000.0 * x[:, 3], large * layer.weight[:, 3]
    seen = InputStatistics(len(x))
    seen.see("layer", x.float())
    found = treatment(Quantize(method="smoothquant"), "int8", layer.weight, seen)
    smooth = instead_of_linear(layer, layerwise.Int8DynamicLinear, "int8", 0, found).layer
    assert found.exponents
    with torch.no_grad():
        assert error(smooth(x).float(), layer(x).float()) < 0.01


def test_no_scales_are_taken_with_which_inputs_would_overflow():
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 32).half(), torch.randn(256, 64).half()
    with torch.no_grad():  # small weights let inputs be scaled up, and one input and its weights are large
        layer.weight.mul_(0.005)
        x[:, 3], layer.weight[:, 3] = 300.0 * x[:, 3], 20.0 * torch.randn(32)
    seen = InputStatistics(len(x))
    seen.see("layer", x.float())
    for alpha in (0.0, 0.1):
        found = treatment(Quantize(method="smoothquant", alpha=alpha), "int8", layer.weight, seen)
        smooth = instead_of_linear(layer, layerwise.Int8DynamicLinear, "int8", 0, found).layer
        with torch.no_grad():
            assert smooth(x).isfinite().all() and layer(x).isfinite().all()


@pytest.mark.parametrize(("method", "scheme"), [("awq", "int4_weight"), ("smoothquant", "int8_dynamic")])
def test_scaled_inputs_err_less_beside_outliers(method: str, scheme: str):
    model = with_outliers()
    plain, better = by(model, scheme), by(model, scheme, method)
    x = model.norm(NEW)
    assert error(better.up(x), model.up(x)) < 0.75 * error(plain.up(x), model.up(x))
    assert error(better(NEW), model(NEW)) < 0.9 * error(plain(NEW), model(NEW))


def test_bias_correction_takes_the_mean_error_away():
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 16, bias=False)).eval()
    seen = [(each + 2,) for each in SEEN]
    plain = by(model, "int4_weight")
    better = by(model, "int4_weight", bias_correction=True, calibration=seen)
    x = torch.cat([each for (each,) in seen])
    layers = [(each[0](x) - model[0](x)).mean(0).norm() for each in (plain, better)]
    assert layers[1] < 0.2 * layers[0]
    assert error(better(NEW + 2), model(NEW + 2)) < error(plain(NEW + 2), model(NEW + 2))
    assert better[1].bias is None and torch.equal(better.state_dict()["0.bias"], model[0].bias)


def test_a_method_that_gains_nothing_leaves_plain_rounding():
    model = nn.Sequential(nn.Linear(64, 48)).eval()
    zeros = [torch.zeros(8, 64)]
    for method, scheme in METHODS:
        fast = by(model, scheme, method, calibration=zeros)
        assert torch.equal(fast(NEW), by(model, scheme)(NEW))


# -- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "scheme"), METHODS)
def test_state_comes_back_bit_by_bit(method: str, scheme: str, tmp_path: Path):
    model = with_outliers()
    fast = by(model, scheme, method, bias_correction=True)
    before, saved = fast(NEW), fast.state_dict()
    assert list(saved) == list(model.state_dict())
    assert torch.equal(saved["norm.weight"], model.norm.weight) and torch.equal(saved["up.bias"], model.up.bias)
    assert error(saved["up.weight"], model.up.weight) < 0.4
    for buffer in (fast.up.weight_values, fast.up.weight_scales):
        buffer.zero_()
    fast.load_state_dict(saved)
    assert torch.equal(fast(NEW), before)
    assert torch.equal(copy.deepcopy(fast)(NEW), before)
    assert torch.equal(pickle.loads(pickle.dumps(fast))(NEW), before)
    fxopt.save(fast, tmp_path / "model.fxopt", factory="torch.nn:Identity")
    loaded = fxopt.load(tmp_path / "model.fxopt", model=model)
    assert torch.equal(loaded(NEW), before)


def test_restoring_undoes_the_scales_of_inputs():
    model = with_outliers()
    fast = by(model, "int8_dynamic", "smoothquant")
    assert fast.up.factors.unique().numel() > 1
    back = fxopt.restore(fast)
    assert torch.equal(back.norm.weight, model.norm.weight)
    assert torch.equal(back.up.weight, fast.up.weight + 0) and error(back.up.weight, model.up.weight) < 0.05
    assert error(back(NEW), model(NEW)) < 0.05


def test_another_checkpoint_is_rounded_with_the_same_scales_of_inputs():
    model, other = with_outliers(), with_outliers()
    with torch.no_grad():
        other.up.weight.mul_(1.5)
    fast = by(model, "int8_dynamic", "smoothquant")
    fast.load_state_dict(other.state_dict())
    assert error(fast(NEW), other(NEW)) < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_16_bits(dtype: torch.dtype):
    model = with_outliers().to(dtype)
    seen = [each.to(dtype) for each in SEEN]
    for method, scheme in METHODS:
        pass_ = Quantize(scheme, method=method, aim="size", budget=0.9, calibration=seen)  # pyright: ignore[reportArgumentType]
        fast = fxopt.optimize(model, pass_, example_inputs=(NEW.to(dtype),))
        before, saved = fast(NEW.to(dtype)), fast.state_dict()
        assert before.dtype is dtype and error(before.float(), model(NEW.to(dtype)).float()) < 0.3
        fast.load_state_dict(saved)
        assert torch.equal(fast(NEW.to(dtype)), before)


def test_plans_hold_scales_of_inputs_but_no_weights_made_of_data():
    model = with_outliers()
    for method, scheme in METHODS[:2]:
        fast = by(model, scheme, method, bias_correction=True)
        again = fxopt.optimize(model, plan=fxopt.plan(fast), example_inputs=(NEW,))
        assert torch.equal(again(NEW), fast(NEW))
    fast = by(model, "int4_weight", "gptq")
    with pytest.raises(PlanError, match=r"a plan does not hold them: load the archive, or optimize again with calibra"):
        fxopt.optimize(model, plan=fxopt.plan(fast), example_inputs=(NEW,))
    again = fxopt.optimize(fxopt.restore(fast), plan=fxopt.plan(fast), example_inputs=(NEW,))
    assert torch.equal(again(NEW), fast(NEW))


@pytest.mark.parametrize("form", ["int4", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_gptq_gives_is_rounded_to_itself(form: str, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 64, generator=generator).to(dtype)
    weight[:, 5], weight[3] = 0.0, 0.0
    x = correlated(1)
    found = gptq(weight, x.T @ x, form, 32, damp=0.01, by_size=True)
    assert found is not None and not torch.equal(found, weight)
    assert torch.equal(dequantized(*quantized(found, form, 32), form, dtype), found)
    assert not found[3].any()


# -- the layers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "scheme"), METHODS)
def test_exporters_and_gradients_know_of_scales_and_shifts(method: str, scheme: str):
    fast = by(with_outliers(), scheme, method, bias_correction=True)
    with torch.no_grad():
        expected = fast(NEW)
        exported = torch.export.export(fast, (NEW,)).module()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced: Any = torch.jit.trace(fast, NEW, check_trace=False)
        for found in (exported(NEW), traced(NEW)):
            assert error(found, expected) < 0.02
    x = NEW.clone().requires_grad_()
    fast.up(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad[0], fast.up.weight.sum(0), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        fast.up.bias.add_(1.0)
        assert error(fast.up(NEW) - 1.0, by(with_outliers(), scheme, method, bias_correction=True).up(NEW)) < 1e-4


def test_conv1d_of_transformers_has_its_inputs_first():
    transformers: Any = pytest.importorskip("transformers.pytorch_utils")
    torch.manual_seed(0)
    model = nn.Sequential(transformers.Conv1D(48, 64)).eval()
    for method, scheme in METHODS:
        fast = by(model, scheme, method)
        before = fast(NEW)
        assert error(before, model(NEW)) < 0.2
        fast.load_state_dict(fast.state_dict())
        assert torch.equal(fast(NEW), before)


# -- bits by layer ---------------------------------------------------------------------------------------------------


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def test_mixed_bits_hold_in_eight_what_four_cannot():
    model = Stack().eval()
    kinds: dict[str, list[str]] = {}
    for bits in ("same", "mixed"):
        fast = by(model, "int4_weight", bits=bits, budget=0.07)
        kinds[bits] = [type(layer).__name__ for layer in fast.layers]
        with torch.no_grad():
            assert float((fast(NEW) - model(NEW)).abs().max() / model(NEW).abs().max()) <= 0.07
    assert "Linear" in kinds["same"] and "Linear" not in kinds["mixed"]
    assert {"Int4WeightLinear", "Int8WeightLinear"} == set(kinds["mixed"])
    again = fxopt.optimize(model, plan=fxopt.plan(fast), example_inputs=(NEW,))
    assert torch.equal(again(NEW), fast(NEW))


def test_mixed_bits_take_layers_that_four_bits_do_not():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 10)).eval()
    fast = by(model, "int4_weight", bits="mixed")
    assert [type(layer).__name__ for layer in fast] == ["Int4WeightLinear", "Int8WeightLinear"]


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([torch.randn(4, 63)], r"the model does not take calibration batch 0: RuntimeError"),
        ([torch.full((4, 64), float("nan"))], r"the input of 'up' is not finite on the calibration data"),
        ([], r"calibration= has no batches"),
        (3, r"calibration= is of type int"),
    ],
)
@pytest.mark.parametrize(("method", "scheme"), METHODS[1:3])
def test_bad_data_are_named(data: Any, message: str, method: str, scheme: str):
    with pytest.raises(CalibrationError, match=message):
        by(Net().eval(), scheme, method, calibration=data)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "gtpq"}, "method='gtpq'; give rtn, gptq, awq or smoothquant"),
        ({"method": "awq"}, "method=awq is for scheme=int8_weight or int4_weight, not for int8_dynamic"),
        ({"method": "smoothquant", "scheme": "int4_weight"}, "method=smoothquant is for scheme=int8_dynamic"),
        ({"method": "awq", "scheme": "int8_static"}, "not for int8_static, which takes method=rtn or gptq or smoothqu"),
        ({"method": "awq", "scheme": "float8"}, "not for float8, which takes method=rtn"),
        ({"bias_correction": True, "scheme": "int8_static"}, "and scheme=int8_static does not read it"),
        ({"method": "gptq", "alpha": 0.7}, "alpha= is for method=smoothquant, and method=gptq does not read it"),
        ({"damp": 0.1}, "damp= is for method=gptq"),
        ({"method": "smoothquant", "alpha": 1.5}, "alpha=1.5; give a number from 0"),
        ({"method": "gptq", "damp": 0.0}, "damp=0.0; give a share"),
        ({"bits": "mixed"}, "bits= is for scheme=int4_weight"),
        ({"bias_correction": True, "scheme": "float8"}, "bias_correction= is for scheme="),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str):
    with pytest.raises(UsageError) as caught:
        fxopt.optimize(Net().eval(), Quantize(**options), example_inputs=(NEW,))
    assert message in str(caught.value)


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other, self.never = nn.Linear(64, 1), nn.Linear(1, 16), nn.Linear(64, 64)

    def forward(self, x: Tensor, more: bool = False) -> Tensor:
        return self.never(x) if more else self.other(self.one(x))


@pytest.mark.parametrize(("method", "scheme"), [METHODS[0], METHODS[3], ("awq", "int8_weight")])
def test_layers_of_one_channel_and_without_any_weight(method: str, scheme: str):
    model = Narrow().eval()
    assert error(by(model, scheme, method)(NEW), model(NEW)) < 0.05
    with torch.no_grad():
        model.one.weight.zero_()
        model.other.weight.zero_()
    assert torch.equal(by(model, scheme, method)(NEW), model(NEW))


def test_layers_that_data_never_reach_are_named():
    model = Narrow().eval()
    pass_ = Quantize("int8_weight", method="awq", aim="size", calibration=[NEW])
    fast = fxopt.optimize(model, pass_, example_inputs=fxopt.Inputs(NEW, more=True))
    reasons = {decision.label: decision.reason for decision in fxopt.plan(fast).decisions}
    assert reasons["never"] == "the calibration data never reaches it"


@pytest.mark.parametrize(("name", "text"), [("exponents", "AAA="), ("exponents", "?"), ("shift", "AAAA")])
def test_damaged_plans_are_refused(name: str, text: str):
    model = with_outliers()
    data = fxopt.plan(by(model, "int8_dynamic", "smoothquant", bias_correction=True)).to_json()
    data["decisions"][0]["site"]["data"][name] = text
    with pytest.raises(FxoptError, match=r"scales of inputs|shifts of a bias"):
        fxopt.optimize(model, plan=fxopt.Plan.from_json(data, "the plan"), example_inputs=(NEW,))


def test_weights_that_are_not_there_cannot_be_calibrated():
    with torch.device("meta"):
        model = Net().eval()
    with pytest.raises(CalibrationError, match=r"on the meta device; load its weights, then calibrate"):
        fxopt.optimize(model, Quantize("int8_weight", method="gptq", calibration=[NEW]))
