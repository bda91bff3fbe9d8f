"""Diffs of long texts: they say what changed, and do not take the square of the length to say it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxopt.reporting.diff import diff_lines

LINES = st.lists(st.sampled_from("abcdefgh"), max_size=12) | st.lists(st.text("xyz", max_size=3), max_size=12)


def patched(old: Sequence[str], hunks: Sequence[str]) -> list[str]:
    """Apply a diff, and check on the way that what it says of the old text is so."""
    new: list[str] = []
    position = 0
    for line in hunks:
        if line.startswith("@@"):
            start, length = re.match(r"@@ -(\d+)(?:,(\d+))?", line).groups()  # pyright: ignore[reportOptionalMemberAccess]
            until = int(start) - (length != "0")
            new += old[position:until]
            position = until
            continue
        if line[0] in " -":
            assert old[position] == line[1:]
            position += 1
        if line[0] in " +":
            new.append(line[1:])
    return [*new, *old[position:]]


@given(LINES, LINES)
def test_a_diff_leads_from_one_text_to_the_other(old: list[str], new: list[str]) -> None:
    hunks = list(diff_lines(old, new, 3))
    assert patched(old, hunks) == new
    assert bool(hunks) == (old != new)


def test_plain_changes_read_as_those_of_difflib() -> None:
    old = [f"line {number}" for number in range(40)]
    new = [*old[:10], "another", *old[11:20], *old[22:], "more"]
    assert list(diff_lines(old, new, 3)) == list(difflib.unified_diff(old, new, n=3, lineterm=""))[2:]


def test_many_changes_cost_few_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    plain = difflib.SequenceMatcher.find_longest_match

    def counting(self: difflib.SequenceMatcher[str], low: int = 0, high: int | None = None, *rest: int) -> object:
        compared.append((len(self.a) if high is None else high) - low)  # pyright: ignore[reportAttributeAccessIssue]
        return plain(self, low, high, *rest)

    monkeypatch.setattr(difflib.SequenceMatcher, "find_longest_match", counting)
    old = [f"line {number}" for number in range(6000)]
    new = [f"{line}, changed" if number % 3 == 0 else line for number, line in enumerate(old)]
    assert len(list(diff_lines(old, new, 3))) > 6000
    assert sum(compared) < 3 * len(old)
