"""A search on a small model: what it tries, what it finds, what stops it, and what it refuses."""

from __future__ import annotations

import html
import logging
import re
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cpus import needs_static_int8
from torch import Tensor, nn

import fxopt
from fxopt.errors import CalibrationError, InputError, UsageError
from fxopt.searching.bench import Bench
from fxopt.searching.points import Aim, Point
from fxopt.tracing.examples import normalize_inputs

pytest.importorskip("optuna")

X = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time each point for a moment: these tests are of no figure. All CPUs try the same."""
    monkeypatch.setattr("fxopt.searching.space.why_no_packing", lambda _: "")
    monkeypatch.setattr("fxopt.searching.bench._SECONDS", 0.01)
    monkeypatch.setattr("fxopt.searching.bench._ROUNDS", 3)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 4)).eval()


def accuracy(model: nn.Module) -> float:
    labels = net()(X).argmax(1)
    return float((model(X).argmax(1) == labels).float().mean())


def search(model: nn.Module | None = None, **options: Any) -> fxopt.Front:
    settings = {"example_inputs": X, "trials": 3, "time_budget": 60, **options}
    return fxopt.search(net() if model is None else model, **settings)


def test_points_are_built_from_their_plans_and_equal_what_was_measured(tmp_path: Path):
    model = net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    front = search(model, evaluate=accuracy, trials=9, constraints={"metric": "-20%"})
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    tried = [point.pipeline for point in front.trials]
    assert tried[:2] == ["inference{dtype=float32}", "inference{dtype=bfloat16}"]
    assert tried[3] == "quantize,inference{dtype=float32}"
    measured = [point for point in front.trials if point.is_known]
    assert len(measured) >= 6
    places = [(front.aim.cost(each.figures), front.aim.loss(each.figures)) for each in front]
    assert places == sorted(places)
    for point in measured:
        cost, loss = front.aim.cost(point.figures), front.aim.loss(point.figures)
        assert front.lacks(point) or any(x <= cost and y <= loss for x, y in places)
        assert not any(cost <= x and loss <= y and (cost, loss) != (x, y) for x, y in places)
    lossy = max(measured, key=lambda point: point.figures["error"])
    assert lossy.figures["error"] > 0
    with torch.no_grad():
        results = front.model(lossy)(X)
        error = float((results - model(X)).abs().max() / model(X).abs().max())
    assert error == pytest.approx(lossy.figures["error"], rel=1e-3)
    assert accuracy(front.model(lossy)) == lossy.figures["metric"]
    best = front.best("latency", metric=">= 0.9")
    assert best.figures["metric"] >= 0.9
    with pytest.raises(UsageError, match="no trial meets the bounds; the nearest"):
        front.best(latency="1 us")
    with pytest.raises(UsageError, match="and none at 99"):
        front.model(99)
    front.save(tmp_path / "front")
    with pytest.raises(UsageError, match=r"front.json is a file; name a folder"):
        front.save(tmp_path / "front" / "front.json")
    again = fxopt.Front.load(tmp_path / "front", model=model, example_inputs=X)
    assert str(again) == str(front)
    assert "that no other trial beats" in str(front)
    assert len(repr(lossy)) < 1000 and lossy.pipeline in repr(lossy)
    assert "<table" in front._repr_html_()
    with torch.no_grad():
        assert torch.equal(again.model(lossy)(X), results)
    assert front.plot().axes[0].get_xlabel() == "latency"
    again.to_html(tmp_path / "points.html")
    assert (tmp_path / "points.html").read_text().count(f">{front.headline()}<") == 1  # and as the title of the page


def test_the_table_has_the_number_of_each_point_that_of_the_original_as_well():
    original = Point(-1, "", {"latency": 2.0, "error": 0.0})
    faster = Point(0, "quantize", {"latency": 1.0, "error": 0.1})
    front = fxopt.Front(Aim("latency", (), original.figures, has_metric=False, minimize=False), original, [faster])
    assert front[1] is original
    assert [row[:2] for row in front.table()[1]] == [["1", "as it was"], ["0", "quantize"]]


def made(model: nn.Module, pipeline: str, finetune: Callable[[nn.Module], object] | None = None) -> fxopt.Front:
    """Return a front that has tried one pipeline."""
    calls = normalize_inputs(X, model)
    bench = Bench(model, calls, training=False, evaluate=None, finetune=finetune, seed=0)
    aim = Aim("latency", (), bench.original.figures, has_metric=False, minimize=False)
    point = bench.point(0, pipeline, {})
    return fxopt.Front(aim, bench.original, [point], states=bench.states, model=bench.base, calls=calls)


def test_a_point_says_which_layers_hold_it_back_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = net()
    model[0].register_forward_hook(lambda *_: None)
    front = made(model, "quantize,inference{dtype=float32}")
    (point,) = front.trials
    assert point.plan is not None
    refused = next(each for each in point.plan.decisions if (each.pass_name, each.label) == ("quantize", "0"))
    assert refused.status == "refused"
    assert fxopt.plan(front.model(point)) == point.plan
    assert any(line.startswith("0: ") and f"quantize: {refused.reason}" in line for line in front.why(point))
    monkeypatch.setattr(fxopt.Front, "_shown", property(lambda front: front.trials))
    front.to_html(tmp_path / "points.html")
    assert f"quantize: {refused.reason}" in html.unescape((tmp_path / "points.html").read_text())


def test_a_model_that_was_optimized_before_is_searched_as_well():
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.Linear(48, 4)).eval()
    earlier = fxopt.optimize(model, "quantize{scheme=int8_weight,aim=size,keep=[2]}", example_inputs=X)
    assert any(each.status == "applied" for each in fxopt.plan(earlier).decisions)
    front = search(earlier, trials=4)
    for point in front.trials:
        if point.is_known:
            fast = front.model(point)
            with torch.no_grad():
                error = float((fast(X) - earlier(X)).abs().max() / earlier(X).abs().max())
            assert error == pytest.approx(point.figures["error"], rel=1e-3, abs=1e-6)
            assert fxopt.plan(fast).pipeline[:1] == fxopt.plan(earlier).pipeline


def test_trials_on_an_optimized_model_say_what_became_of_its_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Pruned layers are not those whose norms were folded: the pruned model runs its own forward."""
    monkeypatch.setattr("fxopt.searching.space.pass_names", lambda: {"prune": "fxopt"})
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 4)
    ).eval()
    x = torch.randn(4, 1, 8, 8)
    earlier = fxopt.optimize(model, "fold_batchnorm", example_inputs=x, measure=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxopt.GuardWarning)
        front = search(earlier, example_inputs=x, trials=3)
    assert front.notes[0].startswith("the model was optimized before (fold_batchnorm): trials add to that")
    pruned = [point for point in front.trials if point.choice["prune"] and point.is_known]
    assert pruned
    assert all("used the original forward" in point.left[0] for point in pruned)
    assert front.why(pruned[0])[0] == pruned[0].left[0]
    monkeypatch.setattr(fxopt.Front, "_shown", property(lambda _: pruned[:1]))
    front.to_html(tmp_path / "points.html")
    page = (tmp_path / "points.html").read_text()
    assert 0 < page.index("used the original forward") < page.index("% of the time")


