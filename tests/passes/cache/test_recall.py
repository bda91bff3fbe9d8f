"""Models that were optimized before are rewritten as was decided then, compared, and timed no more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxopt
from fxopt.passes.contract import Pass
from fxopt.passes.driver import Manager, RunContext
from fxopt.passes.timing import Runner, TimeBudget
from fxopt.passes.verification import Original
from fxopt.testing import assert_equivalent
from fxopt.tracing.examples import Inputs
from fxopt.tracing.program import deactivate
from fxopt.tracing.recording import disagreeing

X = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
PASSES = "fold_batchnorm, pack"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FXOPT_CACHE", str(tmp_path / "decisions"))
    return tmp_path / "decisions"


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count what is made to be timed."""
    count, made = [0], Runner.__init__

    def counting(self: Any, *args: Any, **kwargs: Any) -> None:
        count[0] += 1
        made(self, *args, **kwargs)

    monkeypatch.setattr(Runner, "__init__", counting)
    return count


def net(seed: int = 0, width: int = 8) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten(), nn.Linear(width * 196, 4)
    )
    model[1].running_mean.normal_()  # type: ignore[union-attr]
    return model.eval()


def fast(model: nn.Module, passes: str = PASSES, **options: Any) -> nn.Module:
    return fxopt.optimize(model, passes, example_inputs=X, **options)


class Switched(nn.Module):
    """Has a part under a context."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            x = self.layer(x)
        return self.layer(x).relu()


def test_parts_under_contexts_are_found_by_passes_where_decisions_are_kept() -> None:
    model = nn.Sequential(Switched(), Switched()).eval()
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(fast(model, "autocast", verify=True)(X), model(X), atol=0.1, rtol=0.1)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_of_a_model_with_torchscript_inside_nothing_is_kept() -> None:
    inner = torch.jit.trace(nn.Conv2d(3, 3, 1).eval(), X)
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), inner).eval()
    for _ in range(2):
        found = fast(model, "fold_batchnorm")
        assert not is_recalled(found)
        torch.testing.assert_close(found(X), model(X))


def is_recalled(model: nn.Module) -> bool:
    return fxopt.report(model).to_json()["cached"] is not None


def test_the_second_time_nothing_is_timed_and_all_is_decided_alike(timed: list[int], folder: Path):
    model = net()
    first = fast(model, "inference")
    assert not is_recalled(first)
    assert timed[0] > 0
    assert len([*folder.iterdir()]) == 1
    timed[0] = 0
    again = fast(model, "inference")
    assert timed[0] == 0
    assert is_recalled(again)
    assert fxopt.plan(again).to_json() == fxopt.plan(first).to_json()
    assert any(decision.status == "applied" for decision in fxopt.plan(again).decisions)
    assert {n: str(g) for n, g in fxopt.graphs(again).items()} == {n: str(g) for n, g in fxopt.graphs(first).items()}
    torch.testing.assert_close(again(X), first(X), rtol=0, atol=0)
    assert_equivalent(model, again, (X,))


def test_the_report_says_where_the_figures_are_from():
    first, again = (fxopt.report(fast(net())) for _ in range(2))
    assert "from the cache" not in str(first)
    assert str(again).count("from the cache") == 1
    before, now = first.to_json(), again.to_json()
    assert (now["timings"], now["checked"], now["spent"]) == (before["timings"], before["checked"], None)
    assert now["cached"][:2] == "20"
    assert [each["decided"] for each in now["passes"]] == [each["decided"] for each in before["passes"]]


def test_other_weights_are_rewritten_as_they_are(timed: list[int]):
    fast(net(0))
    timed[0] = 0
    other = net(1)
    again = fast(other)
    assert is_recalled(again)
    assert timed[0] == 0
    assert_equivalent(other, again, (X,))


def test_a_budget_is_kept_for_each_set_of_weights():
    fast(net(0), "quantize{scheme=int8_weight}")
    assert is_recalled(fast(net(0), "quantize{scheme=int8_weight}"))
    assert not is_recalled(fast(net(1), "quantize{scheme=int8_weight}"))


def test_training_is_recalled_with_its_gradients():
    model = net().train()
    fast(model, "eliminate_common_subexpressions, channels_last")
    again = fast(model, "eliminate_common_subexpressions, channels_last")
    assert is_recalled(again)
    assert_equivalent(model, again, (X,), gradients=True)


def test_other_requests_are_decided_anew():
    fast(net())
    assert not is_recalled(fast(net(), "pack"))
    assert not is_recalled(fast(net(width=6)))
    assert is_recalled(fast(net()))


def test_with_more_time_decisions_are_made_anew_and_serve_those_with_less():
    fast(net(), time_budget=2.0)
    assert is_recalled(fast(net(), time_budget=2.0))
    assert not is_recalled(fast(net(), time_budget=60.0))
    assert is_recalled(fast(net(), time_budget=60.0))
    assert is_recalled(fast(net(), time_budget=2.0))
    assert not is_recalled(fast(net(), time_budget=float("inf")))
    assert is_recalled(fast(net(), time_budget=float("inf")))


def without_time_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no check fit of what a pass does, neither by itself nor with the whole model."""
    check_of = RunContext.check_of

    def without(self: RunContext, pass_: Pass, *given: Any, ended: bool = False) -> Any:
        return check_of(self, pass_, *given, ended=ended or pass_.name == name)

    monkeypatch.setattr(RunContext, "check_of", without)
    monkeypatch.setattr(TimeBudget, "end_of_check", 0.0)


