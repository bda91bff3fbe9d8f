"""Compare two long texts line by line, in a time that grows with their length."""

from __future__ import annotations

import difflib
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

__all__ = ["diff_lines"]


def diff_lines(old: Sequence[str], new: Sequence[str], context: int) -> Iterator[str]:
    """Yield the hunks of a unified diff, without a header.

    Args:
        old, new: the lines, without line ends.
        context: how many equal lines to show around each change.
    """
    for group in _AnchoredMatcher(old, new).get_grouped_opcodes(context):
        first, last = group[0], group[-1]
        yield f"@@ -{_range(first[1], last[2])} +{_range(first[3], last[4])} @@"
        for tag, i, i_end, j, j_end in group:
            if tag == "equal":
                yield from (f" {line}" for line in old[i:i_end])
                continue
            yield from (f"-{line}" for line in old[i:i_end])
            yield from (f"+{line}" for line in new[j:j_end])


def _range(start: int, stop: int) -> str:
    """Write a range of lines as unified diffs do: from 1, and an empty one behind the line before it."""
    length = stop - start
    if length == 1:
        return str(start + 1)
    return f"{start + 1 if length else start},{length}"


class _AnchoredMatcher(difflib.SequenceMatcher[str]):
    """Let lines that occur once in either text hold it together, and compare what lies between them only.

    This is Bram Cohen's patience diff. Without anchors, each of n changes costs a walk over the rest of the text.
    """

    def __init__(self, old: Sequence[str], new: Sequence[str]) -> None:
        super().__init__(None, old, new, autojunk=False)
        self._old, self._new = old, new

    def get_matching_blocks(self) -> list[difflib.Match]:
        old, new = self._old, self._new
        blocks: list[difflib.Match] = []
        i = j = 0
        for anchor_i, anchor_j in _anchors(old, new):
            _compare(blocks, old, new, (i, anchor_i), (j, anchor_j))
            _add(blocks, anchor_i, anchor_j, 1)
            i, j = anchor_i + 1, anchor_j + 1
        _compare(blocks, old, new, (i, len(old)), (j, len(new)))
        return [*blocks, difflib.Match(len(old), len(new), 0)]


def _compare(
    blocks: list[difflib.Match],
    old: Sequence[str],
    new: Sequence[str],
    of_old: tuple[int, int],
    of_new: tuple[int, int],
) -> None:
    """Add what matches between two anchors."""
    (i, i_end), (j, j_end) = of_old, of_new
    if i < i_end and j < j_end:
        matcher = difflib.SequenceMatcher(None, old[i:i_end], new[j:j_end], autojunk=False)
        for block in matcher.get_matching_blocks():
            _add(blocks, block.a + i, block.b + j, block.size)


def _add(blocks: list[difflib.Match], i: int, j: int, size: int) -> None:
    """Add a block, as part of the one before where it follows that one in both texts."""
    if not size:
        return
    last = blocks[-1] if blocks else None
    if last is not None and (last.a + last.size, last.b + last.size) == (i, j):
        blocks[-1] = difflib.Match(last.a, last.b, last.size + size)
    else:
        blocks.append(difflib.Match(i, j, size))


def _anchors(old: Sequence[str], new: Sequence[str]) -> list[tuple[int, int]]:
    """Return places of lines that occur once in each text, as many as are in the same order in both."""
    counts = Counter(old), Counter(new)
    places = {line: j for j, line in enumerate(new) if counts[1][line] == 1}
    pairs = [(i, places[line]) for i, line in enumerate(old) if counts[0][line] == 1 and line in places]
    return _longest_increasing(pairs)


def _longest_increasing(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the longest run of pairs whose second numbers grow, by patience sorting."""
    tops: list[int] = []
    ends: list[int] = []
    before: list[int | None] = []
    for number, (_, j) in enumerate(pairs):
        pile = bisect_left(tops, j)
        tops[pile : pile + 1] = [j]
        ends[pile : pile + 1] = [number]
        before.append(ends[pile - 1] if pile else None)
    chosen: list[tuple[int, int]] = []
    at = ends[-1] if ends else None
    while at is not None:
        chosen.append(pairs[at])
        at = before[at]
    return chosen[::-1]
