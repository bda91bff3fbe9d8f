"""Archives load without example inputs where capture needs some: they note what calls look like."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxopt
from fxopt.deploy import archive
from fxopt.errors import PlanError


class Looping(nn.Module):
    """Go over a value whose length only a call tells; where `strict`, take whole numbers only."""

    def __init__(self, strict: bool = False) -> None:
        super().__init__()
        self.strict, self.linear, self.norm = strict, nn.Linear(4, 2), nn.BatchNorm1d(2)
        self.norm.running_mean = torch.tensor([1.0, 2.0])

    def forward(self, steps: torch.Tensor, *, scale: float) -> torch.Tensor:
        if self.strict and steps.sum() != steps.sum().round():
            raise ValueError("whole numbers only")
        total = torch.zeros(1, 4)
        for step in steps:
            total = total + step * scale
        return self.norm(self.linear(total))


@dataclass
class Steps:
    """What a call is given beside numbers: a length, which example inputs tell."""

    values: torch.Tensor
    before: list[torch.Tensor] | None = None


class Walking(Looping):
    """Take its steps from an object, and more where it holds more."""

    def forward(self, steps: Steps) -> torch.Tensor:
        before = [] if steps.before is None else steps.before
        return super().forward(torch.cat([*before, steps.values]), scale=1.0)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, nn.Module]:
    model = Looping().eval()
    fast = fxopt.optimize(
        model, "fold_batchnorm", example_inputs=fxopt.Inputs(torch.randn(3, 1, 4), scale=2.0), measure=False
    )
    assert any(decision.status == "applied" for decision in fxopt.plan(fast).decisions)
    fxopt.save(fast, tmp_path / "model.fxopt")
    return tmp_path / "model.fxopt", fast


def test_calls_are_drawn_in_the_form_of_the_examples(saved: tuple[Path, nn.Module]) -> None:
    path, fast = saved
    loaded, x = fxopt.load(path, model=Looping().eval()), torch.randn(3, 1, 4)
    assert torch.equal(loaded(x, scale=2.0), fast(x, scale=2.0))
    fxopt.save(loaded, path)
    assert torch.equal(fxopt.load(path, model=Looping().eval())(x, scale=2.0), fast(x, scale=2.0))


def test_without_a_form_or_where_the_model_refuses_it_inputs_are_asked_for(
    saved: tuple[Path, nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PlanError, match="give example_inputs="):
        fxopt.load(saved[0], model=Looping(strict=True).eval())
    written = archive.write_container

    def without_calls(path: Any, manifest: dict[str, Any], members: Any) -> None:
        written(path, {key: value for key, value in manifest.items() if key != "calls"}, members)

    monkeypatch.setattr(archive, "write_container", without_calls)
    fxopt.save(saved[1], tmp_path / "older.fxopt")
    with pytest.raises(PlanError, match="give example_inputs="):
        fxopt.load(tmp_path / "older.fxopt", model=Looping().eval())


def test_objects_among_the_arguments_are_drawn_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def given() -> Steps:
        return Steps(torch.randn(3, 1, 4), [torch.randn(2, 1, 4)])

    fast = fxopt.optimize(Walking().eval(), "fold_batchnorm", example_inputs=(given(),), measure=False)
    assert any(decision.status == "applied" for decision in fxopt.plan(fast).decisions)
    fxopt.save(fast, tmp_path / "model.fxopt")
    steps = given()
    loaded = fxopt.load(tmp_path / "model.fxopt", model=Walking().eval())
    assert torch.equal(loaded(steps), fast(steps))
    monkeypatch.setattr(archive, "packages_of", lambda model: {"elsewhere"})
    with pytest.raises(PlanError, match=rf"{__name__}:Steps.*pass trust="):
        fxopt.load(tmp_path / "model.fxopt", model=Walking().eval())
    package = __name__.partition(".")[0]
    for more in ({"trust": package}, {"trust": True}, {"example_inputs": (given(),)}):
        assert torch.equal(fxopt.load(tmp_path / "model.fxopt", model=Walking().eval(), **more)(steps), fast(steps))