def test_layers_that_do_not_hold_their_weight_are_not_sorted():
    """Members of a fused ensemble have views of one tensor, and a parametrized layer computes its weight."""
    heads = nn.ModuleList(nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 2)) for _ in range(6))
    fused = fxopt.optimize(Heads(heads).eval(), "fuse_ensembles", example_inputs=X, measure=False)
    assert any(each.status == "applied" for each in fxopt.plan(fused).decisions)
    for model in (fused, nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(64, 4))).eval()):
        assert search(model, trials=1).trials


class Heads(nn.Module):
    """An ensemble, whose members are fused into one."""

    def __init__(self, heads: nn.ModuleList) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(x) for head in self.heads], dim=1)


def test_a_pruned_point_is_trained_and_its_weights_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fxopt.searching.space.pass_names", lambda: {"prune": "fxopt"})  # `qat` is trained, too

    def finetune(model: nn.Module) -> None:
        assert model.training
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            model(X).square().mean().backward()
            optimizer.step()

    folder = tmp_path / "trials"
    front = search(finetune=finetune, trials=5, storage=folder)
    pruned = [point for point in front.trials if point.finetuned]
    assert pruned
    assert all("prune" in point.pipeline for point in pruned)
    with torch.no_grad():
        first = front.model(pruned[0])(X)
        error = float((first - net()(X)).abs().max() / net()(X).abs().max())
    assert error == pytest.approx(pruned[0].figures["error"], rel=1e-3)
    again = search(finetune=finetune, trials=1, storage=folder)
    assert [point.pipeline for point in again.trials[: len(front.trials)]] == [p.pipeline for p in front.trials]
    with torch.no_grad():
        torch.testing.assert_close(again.model(again.trials[pruned[0].number])(X), first)
    with pytest.raises(UsageError, match="holds another search"):
        search(evaluate=accuracy, storage=folder)
    with pytest.raises(UsageError, match=r"called with \[32, 64\], latency for the error"):
        search(example_inputs=X[:8], storage=folder)
    other = net()
    nn.init.zeros_(other[0].bias)
    with pytest.raises(UsageError, match="holds another search"):
        search(other, storage=folder)


