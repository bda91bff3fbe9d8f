"""Engines compute layers of `quantize{scheme=int8_static}` in 8 bits, but for rounding; others in floats."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from support.engines import engines, one_engine, openvino_only, reasons, regions
from torch import Tensor, nn

import fxopt
from fxopt.compat.packed import why_no_packing
from fxopt.compat.quantized import why_no_static_int8
from fxopt.errors import NothingDoneWarning
from fxopt.operators import canonical_name
from fxopt.transforms.delegate import Delegate
from fxopt.transforms.delegate.delegate import engine_named
from fxopt.transforms.quantize import Quantize

pytestmark = pytest.mark.skipif(bool(why_no_static_int8()), reason="needs exact sums of 8-bit products")
pytest.importorskip("torchao")
Conv1D: Any = pytest.importorskip("transformers.pytorch_utils").Conv1D

X = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Layers that pass numbers on, through a norm, a pooling and a reshape; a sum; a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.third = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.pool, self.head = nn.MaxPool2d(2), nn.Linear(8 * 36, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.norm(self.first(x))))
        x = torch.relu(x + self.third(torch.relu(self.second(x))))
        return self.head(x.flatten(1))


def net() -> Net:
    torch.manual_seed(0)
    found = Net()
    with torch.no_grad():
        found.norm.weight[0], found.norm.weight[1] = -1.0, 0.0  # a norm may turn signs, and close a channel
        found(X)
    return found.eval()


def static() -> Quantize:
    return Quantize(scheme="int8_static", calibration=[X, -X])


def made(engine: str, *, measure: bool = False) -> tuple[nn.Module, nn.Module]:
    """Return the quantized model, and the same with an engine."""
    model = net()
    passes: list[Any] = [static(), Delegate(engine, torch.int8)]
    quantized = fxopt.optimize(model, passes[:1], example_inputs=X, measure=False)
    return quantized, fxopt.optimize(model, passes, example_inputs=X, measure=measure)


@torch.no_grad()
def off(one: nn.Module, other: nn.Module, x: Tensor = X) -> float:
    found, expected = one(x), other(x)
    return float((found - expected).abs().max() / expected.abs().max())


@engines
def test_an_engine_computes_quantized_layers(engine: str, computed: list[str]) -> None:
    quantized, fast = made(engine)
    (region,) = regions(fast)
    assert (region.dtype, region.left) == (torch.int8, "")
    assert [getattr(node.target, "operator", "") for node in region.graph.nodes].count("static_int8") == 4
    computed.clear()
    for x in (X, X[:2], X[:1]):
        assert off(fast, quantized, x) < 0.02, "some numbers are rounded to the next one"
        assert off(fast, net(), x) < 0.05
    assert computed
    assert off(fast, net(), X.double().float().requires_grad_()) < 0.05  # by the layers' own kernels


@openvino_only
def test_it_multiplies_in_8_bits(engine: str) -> None:
    _, fast = made(engine)
    with torch.no_grad():
        fast(X)
    (region,) = regions(fast)
    (held,) = region._converted.values()
    operations = [
        each.get_rt_info() for each in held.session(next(iter(held.by_shapes)))._compiled.get_runtime_model().get_ops()
    ]
    kinds = {each["layerType"]: each["runtimePrecision"] for each in operations}
    assert {kinds["Convolution"], kinds["FullyConnected"], kinds["Pooling"]} <= {"u8", "i8"}


@one_engine
def test_a_sum_behind_a_convolution_and_pooling_read_what_is_rounded_once(engine: str) -> None:
    _, fast = made(engine)
    (region,) = regions(fast)
    (pooled,) = [node for node in region.graph.nodes if canonical_name(node) == "max_pool2d"]
    assert pooled.args[0].target.__name__ == "rounded"
    (total,) = [node for node in region.graph.nodes if canonical_name(node) in ("add", "iadd")]
    assert pooled in total.args


class Pooled(Net):
    """Returns what it pools, too."""

    def forward(self, x: Tensor) -> Any:
        pooled = self.pool(torch.relu(self.norm(self.first(x))))
        return self.third(torch.relu(self.second(pooled))), pooled


@one_engine
def test_what_others_read_of_a_pooling_is_not_rounded(engine: str) -> None:
    model = Pooled().eval()
    fast = fxopt.optimize(model, [static(), Delegate(engine, torch.int8)], example_inputs=X, measure=False)
    assert regions(fast)
    with torch.no_grad():
        assert fast(X)[1].unique().numel() > 256


class Twice(nn.Module):
    """Two layers of the same activation, of which a check is asked first."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != 8:
            return x
        return torch.tanh(self.one(x) + self.two(x))


