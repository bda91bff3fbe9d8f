"""Layers of one shape are timed once, whatever weights and ranges they have; each of them is checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.cpus import needs_static_int8
from torch import Tensor, nn

import fxopt
from fxopt.compat.packed import why_no_packing
from fxopt.passes import timing
from fxopt.passes.timing import Timings, timing_figures
from fxopt.transforms.quantize import Quantize, find

X = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, width), nn.Linear(width, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def net(*widths: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*map(Block, widths)).eval()


WHOLE = ["Sequential", "Sequential"]
"""The whole model is raced on the example, and on a smaller batch."""


@pytest.fixture
def races(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note of which class each module is that is raced; what is rewritten is always twice as fast."""
    seen: list[str] = []

    def timed(candidates: Any, **_: Any) -> Timings:
        seen.append(type(candidates["before"].module).__name__)
        return Timings([{name: 2.0 if name == "before" else 1.0 for name in candidates}] * 9)

    monkeypatch.setattr(timing, "time_candidates", timed)
    return seen


def decisions(scheme: str, model: nn.Module) -> list[Any]:
    fast = fxopt.optimize(model, f"quantize{{scheme={scheme}}}", example_inputs=(X,), time_budget=1e6)
    with torch.no_grad():
        assert float((fast(X) - model(X)).abs().max()) < 0.1 * float(model(X).abs().max())
    return list(fxopt.plan(fast).decisions)


@needs_static_int8
def test_equal_layers_are_raced_once(races: list[str]) -> None:
    made = decisions("int8_static", net(64, 64, 64, 64))
    assert races == ["Block", *WHOLE]  # of each chain one, and the whole model
    assert [decision.status for decision in made] == ["applied"] * 4
    assert all(decision.figures["checked"] for decision in made)
    assert sum("as" in decision.figures for decision in made) == 3


@needs_static_int8
def test_layers_of_other_shapes_are_raced_too(races: list[str]) -> None:
    decisions("int8_static", net(64, 48, 64))
    assert len(races) == 2 + len(WHOLE)


