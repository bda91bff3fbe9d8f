"""The key of decisions: equal for what is decided alike, another for everything that decisions rest on."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from fxopt.passes.cache import key_of
from fxopt.passes.contract import FunctionPass, Pass
from fxopt.passes.pipeline import parse
from fxopt.passes.sites import Goal
from fxopt.tracing.examples import Inputs
from fxopt.tracing.program import capture_program

key: Any = importlib.import_module("fxopt.passes.cache.key")
PASSES = parse("fold_batchnorm, pack")


class Net(nn.Module):
    def __init__(self, width: int = 8, *, tied: bool = False, slope: float = 0.1) -> None:
        super().__init__()
        self.first, self.second, self.slope = nn.Linear(8, width), nn.Linear(width, 8), slope
        if tied:
            self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.leaky_relu(self.second(self.first(x)), self.slope)


def found(
    model: nn.Module | None = None, passes: Sequence[Pass] = PASSES, rows: int = 4, x: Tensor | None = None,
    training: bool = False, **asked: Any,
) -> str | None:  # fmt: skip
    model = Net() if model is None else model
    inputs = [Inputs(torch.ones(rows, 8) if x is None else x)]
    return key_of(capture_program(model.train(training), inputs, training=training), passes, asked)


def test_equal_models_have_one_key_whatever_their_weights():
    assert found() == found() is not None
    assert found(x=torch.randn(4, 8)) == found()


def fixed(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False)


@pytest.mark.parametrize(
    "other",
    [
        {"model": Net(16)},
        {"model": Net(tied=True)},
        {"model": Net(slope=0.2)},
        {"model": Net().double(), "x": torch.ones(4, 8, dtype=torch.float64)},
        {"model": fixed(Net())},
        {"model": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))},
        {"rows": 5},
        {"x": torch.ones(8, 4).t()},
        {"training": True},
        {"passes": parse("pack")},
        {"passes": parse("fold_batchnorm, pack{dtype=bfloat16}")},
        {"time_budget": 3.0},
    ],
)
def test_what_decisions_rest_on_gives_another_key(other: dict[str, Any]):
    assert found(**other) not in (None, found())


def test_options_are_told_apart():
    texts = ["quantize{scheme=int8_weight}", "quantize{scheme=int8_weight,keep=[first]}", "quantize{budget=0.1}"]
    assert len({found(passes=parse(text)) for text in texts}) == 3


def test_threads_versions_and_the_machine_count(monkeypatch: pytest.MonkeyPatch):
    keys = [found()]
    torch.set_num_threads(2)
    try:
        keys.append(found())
    finally:
        torch.set_num_threads(1)
    for name in ("_versions", "_machine"):
        with monkeypatch.context() as patch:
            patch.setattr(key, name, lambda: ("another",))
            keys.append(found())
    assert None not in keys
    assert len(set(keys)) == 4


def test_an_engine_that_comes_later_counts(monkeypatch: pytest.MonkeyPatch):
    first = found()
    monkeypatch.setattr(key, "engines", dict)
    assert found() not in (None, first)


def test_the_source_of_the_package_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    (tmp_path / "__init__.py").write_text("")
    monkeypatch.setattr(key, "_ROOT", tmp_path)
    first = key._source.__wrapped__()
    (tmp_path / "__init__.py").write_text("edited")
    assert key._source.__wrapped__() != first


def test_errors_within_a_budget_hang_on_the_numbers():
    lossy, model = parse("quantize"), Net()
    same = found(model, lossy)
    assert found(model, lossy) == same is not None
    assert found(model, lossy, x=torch.zeros(4, 8)) != same
    with torch.no_grad():
        model.first.bias[0] += 1
    assert found(model, lossy) not in (None, same)


@dataclasses.dataclass(frozen=True)
class Own(Pass):
    """A pass of a user."""

    goal: ClassVar[Goal] = Goal.SIZE


def test_what_no_text_tells_is_not_kept():
    quantize = parse("quantize{scheme=int8_static}")[0]
    assert found(passes=[Own()]) is None
    assert found(passes=[FunctionPass(lambda graph: graph)]) is None
    assert found(passes=[dataclasses.replace(quantize, calibration=[torch.ones(4, 8)])]) is None
    assert found(passes=[*PASSES, Own()]) is None
    assert found(passes=parse("prune")) is None  # what a plan prunes is right by that plan
    hooked = Net()
    hooked.first.register_forward_hook(lambda *_: None)
    assert found(hooked) is None


class Decorated(nn.Module):
    def __init__(self, tag: object) -> None:
        super().__init__()
        self.layer, self.tag = nn.Linear(8, 8), tag

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_objects_that_no_graph_reads_do_not_count():
    assert found(Decorated(object())) == found(Decorated(object())) is not None
