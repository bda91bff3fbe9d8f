"""Models of PyTorch Geometric: captured, with message passing and aggregations as leaves, they give the same."""

from __future__ import annotations

import pytest

pytest.importorskip("torch_geometric")
pytest.importorskip("transformers")

from support.model_zoo.examination import captured_row, inference_row
from support.model_zoo.subjects import Subject, graph_subjects
from support.shares import share

pytestmark = pytest.mark.filterwarnings("ignore")

SUBJECTS = graph_subjects()
NAMES = [subject.name for subject in SUBJECTS]


def test_there_are_fifteen():
    assert len(SUBJECTS) >= 15


@pytest.mark.parametrize("subject", SUBJECTS, ids=NAMES)
def test_models_on_graphs_are_captured_and_equal(subject: Subject):
    row, _ = captured_row(subject.make())
    assert row["different"] == row["opaque"] == []
    assert row["fallbacks"] == {}
    assert row["graphs"] > 0


@pytest.mark.parametrize("subject", share(2, SUBJECTS), ids=NAMES)
def test_models_on_graphs_are_optimized_and_restored(subject: Subject):
    row, _ = inference_row(subject.make(), measure=False)
    assert row["different"] == row["restored_different"] == []
    kept = ("class_kept", "untouched", "loads_old", "writes_old", "restored_class")
    assert {key: row[key] for key in kept} == dict.fromkeys(kept, True)
