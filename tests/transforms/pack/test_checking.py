"""pack refuses kernels that compute something else than the layer: each kind is compared with float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxopt
from fxopt import Cause, Refusal
from fxopt.compat.packed import why_no_packing
from fxopt.passes.sites import Reason
from fxopt.reporting import in_words
from fxopt.transforms.pack import layers, timing

pytestmark = pytest.mark.skipif(bool(why_no_packing(torch.float32)), reason=why_no_packing(torch.float32))


class Residual(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.layer(x) + x)


LAYERS = (
    (nn.Linear(16, 16), (6, 16)),
    (Residual(nn.Linear(16, 16)), (2, 3, 16)),
    (nn.Conv2d(8, 8, 3), (2, 8, 7, 7)),
    (Residual(nn.Conv2d(8, 8, 3, padding=1)), (8, 7, 7)),
    (nn.Conv2d(8, 8, 3, groups=4), (2, 8, 7, 7)),
    (nn.ConvTranspose2d(8, 8, 3), (2, 8, 7, 7)),
    (nn.Conv2d(512, 8, 3, padding=1), (1, 512, 7, 7)),  # sums of so many terms round by more than torch's own
)


def too_large(result: Tensor) -> Tensor:
    return result * (1 + 1e-4)


def wrong_at_the_end(result: Tensor) -> Tensor:
    result[(-1,) * result.ndim] += 0.01
    return result


def in_bfloat16(result: Tensor) -> Tensor:
    return result.bfloat16().float()


@pytest.fixture(params=[too_large, wrong_at_the_end, in_bfloat16])
def _wrong(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(layer: Any) -> type:
        def finished(self: Any, *args: Any) -> Tensor:
            return request.param(layer.finished(self, *args))

        return type(layer.__name__, (layer,), {"finished": finished})

    monkeypatch.setattr(layers, "PackedLinear", spoiled(layers.PackedLinear))
    monkeypatch.setattr(layers, "PackedConvolution", spoiled(layers.PackedConvolution))


def decided(layer: nn.Module, shape: tuple[int, ...], **options: Any) -> list[tuple[str, str]]:
    model, x = nn.Sequential(layer).eval(), torch.randn(shape)
    fast = fxopt.optimize(model, "pack", example_inputs=x, **options)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    return [(decision.status, decision.reason) for decision in fxopt.plan(fast).decisions]


@pytest.mark.usefixtures("_wrong")
@pytest.mark.parametrize("measure", [False, True])
@pytest.mark.parametrize(("layer", "shape"), [LAYERS[1], LAYERS[2]], ids=str)
def test_wrong_kernels_are_refused_with_figures(layer: nn.Module, shape: tuple[int, ...], measure: bool) -> None:
    ((status, reason),) = decided(layer, shape, measure=measure)
    assert status == "refused"
    assert "packed, it is off by" in reason and "of the scale, where the layer itself is off by" in reason


@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=str)
def test_kernels_that_only_round_otherwise_pass(layer: nn.Module, shape: tuple[int, ...]) -> None:
    assert "applied" in [status for status, _ in decided(layer, shape, measure=False)]


class Said:
    """A check that says what it is told to."""

    def __init__(self, fault: str, error: float) -> None:
        self._fault, self._error = fault, error

    def reason_against(self, x: Tensor, laid: Tensor) -> Reason | None:
        return Reason.of(Cause.JUDGED_WRONG, self._fault) if self._fault else None

    def error(self, x: Tensor, laid: Tensor) -> float:
        return self._error


def calls(fault: str = "", error: float = 0.0) -> timing.Calls:
    return timing.Calls((1, 4), torch.relu, torch.relu, [()], Said(fault, error))


def test_where_the_packed_weight_is_wrong_no_other_lowering_is_offered() -> None:
    known, right = timing.compared({"packed": calls("off"), "transposed": calls()}, allowed=None)
    assert right == {}
    assert known.refusal("fc") == Refusal(Reason.of(Cause.JUDGED_WRONG, "off"), "fc")


def test_a_wrong_lowering_leaves_the_packed_one() -> None:
    known, right = timing.compared({"packed": calls(), "transposed": calls("off")}, allowed=None)
    assert list(right) == ["packed"]
    assert known.refusal("fc") is None


def test_an_error_beyond_the_budget_is_said_and_kept() -> None:
    known, right = timing.compared({"packed": calls(error=0.3)}, allowed=0.1)
    assert right == {}
    refusal = known.refusal("fc")
    assert refusal is not None and "errs by 0.3" in in_words(refusal.why) and timing.largest_error([known]) == 0.3