@one_engine
def test_blocks_whose_layers_share_numbers_are_one_region(engine: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Twice(), Twice(), Twice()).eval(), torch.randn(4, 8)
    passes: list[Any] = [Quantize(scheme="int8_static", calibration=[x, -x]), Delegate(engine, torch.int8)]
    fast = fxopt.optimize(model, passes, example_inputs=x, measure=False)
    (region,) = regions(fast)
    assert [getattr(node.target, "operator", "") for node in region.graph.nodes].count("static_int8") == 6
    assert off(fast, model, x) < 0.05


@one_engine
def test_what_is_saved_and_changed_goes_with_the_quantized_layers(engine: str) -> None:
    quantized, fast = made(engine)
    assert [type(each).__name__ for each in (fast.first, fast.head)] == ["StaticConv", "StaticLinear"]
    assert list(fast.state_dict()) == list(net().state_dict())
    for copied in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert off(copied, fast) < 0.02
    other = net()
    with torch.no_grad():
        other.head.weight.mul_(-1.0)
        other.norm.bias.add_(0.5)
    fast.load_state_dict(other.state_dict())
    quantized.load_state_dict(other.state_dict())
    for _ in range(4):
        assert off(fast, quantized) < 0.02
    again = fxopt.optimize(net(), plan=fxopt.plan(fast), example_inputs=X)
    assert [each.dtype for each in regions(again)] == [torch.int8]


class Tied(nn.Module):
    """A head that is tied to an embedding, behind layers of which one holds its weight the other way round."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.norm = nn.Embedding(50, 64), nn.LayerNorm(64)
        self.one, self.two, self.head = nn.Linear(64, 64), Conv1D(64, 64), nn.Linear(64, 50, bias=False)
        self.head.weight = self.words.weight
        with torch.no_grad():
            self.norm.weight[[3, 17]] = 60.0  # so that inputs are scaled
            self.two.weight.mul_(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(self.norm(x))
        return self.head(x + torch.relu(self.two(x)))


ROWS = torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(1))


def dynamic(method: str) -> Quantize:
    found = {"calibration": [ROWS, -ROWS], "bias_correction": True} if method != "rtn" else {}
    return Quantize(method=method, **found)  # pyright: ignore[reportArgumentType]


@engines
@pytest.mark.parametrize("method", ["rtn", "smoothquant"])
def test_layers_that_round_at_each_call_are_floats_to_an_engine(engine: str, method: str, computed: list[str]) -> None:
    model = Tied().eval()
    passes: list[Any] = [dynamic(method), Delegate(engine, torch.int8)]
    quantized = fxopt.optimize(model, passes[:1], example_inputs=ROWS, measure=False)
    fast = fxopt.optimize(model, passes, example_inputs=ROWS, measure=False)
    (region,) = regions(fast)
    assert [canonical_name(node) for node in region.graph.nodes].count("linear") == 3
    assert {type(each).__name__ for each in fast.children()} >= {"Int8DynamicLinear", "TiedInt8Linear"}
    computed.clear()
    for x in (ROWS, ROWS[:1], -2 * ROWS):
        assert off(fast, quantized, x) < 0.05
        assert off(fast, model, x) < off(quantized, model, x)
    assert computed
    for one, other in ((fast, quantized), (copy.deepcopy(fast).double(), copy.deepcopy(quantized).double())):
        x = ROWS.to(one.norm.weight.dtype).requires_grad_()
        found, expected = (torch.autograd.grad(each(x).sum(), x)[0] for each in (one, other))
        assert float((found - expected).norm()) < 0.1 * float(expected.norm())
    fast.load_state_dict({name: 2 * each for name, each in fast.state_dict().items()})
    quantized.load_state_dict({name: 2 * each for name, each in quantized.state_dict().items()})
    assert off(fast, quantized, ROWS) < 0.05
    again = fxopt.optimize(Tied().eval(), plan=fxopt.plan(fast), example_inputs=ROWS)
    assert regions(again)


class Counting(nn.Module):
    """Layers between which a number is read out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[1](torch.tanh(self.layers[0](x))))
        for layer in self.layers[2:]:
            x = torch.tanh(layer(x)) * x.abs().max().item()
        return x


