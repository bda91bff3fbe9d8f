"""A module of models that archives and pickles name, written for each test anew."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def zoo(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Give the test a module `zoo`, made of the text `SOURCE` of the test's own module."""
    (tmp_path / "zoo.py").write_text(request.module.SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    import zoo

    yield zoo
    sys.modules.pop("zoo", None)
