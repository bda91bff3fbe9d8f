"""delegate: what is not converted, and not run, while a model is optimized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import X, delegated, linears, one_engine, openvino_only, regions, same
from torch import Tensor, fx, nn

import fxopt
from fxopt import Cause
from fxopt.passes import timing
from fxopt.passes.timing import Timings
from fxopt.transforms.delegate import find
from fxopt.transforms.delegate.delegate import engine_named
from fxopt.transforms.delegate.write import DelegatedRegion


class Checked(nn.Module):
    """Decides by the numbers in its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) if bool(x.sum() > 1e6) else self.second(x).relu()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows by a name with each computation that an engine compiles."""
    found, kind = list[str](), type(engine_named("onnxruntime"))
    compile_ = kind.compile

    def counted(engine: Any, *args: Any) -> Any:
        found.append(engine.name)
        return compile_(engine, *args)

    monkeypatch.setattr(kind, "compile", counted)
    return found


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the names of nodes that run on numbers while regions are looked for."""
    found, run_node = list[str](), find._Runner.run_node

    def noted(runner: Any, node: fx.Node) -> Any:
        found.append(node.name)
        return run_node(runner, node)

    monkeypatch.setattr(find._Runner, "run_node", noted)
    return found


@one_engine
def test_numbers_that_verification_makes_up_are_not_converted(engine: str, compiled: list[str]) -> None:
    model = linears()
    fast = delegated(model, engine, verify=True)
    assert regions(fast) and compiled == [engine]
    same(fast, model)
    with torch.no_grad():
        for parameter in (*model.parameters(), *fast.parameters()):
            parameter.mul_(1.5)
    for _ in range(9):
        same(fast, model)
    fxopt.refresh(fast)
    same(fast, model)
    assert compiled == [engine, engine]


@openvino_only
def test_each_engine_is_converted_once_and_only_the_one_that_stands_gets_more_time(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    converted, settled, settle = list[str](), list[str](), DelegatedRegion.settle
    for name in ("openvino", "onnxruntime"):
        kind = type(engine_named(name))

        def counted(engine: Any, *args: Any, compile_: Any = kind.compile) -> Any:
            converted.append(engine.name)
            return compile_(engine, *args)

        monkeypatch.setattr(kind, "compile", counted)

    def noted(region: DelegatedRegion) -> None:
        settled.append(region.engine)
        settle(region)

    monkeypatch.setattr(DelegatedRegion, "settle", noted)
    costs = {"before": 3.0, "onnxruntime": 2.0}
    monkeypatch.setattr(
        timing, "time_candidates", lambda them, **_: Timings([{name: costs.get(name, 1.0) for name in them}] * 9)
    )
    fast = fxopt.optimize(linears(), "delegate", example_inputs=X, time_budget=60)
    assert [(each.status, each.choice) for each in fxopt.plan(fast).decisions] == [("applied", engine)]
    assert (converted, settled) == (["openvino", "onnxruntime"], [engine])


@one_engine
def test_what_would_take_much_longer_than_is_left_is_not_converted(
    engine: str, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def estimated(self: Any, nodes: int, forward: float) -> float:
        return 0.01 * nodes + forward

    for name in ("openvino", "onnxruntime"):
        monkeypatch.setattr(type(engine_named(name)), "seconds_to_take", estimated)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(200))).eval()
    fast = fxopt.optimize(model, "delegate", example_inputs=X, time_budget=2.0)
    (decision,) = fxopt.plan(fast).decisions
    assert decision.cause == Cause.TOO_LONG and not compiled
    assert "to write it would take about 6" in decision.reason and "of the time budget of 2 s" in decision.reason
    named = fxopt.optimize(model, f"delegate{{engine={engine}}}", example_inputs=X, time_budget=2.0)
    assert regions(named) and compiled == [engine]
    fxopt.optimize(model, "delegate", example_inputs=X, time_budget=60.0)
    assert len(compiled) > 1


@one_engine
def test_what_is_recalled_runs_nothing_to_know_forms(
    engine: str, run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXOPT_CACHE", str(tmp_path))
    model, options = linears(nn.LayerNorm(8)), {"verify": True}
    fxopt.optimize(model, f"delegate{{engine={engine}}}", example_inputs=X, **options)  # type: ignore[arg-type]
    assert run
    run.clear()
    fast = fxopt.optimize(model, f"delegate{{engine={engine}}}", example_inputs=X, **options)  # type: ignore[arg-type]
    assert fxopt.report(fast).to_json()["cached"] and regions(fast) and not run
    same(fast, model)


def test_forms_without_numbers_are_those_of_a_run() -> None:
    program = fxopt.capture(linears(nn.LayerNorm(8), nn.Softmax(-1)), X)
    (runs,) = find.look(program, "", in_8_bits=False)
    assert runs.runner.knows_forms() and len(runs.runner.metas) > 10
    known = runs.runner.metas
    runs.runner.metas = {}
    assert runs.runner.runs_through() and runs.runner.metas == known


def test_forms_of_what_layers_give_are_known_of_their_calls() -> None:
    program = fxopt.capture(linears(nn.LayerNorm(8)), X)
    (runs,) = find.look(program, "", in_8_bits=False)
    computed = [node for node in runs.flat.specialization.graph.nodes if node.op == "call_function"]
    assert len(computed) > 4 and all("val" in node.meta for node in computed)


def test_of_what_depends_on_numbers_no_forms_are_known_without_them() -> None:
    program = fxopt.capture(Checked().eval(), X)
    (runs,) = find.look(program, "", in_8_bits=False)
    assert runs.runner.metas and not runs.runner.knows_forms()


def test_what_a_region_is_given_is_computed_no_further(run: list[str]) -> None:
    program = fxopt.capture(linears(), X)
    (runs,) = find.look(program, "", in_8_bits=False)
    nodes = [node for node in runs.flat.specialization.graph.nodes if node.op == "call_function"]
    run.clear()
    runs.runner.values_of([nodes[1]])
    assert nodes[1].name in run and nodes[2].name not in run
