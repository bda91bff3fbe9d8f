"""Put faults into fxopt's passes, one at a time, and count how many verification keeps from the user.

    python benchmarks/mutants.py [--count 300] [--seed 0] [--jobs 2] [--json benchmarks/results/mutants.json]

A mutant is fxopt with one small fault in the source of a pass, or of a layer or state map that passes write into
models. Each is tried on models that run the faulty line. One is effective if without verification some model comes out
wrong, or optimizing raises; those without effect are drawn again. An effective mutant is caught if with verification
every model comes out right (the rewrite was undone, or another lowering taken), or if the pass raises; it has escaped
if a user gets a wrong model. Right and wrong are judged from outside, by running, training, saving, loading and
restoring the model beside the original.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.mutation.faults import Fault, faults_in
from support.mutation.sandbox import in_children, package_root, sources, warm_up
from support.mutation.trials import MODELS, Coverage, Verdict, drawn, healthy, try_mutant
from support.mutation.zoo import Entry, zoo

ENSEMBLES = "transforms/fuse_ensembles"
FILES = (
    "transforms/eliminate_dead_code.py", "transforms/eliminate_common_subexpressions.py",
    "transforms/fold_constants.py", "transforms/fold_batchnorm/fold_batchnorm.py", "transforms/fold_batchnorm/write.py",
    f"{ENSEMBLES}/fuse_ensembles.py", f"{ENSEMBLES}/search/isomorphism.py", f"{ENSEMBLES}/search/packs.py",
    f"{ENSEMBLES}/lowerings/packwise.py", f"{ENSEMBLES}/lowerings/units.py",
    f"{ENSEMBLES}/lowerings/batching_rules.py", f"{ENSEMBLES}/lowerings/rebuilding.py",
    "layers/ensemble.py", "layers/batched_layers.py", "layers/batched_recurrent.py",
    "layers/members.py", "layers/vectorized.py",
    "runtime/state/state_steps.py", "operators/derived.py", "layers/folded.py",
    "passes/rewriting/effects.py",
)  # fmt: skip
EFFECTIVE = ("escaped", "undone", "raised")


def covered(entries: Sequence[Entry], root: Path, jobs: int) -> Coverage:
    """Run every model on fxopt as it is, which must be right, and note what it runs."""
    lines: dict[str, set[tuple[str, int]]] = {}
    for number, result in in_children([partial(healthy, entry, root, FILES) for entry in entries], jobs):
        if result.get("wrong", True):
            raise SystemExit(f"{entries[number].name} is wrong without any fault: {result.get('wrong', result)}")
        lines[entries[number].name] = {(path, line) for path, line in result["lines"]}
    return Coverage({entry.name: lines[entry.name] for entry in entries})


def shuffled_faults(texts: dict[str, str], seed: int) -> list[Fault]:
    """Return all faults in the order in which they are tried: files take turns, so that none crowds out the others."""
    chance = random.Random(seed)
    piles = {path: faults_in(path, text) for path, text in texts.items()}
    for pile in piles.values():
        chance.shuffle(pile)
    order: list[Fault] = []
    while any(piles.values()):
        paths = [path for path, pile in piles.items() if pile]
        weights = [len(piles[path]) ** 0.5 for path in paths]
        order.append(piles[chance.choices(paths, weights)[0]].pop())
    return order


def run(count: int, seed: int, jobs: int, models: int = MODELS, every: int = 1) -> tuple[list[Verdict], int]:
    """Return the verdicts on the mutants that `count` effective ones take, and how many faults no model runs."""
    root, entries = package_root(), zoo()[::every]
    warm_up()
    texts = dict(sources(root, FILES))
    coverage = covered(entries, root, jobs)
    reached = [(fault, coverage.entries(fault, entries)) for fault in shuffled_faults(texts, seed)]
    waiting = [(fault, tried) for fault, tried in reached if tried]
    verdicts: list[Verdict] = []
    while waiting and effective(verdicts) < count:
        batch = waiting[: max(jobs, min(40, count - effective(verdicts)))]
        del waiting[: len(batch)]
        tasks = [
            partial(try_mutant, f, texts[f.path], drawn(tried, random.Random(f"{seed} {f}"), models), root)
            for f, tried in batch
        ]
        results = dict(in_children(tasks, jobs))
        verdicts += [Verdict(fault, **results[number]) for number, (fault, _) in enumerate(batch)]
        report(verdicts[-len(batch) :])
    return verdicts, len(reached) - sum(1 for _, tried in reached if tried)


def report(verdicts: Sequence[Verdict]) -> None:
    """Say how it goes, for it takes minutes."""
    for verdict in verdicts:
        print(f"{verdict.outcome:9} {verdict.fault}", file=sys.stderr, flush=True)


def effective(verdicts: Sequence[Verdict]) -> int:
    return sum(verdict.outcome in EFFECTIVE for verdict in verdicts)


def summary(verdicts: Sequence[Verdict], unreached: int, seed: int, seconds: float) -> dict[str, Any]:
    """Return the figures, and every mutant that is not simply caught."""
    outcomes = Counter(verdict.outcome for verdict in verdicts)
    caught = outcomes["undone"] + outcomes["raised"]
    silent = outcomes["undone"] + outcomes["escaped"]
    return {
        "seed": seed,
        "torch": torch.__version__,
        "seconds": round(seconds),
        "effective": effective(verdicts),
        "caught": caught,
        "share": round(caught / max(1, effective(verdicts)), 4),
        "share of those that do not raise": round(outcomes["undone"] / max(1, silent), 4),
        "outcomes": dict(outcomes),
        "faults that no model runs": unreached,
        "by file": by(verdicts, lambda verdict: verdict.fault.path),
        "by kind": by(verdicts, lambda verdict: verdict.fault.kind),
        "escaped": listed(verdicts, "escaped"),
        "hung or failed": listed(verdicts, "hung", "failed"),
        "harmless": [str(verdict.fault) for verdict in verdicts if verdict.outcome in ("harmless", "stillborn")],
    }


def by(verdicts: Sequence[Verdict], key: Any) -> dict[str, str]:
    total = Counter(key(v) for v in verdicts if v.outcome in EFFECTIVE)
    caught = Counter(key(v) for v in verdicts if v.outcome in ("undone", "raised"))
    return {name: f"{caught[name]} of {total[name]}" for name in sorted(total)}


def listed(verdicts: Sequence[Verdict], *outcomes: str) -> list[dict[str, Any]]:
    return [asdict(verdict) for verdict in verdicts if verdict.outcome in outcomes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--models", type=int, default=MODELS, help="models that each mutant is tried on")
    parser.add_argument("--every", type=int, default=1, help="take one model of so many")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(FXOPT_REPRODUCER_DIR=folder, FXOPT_PASS_TIMEOUT="20", FXOPT_CACHE="0")
        verdicts, unreached = run(options.count, options.seed, options.jobs, options.models, options.every)
    result = summary(verdicts, unreached, options.seed, time.perf_counter() - start)
    print(json.dumps({key: value for key, value in result.items() if key != "harmless"}, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