@pytest.fixture
def trials(races: list[str], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note each time that layers are timed by themselves; with small numbers they are always twice as fast."""
    seen: list[int] = []

    def timed(before: Any, after: Any, *, cold: bool) -> dict[str, Any]:
        seen.append(len((before, after)))
        return timing_figures(Timings([{"before": 2.0, "after": 1.0}] * 9, cold=cold), count=len(before))

    monkeypatch.setattr(find, "figures_of", timed)
    return seen


@pytest.mark.parametrize("scheme", ["int8_dynamic", "int8_weight"])
def test_one_layer_of_each_kind_is_timed_and_each_is_compared(scheme: str, trials: list[int], races: list[str]) -> None:
    made = decisions(scheme, net(64, 64, 48))
    assert len(trials) == 4 and races == WHOLE  # up and down of both widths, and the whole model
    assert [decision.status for decision in made] == ["applied"] * 6
    assert all(decision.figures["checked"] == "with the whole model" for decision in made)
    assert all(decision.figures["speedup"] == 2.0 for decision in made)
    assert len({decision.figures["precision_error"] for decision in made}) == 6


@pytest.mark.parametrize("measure", [True, "cold"])
def test_layers_are_timed_with_caches_emptied_where_that_is_asked_for(
    measure: object, trials: list[int], races: list[str]
) -> None:
    fast = fxopt.optimize(net(64), "quantize", example_inputs=(X,), measure=measure, time_budget=1e6)
    assert trials
    assert {decision.figures.get("cold", False) for decision in fxopt.plan(fast).decisions} == {measure == "cold"}


def test_what_saves_most_for_its_error_comes_first(trials: list[int]) -> None:
    errors = [decision.figures["precision_error"] for decision in decisions("int8_dynamic", net(64, 64, 64))]
    assert errors == sorted(errors)  # all save as much


def test_a_layer_that_errs_by_more_than_the_budget_stays_by_itself() -> None:
    model, x = net(64), X.clone()
    x[:, 0] = 1000.0  # one scale for all numbers of a row leaves little of the others
    with torch.no_grad():
        model[0].up.weight[:, 0] = 0.0
    fast = fxopt.optimize(model, "quantize{budget=0.02}", example_inputs=(x,), measure=False)
    found = {decision.label: decision for decision in fxopt.plan(fast).decisions}
    assert found["0.up"].status == "refused"
    assert found["0.up"].reason.endswith("of its scale, more than the budget of 0.02")
    assert found["0.down"].status == "applied"


def test_where_the_whole_model_errs_by_too_much_what_costs_most_stays() -> None:
    model = net(64, 64, 64)
    with torch.no_grad():
        for number, block in enumerate(model):
            block.down.weight.mul_(10.0 ** (number + 1))  # what comes of each is most of the result so far
    whole = fxopt.optimize(model, "quantize", example_inputs=(X,), measure=False)
    errors = [decision.figures["precision_error"] for decision in fxopt.plan(whole).decisions]
    with torch.no_grad():
        error = float((whole(X) - model(X)).abs().max() / model(X).abs().max())
    budget = (error + max(errors)) / 2
    assert max(errors) < 0.9 * budget < error, "each layer is within the budget, and all together are not"
    fast = fxopt.optimize(model, f"quantize{{budget={budget}}}", example_inputs=(X,), measure=False)
    found = {decision.label: decision for decision in fxopt.plan(fast).decisions}
    left = [decision.reason for decision in found.values() if decision.status == "refused"]
    assert 0 < len(left) < 6 and all("the whole model would err by" in reason for reason in left)
    with torch.no_grad():
        assert float((fast(X) - model(X)).abs().max() / model(X).abs().max()) <= budget


def test_time_for_checks_is_no_limit_to_layers() -> None:
    fast = fxopt.optimize(net(64, 48, 32, 24), "quantize", example_inputs=(X,), measure=False, time_budget=0)
    assert [decision.status for decision in fxopt.plan(fast).decisions] == ["applied"] * 8


class Gated(nn.Module):
    """Two layers that are quantized one after the other in one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sigmoid(self.gate(x)) * self.value(x)


@needs_static_int8
def test_a_layer_beside_one_that_is_quantized_is_raced_once(races: list[str]) -> None:
    torch.manual_seed(0)
    made = decisions("int8_static", nn.Sequential(Gated(), Gated(), Gated()).eval())
    assert [decision.status for decision in made] == ["applied"] * 6
    assert races == ["Gated", "Gated", *WHOLE]


@needs_static_int8
def test_ranges_are_each_layers_own() -> None:
    model = net(64, 64)
    with torch.no_grad():
        model[1].up.weight.mul_(5.0)
    made = [decision.site["data"]["layers"] for decision in decisions("int8_static", model)]
    scales = [[layer["scale"] for layer in layers] for layers in made]
    assert scales[0] != scales[1]


def test_a_cache_that_grows_as_a_model_runs_is_given_anew() -> None:
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=96, bos_token_id=0, eos_token_id=1)
    model, ids = transformers.GPT2LMHeadModel(config).eval(), torch.randint(2, 96, (1, 12))
    calls = fxopt.Inputs.generating(ids, max_new_tokens=3)
    fast = fxopt.optimize(model, "quantize", example_inputs=calls, measure=False)
    assert {decision.status for decision in fxopt.plan(fast).decisions} == {"applied"}


def _agreement(model: nn.Module, x: Tensor) -> Any:
    """Return a metric: the part of some rows of which the largest result stays where it is in floats."""
    with torch.no_grad():
        expected = model(x).argmax(-1)
    return lambda other: (other(x).argmax(-1) == expected).float().mean()


@pytest.mark.parametrize("scheme", ["int8_dynamic", pytest.param("int8_static", marks=needs_static_int8)])
def test_a_metric_decides_in_the_place_of_the_budget(scheme: str) -> None:
    model, x = net(64, 64, 64), torch.randn(512, 32)
    with torch.no_grad():
        model[1].down.weight[:, 0] *= 3000.0  # one column takes the steps of all others
    metric = _agreement(model, x)

    def fast(drop: float) -> nn.Module:
        options = Quantize(scheme=scheme, metric=metric, drop=drop, per_channel=True)
        return fxopt.optimize(model, options, example_inputs=(x,), measure=False)

    alike = [float(metric(fast(drop))) for drop in (1.0, 0.01)]
    assert alike[0] < 0.99 <= alike[1]
    left = [decision.reason for decision in fxopt.plan(fast(0.01)).decisions if decision.status == "refused"]
    assert 0 < len(left) < 6 and all("the metric would fall from 1 to 0." in reason for reason in left)
    assert all("the allowed drop is 0.01" in reason for reason in left)


