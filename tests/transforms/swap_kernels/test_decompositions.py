"""swap_kernels: operations are found in every spelling, and what only looks like them is not."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxopt
from fxopt.cuda_ops import Kernel
from fxopt.testing import assert_equivalent
from fxopt.transforms.swap_kernels import SwapKernels


class Computes(nn.Module):
    """Some function of an input and two vectors that are parameters."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.a, self.b = nn.Parameter(torch.rand(8) + 0.5), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Any:
        return self.function(x, self.a, self.b)


def swapped(model: nn.Module, x: Tensor, **options: Any) -> tuple[nn.Module, Counter[str]]:
    fast = fxopt.optimize(model, "swap_kernels", example_inputs=(x,), measure=False, **options)
    applied = [each for each in fxopt.plan(fast).decisions if each.status == "applied"]
    return fast, Counter(each.site["data"]["kernel"] for each in applied)


def mean(x: Tensor) -> Tensor:
    return torch.mean(torch.pow(x, exponent=2), dim=(-1,), keepdim=True)


def centered(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def gated(gate: Tensor, value: Tensor) -> Tensor:
    return torch.mul(gate.sigmoid() * gate, value)


FOUND: dict[str, tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "method": ("rms_norm", lambda x, w, _: w * (x.float() * (mean(x.float()) + 1e-5).rsqrt()).type_as(x)),
    "keywords": ("rms_norm", lambda x, w, _: x * torch.rsqrt(1e-6 + mean(x)) * (1.0 + w)),
    "divided": ("rms_norm", lambda x, w, _: x / torch.sqrt((x * x).mean(dim=-1, keepdim=True).add(1e-6)) * w),
    "unscaled": ("rms_norm", lambda x, w, _: torch.rsqrt((x**2.0).mean(-1, keepdim=True) + 1e-6) * x),
    "torch": ("rms_norm", lambda x, w, _: F.rms_norm(x, (8,), eps=1e-6, weight=w)),
    "layer": ("layer_norm", lambda x, w, b: F.layer_norm(x, [8], w, b)),
    "layer by hand": (
        "layer_norm",
        lambda x, w, b: b + w * (centered(x) / torch.sqrt(1e-6 + centered(x).square().mean(-1, keepdim=True))),
    ),
    "swiglu": ("swiglu", lambda x, w, b: (x + w) * torch.nn.SiLU()(x - b)),
    "swiglu by hand": ("swiglu", lambda x, w, b: gated(x - b, x + w)),
    "geglu": ("geglu", lambda x, w, b: F.gelu(x - b, approximate="tanh") * (x + w)),
    "bias": ("bias_act", lambda x, w, b: torch.tanh(b + x)),
    "bias, residual": ("bias_act", lambda x, w, b: x + F.relu(x + b)),
    "gelu": ("bias_act", lambda x, w, b: 0.5 * x * (1 + torch.erf(x / 2**0.5))),
    "rotary": (
        "rotary_embedding",
        lambda x, w, b: x * w + torch.cat([x[..., x.size(-1) // 2 :].neg(), x[..., : x.size(-1) // 2]], -1) * b,
    ),
    "rotary by chunks": (
        "rotary_embedding",
        lambda x, w, b: b * torch.cat((-x.chunk(2, -1)[1], x.chunk(2, -1)[0]), dim=-1) + w * x,
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_spelling_is_found_and_equal(name: str):
    kernel, function = FOUND[name]
    model, x = Computes(function), torch.randn(3, 8)
    fast, found = swapped(model, x)
    assert found == {kernel: 1}
    assert_equivalent(model, fast, (x,))


ALMOST: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "another dimension": lambda x, w, _: w * (x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6)),
    "another tensor": lambda x, w, b: w * (x * torch.rsqrt((x + b).pow(2).mean(-1, keepdim=True) + 1e-6)),
    "another power": lambda x, w, _: w * (x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-6)),
    "two dimensions": lambda x, w, b: F.layer_norm(x, (3, 8)),
    "another activation": lambda x, w, b: F.mish(x) * (x + w),
    "scaled": lambda x, w, b: torch.relu(torch.add(x, b, alpha=2)),
    "broadcast": lambda x, w, b: F.silu(x - b) * w,
    "unequal parts": lambda x, w, b: x * w + torch.cat((-x[..., 3:], x[..., :3]), dim=-1) * b,
    "integers": lambda x, w, b: (x.long() * 2).to(x.dtype) * 1.0,
    "written between": lambda x, w, b: _written(x * 1.0, w),
}


def _written(x: Tensor, w: Tensor) -> Tensor:
    gate = F.silu(x)
    w = x + w
    gate.add_(1)
    return gate * w


@pytest.mark.parametrize("name", ALMOST)
def test_what_only_looks_like_it_stays(name: str):
    model, x = Computes(ALMOST[name]), torch.randn(3, 8)
    fast, found = swapped(model, x)
    assert found == {}
    assert torch.equal(fast(x), model(x))


def twice(gate: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return gate * value, gate + 1


def test_what_is_read_elsewhere_too_is_refused_by_name():
    model, x = Computes(lambda x, w, b: (F.silu(x) * (x + w), F.silu(x) + 1)), torch.randn(3, 8)
    shared = Computes(lambda x, w, b: twice(F.silu(x), x + w))
    assert swapped(model, x)[1] == {"swiglu": 1}
    fast, found = swapped(shared, x)
    assert found == {}
    assert "swiglu: 'silu' is read elsewhere too" in str(fxopt.report(fast))


def test_modules_hold_their_tensors_and_keep_their_settings():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.RMSNorm(8, eps=1e-6))
    x = torch.randn(3, 8)
    fast, found = swapped(model, x)
    assert found == {"layer_norm": 1, "rms_norm": 1}
    assert list(fast.state_dict()) == list(model.state_dict())
    assert_equivalent(model, fast, (x,))
    with pytest.raises(fxopt.FxoptError):
        fast[1].eps = 1.0


def test_options_choose_kernels():
    model, x = Computes(lambda x, w, b: F.silu(F.layer_norm(x, (8,), w, b)) * (x + 1)), torch.randn(3, 8)
    assert swapped(model, x)[1] == {"layer_norm": 1, "swiglu": 1}
    fast = fxopt.optimize(model, "swap_kernels{kernels=[swiglu]}", example_inputs=(x,), measure=False)
    assert [each.site["data"]["kernel"] for each in fxopt.plan(fast).decisions] == ["swiglu"]
    with pytest.raises(fxopt.UsageError, match=r"unknown kernel 'swiglo'.*swiglu"):
        fxopt.optimize(model, "swap_kernels{kernels=[swiglo]}", example_inputs=(x,))


def test_a_kernel_that_is_not_listed_is_given_itself():
    def spelled(x: Tensor) -> Tensor:
        return torch.sin(x) * torch.cos(x)

    kernel = Kernel("half_of_sine_of_double", spelled, (spelled,))
    model, x = Computes(lambda x, w, b: torch.sin(x) * torch.cos(x)), torch.randn(3, 8)
    chosen = SwapKernels(kernels=[kernel])  # type: ignore[arg-type]
    fast = fxopt.optimize(model, chosen, example_inputs=(x,), measure=False)
    plan = fxopt.plan(fast)
    assert [each.site["data"]["kernel"] for each in plan.decisions] == [kernel.name]
    again = fxopt.optimize(model, chosen, plan=plan, example_inputs=(x,))
    assert [(each.status, each.key) for each in fxopt.plan(again).decisions] == [("applied", plan.decisions[0].key)]
    assert torch.equal(again(x), fast(x))
    with pytest.raises(fxopt.PlanError, match="half_of_sine_of_double"):  # a plan holds its name alone
        fxopt.optimize(model, plan=plan, example_inputs=(x,))
    with pytest.raises(fxopt.UsageError) as caught:
        SwapKernels(kernels=("zzz",))
    assert str(caught.value).count("there are") == 1


def test_another_distribution_adds_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "acme-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(
        "[fxopt.kernels]\ntwice = acme_kernels:TWICE\nbroken = acme_kernels:NONE\n"
    )
    (tmp_path / "acme_kernels.py").write_text(
        "import torch\nfrom fxopt.cuda_ops import Kernel\n"
        "def spelling(x: torch.Tensor, by: float):\n    return (x + x) * by\n"
        "TWICE = Kernel('twice', lambda x, by: x * (2 * by), (spelling,))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    model, x = Computes(lambda x, w, b: 3.0 * (x + x)), torch.randn(3, 8)
    fast = fxopt.optimize(model, "swap_kernels{kernels=[twice]}", example_inputs=(x,), measure=False)
    assert [each.status for each in fxopt.plan(fast).decisions] == ["applied"]
    assert torch.allclose(fast(x), 6 * x)
    with pytest.raises(fxopt.UsageError, match=r"kernel 'broken' .*cannot be loaded"):
        fxopt.optimize(model, "swap_kernels{kernels=[broken]}", example_inputs=(x,))
    sys.modules.pop("acme_kernels", None)
