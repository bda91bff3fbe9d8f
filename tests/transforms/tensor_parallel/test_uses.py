"""Models whose layers are split over two processes, under every use: the same, refused, or a row in docs/limits.md."""

from __future__ import annotations

from typing import Any

import pytest
from support.all_uses import USES
from support.catalog import OF_RANKS
from support.limits import findings, limits
from support.net import Trial, trial


def on_rank_trials() -> list[Trial]:
    """Try each quick use, on another model each, of one pass and the other in turn."""
    quick, passes = [name for name, use in USES.items() if not use.slow], list(OF_RANKS)
    return [trial(passes[number % 2], number // 2, name) for number, name in enumerate(quick)]


@pytest.mark.slow
def test_split_models_do_what_they_did_before(of_ranks: list[dict[str, Any]]) -> None:
    for each in of_ranks:
        assert {found.kind for found in each["trials"] if found.outcome == "same"} == set(OF_RANKS)
        assert "\n".join(map(str, findings(each["trials"], limits()))) == ""