def test_what_a_metric_decided_is_loaded_and_repeated_without_it(tmp_path: Path) -> None:
    model, x = net(64), torch.randn(64, 32)
    options = Quantize(metric=_agreement(model, x), drop=0.02)
    fast = fxopt.optimize(model, options, example_inputs=(x,), measure=False)
    fxopt.save(fast, tmp_path / "model.fxopt")
    repeated = fxopt.optimize(model, plan=fxopt.plan(fast), example_inputs=(x,))
    with torch.no_grad():
        for other in (fxopt.load(tmp_path / "model.fxopt", model=model), repeated):
            assert torch.equal(other(x), fast(x))


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (lambda _: 1 / 0, "metric= raised ZeroDivisionError"),
        (lambda _: float("nan"), "metric= returned nan; return a finite number"),
        (lambda _: float("inf"), "metric= returned inf; return a finite number"),
        (lambda _: None, "metric= returned None; return a finite number"),
        (lambda model: model(X), "metric= returned a Tensor; return a finite number"),
        (
            lambda model: model[0].down.weight.detach().mul_(2.0).sum(),
            "metric= changes parameters of the model in place",
        ),
    ],
)
@pytest.mark.parametrize("scheme", ["int8_dynamic", pytest.param("int8_static", marks=needs_static_int8)])
def test_a_metric_that_raises_or_gives_no_number_is_told_of(metric: Any, said: str, scheme: str) -> None:
    with pytest.raises(fxopt.CalibrationError, match=said):
        fxopt.optimize(net(64), Quantize(scheme=scheme, metric=metric), example_inputs=(X,), measure=False)


@pytest.mark.parametrize("scheme", ["int8_dynamic", pytest.param("int8_static", marks=needs_static_int8)])
@pytest.mark.parametrize("drop", [1.0, 0.01])
def test_the_report_has_the_metric_before_and_after(scheme: str, drop: float) -> None:
    model, x = net(64, 64, 64), torch.randn(512, 32)
    with torch.no_grad():
        model[1].down.weight[:, 0] *= 3000.0  # so with 0.01 some layers stay in floats
    metric = _agreement(model, x)
    options = Quantize(scheme=scheme, metric=metric, drop=drop, per_channel=True)
    fast = fxopt.optimize(model, options, example_inputs=(x,), measure=False)
    sites = [d["site"]["data"] for d in fxopt.report(fast).to_json()["decisions"] if d["site"]]
    found = [data["metric"] for data in sites if "metric" in data]
    assert len(found) == 1 and found[0]["before"] == 1.0 and found[0]["drop"] == drop
    assert abs(found[0]["after"] - float(metric(fast))) < 0.01  # it was measured with every layer simulated
    line = f"quantize: the metric 1 -> {found[0]['after']:.4g}; it may fall by {drop:g}"
    assert line in str(fxopt.report(fast)) and line in fxopt.report(fast).to_json()["messages"]


@pytest.mark.parametrize(
    ("options", "said"), [({"drop": 0.1}, "give a metric="), ({"metric": 1}, "metric= is no function")]
)
def test_a_metric_and_its_drop_go_together(options: Any, said: str) -> None:
    with pytest.raises(fxopt.UsageError, match=said):
        fxopt.optimize(net(64), Quantize(**options), example_inputs=(X,), measure=False)


@pytest.mark.parametrize(
    ("baseline", "said"), [("float32", ""), ("bfloat16", "no faster by itself than in bfloat16: 0.5x")]
)
def test_a_layer_may_have_to_be_faster_than_in_bfloat16(
    baseline: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ratios = iter((2.0, 0.5))  # beside float32, and beside bfloat16

    def figures(before: Any, after: Any, **_: Any) -> dict[str, Any]:
        for call in (*before, *after):
            assert call().shape == (6, 32)
        ratio = next(ratios)
        return {"speedup": ratio, "speedup_low": ratio, "speedup_high": ratio}

    monkeypatch.setattr(find, "figures_of", figures)
    model = nn.Sequential(nn.Linear(32, 32)).eval()
    fast = fxopt.optimize(model, f"quantize{{baseline={baseline}}}", example_inputs=(X,))
    (decision,) = fxopt.plan(fast).decisions
    said = "" if why_no_packing(torch.bfloat16) else said  # such a CPU has no layer in bfloat16 to be faster than
    assert decision.reason.startswith(said) and (decision.status == "refused") == bool(said)
