"""One mutant: optimize the models that run the faulty line, with and without verification, and judge what comes out."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .faults import Fault, mutated
from .sandbox import LinesRun, install
from .zoo import Entry

MODELS = 4
"""How many of the models that run its line a mutant is tried on."""

OUTCOMES = ("escaped", "undone", "raised", "harmless", "stillborn", "hung", "failed")


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant.

    Attributes:
        outcome: `escaped`: a user got a wrong model; `undone`: without verification a user would have, with it not;
            `raised`: optimizing raised either way; `harmless`: every model came out right without verification, too;
            `stillborn`: fxopt cannot be imported with it; `hung`: it never ended; `failed`: the trial itself broke.
        entry: on which model.
        without: what was wrong without verification.
        detail: what verification said; for an escaped mutant, what is wrong all the same.
    """

    fault: Fault
    outcome: str
    entry: str = ""
    without: str = ""
    detail: str = ""


def healthy(entry: Entry, root: Path, paths: Sequence[str]) -> dict[str, Any]:
    """Optimize one model with fxopt as it is; return what is wrong (nothing), and the lines that ran."""
    from . import judge  # noqa: F401 - imports fxopt, without counting what runs on import

    model = entry.model()
    lines = LinesRun(root, paths)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with lines:
            plain, _ = attempt(entry, model, verify=False)
        checked, said = attempt(entry, model, verify=True)
    return {"wrong": [c for c in (plain, checked) if c], "said": said, "lines": sorted(lines.lines)}


def try_mutant(fault: Fault, source: str, entries: Sequence[Entry], root: Path) -> dict[str, str]:
    """Put a fault into this process's fxopt, which must not be imported yet, and try it on `entries`."""
    warnings.simplefilter("ignore")
    install(root, fault.path, mutated(source, fault))
    try:
        from . import judge  # noqa: F401 - imports fxopt
    except Exception as error:
        return {"outcome": "stillborn", "detail": f"{type(error).__name__}: {error}"}
    found = [try_entry(entry) for entry in entries]
    return min(found, key=lambda result: OUTCOMES.index(result["outcome"]), default={"outcome": "harmless"})


def try_entry(entry: Entry) -> dict[str, str]:
    model = entry.model()
    without, _ = attempt(entry, model, verify=False)
    if not without:
        return {"outcome": "harmless"}
    result = {"entry": entry.name, "without": without}
    wrong, said = attempt(entry, model, verify=True)
    if wrong.startswith("optimize raised"):
        return result | {"outcome": "raised" if without.startswith("optimize raised") else "undone", "detail": wrong}
    if wrong:
        return result | {"outcome": "escaped", "detail": f"{wrong} ({said})"}
    return result | {"outcome": "undone", "detail": said}


def attempt(entry: Entry, model: nn.Module, verify: bool) -> tuple[str, str]:
    """Return what is wrong with the optimized model, and what was decided about the sites."""
    import fxopt

    from .judge import TOLERANCE, complaint

    before, given = copy.deepcopy(model), entry.inputs(1)
    assert entry.dtype in TOLERANCE
    try:
        fast = fxopt.optimize(model, entry.passes, example_inputs=(given,), verify=verify, measure=False)
    except Exception as error:
        return f"optimize raised {type(error).__name__}: {str(error)[:200]}", ""
    said = "; ".join(f"{d.status} {d.reason}".strip()[:200] for d in fxopt.plan(fast).decisions)
    for name, tensor in model.state_dict().items():
        if not torch.equal(tensor, before.state_dict()[name]):
            return f"the user's model was changed: {name}", said
    return complaint(entry, before, fast), said


class Coverage:
    """Which models run which lines."""

    def __init__(self, lines_of: Mapping[str, set[tuple[str, int]]]) -> None:
        self.lines_of = lines_of
        self.files_of = {name: {path for path, _ in lines} for name, lines in lines_of.items()}

    def entries(self, fault: Fault, among: Sequence[Entry]) -> list[Entry]:
        """Return the models that run a faulty line; a line outside of functions counts with its whole file."""
        if not fault.inside or not fault.inside.split(".")[-1].islower():
            return [entry for entry in among if fault.path in self.files_of[entry.name]]
        lines = {(fault.path, line) for line in range(fault.line, fault.last_line + 1)}
        return [entry for entry in among if lines & self.lines_of[entry.name]]


def drawn(entries: Sequence[Entry], chance: random.Random, count: int = MODELS) -> list[Entry]:
    """Draw models for one mutant, as different as can be: no name twice before every name is there once."""
    shuffled = chance.sample(list(entries), len(entries))
    seen: dict[str, int] = {}
    rank: dict[str, int] = {}
    for entry in shuffled:
        kind = entry.name.split(" | ")[0]
        rank[entry.name] = seen[kind] = seen.get(kind, -1) + 1
    return sorted(shuffled, key=lambda entry: rank[entry.name])[:count]


Task = Callable[[], dict[str, Any]]
