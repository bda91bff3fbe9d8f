"""Models that other packages have quantized: passes leave them as they are, and say why."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt

X = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).eval()


class Linear8bit(nn.Linear):
    """As packages of kernels for 8 bits have it: a subclass whose weight is in int8."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features)
        self.scale = linear.weight.detach().abs().max() / 127
        self.weight = nn.Parameter((linear.weight.detach() / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.float() * self.scale, self.bias)


def by_torchao() -> nn.Module:
    quantization: Any = pytest.importorskip("torchao.quantization")
    model = plain()
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


def by_torch() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        return torch.ao.quantization.quantize_dynamic(plain(), {nn.Linear}, torch.qint8)


def by_a_package() -> nn.Module:
    return nn.Sequential(*(Linear8bit(each) if isinstance(each, nn.Linear) else each for each in plain())).eval()


SAID = {
    by_torchao: "is no plain tensor, but a Int8Tensor of torchao",
    by_torch: "it is a Linear, whose weight is quantized already",
    by_a_package: "it is a Linear8bit, whose weight is quantized already",
}


@pytest.mark.parametrize("made", SAID)
@pytest.mark.parametrize(
    "passes", ["quantize", "quantize{scheme=int8_weight,aim=size}", "quantize{scheme=int8_static}"]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantize_says_why_it_leaves_each_layer(made: Any, passes: str) -> None:
    model = made()
    fast = fxopt.optimize(model, passes, example_inputs=(X,), measure=False)
    refused = {each.label: each.reason for each in fxopt.plan(fast).decisions}
    assert refused.keys() == {"0", "2"}
    assert all(SAID[made] in reason for reason in refused.values())
    assert torch.equal(fast(X), model(X))


@pytest.mark.parametrize("made", SAID)
@pytest.mark.parametrize("passes", ["prune{amount=0.5}", "inference", "qat"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_other_passes_keep_its_results(made: Any, passes: str) -> None:
    model = made()
    if made is by_torchao and passes.startswith("prune"):
        with pytest.raises(fxopt.UsageError, match=r"'0\.weight' is no plain tensor, but a Int8Tensor of torchao"):
            fxopt.optimize(model, passes, example_inputs=(X,), measure=False)
        return
    fast = fxopt.optimize(model, passes, example_inputs=(X,), measure=False)
    torch.testing.assert_close(fast(X), model(X))
    if made is by_torch and passes.startswith("prune"):
        reasons = {each.label: each.reason for each in fxopt.plan(fast).decisions}
        assert reasons == dict.fromkeys("02", f"{SAID[made]}; prune the model before it is quantized")
