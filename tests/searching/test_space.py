"""What can be chosen: presets, and what passes declare, those of other packages too."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from fxopt.errors import UsageError
from fxopt.passes.contract import Pass
from fxopt.passes.sites import Goal, Numerics, Phase, Refusal, Site
from fxopt.searching import search
from fxopt.searching.sensitivity import Sensitivities
from fxopt.searching.space import Space, can_be, key_of, passes_of, pipeline_of
from fxopt.tracing.program import Program


@dataclass(frozen=True)
class Doze(Pass):
    """Do nothing, at several depths."""

    depth: int = 1
    kind: str = "light"
    numerics = Numerics.APPROXIMATE

    @classmethod
    def searched(cls, phase: Phase, goals: Collection[Goal]) -> Mapping[str, Sequence[Any]] | None:
        return {"depth": (1, 2, 3), "kind": ("light", "deep")}

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        yield Refusal("it sleeps", at="(root)")


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = importlib.metadata.EntryPoint("doze", f"{__name__}:Doze", "fxopt.passes")
    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", lambda _: Doze)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda *, group: [entry] if group == "fxopt.passes" else [])


def space(goals: Collection[Goal] = (Goal.SPEED,), phase: Phase = Phase.EVAL) -> Space:
    return Space(phase, goals, Sensitivities({"a": 0.1, "b": 0.4, "c": 0.2}, {"a": 0.3, "b": 0.2, "c": 0.1}))


@pytest.fixture(autouse=True)
def _every_type_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxopt.searching.space.why_no_packing", lambda _: "")


def test_a_search_begins_with_presets_and_passes_in_turn():
    singles = [pipeline_of(choice) for choice in space().singles()]
    assert singles[:4] == [
        "inference{dtype=float32}",
        "inference{dtype=bfloat16}",
        "prune{method=structured,amount=0.4},inference{dtype=float32}",
        "quantize,inference{dtype=float32}",
    ]
    assert "prune{method=structured,amount=0.4},inference{dtype=float32}" in singles
    assert "quantize{scheme=int8_static},inference{dtype=float32}" in singles
    assert len(singles) == len(set(singles))


def test_with_an_engine_a_search_begins_with_it_and_with_what_is_strong_beside_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fxopt.searching.space.has_engines", lambda: True)
    singles = [pipeline_of(choice) for choice in space().singles()]
    assert singles[:2] == [
        "inference{engine=auto,dtype=float32}",
        "quantize{scheme=int8_static},delegate{dtype=int8}",
    ]
    assert "prune{method=structured,amount=0.4},inference{engine=auto,dtype=float32}" in singles
    assert len(singles) == len(set(singles))


def test_what_the_machine_has_no_instructions_for_comes_last(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fxopt.searching.space.why_no_packing", lambda _: "no instructions")
    assert space().groups["preset"].texts[-1] == "inference{dtype=bfloat16}"
    singles = [pipeline_of(choice) for choice in space().singles()]
    assert singles[1] == "inference{dtype=int8}"


def test_a_lossy_pass_may_err_by_what_is_allowed_or_by_half_of_it():
    found = Space(Phase.EVAL, {Goal.SPEED}, error=0.01)
    singles = [pipeline_of(choice) for choice in found.singles()]
    assert "quantize{scheme=int8_static,budget=0.01},inference{dtype=float32}" in singles
    assert not any("budget=0.005" in each for each in singles)
    single = {**found.start, "quantize": "quantize{budget=0.01}"}
    (milder,) = found.milder(single)
    assert milder["quantize"] == "quantize{budget=0.005}"
    assert found.further(milder) == [single]
    assert found.milder(milder) == []
    assert "budget" not in space().groups["quantize"].options


def test_what_changes_the_function_comes_last_where_results_are_to_stay_as_they_are():
    pruned = "prune{method=structured,amount=0.4},inference{dtype=float32}"
    assert pipeline_of(Space(Phase.EVAL, {Goal.SPEED}, error=0.01).singles()[-1]) == pruned
    assert pipeline_of(Space(Phase.EVAL, {Goal.SPEED}, error=0.01, trains=True).singles()[2]) == pruned


def test_what_saves_only_bytes_takes_part_where_bytes_are_asked_for():
    assert "release" not in space().groups
    wanted = space((Goal.SPEED, Goal.MEMORY))
    assert pipeline_of({**wanted.start, "release": "release"}) == "inference{dtype=float32},release"
    assert wanted.groups["preset"].texts[-1] == ""


def test_training_has_its_own_passes():
    assert set(space((Goal.SPEED, Goal.MEMORY), Phase.TRAIN).groups) == {"preset", "autocast", "checkpoint"}


def test_lossy_passes_leave_the_most_sensitive_layers_alone():
    found = space()
    kept = found.groups["quantize"].options["keep"].texts
    assert kept == ("[]", "[b]", "[b,c]")
    assert found.groups["prune"].options["keep"].texts == ("[]", "[a]", "[a,b]")
    single = {**found.start, "quantize": "quantize"}
    more = [pipeline_of(choice) for choice in found.keeping_more(single)]
    assert more == [f"quantize{{keep={each}}},inference{{dtype=float32}}" for each in kept[1:]]


def test_what_does_not_go_together_is_refused():
    both = {**space().start, "preset": "inference{dtype=int8}", "quantize": "quantize{scheme=int8_static}"}
    with pytest.raises(UsageError, match="has 'quantize' with other options"):
        passes_of(both)


@pytest.mark.usefixtures("others")
def test_a_pass_of_another_package_takes_part():
    found = space()
    assert found.groups["doze"].texts[1:3] == ("doze", "doze{kind=deep}")
    assert found.groups["doze"].alone() == ["doze{depth=2}", "doze{depth=2,kind=deep}"]
    names = [each.name for each in passes_of({**found.start, "doze": "doze{depth=2}"})]
    assert names[0] == "doze"


@pytest.mark.usefixtures("others")
def test_a_pass_of_another_package_is_tried_in_a_search(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("optuna")
    monkeypatch.setattr("fxopt.searching.space.pass_names", lambda: {"doze": "another"})
    front = search(nn.Linear(4, 2).eval(), example_inputs=torch.randn(2, 4), time_budget=60)
    tried = [point for point in front.trials if point.choice["doze"] and point.is_known]
    assert [point.choice["doze"] for point in tried][:2] == ["doze{depth=2}", "doze{depth=2,kind=deep}"]
    assert all(any("it sleeps" in line for line in point.left) for point in tried)


def test_what_prepares_training_takes_part_with_what_follows_it_where_models_are_trained():
    assert "qat" not in space().groups
    found = Space(Phase.EVAL, {Goal.SPEED}, trains=True)
    singles = [pipeline_of(choice) for choice in found.singles()]
    assert "qat,quantize{scheme=int8_static},inference{dtype=float32}" in singles
    with pytest.raises(UsageError, match=r"'qat' prepares 'quantize\{scheme=int8_static\}', which is not there"):
        passes_of({**found.start, "qat": "qat"})
    assert can_be({**found.start, "qat": "qat", "quantize": "quantize{scheme=int8_static}"})
    assert not can_be({**found.start, "qat": "qat", "quantize": "quantize{scheme=int8_weight}"})


def test_the_next_number_changes_one_option():
    found = space()
    more = found.further({**found.start, "prune": "prune{method=structured,amount=0.4}"})
    assert [pipeline_of(each) for each in more] == ["prune{method=structured},inference{dtype=float32}"]  # 0.5
    assert found.further({**found.start, "prune": "prune{method=structured,amount=0.6}"}) == []
    assert found.further({**found.start, "quantize": "quantize"}) == []
    less = found.milder({**found.start, "prune": "prune{method=structured,amount=0.4}"})
    assert [pipeline_of(each) for each in less] == ["prune{method=structured,amount=0.3},inference{dtype=float32}"]


@pytest.mark.usefixtures("others")
def test_a_declaration_of_what_is_no_option_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Doze, "searched", classmethod(lambda cls, phase, goals: {"width": (1,)}))
    with pytest.raises(UsageError, match="'width', which is no option"):
        space()


def test_equal_choices_have_equal_keys():
    start = space().start
    assert key_of(start) == key_of({**start, "unknown": ""}) != key_of({**start, "quantize": "quantize"})