def test_what_no_time_was_left_to_check_is_decided_anew_with_more_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = "fold_batchnorm, flatten_calls"

    def statuses(model: nn.Module) -> set[tuple[str, str, str]]:
        return {(each.pass_name, each.status, each.cause) for each in fxopt.plan(model).decisions}

    with monkeypatch.context() as busy:
        without_time_for("flatten_calls", busy)
        first = fast(net(), passes, measure=False, time_budget=2.0)
    expected = {("fold_batchnorm", "applied", ""), ("flatten_calls", "undone", "budget.not_checked")}
    assert statuses(first) == expected
    again = fast(net(), passes, measure=False, time_budget=2.0)
    assert is_recalled(again)
    assert statuses(again) == expected
    assert_equivalent(net(), again, (X,))
    more = fast(net(), passes, measure=False, time_budget=60.0)
    assert not is_recalled(more)
    assert {status for _, status, _ in statuses(more)} == {"applied"}


def test_nothing_is_kept_where_all_was_lost_for_want_of_time(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    without_time_for("flatten_calls", monkeypatch)
    lost = fast(net(), "flatten_calls", measure=False)
    assert {each.status for each in fxopt.plan(lost).decisions} == {"undone"}
    assert not folder.exists() or not [*folder.iterdir()]


def entry(folder: Path) -> tuple[Path, dict[str, Any]]:
    (path,) = folder.iterdir()
    return path, json.loads(path.read_text())


def test_what_was_compared_in_haste_is_compared_as_usual_once(folder: Path, monkeypatch: pytest.MonkeyPatch):
    briefly: list[bool] = []
    made = Original.__init__

    def noted(self: Any, *args: Any, **options: Any) -> None:
        briefly.append(options["brief"])
        made(self, *args, **options)

    fast(net(), measure=False)
    path, given = entry(folder)
    assert given["is_compared"]
    given["plan"]["decisions"][0]["figures"]["hurried"] = "no time was left"
    path.write_text(json.dumps({**given, "is_compared": False}))
    monkeypatch.setattr(Original, "__init__", noted)
    for expected in (False, True):
        assert is_recalled(fast(net(), measure=False))
        assert set(briefly) == {expected}
        assert entry(folder)[1]["is_compared"]
        briefly.clear()


def test_rounding_that_was_looked_at_is_not_looked_at_again(folder: Path, monkeypatch: pytest.MonkeyPatch):
    looked: list[int] = []
    closely = Original._looked_at_closely

    def noted(self: Any, *args: Any) -> Any:
        looked.append(1)
        return closely(self, *args)

    monkeypatch.setattr(Original, "_looked_at_closely", noted)
    monkeypatch.setattr(sys.modules[Original.__module__], "CLOSE", {torch.float32: 0.0})  # all is looked at closely
    model = net()
    first = fast(model)
    if torch.equal(first(X), model(X)):
        pytest.skip("this CPU rounds both alike")
    assert looked
    path, given = entry(folder)
    assert 0 < given["rounding"] < 1e-3
    looked.clear()
    assert is_recalled(fast(model))
    assert not looked
    path.write_text(json.dumps({**given, "rounding": 0.0}))
    assert is_recalled(fast(model))
    assert looked


def test_a_smaller_call_tells_of_rounding_where_no_time_is_left_for_the_example(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[Original.__module__], "CLOSE", {torch.float32: 0.0})  # all is looked at closely
    check: Any = vars(sys.modules[Manager.__module__])["FinalCheck"]
    monkeypatch.setattr(check, "_fits_as_usual", lambda *_: False)
    model = net()
    first = fast(model, "fold_batchnorm", measure=False)
    assert any(decision.status == "applied" for decision in fxopt.plan(first).decisions)
    with torch.no_grad():
        if torch.equal(first(X), model(X)):
            pytest.skip("this CPU rounds both alike")
    _, given = entry(folder)
    assert not given["is_compared"]
    assert 0 < given["rounding"] < 1e-3


class Scaled(nn.Module):
    """A layer that is off by a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(16, 4), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.factor


def test_no_entry_makes_a_large_error_pass_for_rounding():
    model, close, wrong = (Scaled(factor).eval() for factor in (1.0, 1.0001, 1.01))
    for other in (close, wrong):
        other.load_state_dict(model.state_dict())
    for rounding in (0.0, 1e3):
        original = Original(model, [Inputs(X)], brief=True, rounding=rounding)
        assert original.verdict(model).ok
        assert original.verdict(close).ok == bool(rounding)
        assert not original.verdict(wrong).ok


def test_what_is_not_kept(monkeypatch: pytest.MonkeyPatch, folder: Path):
    with pytest.warns(fxopt.UnverifiedWarning):
        fxopt.optimize(net(), PASSES)  # no inputs: nothing is timed
    with pytest.warns(fxopt.UnverifiedWarning):
        fast(net(), verify=False, measure=False)
    plan = fxopt.plan(fast(net(2), time_budget=1.5))
    for each in folder.iterdir():
        each.unlink()
    fxopt.optimize(net(), plan=plan, example_inputs=X)
    monkeypatch.setenv("FXOPT_CACHE", "0")
    assert not is_recalled(fast(net()))
    assert [*folder.iterdir()] == []


def test_what_is_wrong_now_is_decided_anew(monkeypatch: pytest.MonkeyPatch):
    model = net()
    first = fast(model, "fold_batchnorm")
    nodes = [node for graph in fxopt.graphs(first).values() for node in graph.nodes]
    (fold,) = {type(node.target.function) for node in nodes if hasattr(node.target, "function")}

    def wrong(_: Any, weight: torch.Tensor, *__: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return weight * 1.5, torch.zeros(len(weight), dtype=weight.dtype)

    with monkeypatch.context() as patch:
        patch.setattr(fold, "__call__", wrong)
        again = fast(model, "fold_batchnorm")
        assert not is_recalled(again)
        assert [d.status for d in fxopt.plan(again).decisions if d.status == "applied"] == []
        torch.testing.assert_close(again(X), model(X))
    third = fast(model, "fold_batchnorm")
    assert is_recalled(third)
    assert fxopt.plan(third).to_json() == fxopt.plan(again).to_json()  # the entry was replaced


def entry_of(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


@pytest.mark.parametrize(
    "damaged",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "{}",
        lambda text: text.replace('"pipeline":["fold_batchnorm","pack"]', '"pipeline":["pack","fold_batchnorm"]'),
        lambda text: text.replace('"pass_name":"pack"', '"pass_name":"quantize"'),
        lambda text: text.replace('"phase":"eval"', '"phase":"train"', 1),
        lambda text: text.replace('"step":1', '"step":7').replace('"step":0', '"step":-1'),
        lambda text: text.replace('"key":"(root)', '"key":"elsewhere'),
        lambda text: text.replace('"owner":""', '"owner":"elsewhere"'),
        lambda text: text.replace('"data":{', '"data":{"more":1e300,'),
    ],
)
def test_a_damaged_or_hostile_entry_does_no_harm(damaged: Any, folder: Path):
    model = net()
    first = fast(model, measure=False)
    path = entry_of(folder)
    text = path.read_text()
    path.write_text(damaged(text))
    assert path.read_text() != text
    again = fast(model, measure=False)
    assert_equivalent(model, again, (X,))
    if not is_recalled(again):
        assert json.loads(path.read_text())["plan"]["pipeline"] == list(fxopt.plan(first).pipeline)
        assert is_recalled(fast(model, measure=False))


def test_the_entry_of_another_model_does_no_harm(folder: Path):
    fast(net())
    mine = entry_of(folder)
    text = mine.read_text()
    mine.unlink()
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    fast(model)
    entry_of(folder).write_text(text)
    again = fast(model)
    assert not is_recalled(again)
    assert_equivalent(model, again, (X,))


SCRIPT = """
import sys, torch, test_recall
torch.set_num_threads(1)
print(test_recall.is_recalled(test_recall.fast(test_recall.net())))
"""


def test_another_process_recalls(folder: Path):
    fast(net())
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True"], done.stderr


def test_code_of_layers_that_is_not_torchs_is_decided_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    own = nn.Linear.forward
    fast(net(), "flatten_calls", measure=False)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: own(self, x) if x.sum() < 1e4 else own(self, x) + 1)
    model, large = net(), torch.full_like(X, 1e5)
    again = fast(model, "flatten_calls", measure=False)
    assert not is_recalled(again)
    with torch.no_grad():
        torch.testing.assert_close(again(large), model(large))


class Own(nn.Module):
    """Has code of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).relu()


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return a list that has an item for each comparison of graphs with their forwards: those that differ."""
    found = list[list[str]]()

    def noted(*args: Any, **options: Any) -> list[str]:
        found.append(disagreeing(*args, **options))
        return found[-1]

    monkeypatch.setattr(sys.modules[deactivate.__module__], "disagreeing", noted)
    return found


def test_graphs_of_code_that_was_compared_are_not_compared_again(
    compared: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_recalled(fast(Own().eval()))
    assert compared == [[]]
    again = fast(Own().eval())
    assert is_recalled(again)
    assert compared == [[]]
    assert_equivalent(Own().eval(), again, (X,))
    fast(Own().eval(), verify=False)  # then nothing else would compare them
    fast(Own().eval(), verify=False)
    assert compared == [[]] * 3

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        found = self.layers(x)
        return found.relu()

    monkeypatch.setattr(Own, "forward", forward)
    assert not is_recalled(fast(Own().eval()))
    assert compared == [[]] * 4


def test_a_graph_that_differs_is_found_where_decisions_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[deactivate.__module__], "disagreeing", lambda *_, **__: [""])
    for _ in range(2):
        decided = fast(Own().eval())
        assert [each["module"] for each in fxopt.report(decided).to_json()["opaque"]] == [""]
        assert_equivalent(Own().eval(), decided, (X,))


def test_what_hangs_on_the_numbers_is_not_told_of_others() -> None:
    pytest.importorskip("onnxruntime")
    broken, passes = net(), "delegate{engine=onnxruntime}"
    with torch.no_grad():
        next(broken.parameters()).fill_(float("nan"))
    for model, status, recalls in ((broken, "refused", False), (broken, "refused", True), (net(), "applied", False)):
        decided = fast(model, passes, measure=False)
        assert [decision.status for decision in fxopt.plan(decided).decisions] == [status]
        assert is_recalled(decided) is recalls
