"""One example is enough for most wrong passes, and honest ones are kept."""

from __future__ import annotations

import importlib
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def corpus(checkout: Path) -> ModuleType:
    """Return `benchmarks/one_example.py`, which holds the wrong passes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(checkout / "benchmarks")
        return importlib.import_module("one_example")


def test_one_of_each_family_of_wrong_passes_is_undone(corpus: ModuleType) -> None:
    families = defaultdict[str, list[tuple[object, object, str]]](list)
    for subject in corpus.SUBJECTS:
        for (family, what), function in subject.wrong.items():
            families[family].append((subject, function, what))
    assert len(families) >= 20
    assert sum(map(len, families.values())) >= 100
    for family, wrong in families.items():
        subject, function, what = wrong[0]
        assert corpus.outcome(subject, function), f"{family}: {what} was kept"


def test_honest_passes_are_kept(corpus: ModuleType) -> None:
    undone = {str(subject.model): corpus.outcome(subject, subject.honest) for subject in corpus.SUBJECTS[::3]}
    assert not any(undone.values()), undone
