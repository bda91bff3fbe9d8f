"""What `bisect` does: find the rewrite from which on a check fails, by halving; and what `plan show` shows."""

from __future__ import annotations

import dataclasses
import subprocess
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text
from torch import nn

from .. import api
from ..deploy.archive import plan_of
from ..deploy.opening import FileKind, kind_of_file
from ..errors import InputError, NothingDoneWarning, PlanError, UnverifiedWarning, UsageError
from ..interrupts import stop_if_interrupted
from ..passes.driver import longest_right
from ..passes.pipeline import unfinished
from ..reporting.notes import in_one_line
from ..reporting.table import ReportTable
from ..reporting.verdicts import compare_models
from ..reporting.wording import counted, printable
from ..runtime.record import Decision, Plan, Record, record_of
from ..runtime.state import StateMap
from ..settings import environment_with
from ..tracing.examples import Inputs, normalize_inputs
from .app import PhaseOption, note, preset_for

__all__ = ["MODEL_VARIABLE", "Bisection", "Found", "PlanTable", "command_check", "decided", "plan_in", "verify_check"]

MODEL_VARIABLE = "FXOPT_MODEL"
"""What holds, for a check, the path of the model that it judges."""
_CANNOT_TELL, _FIRST_SIGNAL = 125, 128
"""What exit codes mean to `git bisect run`, and here: 125 that nothing can be told, 128 and more that it is to end."""

Check = Callable[[nn.Module], bool]
"""Say whether a model is right."""


@dataclass(frozen=True)
class Found:
    """The rewrite from which on a check fails: the `number`th of `count`; whether it fails of that one `alone`, too."""

    decision: Decision
    number: int
    count: int
    alone: bool
    checks: int

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        decision = self.decision
        at_fault = {
            "pass": decision.pass_name,
            "site": decision.key,
            "label": decision.label,
            "choice": decision.choice,
        }
        return {"at_fault": at_fault, **{name: getattr(self, name) for name in ("number", "count", "alone", "checks")}}

    def __str__(self) -> str:
        decision = self.decision
        how = f" ({printable(decision.choice)})" if decision.choice else ""
        also = "with it alone, too" if self.alone else "not with it alone: it needs rewrites before it"
        return (
            f"at fault: {decision.pass_name} at {printable(decision.label) or '(root)'}{how}\n"
            f"the check fails from rewrite {self.number} of {self.count} on, and {also}; "
            f"{counted(self.checks, 'model')} checked\n"
        )


class Bisection:
    """Repeat the first of a plan's rewrites on the original, and ask a check of the result."""

    def __init__(self, original: nn.Module, plan: Plan, calls: Sequence[Inputs], check: Check) -> None:
        self.plan = unfinished(plan)
        self.applied = [each for each in self.plan.decisions if each.status == "applied"]
        self.checks = 0
        self._original, self._calls, self._check = original, list(calls) or None, check

    def run(self) -> Found:
        """Find the rewrite at fault; raise `InputError` where no rewrite is."""
        count = len(self.applied)
        if not self._fails(count):
            raise InputError(f"the check passes with all of {counted(count, 'rewrite')}: there is nothing to look for")
        if self._fails(0):
            raise InputError("the check fails on the model without any rewrite, too: no rewrite is at fault")
        right, _ = longest_right(count, "fails", lambda middle: "fails" if self._fails(middle) else "", lambda: True)
        return Found(self.applied[right], right + 1, count, self._fails_alone(right), self.checks)

    def _fails(self, first: int) -> bool:
        return self._fails_with(self.applied[:first], f"with {first} of {counted(len(self.applied), 'rewrite')}")

    def _fails_alone(self, number: int) -> bool:
        if number == 0:
            return True
        try:
            return self._fails_with([self.applied[number]], f"with rewrite {number + 1} alone")
        except PlanError:  # it rewrites what others have made
            return False

    def _fails_with(self, decisions: Sequence[Decision], what: str) -> bool:
        plan = dataclasses.replace(self.plan, decisions=tuple(decisions))
        fast = api.optimize(self._original, plan=plan, example_inputs=self._calls, verify=False, measure=False)
        is_right = self._check(fast)
        stop_if_interrupted()
        self.checks += 1
        note(f"{what}: the check {'passes' if is_right else 'fails'}")
        return not is_right


def decided(
    model: nn.Module,
    example_inputs: object,
    passes: str | None,
    plan: Plan | None,
    phase: PhaseOption | None,
    options: Mapping[str, Any],
) -> tuple[nn.Module, tuple[Inputs, ...], Plan]:
    """Return the original of a model, its calls, and the plan to look in: the one given, that of an optimized model,
    or the one that is made now.
    """
    calls = normalize_inputs(example_inputs, model)
    if plan is None and passes is None and record_of(model) is not None:
        return api.restore(model), calls, api.plan(model)
    if plan is None:
        with in_one_line(UnverifiedWarning, NothingDoneWarning):
            wanted = passes or preset_for(model, phase)
            plan = api.plan(api.optimize(model, wanted, example_inputs=list(calls) or None, **options))
    return model, calls, plan


def verify_check(original: nn.Module, calls: Sequence[Inputs], seed: int, tolerance: float | None) -> Check:
    """Return a check that compares a model with the original, as `fxopt verify` does."""
    if not calls:
        raise UsageError("--check verify compares models on example inputs, and there are none; give --inputs FILE")
    training = original.training

    def check(fast: nn.Module) -> bool:
        found = compare_models(
            original, fast, calls, gradients=training, training=training, seed=seed, tolerance=tolerance
        )
        return found.equal

    return check


def command_check(command: str, factory: str | None, folder: Path) -> Check:
    """Return a check that saves a model and runs a command of the shell, whose exit code means what it does to
    `git bisect run`.
    """
    path = folder / "model.fxopt"

    def check(fast: nn.Module) -> bool:
        api.save(fast, path, factory=factory)
        environment = environment_with(**{MODEL_VARIABLE: str(path)})
        # The command is the user's own, and what it prints is no result of this one.
        code = subprocess.run(command, shell=True, check=False, stdout=2, env=environment).returncode  # noqa: S602
        if code == _CANNOT_TELL or code < 0 or code >= _FIRST_SIGNAL:
            raise InputError(
                f"the check ended with {code}, which ends a bisection (as with git bisect run); 0 is right, "
                "1 to 124 is wrong; to look for a crash, append: || exit 1"
            )
        return code == 0

    return check


def plan_in(path: Path) -> Plan:
    """Return the plan in a JSON file, or in an archive."""
    if zipfile.is_zipfile(path):
        if kind_of_file(path) is not FileKind.RECIPE:
            raise InputError(f"{path} has no plan; name one that --save-plan wrote, or a model that optimize saved")
        return plan_of(path)
    return Plan.load(path)


class PlanTable(ReportTable):
    """The decisions of a plan, without what only a model tells."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(Record(plan, StateMap(), {}, {}, "", 0, 0))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        plan = self.record.plan
        yield Text(f"plan for {'training' if plan.phase == 'train' else 'inference'}", style="bold")
        yield Text(f"made by fxopt {printable(plan.fxopt)} on torch {printable(plan.torch)}")
        yield Text(f"passes: {printable(', '.join(plan.pipeline)) or 'none'}")
        yield from self.decided(options)
