"""pack on convolutions: settings, what is computed with them, memory formats, batch norms folded before."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxopt
from fxopt.compat.packed import why_no_packing
from fxopt.transforms.pack import Pack

pytestmark = pytest.mark.skipif(bool(why_no_packing(torch.float32)), reason=why_no_packing(torch.float32))

IMAGES = torch.randn(2, 8, 9, 11, generator=torch.Generator().manual_seed(0))


def packed(model: nn.Module, x: Tensor = IMAGES, passes: object = "pack") -> nn.Module:
    return fxopt.optimize(model.eval(), passes, example_inputs=x, measure=False)  # type: ignore[arg-type]


def functions(model: nn.Module, owner: str = "") -> list[str]:
    return [node.name for node in fxopt.graphs(model)[owner].nodes if node.op == "call_function"]


def same(one: nn.Module, other: nn.Module, x: Tensor = IMAGES) -> None:
    with torch.no_grad():
        torch.testing.assert_close(one(x), other(x))


class Around(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x))


SETTINGS = (
    {}, {"bias": False}, {"stride": 2}, {"padding": 1}, {"padding": (1, 0)}, {"dilation": 2}, {"groups": 4},
    {"groups": 8, "padding": "same"}, {"stride": (2, 1), "padding": 2, "dilation": (1, 2), "groups": 2},
)  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_convolutions_of_all_settings(settings: dict[str, object]) -> None:
    torch.manual_seed(0)
    model = Around(nn.Conv2d(8, 16, 3, **settings))  # type: ignore[arg-type]
    fast = packed(model)
    assert functions(fast) == ["packed_convolution"]
    same(fast, model)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv3d(4, 6, 3, padding=1), (2, 4, 5, 6, 7)),
        (nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1), (2, 4, 5, 6)),
        (nn.ConvTranspose2d(4, 6, 2, groups=2, bias=False), (2, 4, 5, 6)),
        (nn.ConvTranspose3d(4, 6, 2), (1, 4, 3, 5, 6)),
    ],
    ids=str,
)
def test_other_convolutions(layer: nn.Module, shape: tuple[int, ...]) -> None:
    model, x = Around(layer), torch.randn(shape)
    fast = packed(model, x)
    assert functions(fast) == ["packed_convolution"]
    same(fast, model, x)


@pytest.mark.parametrize("shape", [(1, 8, 9, 11), (0, 8, 9, 11), (3, 8, 20, 7), (8, 9, 11)], ids=str)
def test_other_sizes(shape: tuple[int, ...]) -> None:
    model = Around(nn.Conv2d(8, 16, 3))
    same(packed(model), model, torch.randn(shape))


@pytest.mark.parametrize("layer", [nn.Conv2d(8, 4, 3, groups=2), nn.ConvTranspose2d(8, 4, 3, groups=2)], ids=str)
def test_wrong_channels_raise_what_they_raised(layer: nn.Module) -> None:
    model = Around(layer)
    fast, x = packed(model), torch.randn(2, 6, 9, 11)
    with torch.no_grad(), pytest.raises(RuntimeError) as expected:
        model(x)
    with torch.no_grad(), pytest.raises(RuntimeError) as found:
        fast(x)
    assert str(found.value) == str(expected.value)
    model.layer.bias = fast.layer.bias = nn.Parameter(torch.randn(4)[::2].repeat(2))  # type: ignore[assignment]
    same(fast, model)


def test_inputs_that_lie_channels_last() -> None:
    model = Around(nn.Conv2d(8, 16, 3))
    same(packed(model), model, IMAGES.contiguous(memory_format=torch.channels_last))


def test_padding_with_other_than_zeros_is_refused() -> None:
    fast = packed(Around(nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect")))
    assert "pads otherwise than with zeros" in fxopt.plan(fast).decisions[0].reason


class Padded(nn.Module):
    """A convolution behind a pad."""

    def __init__(self, pad: object, **settings: object) -> None:
        super().__init__()
        self.pad, self.conv = pad, nn.Conv2d(8, 16, 3, **settings)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        x = self.pad(x) if isinstance(self.pad, nn.Module) else F.pad(x, self.pad, "constant", 0.0)  # type: ignore[arg-type]
        return F.relu6(self.conv(x))


@pytest.mark.parametrize(
    "model",
    [
        Padded((1, 1, 1, 1)), Padded((0, 0, 0, 0), stride=2), Padded((0, 1, 0, 1), stride=2), Padded((1, 0, 2, 1)),
        Padded((1, 0), padding=1, groups=4), Padded((0, 2, 0, 1), dilation=2, stride=(2, 1)),
        Padded(nn.ZeroPad2d((0, 1, 0, 1)), stride=2), Around(nn.Conv2d(8, 8, 2, padding="same")),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_before_a_convolution_are_its_padding(model: nn.Module, dtype: torch.dtype) -> None:
    if why_no_packing(dtype):
        pytest.skip(why_no_packing(dtype))
    fast = packed(model, passes=[Pack(dtype)])
    assert functions(fast) == ["packed_convolution"]
    assert not fxopt.graphs(fast)[""].find_nodes(op="call_module")
    tolerances = {"atol": 0.05, "rtol": 0.05} if dtype is torch.bfloat16 else {}
    for x in (IMAGES, torch.randn(1, 8, 4, 12), torch.full((1, 8, 5, 5), torch.inf), IMAGES.clone().requires_grad_()):
        with torch.set_grad_enabled(x.requires_grad):
            torch.testing.assert_close(fast(x), model(x), equal_nan=True, **tolerances)
    with torch.no_grad(), pytest.raises(RuntimeError) as expected:
        model(torch.randn(1, 8, 0, 1))
    with torch.no_grad(), pytest.raises(RuntimeError) as found:
        fast(torch.randn(1, 8, 0, 1))
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize(
    "pad", [(1, 1, 0, 0, 0, 0, 0, 0), (-1, 0, 0, 0), nn.ConstantPad2d(1, 0.5), nn.ReflectionPad2d(1)], ids=str
)
def test_other_pads_stay(pad: object) -> None:
    model = Padded(pad)
    fast = packed(model)
    assert len(fxopt.graphs(fast)[""].nodes) > len(fxopt.graphs(packed(Padded((1, 1, 1, 1))))[""].nodes)
    same(fast, model)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.act = nn.BatchNorm2d(8), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.norm(self.one(x)))
        h = self.two(h)
        h += x
        return self.act(h)


def residual() -> Residual:
    torch.manual_seed(0)
    model = Residual()
    model.norm.running_mean.normal_()  # type: ignore[union-attr]
    model.norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    return model.eval()


def test_norms_folded_before_sums_and_activations() -> None:
    model = residual()
    fast = packed(model, passes="fold_batchnorm,pack")
    assert [name for name in functions(fast) if "packed" in name] == ["packed_convolution", "packed_convolution_1"]
    assert "iadd" not in functions(fast)
    assert not fxopt.graphs(fast)[""].find_nodes(op="call_module")
    x = IMAGES.clone()
    same(fast, model, x)
    assert torch.equal(x, IMAGES)  # what is added is only read
    model.norm.running_mean.add_(1)  # type: ignore[operator]
    fast.norm.running_mean.add_(1)  # type: ignore[operator, union-attr]
    same(fast, model)
    same(copy.deepcopy(fast), model)


def test_gradients_flow_to_the_originals_and_to_what_is_added() -> None:
    model = residual()
    fast = packed(model, passes="fold_batchnorm,pack")
    for parameters in (True, False):
        model.requires_grad_(parameters), fast.requires_grad_(parameters)
        one, other = (IMAGES.clone().requires_grad_() for _ in range(2))
        fast(one).sum().backward()
        model(other).sum().backward()
        torch.testing.assert_close(one.grad, other.grad)
    torch.testing.assert_close(fast.one.weight.grad, model.one.weight.grad)  # type: ignore[union-attr]


class Viewed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(8, 4, 3), nn.Linear(4 * 7 * 9, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.elu(self.conv(x))
        return self.head(h.view(h.size(0), -1)), h


def test_views_and_results_lie_in_memory_as_they_did() -> None:
    model = Viewed().eval()
    fast = packed(model)
    with torch.no_grad():
        (one, image), (other, expected) = fast(IMAGES), model(IMAGES)
    torch.testing.assert_close(one, other)
    torch.testing.assert_close(image, expected)
    assert image.stride() == expected.stride()
    assert functions(fast).count("packed_convolution") == 1


@pytest.mark.skipif(bool(why_no_packing(torch.bfloat16)), reason=why_no_packing(torch.bfloat16))
def test_bfloat16() -> None:
    model = residual()
    fast = packed(model, passes=["fold_batchnorm", Pack(torch.bfloat16)])
    with torch.no_grad():
        found, expected = fast(IMAGES), model(IMAGES)
    assert found.dtype is torch.float32
    assert 1e-5 < (found - expected).abs().max() / expected.abs().max() < 2e-2


class Opaque(nn.Module):
    """It runs its own forward, for that hangs on numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if float(x.sum()) > 1e9:
            return x
        x.view(-1)[0] = 0.5
        return self.inner(x).view(x.size(0), -1)


