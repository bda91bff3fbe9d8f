"""`make fuzz MODELS=300 SEED=0`: use random small models before and after each pass, and tell what differs."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from support import limits
from support.all_uses import USES
from support.catalog import PASSES, sample
from support.net import Trial, sites, trial


def plan(models: int, seed: int, uses: int) -> Iterator[tuple[str, int, list[str]]]:
    """Yield passes, seeds and uses: passes in turn, and for each of them all uses in turn."""
    every = {name: itertools.cycle(_turned(list(USES), number + seed)) for number, name in enumerate(PASSES)}
    for number, name in zip(range(models), itertools.cycle(PASSES), strict=False):
        yield name, seed + number, list(itertools.islice(every[name], uses))


def _turned(names: list[str], number: int) -> list[str]:
    start = number * 37 % len(names)
    return names[start:] + names[:start]


def run(
    models: int, seed: int, uses: int, hit: Counter[str], done: Collection[Trial] = (), *, slow: bool = True
) -> Iterator[Trial]:
    """Yield trials that are not done yet; count the sites that each pass rewrites."""
    known = {(each.kind, each.seed, each.use) for each in done}
    for name, own, chosen in plan(models, seed, uses):
        rewritten = sites(sample(name, own))
        hit[name] += rewritten
        for use in chosen:
            if (name, own, use) in known or (USES[use].slow and not slow):
                continue
            yield trial(name, own, use) if rewritten else Trial(name, use, own, "untouched")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--uses", type=int, default=5, help="uses of each model; 0: all")
    parser.add_argument("--only", default="", help="'PASS SEED USE': one trial, or 'PASS SEED': all uses of one model")
    parser.add_argument("--passes", default="", help="names of passes, with commas: these only")
    parser.add_argument("--done", type=Path, help="a file of trials: they are not repeated, new ones are added")
    parser.add_argument("--write", action="store_true", help="write docs/uses.md")
    return parser.parse_args()


def _only(text: str) -> int:
    kind, seed, *uses = text.split()
    found = [trial(kind, int(seed), use) for use in uses or USES]
    for each in found:
        print(each)
    return int(any(each.outcome == "different" for each in found))


def _note(path: Path, each: Trial) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": each.kind, "use": each.use, "seed": each.seed, "outcome": each.outcome}) + "\n")


def _read(path: Path | None) -> list[Trial]:
    if path is None or not path.exists():
        return []
    return [Trial(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> int:
    torch.set_num_threads(1)
    given = _arguments()
    if given.only:
        return _only(given.only)
    allowed, trials, hit, started = limits.limits(), _read(given.done), Counter(), time.monotonic()
    for name in set(PASSES) - set(filter(None, given.passes.split(","))) if given.passes else ():
        del PASSES[name]
    for number, each in enumerate(run(given.models, given.seed, given.uses or len(USES), hit, tuple(trials))):
        trials.append(each)
        if given.done is not None:
            _note(given.done, each)
        if limits.findings([each], allowed):
            print(each, flush=True)
        if sys.stderr.isatty() or number % 200 == 0:
            print(f"{number} uses, {time.monotonic() - started:.0f} s", end="\r", file=sys.stderr)
    return _summary(trials, allowed, hit, given)


def _summary(trials: list[Trial], allowed: list[limits.Limit], hit: Counter[str], given: argparse.Namespace) -> int:
    found = limits.findings(trials, allowed)
    pairs = {(each.kind, each.use) for each in trials}
    print(f"\n{given.models} models, {len(trials)} uses, {len(pairs)} pairs of {len(PASSES) * len(USES)}:", end=" ")
    print(", ".join(f"{count} {outcome}" for outcome, count in Counter(each.outcome for each in trials).most_common()))
    print("sites: " + ", ".join(f"{name} {hit[name]}" for name in PASSES))
    for (kind, use), count in Counter((each.kind, each.use) for each in found).most_common():
        first = next(each for each in found if (each.kind, each.use) == (kind, use))
        print(f"finding: {kind} x {use}, {count} times: {first.command}")
    for row in limits.past(trials, allowed):
        print(f"no longer needed in docs/limits.md: {sorted(row.passes)} {sorted(row.uses)}: {row.text}")
    if given.write:
        (limits.DOCS / "uses.md").write_text(limits.page(trials, allowed, hit), encoding="utf-8")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
