"""Graphs before and after as a unified diff that a person can read, however many members an ensemble has."""

from __future__ import annotations

import difflib
import itertools
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["diff_graphs", "diff_lines"]

CONTEXT = 3
LEAST_REPEATS = 4
LONGEST_PERIOD = 8
LEAST_ITEMS = 6
MOST_ITEMS = 24
MOST_READS = 12
_NUMBER = re.compile(r"\d+")
_ITEM = re.compile(r"[^\s,()\[\]{}][^,()\[\]{}]*")
_READS = re.compile(r"([+ -]) *%\w+ : .*= get_attr\[")
_SEQUENCE = re.compile(rf"{_ITEM.pattern}(?:,\s*{_ITEM.pattern}){{{LEAST_ITEMS - 1},}}")


def diff_graphs(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Return a unified diff of each module's graph, equal changes and repeated lines once; empty if none changed."""
    bodies = {
        name: list(diff_lines(before.get(name, "").splitlines(), after.get(name, "").splitlines(), CONTEXT))
        for name in dict.fromkeys((*before, *after))
    }
    changes: dict[tuple[str, ...], list[str]] = {}
    for name, body in bodies.items():
        if body:
            changes.setdefault(_shape(body), []).append(name)
    return "\n".join(_section(names, bodies[names[0]], before, after) for names in changes.values())


def _section(names: Sequence[str], lines: Sequence[str], before: Mapping[str, str], after: Mapping[str, str]) -> str:
    first = names[0]
    title = first or "(root)"
    if len(names) > 1:
        title += f" and {len(names) - 1} more, up to {names[-1]}"
    old = f"--- {title}" + ("" if first in before else " (new)")
    new = f"+++ {title}" + ("" if first in after else " (no longer has its own graph)")
    body = (_SEQUENCE.sub(_shorten_items, line) for line in collapse(_without_reads(lines)))
    return "\n".join([old, new, *body]) + "\n"


def _shape(lines: Sequence[str]) -> tuple[str, ...]:
    return tuple(_NUMBER.sub("#", line) for line in lines)


@dataclass(frozen=True)
class _Repeated:
    """`repeats` blocks of `period` lines each, equal but for their numbers, from line `start` on."""

    start: int
    period: int
    repeats: int

    @property
    def lines(self) -> int:
        return self.period * self.repeats


def _without_reads(lines: Sequence[str]) -> list[str]:
    """Shorten each long run of lines that read tensors, of whatever names, to the first two and the last."""
    shown: list[str] = []
    for kind, group in itertools.groupby(lines, _sign_of_read):
        run = list(group)
        if kind and len(run) > MOST_READS:
            run[2:-1] = [f"{kind}    ... {len(run) - 3} more lines that read tensors ..."]
        shown += run
    return shown


def _sign_of_read(line: str) -> str:
    """Return whether a line that reads a tensor is added, removed or as before; "" for other lines."""
    found = _READS.match(line)
    return found[1] if found else ""


def collapse(lines: Sequence[str]) -> list[str]:
    """Shorten each run of repeated blocks of lines to its first and its last block."""
    shapes, shown, position = _shape(lines), list[str](), 0
    while position < len(lines):
        run = _longest_run(shapes, position)
        if run is None:
            shown.append(lines[position])
            position += 1
            continue
        end = position + run.lines
        hidden = run.lines - 2 * run.period
        shown += lines[position : position + run.period]
        shown.append(f"{lines[position][:1]}    ... {hidden} more lines like these ...")
        shown += lines[end - run.period : end]
        position = end
    return shown


def _longest_run(shapes: Sequence[str], start: int) -> _Repeated | None:
    runs = [_run_of(shapes, start, period) for period in range(1, LONGEST_PERIOD + 1)]
    long = [run for run in runs if run.repeats >= LEAST_REPEATS and not shapes[start].startswith("@@")]
    return max(long, key=lambda run: (run.lines, -run.period), default=None)


def _run_of(shapes: Sequence[str], start: int, period: int) -> _Repeated:
    block, repeats = shapes[start : start + period], 1
    while shapes[start + repeats * period : start + (repeats + 1) * period] == block:
        repeats += 1
    return _Repeated(start, period, repeats)


def _shorten_items(match: re.Match[str]) -> str:
    """Shorten a sequence of items that differ in their numbers only, or is very long: `cat([h_0, h_1, ..., h_9])`."""
    items = re.split(r",\s*", match.group())
    if len(set(_shape([item.strip() for item in items[1:-1]]))) > 1 and len(items) <= MOST_ITEMS:
        return match.group()
    return f"{items[0]}, {items[1]}, ..., {items[-1]}"


def diff_lines(old: Sequence[str], new: Sequence[str], context: int) -> Iterator[str]:
    """Yield the hunks of a unified diff, without a header, with so many equal lines around each change."""
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
    """Bram Cohen's patience diff: lines that occur once in either text are anchors, and hold it together."""

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
