"""One trial: a use of a plain model and of the rewritten one, and how the two differ."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from support.all_uses import USES
from support.catalog import IN_A_GROUP, sample
from support.concurrency import group_of_one_process
from support.outcomes import WHOLE, Difference, Judge, Outcome, Raised
from support.samples import NotForThis, Sample, Subject, quiet
from support.using import Use

import fxopt

NUDGES = ((1, 0.0), (2, 0.0), (3, 0.04), (4, 0.04), (5, 0.04), (6, 0.04))
"""Seeds of noise on weights and inputs of the plain model, and its size by what the pass may lose; 0: by rounding.

A pass that rounds moves numbers across the kinks of an activation, and a gradient there is another one by right.
"""


@dataclass(frozen=True)
class Trial:
    """What came of one use of one model."""

    kind: str
    use: str
    seed: int
    outcome: str
    """`same`, `refused`, `different`, `nothing` (it means nothing here) or `untouched` (the pass found no site)."""
    differences: tuple[Difference, ...] = field(default=(), compare=False)
    about: str = ""

    @property
    def command(self) -> str:
        return f"make fuzz ONLY='{self.kind} {self.seed} {self.use}'"

    def __str__(self) -> str:
        told = [each for each in self.differences if not each.refused or self.outcome == "refused"]
        lines = [f"{self.kind} x {self.use}, seed {self.seed} ({self.about}): {self.outcome}"]
        return "\n".join([*lines, *(f"    {each.label}: {each.text}" for each in told[:4]), f"    {self.command}"])


def sites(made: Sample) -> int:
    """Return how many sites the pass rewrites in a sample."""
    with group_of_one(made), quiet():
        fast = Subject(made, fast=True).new()
        return sum(each.status == "applied" for each in fxopt.plan(fast).decisions if each.pass_name == made.last)


def trial(kind: str, seed: int, name: str, *, verify: bool = False) -> Trial:
    """Use the sample of a pass and a seed in one way, plain and rewritten.

    Rewrites are not verified at first, which is quick; what differs is tried again with verification, which undoes what
    is wrong by itself.
    """
    made, chosen = sample(kind, seed), USES[name]
    about = f"{made.pipeline}, {made.spelling}, {'training' if made.training else 'evaluation'}"
    with group_of_one(made), quiet(), torch.random.fork_rng(devices=[]):
        try:
            differences = _differences(made, chosen, verify)
        except NotForThis:
            return Trial(kind, name, seed, "nothing", about=about)
    found = Trial(kind, name, seed, _outcome(differences), tuple(differences), about)
    return trial(kind, seed, name, verify=True) if found.outcome == "different" and not verify else found


def _outcome(differences: list[Difference]) -> str:
    if not differences:
        return "same"
    return "refused" if all(each.refused for each in differences) else "different"


def _differences(made: Sample, chosen: Use, verify: bool) -> list[Difference]:
    near = made.near * (5 if chosen.writes else 1)  # steps carry what a lossy pass loses from one to the next
    observes = made.last == "qat" or "int8_static" in made.pipeline
    form = made.form or (chosen.writes and (made.zeros or observes)) or (chosen.ranges and observes)
    judge = Judge(max(near, chosen.tolerance), form, adds=made.adds, serves=made.serves)
    plain = _used(chosen, Subject(made, fast=False))
    fast = _used(chosen, Subject(made, fast=True, verify=verify))
    found = judge.compare(plain, fast)
    if all(each.refused for each in found):
        return found
    for number, noise in NUDGES if made.near else NUDGES[:2]:
        moved = _used(chosen, Subject(made, fast=False, nudge=number, noise=noise * made.near))
        left = set(_labels(judge.compare(plain, fast, moved, slack=4 if noise else 64)))
        found = [each for each in found if each.refused or each.label in left]
    return found


def _labels(differences: list[Difference]) -> Iterator[str]:
    return (each.label for each in differences)


def _used(chosen: Use, subject: Subject) -> Outcome:
    torch.manual_seed(0)
    try:
        return chosen.run(subject)
    except NotForThis:
        raise
    except Exception as error:
        if not subject.fast:
            raise
        return {WHOLE: Raised(error)}


def group_of_one(made: Sample) -> contextlib.AbstractContextManager[None]:
    """Open a group of one process for passes that need one."""
    return group_of_one_process() if made.last in IN_A_GROUP else contextlib.nullcontext()
