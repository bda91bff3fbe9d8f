"""Families of `transformers`, drawn by the benchmark's seed: captured, they give what their own forwards give."""

from __future__ import annotations

import functools
import itertools

import pytest

pytest.importorskip("transformers")
pytest.importorskip("torch_geometric")

from support.model_zoo.examination import captured_row, inference_row
from support.model_zoo.families import KINDS, drawn, family_of
from support.model_zoo.subjects import Built, Subject, candidates, named_subjects
from support.shares import share

pytestmark = pytest.mark.filterwarnings("ignore")

EACH = 2
"""Families of each kind that are looked at here; the benchmark looks at all that are drawn."""


@functools.cache
def built(kind: str, number: int) -> tuple[Subject, Built]:
    """Return the model of a kind that is drawn and can be built, by its place in the draw."""
    return next(itertools.islice(buildable(kind), number, None))


def buildable(kind: str):
    for subject in candidates(kind):
        try:
            yield subject, subject.make()
        except Exception:  # those that cannot be built are listed by the benchmark
            continue


DRAWN = [pytest.param(kind, number, id=f"{kind}-{number}") for kind in KINDS for number in range(EACH)]


def test_the_draw_repeats_and_holds_at_least_60_families_of_every_kind():
    assert sum(KINDS.values()) >= 60
    for kind, count in KINDS.items():
        first = list(drawn(kind))
        assert first == list(drawn(kind))
        assert first != list(drawn(kind, seed=1))
        assert len({family.name for family in first}) == len(first) >= count


def test_a_family_is_found_by_name():
    family = family_of("bert")
    assert (family.kind, family.classes) == ("text", ("BertModel",))


@pytest.mark.parametrize(("kind", "number"), share(2, DRAWN[1::EACH]))
def test_drawn_families_are_captured_and_equal(kind: str, number: int):
    subject, model = built(kind, number)
    row, _ = captured_row(model)
    assert row["different"] == [], subject.name
    assert row["graphs"] > 0
    assert all(opaque["reason"] for opaque in row["opaque"])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "number"), share(3, DRAWN[::EACH]))
def test_drawn_families_are_optimized_and_restored(kind: str, number: int):
    subject, model = built(kind, number)
    row, _ = inference_row(model, measure=False)
    assert_kept(row, subject.name)


def assert_kept(row: dict, name: str) -> None:
    assert row["different"] == [], name
    assert row["restored_different"] == [], name
    kept = ("class_kept", "untouched", "loads_old", "writes_old", "restored_class")
    assert {key: row[key] for key in kept} == dict.fromkeys(kept, True), name


@pytest.mark.parametrize("subject", share(2, named_subjects()), ids=lambda subject: subject.name)
def test_models_known_by_name(subject: Subject):
    model = subject.make()
    row, _ = captured_row(model)
    assert row["different"] == []
    assert row["parameters"]["never_called"] == 0
    optimized, _ = inference_row(model, measure=False)
    assert_kept(optimized, subject.name)
