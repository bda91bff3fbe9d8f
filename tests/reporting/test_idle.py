"""What was asked for and changed nothing is said: in a warning, in the report, on standard error."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from support.cpus import needs_static_int8
from torch import nn

import fxopt
from fxopt.reporting.notes import in_one_line

X = torch.randn(4, 8)


def net(*, training: bool = False) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU()).train(training)


def warned(passes: Any, *, training: bool = False, **options: Any) -> tuple[list[str], nn.Module]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fast = fxopt.optimize(net(training=training), passes, example_inputs=(X,), measure=False, **options)
    return [str(each.message) for each in caught if each.category is fxopt.NothingDoneWarning], fast


def test_each_pass_that_was_named_and_changed_nothing_says_why() -> None:
    (said,), fast = warned("fold_batchnorm,release")
    assert "fold_batchnorm changed nothing: it found no place for it in this model" in said
    assert "release changed nothing: " in said
    assert fxopt.report(fast).notes == ("fold_batchnorm changed nothing: it found no place for it in this model",)
    assert "refused      release at " in str(fxopt.report(fast))
    assert warned(iter(["prune{amount=0.5}"]))[0] == []  # what did something, from an iterator


def test_a_refusal_is_the_reason() -> None:
    (said,), _ = warned("checkpoint{budget=0.5}")
    assert said.startswith("checkpoint changed nothing: it is for training, and the model is in evaluation")


def test_members_of_presets_are_not_named_and_a_whole_preset_is() -> None:
    (said,), _ = warned("training", training=True)
    assert said.startswith("training changed nothing: ")
    assert not warned(["prune{amount=0.5}"])[0]
    assert not warned([])[0]


def test_training_of_a_model_in_evaluation_is_said() -> None:
    (said,), _ = warned("training")
    assert said.startswith("nothing was done for training: the model is in evaluation")
    assert not any("for training" in each for each in warned("training", phase="train")[0])


def test_inference_of_a_model_in_training_is_said() -> None:
    for passes in ("inference", None):
        (said,), fast = warned(passes, training=True)
        assert said.startswith("nothing was done for inference: the model is in training")
        assert "call model.eval() first (on the command line: --phase eval)" in fxopt.report(fast).notes[0]
    assert not any("for inference: the model" in each for each in warned("inference")[0])


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3)
        self.last = nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.head(self.norm(self.conv(x)).relu()))


@pytest.mark.parametrize("time_budget", [0.0, 60.0])
@pytest.mark.parametrize(("keep", "left"), [("", False), (",keep=head", True)])
@needs_static_int8
def test_what_another_pass_does_on_its_way_is_said_only_where_it_left_some(
    time_budget: float, keep: str, left: bool
) -> None:
    x, passes = torch.randn(2, 3, 8, 8), f"fold_batchnorm,quantize{{scheme=int8_static,aim=size,budget=0.9{keep}}}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fast = fxopt.optimize(Images().eval(), passes, example_inputs=(x,), time_budget=time_budget, measure=False)
    said = [str(each.message) for each in caught if each.category is fxopt.NothingDoneWarning]
    folds = [each.status for each in fxopt.plan(fast).decisions if each.pass_name == "fold_batchnorm"]
    if not left:
        assert not said and not folds
    elif not time_budget:
        assert folds == ["skipped"] and "not checked: the time budget of 0 s was spent" in said[0]
    else:
        assert folds == ["applied"] and not said


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(8, 4), nn.Tanh()) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([head(x) for head in self.heads], dim=1)


def test_fewer_bits_that_a_preset_was_asked_for_in_vain_are_said() -> None:
    with pytest.warns(fxopt.NothingDoneWarning, match="^nothing was done for inference: the model is in training"):
        fast = fxopt.optimize(Heads().train(), "inference{dtype=bfloat16}", example_inputs=(X,), measure=False)
    assert any(note.startswith("nothing is computed in bfloat16: ") for note in fxopt.report(fast).notes)
    assert any(decision.status == "applied" for decision in fxopt.plan(fast).decisions)


def test_on_standard_error_it_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with in_one_line():
            warnings.warn("prune changed nothing: so", fxopt.NothingDoneWarning, stacklevel=1)
    assert capsys.readouterr().err == "warning: prune changed nothing: so\n"
