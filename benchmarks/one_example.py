"""Count the wrong passes that verification catches with one example, and the honest ones that it lets pass.

    python benchmarks/one_example.py [--json benchmarks/results/wrong_passes.json]

Each wrong pass rewrites a small model as an author might get it wrong: on the one example that is given, many of them
compute what the model computes. Beside them goes the same rewrite done right, which must be kept.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.wrong_passes import gradients, modes, numbers, pictures, recomputation, sequences, sizes, states, values
from support.wrong_passes.subject import Subject, outcome

SUBJECTS: tuple[Subject, ...] = (
    *sizes.SUBJECTS, *values.SUBJECTS, *modes.SUBJECTS, *gradients.SUBJECTS, *recomputation.SUBJECTS,
    *pictures.SUBJECTS, *sequences.SUBJECTS, *states.SUBJECTS, *numbers.SUBJECTS,
)  # fmt: skip


def wrong_ones() -> list[dict[str, str]]:
    """Return every wrong pass with the reason why it was undone, which is empty where it was kept."""
    return [
        {"family": family, "what": what, "reason": outcome(subject, function)}
        for subject in SUBJECTS
        for (family, what), function in subject.wrong.items()
    ]


def honest_ones() -> list[dict[str, str]]:
    return [
        {"model": getattr(subject.model, "__name__", ""), "reason": outcome(subject, subject.honest)}
        for subject in SUBJECTS
    ]


def counted(found: list[dict[str, str]]) -> dict[str, str]:
    """Return "caught of all" by family."""
    total = Counter(one["family"] for one in found)
    caught = Counter(one["family"] for one in found if one["reason"])
    return {family: f"{caught[family]} of {total[family]}" for family in total}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found, honest = wrong_ones(), honest_ones()
    caught = sum(bool(one["reason"]) for one in found)
    print(f"wrong passes caught: {caught} of {len(found)}")
    for family, count in counted(found).items():
        print(f"  {family:20} {count}")
    for one in found:
        print(f"  {'caught' if one['reason'] else 'MISSED'} {one['family']}: {one['what']}: {one['reason'][:90]}")
    print(f"honest passes kept: {sum(not one['reason'] for one in honest)} of {len(honest)}")
    for one in honest:
        if one["reason"]:
            print(f"  UNDONE {one['model']}: {one['reason']}")
    if options.json is not None:
        result: dict[str, Any] = {
            "torch": torch.__version__,
            "wrong": {"caught": caught, "of": len(found), "by family": counted(found), "missed": [
                f"{one['family']}: {one['what']}" for one in found if not one["reason"]
            ]},
            "honest": {"kept": sum(not one["reason"] for one in honest), "of": len(honest)},
        }  # fmt: skip
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