class Head(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.size(0), -1)


class Before(nn.Module):
    """A convolution, and one that views its result."""

    def __init__(self, *behind: nn.Module) -> None:
        super().__init__()
        self.conv, self.behind = nn.Conv2d(8, 4, 3), behind[0] if len(behind) == 1 else nn.Sequential(*behind)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.elu(self.conv(x))
        y = self.behind(x)
        return y, x * 2


class Squeezed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(x, (5, 1)).squeeze(-1).view(x.size(0), -1) + x[0, 0].view(-1).sum()


class Around2(nn.Module):
    """Its own forward views what a captured child gives."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(8, 4, 3), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        if float(x.sum()) > 1e9:
            return x
        return self.block(x).view(x.size(0), -1)


@pytest.mark.parametrize(
    "model",
    [Before(Opaque()), Before(Head()), Before(nn.ReLU(), Squeezed()), Before(nn.Unflatten(1, (2, 2))), Around2()],
    ids=lambda model: type(model.behind if isinstance(model, Before) else model).__name__,
)
def test_images_go_back_into_order_before_whoever_may_need_it(model: nn.Module) -> None:
    torch.manual_seed(0)
    fast = packed(model)
    assert any("packed_convolution" in functions(fast, owner) for owner in fxopt.graphs(fast))
    with torch.no_grad():
        torch.testing.assert_close(fast(IMAGES), model(IMAGES))


def test_images_stay_channels_last_between_layers_and_modules() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.pool = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.MaxPool2d(2)

        def forward(self, x: Tensor) -> Tensor:
            return self.pool(F.elu(self.norm(self.conv(x)))) + 1

    model = nn.Sequential(Block(), Block(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)).eval()
    fast = packed(model)
    named = [name for owner in fxopt.graphs(fast) for name in functions(fast, owner)]
    assert named.count("packed_convolution") == 2
    assert not [node for graph in fxopt.graphs(fast).values() for node in graph.nodes if node.target == "contiguous"]
    same(fast, model)
