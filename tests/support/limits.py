"""What docs/limits.md allows, read from its table; and docs/uses.md, written from what trials gave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from support.all_uses import BY_KIND, USES
from support.catalog import OF_RANKS, PASSES
from support.net import Trial

DOCS = Path(__file__).resolve().parents[2] / "docs"
HEADER = "| pass | use | what happens | what to do |"
SIGNS = {"same": "=", "refused": "r", "different": "!", "limit": "L", "nothing": "-", "untouched": ""}


@dataclass(frozen=True)
class Limit:
    """A row of docs/limits.md: passes and uses (`*` is any), what happens, what to do."""

    passes: frozenset[str]
    uses: frozenset[str]
    text: str

    def covers(self, trial: Trial) -> bool:
        return bool({trial.kind, "*"} & self.passes) and bool({trial.use, "*"} & self.uses)


def limits(text: str | None = None) -> list[Limit]:
    """Read the tables.

    Raises:
        ValueError: a row names a pass or a use that there is not.
    """
    lines = (DOCS / "limits.md").read_text(encoding="utf-8").splitlines() if text is None else text.splitlines()
    tables = [line for line in lines if line.startswith("|") and line != HEADER and not line.startswith("|---")]
    return [_row([cell.strip() for cell in line.strip("|").split("|")]) for line in tables]


def _row(cells: list[str]) -> Limit:
    passes, named = ({name.strip(" `") for name in cell.split(",")} for cell in cells[:2])
    uses = {use for name in named for use in ([each.name for each in BY_KIND[name]] if name in BY_KIND else [name])}
    unknown = passes - {*PASSES, *OF_RANKS, "*"} | uses - {*USES, "*"}
    if unknown or len(cells) != 4:
        raise ValueError(f"docs/limits.md: a row of {len(cells)} cells, not 4, or unknown names: {sorted(unknown)}")
    return Limit(frozenset(passes), frozenset(uses), cells[2])


def findings(trials: Iterable[Trial], allowed: Iterable[Limit]) -> list[Trial]:
    """Return the trials that differ silently, and that no row allows."""
    rows = list(allowed)
    return [each for each in trials if each.outcome == "different" and not any(row.covers(each) for row in rows)]


def past(trials: Iterable[Trial], allowed: Iterable[Limit]) -> list[Limit]:
    """Return the rows that were tried, and that nothing needs any more."""
    tried = list(trials)
    covered = [(row, [each for each in tried if row.covers(each)]) for row in allowed]
    return [row for row, each in covered if each and all(trial.outcome != "different" for trial in each)]


def page(trials: Iterable[Trial], allowed: Iterable[Limit], hit: Mapping[str, int]) -> str:
    """Return docs/uses.md: how each pass takes each use."""
    rows = list(allowed)
    worst: dict[tuple[str, str], str] = {}
    counted: Counter[str] = Counter()
    order = ["", "-", "=", "r", "L", "!"]
    for each in trials:
        limited = each.outcome == "different" and any(row.covers(each) for row in rows)
        sign = SIGNS["limit" if limited else each.outcome]
        counted[each.kind] += 1
        key = (each.use, each.kind)
        worst[key] = max(worst.get(key, ""), sign, key=order.index)
    lines = [TITLE.format(number=sum(counted.values()))]
    lines += [f"| {number} | {name} | {hit.get(name, 0)} | {counted[name]} |" for number, name in enumerate(PASSES, 1)]
    for kind, uses in BY_KIND.items():
        numbers = " | ".join(str(i) for i in range(1, len(PASSES) + 1))
        lines += ["", f"## {kind}", "", f"| use | what | {numbers} |"]
        lines.append(f"|---|---|{'---|' * len(PASSES)}")
        for use in uses:
            signs = " | ".join(worst.get((use.name, name), "") for name in PASSES)
            lines.append(f"| `{use.name}` | {use.summary} | {signs} |")
    return "\n".join(lines) + "\n"


TITLE = """# Uses

What rewritten models do when they are used in ways that no pass asked for, beside the plain ones. The table is made by
`make fuzz`, of {number} uses of small random models. Each is used in the same way before and after it is rewritten, and
all that comes out is compared: results, gradients, buffers, state, errors.

- `=`: the same, within rounding or the budget of a lossy pass. Where the plain model raises, no result is asked.
- `r`: the same, or refused in one line that says why, for some models at least.
- `L`: something else, for some models at least: a row of [Limits](limits.md) says what.
- `!`: something else, and no row says so yet.
- `-`: tried, and it means nothing there: no such child, no gradient, no router.
- empty: not tried.

Passes that make another function by design (`graph_pooling`; `prune` and `qat` while they are trained) are compared in
form: what raises, shapes and types. `prune` is compared with the plain model that has its zeros otherwise.

| number | pass | sites rewritten | uses tried |
|---|---|---|---|"""