@needs_static_int8
def test_what_is_rounded_in_training_is_trained_and_computed_in_8_bits():
    trained: list[bool] = []

    def finetune(model: nn.Module) -> None:
        trained.append(any("FakeQuantized" in repr(type(part).__mro__) for part in model.modules()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            model(X).square().mean().backward()
            optimizer.step()

    front = made(net(), "qat,quantize{scheme=int8_static,aim=size}", finetune)
    (point,) = front.trials
    assert point.finetuned
    assert trained == [True]
    with torch.no_grad():
        result = front.model(point)(X)
        error = float((result - net()(X)).abs().max() / net()(X).abs().max())
    assert error == pytest.approx(point.figures["error"], rel=1e-2)


def test_what_nothing_was_pruned_in_is_not_trained():
    front = made(nn.Sequential(nn.ReLU()).eval(), "prune{method=structured}", lambda _: pytest.fail("trained"))
    assert [(point.repeats, point.finetuned) for point in front.trials] == [(-1, False)]


@pytest.mark.parametrize(
    ("old", "new"),
    [('"latency"', '"speed"'), ('"pipeline": "', '"pipeline": 3, "more": "'), ('"notes"', '"other"'), ("{", "")],
)
def test_a_damaged_front_is_refused(tmp_path: Path, old: str, new: str):
    search(trials=1).save(tmp_path)
    file = tmp_path / "front.json"
    file.write_text(file.read_text().replace(old, new, 1))
    with pytest.raises(InputError, match="holds no front"):
        fxopt.Front.load(tmp_path)


def test_constraints_that_nothing_meets_show_the_nearest_points():
    front = search(constraints={"latency": "1 us"})
    assert len(front) == 0
    assert "no trial meets the constraints" in str(front)
    assert "latency" in str(front)
    assert "wanted <= 1 us" in str(front)
    with pytest.raises(UsageError, match="0 points"):
        front.model()


def test_pipelines_that_rewrite_the_same_are_one_point(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    """They are timed once, evaluated once, and count once; the log and the page name the first."""
    monkeypatch.setenv("FXOPT_MEASURE", "0")
    monkeypatch.setattr("fxopt.searching.space.pass_names", lambda: {"quantize": "fxopt"})
    evaluated: list[nn.Module] = []
    model = nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2), nn.ReLU()).eval()
    with caplog.at_level(logging.INFO, "fxopt"):
        front = search(
            model,
            example_inputs=torch.ones(1, 2, 4),
            evaluate=lambda model: float(not evaluated.append(model)),
            trials=3,
        )
    of = {point.pipeline: point for point in front.trials}
    plain, idle = of["inference{dtype=float32}"], of["quantize,inference{dtype=float32}"]  # there is no linear layer
    assert (plain.repeats, idle.repeats) == (None, plain.number)
    assert plain.figures == idle.figures
    assert plain.plan != idle.plan
    measured = [point for point in front.trials if point.is_known and point.repeats is None]
    assert len(evaluated) == 1 + len(measured)
    assert len(measured) <= 3 < len(front.trials)
    same = f"rewrites the same as trial {plain.number}"
    assert f"trial {idle.number}, {idle.pipeline}: {same}" in caplog.text
    front.to_html(tmp_path / "points.html")
    assert f"{same}<" in (tmp_path / "points.html").read_text()


def test_training_steps_and_bytes():
    front = search(net().train(), objective="training_step", constraints={"memory": "-10%"}, trials=2)
    assert {"training_step", "memory", "size", "error"} == set(front.original.figures)
    assert front.trials[0].pipeline == "training"
    assert front.model(front.trials[0]).training


def test_ctrl_c_gives_the_front_so_far(monkeypatch: pytest.MonkeyPatch):
    point: Callable[..., Any] = Bench.point

    def stopped(self: Bench, number: int, *rest: Any) -> Any:
        if number == 1:
            raise KeyboardInterrupt
        return point(self, number, *rest)

    monkeypatch.setattr(Bench, "point", stopped)
    front = search()
    assert len(front.trials) == 1
    assert front.notes[-1] == "the search was stopped after 1 trial"


def test_the_same_seed_tries_the_same(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FXOPT_MEASURE", "0")
    monkeypatch.setattr("fxopt.searching.space.pass_names", lambda: {"quantize": "fxopt"})
    options: dict[str, Any] = {"objective": "size", "trials": 10, "seed": 3}
    first, second = search(**options), search(**options)
    assert [point.pipeline for point in first.trials] == [point.pipeline for point in second.trials]
    assert [point.pipeline for point in first] == [point.pipeline for point in second]
    sizes = [[point.figures.get("size") for point in front.trials] for front in (first, second)]
    assert sizes[0] == sizes[1]


class Changing(nn.Module):
    """A model with a buffer that a metric may change."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 4)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


def raising(model: nn.Module) -> float:
    raise ZeroDivisionError("no data")


def spoiling(model: nn.Module) -> float:
    model[0].weight.mul_(0)
    return 1.0


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"evaluate": raising}, InputError, "evaluate raised ZeroDivisionError: no data"),
        ({"evaluate": lambda _: float("nan")}, InputError, "evaluate returned nan; return a finite number"),
        ({"evaluate": lambda _: torch.tensor(torch.nan)}, InputError, "evaluate returned nan; return a finite number"),
        (
            {"example_inputs": X[:, :3]},
            InputError,
            "the model raised RuntimeError on the example inputs: mat1",
        ),
        ({"evaluate": lambda _: None}, InputError, "evaluate returned None"),
        ({"evaluate": spoiling}, CalibrationError, "evaluate changes parameters of the model in place"),
        ({"evaluate": 3}, UsageError, "evaluate is of type int; give a function"),
        ({"finetune": 3}, UsageError, "finetune is of type int"),
        ({"objective": "speed"}, UsageError, "objective='speed'"),
        ({"time_budget": 0.05}, UsageError, "time_budget: one trial takes about"),
        ({"trials": 0}, UsageError, "trials is 0"),
        ({"example_inputs": None}, UsageError, "there are no example inputs"),
        ({"seed": "a"}, UsageError, "seed is of type str"),
        ({"seed": -1}, UsageError, "seed is -1; give a whole number, at least 0"),
        ({"time_budget": 10**400}, UsageError, "give seconds, or a text such as '10 min'"),
        ({"minimize": True}, UsageError, "minimize says that less of what evaluate returns is better: give evaluate"),
        ({"constraints": {"metric": 0.9}}, UsageError, "without evaluate the metric is the error of the results"),
        ({"storage": __file__}, UsageError, "test_search.py is a file; name a folder"),
        ({"storage": f"{__file__}/inside"}, UsageError, "test_search.py is a file; name a folder"),
        ({"constraints": {"memory": "much"}}, UsageError, "constraints: memory='much'"),
    ],
)
def test_bad_input_is_refused_in_one_line(options: Any, kind: type[Exception], message: str):
    model = net()
    before = model[0].weight.clone()
    with pytest.raises(kind) as caught:
        search(model, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert torch.equal(model[0].weight, before)


def test_evaluate_gets_models_in_evaluation_mode():
    modes: list[bool] = []

    def worth(model: nn.Module) -> float:
        modes.append(model.training or torch.is_grad_enabled())
        return 1.0

    search(net().train(), evaluate=worth, trials=3)
    assert len(modes) > 1
    assert not any(modes)


def test_constraints_that_no_point_meets_together_say_what_each_point_lacks():
    front = search(constraints={"size": "-99%", "error": 1e-12}, trials=6)
    assert len(front) == 0
    assert all(line.count("wanted") == 1 for line in front.lacks(front.original))
    lossy = max((each for each in front.trials if each.is_known), key=lambda each: each.figures["error"])
    assert [line.partition(" ")[0] for line in front.lacks(lossy)] == ["size", "error"]
    assert "wanted <= " in str(front)


def test_a_slow_metric_is_told_with_how_many_trials_fit(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("fxopt.searching.bench._seconds_by_the_clock", lambda _: 1.0)  # as on a machine that is quiet

    def slow(_: nn.Module) -> float:
        time.sleep(0.3)
        return 1.0

    with caplog.at_level(logging.WARNING, "fxopt"):
        front = search(evaluate=slow, trials=3, time_budget=2.5)
    assert re.match(r"(evaluate|a trial) takes .*, so the time budget is enough for about [12] trial", front.notes[0])
    assert front.notes[0] in caplog.text


def test_what_evaluate_changes_is_put_back():
    def worth(model: Any) -> float:
        model.train()
        model.scale.mul_(2.0)
        return float(model(X).abs().mean())

    front = search(Changing().eval(), evaluate=worth, trials=2)
    with torch.no_grad():
        assert front.original.figures["metric"] == pytest.approx(front.trials[0].figures["metric"], rel=1e-3)


def test_where_few_trials_fit_that_is_told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Bench, "trial_seconds", 50.0)
    with caplog.at_level(logging.WARNING, "fxopt"):
        front = search(time_budget="2 min", trials=3)
    assert front.notes[0].startswith("a trial takes about 50 s, so the time budget is enough for about 2 trials; ")
    assert front.notes[0] in caplog.text


def test_a_trial_takes_longer_by_the_clock_where_other_programs_have_the_cores(monkeypatch: pytest.MonkeyPatch):
    real = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: 4 * real())  # of each second here this thread has a quarter
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        bench = Bench(net(), normalize_inputs(X, net()), training=False, evaluate=None, finetune=None, seed=0)
    finally:
        torch.set_num_threads(threads)
    assert bench.trial_seconds > 3.5  # a second of the processor, at the least


def test_an_original_that_fails_its_constraint_is_told():
    front = search(evaluate=accuracy, constraints={"metric": ">= 1.5"}, trials=1)
    assert front.notes[0] == "the original itself does not meet a constraint: metric 1, wanted >= 1.5"


def test_a_metric_that_fails_on_a_point_is_a_reason():
    calls: list[nn.Module] = []

    def once(model: nn.Module) -> float:
        calls.append(model)
        if len(calls) > 1:
            raise ValueError("only once")
        return 1.0

    front = search(evaluate=once, trials=2)
    assert [point.reason for point in front.trials] == ["CalibrationError: evaluate raised ValueError: only once"] * 2
    assert [point.number for point in front] == [-1]
    with pytest.raises(UsageError, match="failed: CalibrationError"):
        front.model(front.trials[0])


def test_a_missing_optuna_is_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(fxopt.UsageError, match=r"needs optuna; install it with: pip install"):
        fxopt.search(nn.Linear(4, 2).eval(), example_inputs=torch.randn(2, 4), trials=1)
