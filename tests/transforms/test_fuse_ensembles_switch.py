"""fuse_ensembles with two lowerings in one graph, chosen by the number of rows."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.passes import measure
from fxopt.passes.measure import Timings
from fxopt.passes.record import record_of
from fxopt.testing import assert_equivalent

N = 3
SWITCH = "wide up to 8 rows, then bmm"
SIZES = (2, 8, 9, 32)
COSTS = {"wide": 1.0, "bmm": 2.0, "wide_input_first": 5.0, "vmap": 6.0, "grouped_conv": 7.0, "before": 9.0, SWITCH: 1.0}


class Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)) for _ in range(N))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x) for head in self.heads])


class Moded(Ensemble):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 2) if self.training else super().forward(x).sum(0)


class Separate(Ensemble):
    """Each member reads its own input; the linears of one lowering are those of the other."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x[i]) for i, head in enumerate(self.heads)])


def switched(model: nn.Module, x: Tensor, choice: str = SWITCH) -> nn.Module:
    """Replay a plan with a switch in it."""
    once = fxopt.plan(fxopt.optimize(model, "fuse_ensembles", example_inputs=(x,), measure=False))
    decisions = tuple(dataclasses.replace(decision, choice=choice) for decision in once.decisions)
    return fxopt.optimize(
        model, "fuse_ensembles", example_inputs=(x,), plan=dataclasses.replace(once, decisions=decisions)
    )


@pytest.mark.parametrize("make", [Ensemble, Moded])
@pytest.mark.parametrize("choice", [SWITCH, "wide_input_first up to 8 rows, then grouped_conv"])
def test_both_sides_of_the_limit_are_right(make: type[nn.Module], choice: str) -> None:
    torch.manual_seed(0)
    model = make()
    fast = switched(model, torch.randn(4, 4), choice)
    for rows in SIZES:
        for mode in (True, False):
            model.train(mode), fast.train(mode)
            assert_equivalent(model, fast, (torch.randn(rows, 4),), map_state=record_of(fast).state_map.forward)


def test_the_graph() -> None:
    text = str(fxopt.graphs(switched(Ensemble(), torch.randn(4, 4)))[""])
    assert text.count("has_more_rows](args = (%x, 8)") == 1
    assert text.count("switched_linear](args = (%has_more_rows, wide, bmm, True, %x") == 1
    assert text.count("batched_linear](args = (%relu") == 1  # the second layer is the same in both


def test_lowerings_that_are_the_same_need_no_switch() -> None:
    text = str(fxopt.graphs(switched(Separate(), torch.randn(N, 4, 4)))[""])
    assert "has_more_rows" not in text and text.count("batched_linear](") == 2


def test_compiled_both_stand_and_exported_the_one_for_large_inputs() -> None:
    model = Ensemble().eval()
    fast = switched(model, torch.randn(4, 4)).eval()
    compiled = torch.compile(fast, backend="eager", dynamic=True)
    batch = torch.export.Dim("batch", min=2, max=1000)
    exported = torch.export.export(fast, (torch.randn(4, 4),), dynamic_shapes={"x": {0: batch}})
    for rows in SIZES:
        x = torch.randn(rows, 4)
        torch.testing.assert_close(compiled(x), model(x))
        torch.testing.assert_close(exported.module()(x), model(x))
    targets = [str(node.target) for node in exported.graph.nodes]
    assert sum("baddbmm" in target for target in targets) == 2 and not any("addmm" in t for t in targets)


def test_copies() -> None:
    model = Ensemble()
    fast = switched(model, torch.randn(4, 4))
    for twin in (copy.deepcopy(fast), fxopt.restore(fast)):
        for rows in SIZES:
            x = torch.randn(rows, 4)
            torch.testing.assert_close(twin(x), model(x))


def rows_in(runner: measure.Runner) -> int:
    return sum(call.arguments[0][0].shape[0] for call in runner._calls)


def fake_times(candidates: Mapping[str, Any], **_: object) -> Timings:
    """Let `wide` win on few rows and `bmm` on many, and let a switch be as fast as the better one."""
    rows = max(map(rows_in, candidates.values()))
    costs = {**COSTS, "wide": 3.0, SWITCH: 2.0} if rows > 8 else COSTS
    return Timings([{name: costs[name] for name in candidates} for _ in range(20)])


def test_measured_sizes_give_the_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measure, "time_candidates", fake_times)
    torch.manual_seed(0)
    model = Ensemble()
    inputs = [(torch.randn(rows, 4),) for rows in (2, 32, 2)]
    fast = fxopt.optimize(model, "fuse_ensembles", example_inputs=inputs)
    (decision,) = fxopt.plan(fast).decisions
    assert (decision.status, decision.choice) == ("applied", SWITCH)
    assert set(decision.figures["rows"]) == {"2", "32"} and decision.figures["meaning_error"] < 1e-10
    assert SWITCH in str(fxopt.report(fast))
    fxopt.plan(fast).save(tmp_path / "plan.json")
    again = fxopt.optimize(model, "fuse_ensembles", example_inputs=inputs, plan=tmp_path / "plan.json")
    assert str(fxopt.graphs(again)[""]) == str(fxopt.graphs(fast)[""])


@pytest.mark.parametrize("sizes", [(2, 2), (16, 32), (32,)])
def test_nothing_is_switched_within_one_side(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]) -> None:
    monkeypatch.setattr(measure, "time_candidates", fake_times)
    inputs = [(torch.randn(rows, 4),) for rows in sizes]
    (decision,) = fxopt.plan(fxopt.optimize(Ensemble(), "fuse_ensembles", example_inputs=inputs)).decisions
    assert decision.choice == ("wide" if sizes == (2, 2) else "bmm")


def test_a_lowering_that_was_asked_for_is_not_switched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "time_candidates", fake_times)
    inputs = [(torch.randn(rows, 4),) for rows in (2, 32)]
    (decision,) = fxopt.plan(
        fxopt.optimize(Ensemble(), "fuse_ensembles{lowering=wide}", example_inputs=inputs)
    ).decisions
    assert decision.choice == "wide"
