"""pack at one row: transposed weights, layers that wait for memory, and what layers in bfloat16 err by."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxopt
from fxopt.compat.packed import why_no_packing
from fxopt.passes.timing import Timings, timing_figures
from fxopt.runtime.record import Plan
from fxopt.transforms.pack import Pack, layers, timing

pytestmark = pytest.mark.skipif(bool(why_no_packing(torch.float32)), reason=why_no_packing(torch.float32))

needs_bfloat16 = pytest.mark.skipif(bool(why_no_packing(torch.bfloat16)), reason=why_no_packing(torch.bfloat16))

ROW = torch.randn(1, 1, 16, generator=torch.Generator().manual_seed(0))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 4, bias=False)).eval()


@pytest.fixture
def transposed_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    def figures(self: timing.Calls, *, cold: bool = False) -> timing.Figures:
        gain = 3.0 if isinstance(self.after, layers.TransposedLinear) else 2.0
        return timing_figures(Timings([{"before": gain, "after": 1.0}] * 9))

    monkeypatch.setattr(timing.Calls, "figures", figures)


# -- in models -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("transposed_wins")
def test_the_faster_way_at_one_row_is_in_the_plan_and_replayed() -> None:
    model = network()
    found = fxopt.plan(fxopt.optimize(model, Pack(), example_inputs=ROW[0], time_budget=None)).to_json()
    (decision,) = found["decisions"]
    assert decision["site"]["data"] == {"speeds": [3.0, 3.0], "transposed": ["layer.0", "layer.1"]}
    decision["status"] = "applied"  # so small a model gains nothing
    fast = fxopt.optimize(network(), plan=Plan.from_json(found), example_inputs=ROW[0])
    kinds = [type(node.target) for node in fxopt.graphs(fast)[""].nodes if node.op == "call_function"]
    assert kinds == [layers.TransposedLinear, layers.TransposedLinear]
    for x in (ROW[0], torch.randn(5, 16)):
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model(x))


@pytest.mark.usefixtures("transposed_wins")
def test_more_rows_are_computed_on_packed_weights() -> None:
    fast = fxopt.optimize(network(), Pack(), example_inputs=torch.randn(4, 16), time_budget=None)
    (decision,) = fxopt.plan(fast).decisions
    assert decision.site["data"] == {"speeds": [2.0, 2.0]}


def test_weights_beyond_the_caches_are_timed_interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxopt.transforms.pack.find.last_level_bytes", lambda: 64)

    def by_itself(self: timing.Calls, *, cold: bool = False) -> timing.Figures:
        raise AssertionError("it finds its weight in the caches")

    monkeypatch.setattr(timing.Calls, "figures", by_itself)
    model = network()
    fast = fxopt.optimize(model, Pack(), example_inputs=ROW[0], time_budget=None)
    assert fxopt.plan(fast).decisions
    with torch.no_grad():
        torch.testing.assert_close(fast(ROW[0]), model(ROW[0]))


# -- what bfloat16 errs by -------------------------------------------------------------------------------------------


@needs_bfloat16
def test_layers_in_bfloat16_are_compared_once_for_each_kind_and_left_to_the_whole_model() -> None:
    fast = fxopt.optimize(network(), Pack(dtype=torch.bfloat16), example_inputs=torch.randn(6, 16), measure=False)
    (decision,) = fxopt.plan(fast).decisions
    assert decision.status == "applied" and decision.figures["checked"] == "with the whole model"
    assert 0 < decision.figures["precision_error"] < 0.02