@one_engine
def test_quantized_layers_that_stay_calls_count(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Delegate, "_asked", property(lambda _: {engine: engine_named(engine)}))
    model, passes = Counting().eval(), [Quantize(aim="size"), Delegate(dtype=torch.int8)]
    fast = fxopt.optimize(model, passes, example_inputs=ROWS, time_budget=5)
    assert reasons(fast)["(root)"].startswith("engines would compute 3 of 6 products and convolutions")


@openvino_only
def test_floats_are_tried_in_bfloat16_and_float32(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = Delegate(engine, torch.int8)._ways()[0]
    assert {name: way.dtype for name, way in ways.items()} == {
        engine: torch.int8, **({} if why_no_packing(torch.bfloat16) else {f"{engine} bfloat16": torch.bfloat16})
    }  # fmt: skip
    monkeypatch.setattr("fxopt.transforms.delegate.delegate.why_no_packing", lambda _: "no instructions")
    assert list(Delegate(engine, torch.int8)._ways()[0]) == [engine]


@one_engine
def test_in_other_types_quantized_layers_stay_calls(engine: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NothingDoneWarning)
        fast = fxopt.optimize(net(), [static(), Delegate(engine)], example_inputs=X, measure=False)
    assert not regions(fast)


def test_the_preset_lets_engines_compute_quantized_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxopt.known_passes.has_engines", lambda: True)
    fast = fxopt.optimize(net(), [static(), "inference{dtype=int8}"], example_inputs=X, measure=False)
    assert [each.dtype for each in regions(fast)] == [torch.int8]
    floats = fxopt.optimize(net(), "inference{dtype=int8}", example_inputs=X, measure=False)
    kind = torch.int8 if why_no_packing(torch.bfloat16) else torch.bfloat16  # where nothing is timed, the first one
    assert [each.dtype for each in regions(floats)] == [kind]


def test_what_others_trace_has_fake_quantization() -> None:
    quantized = fxopt.optimize(net(), static(), example_inputs=X, measure=False)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced: Any = torch.jit.trace(quantized, (X,))
    names = [node.kind() for node in traced.inlined_graph.nodes()]
    assert names.count("aten::fake_quantize_per_tensor_affine") == 4
    assert names.count("aten::fake_quantize_per_channel_affine") == 4
    assert off(traced, quantized) < 0.02


def test_engines_that_know_no_8_bits_are_refused() -> None:
    assert engine_named("aoti").reason_against(torch.int8) == "aoti does not compute in int8"


class Shared(nn.Module):
    """Two layers that read one value, and one that reads numbers of one of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up, self.down = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 48)
        with torch.no_grad():
            self.up.weight[[5, 11]] *= 10.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.gate(x)) + self.down(torch.relu(self.up(x)))


@one_engine
def test_scales_of_inputs_go_to_an_engine(engine: str) -> None:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    x[:, [3, 17]] *= 20.0
    smooth = Quantize(scheme="int8_static", method="smoothquant", calibration=[x, -x], budget=0.9)
    passes: list[Any] = [smooth, Delegate(engine, torch.int8)]
    quantized = fxopt.optimize(Shared().eval(), passes[:1], example_inputs=x, measure=False)
    fast = fxopt.optimize(Shared().eval(), passes, example_inputs=x, measure=False)
    assert regions(fast), reasons(fast)
    (region,) = regions(fast)
    scaled = [node for node in region.graph.nodes if node.kwargs.get("factors") is not None]
    assert len(scaled) == 3 and region.left == "" and quantized.down.factors is not None
    assert off(fast, quantized, x) < 0.02 and off(fast, Shared().eval(), x) < 0.05
