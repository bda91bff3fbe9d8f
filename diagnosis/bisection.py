"""Find the rewrite from which on a check fails, by halving."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from .. import api, files
from ..errors import InputError, PlanError, UsageError
from ..interrupts import stop_if_interrupted
from ..passes.driver import longest_right
from ..passes.pipeline import unfinished
from ..reporting.verdicts import compare_models
from ..reporting.wording import counted, printable
from ..runtime.record import Decision, Plan
from ..settings import environment_with
from ..tracing.examples import Inputs, normalize_inputs

__all__ = ["Check", "Fault", "bisect", "command_check", "verify_check"]

_MODEL_VARIABLE = "FXOPT_MODEL"
"""What holds, for a check, the path of the model that it judges."""
_CANNOT_TELL, _FIRST_SIGNAL = 125, 128
"""What exit codes mean to `git bisect run`, and here: 125 that nothing can be told, 128 and more that it is to end."""

Check = Callable[[nn.Module], bool]
"""Say whether a model is right."""


@dataclass(frozen=True)
class Fault:
    """The rewrite from which on a check fails.

    Attributes:
        decision: what was rewritten, and how.
        number: its place among `count` rewrites.
        alone: whether the check fails with this one alone, too.
        checks: how many models were checked.
    """

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


def bisect(
    model: nn.Module,
    check: Check,
    example_inputs: object = None,
    *,
    plan: Plan | None = None,
    tell: Callable[[str], None] | None = None,
) -> Fault:
    """Find the rewrite from which on a check fails, by halving: the check passes without it, and fails with it.

    Args:
        model: an optimized model; with `plan`, the model that it is a plan for. Of a pruned one give the original with
            the plan: what was removed is gone from it.
        check: is called with models that have some of the rewrites, and says whether one is right.
        example_inputs: as for `fxopt.optimize`.
        plan: look among its decisions.
        tell: is called with a line of text for each check.

    Raises:
        InputError: the check passes with all rewrites, or fails without any.
        PlanError: the plan does not fit the model.
        StateError: the model was not optimized, and there is no plan.
    """
    if plan is None:
        model, plan = api.restore(model), api.plan(model)
    return _Bisection(model, plan, normalize_inputs(example_inputs, model), check, tell or (lambda _: None)).run()


class _Bisection:
    """Repeat the first of a plan's rewrites on the original, and ask a check of the result."""

    def __init__(
        self, original: nn.Module, plan: Plan, calls: Sequence[Inputs], check: Check, tell: Callable[[str], None]
    ) -> None:
        self._plan = unfinished(plan)
        self._applied = [each for each in self._plan.decisions if each.status == "applied"]
        self._checks = 0
        self._original, self._calls, self._check, self._tell = original, list(calls) or None, check, tell

    def run(self) -> Fault:
        """Find the rewrite at fault; raise `InputError` where there is none."""
        count = len(self._applied)
        if not self._fails(count):
            raise InputError(f"the check passes with all of {counted(count, 'rewrite')}: there is nothing to look for")
        if self._fails(0):
            raise InputError("the check fails on the model without any rewrite, too: no rewrite is at fault")
        right, _ = longest_right(count, "fails", lambda middle: "fails" if self._fails(middle) else "", lambda: True)
        return Fault(self._applied[right], right + 1, count, self._fails_alone(right), self._checks)

    def _fails(self, first: int) -> bool:
        return self._fails_with(self._applied[:first], f"with {first} of {counted(len(self._applied), 'rewrite')}")

    def _fails_alone(self, number: int) -> bool:
        if number == 0:
            return True
        try:
            return self._fails_with([self._applied[number]], f"with rewrite {number + 1} alone")
        except PlanError:  # it rewrites what others have made
            return False

    def _fails_with(self, decisions: Sequence[Decision], what: str) -> bool:
        plan = dataclasses.replace(self._plan, decisions=tuple(decisions))
        fast = api.optimize(self._original, plan=plan, example_inputs=self._calls, verify=False, measure=False)
        is_right = self._check(fast)
        stop_if_interrupted()
        self._checks += 1
        self._tell(f"{what}: the check {'passes' if is_right else 'fails'}")
        return not is_right


def verify_check(
    original: nn.Module, example_inputs: object, *, seed: int = 0, tolerance: float | None = None
) -> Check:
    """Return a check that compares a model with the original in its mode, as `fxopt verify` does.

    Args:
        original: is right.
        example_inputs: as for `fxopt.optimize`.
        seed: of what is drawn.
        tolerance: the error that is allowed, relative to the scale of each result; by default that of rounding.

    Raises:
        UsageError: there are no example inputs.
    """
    calls = normalize_inputs(example_inputs, original)
    if not calls:
        raise UsageError("models are compared on example inputs, and there are none; give example_inputs (--inputs)")
    training = original.training

    def check(fast: nn.Module) -> bool:
        found = compare_models(
            original, fast, calls, gradients=training, training=training, seed=seed, tolerance=tolerance
        )
        return found.equal

    return check


def command_check(command: str, folder: Path, *, factory: str | None = None) -> Check:
    """Return a check that saves a model in a folder and runs a command of the shell with its path in `FXOPT_MODEL`.

    Its exit codes mean what they do to `git bisect run`: 0 right, 1 to 124 wrong; at others the check
    raises InputError.

    Args:
        command: what the shell runs.
        folder: where models are saved.
        factory: as for `fxopt.save`.
    """
    path = folder / "model.fxopt"

    def check(fast: nn.Module) -> bool:
        files.save(fast, path, factory=factory)
        environment = environment_with(**{_MODEL_VARIABLE: str(path)})
        # The command is the user's own, and what it prints is no result of this one.
        code = subprocess.run(command, shell=True, check=False, stdout=2, env=environment).returncode  # noqa: S602
        if code == _CANNOT_TELL or code < 0 or code >= _FIRST_SIGNAL:
            raise InputError(
                f"the check ended with {code}, which ends a bisection (as with git bisect run); 0 is right, "
                "1 to 124 is wrong; to look for a crash, append: || exit 1"
            )
        return code == 0

    return check
