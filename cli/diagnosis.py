"""The commands that look closer: how fast a model is, which rewrite is at fault, what a plan says."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import InputError, UsageError
from .app import (
    BothWeights,
    Cold,
    Inputs,
    Json,
    Measure,
    Model,
    Passes,
    Phase,
    PhaseOption,
    Seed,
    Timing,
    Tolerance,
    Trust,
    Verify,
    Weights,
    app,
    note,
    open_with_inputs,
    optimized,
    put_in,
    show,
    took,
)
from .prechecks import check_pipeline, check_read, check_tolerance, check_values, check_written

if TYPE_CHECKING:
    from torch import nn

__all__ = ["bench", "bisect", "plan_show", "reduce", "repro"]

VERIFY = "verify"

plans = typer.Typer(
    name="plan",
    help="Show the decisions behind an optimized model.",
    no_args_is_help=True,
    epilog="Example: fxopt plan show demo.fxopt",
)
app.add_typer(plans)


@app.command(epilog="Example: fxopt bench fxopt.demo:build --threads 1 --batch 8")
def bench(
    a: Model,
    b: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Another model, to compare the first with.")
    ] = None,
    passes: Passes = None,
    weights: BothWeights = None,
    inputs: Inputs = None,
    phase: Annotated[
        PhaseOption | None, typer.Option(help="The mode to time in; default: that of the optimized model.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Compute in so many threads.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Give the example inputs so many rows.")] = None,
    cold: Cold = False,
    seed: Seed = 0,
    trust: Trust = None,
    as_json: Json = False,
    _timing: Timing = False,
) -> None:
    """Time two models side by side, or one before and after: how many times faster, and the memory of each.

    A saved model is compared with its original, any other with what PIPELINE, or the preset for its mode, makes of it.
    """
    if b is not None and passes is not None:
        raise UsageError("-p says what is made of one model; give one, or leave -p out")
    check_pipeline(passes)
    check_read(*filter(None, (a, b)), weights=weights, inputs=inputs)
    from ..diagnosis.speeds import race
    from .arguments import calls_for, in_threads, open_both, open_model

    took("importing torch")
    check_values(passes)
    with in_threads(threads):
        if b is not None:
            before, after, calls = open_both(a, b, weights, inputs, trust, seed, rows=batch)
            names = a, b if a != b else f"{b}, again"
            took("making the models")
        else:
            opened, example_inputs = open_model(a, weights, inputs, trust, seed)
            calls = calls_for(opened, example_inputs, batch)
            took("making the model")
            (before, after), names = _before_and_after(a, opened, calls, passes, phase, cold, seed)
        training = None if phase is None else phase is PhaseOption.TRAIN
        found = race(before, after, calls, names=names, training=training, cold=cold)
    took("timing")
    show(found.to_json() if as_json else found, as_json)


def _before_and_after(
    name: str, model: nn.Module, calls: object, passes: str | None, phase: PhaseOption | None, cold: bool, seed: int
) -> tuple[tuple[nn.Module, nn.Module], tuple[str, str]]:
    """Return a saved model with its original, any other with what passes make of it, and what to call the two."""
    from .. import api
    from ..runtime.record import record_of

    if passes is None and record_of(model) is not None:
        return (api.restore(model), model), (f"{name}, as it was", name)
    how = "cold" if cold else None
    fast = optimized(put_in(phase, model), calls, passes, phase, measure=how, seed=seed)
    return (model, fast), (name, f"{name}, optimized")


@app.command(
    epilog="Example: fxopt bisect fxopt.demo:build -p fuse_ensembles --check '! grep -aq applied $FXOPT_MODEL'"
)
def bisect(
    model: Model,
    check: Annotated[
        str, typer.Option(metavar="CMD", help="A command of the shell that judges $FXOPT_MODEL; or 'verify'.")
    ],
    passes: Passes = None,
    plan: Annotated[Path | None, typer.Option(metavar="FILE", help="Look among the decisions of this plan.")] = None,
    weights: Weights = None,
    inputs: Inputs = None,
    phase: Phase = None,
    tolerance: Tolerance = None,
    verify: Verify = None,
    measure: Measure = None,
    seed: Seed = 0,
    trust: Trust = None,
    as_json: Json = False,
    _timing: Timing = False,
) -> None:
    """Find the rewrite from which on a check fails, by halving.

    The check is run for each half with the path of the saved model in FXOPT_MODEL. Its exit codes mean what they do to
    git bisect run: 0 right, 1 to 124 wrong, others end it. 'verify' compares with the original.
    """
    check_pipeline(passes)
    check_tolerance(tolerance)
    check_read(model, weights=weights, inputs=inputs, plan=plan)
    if plan is not None and passes is not None:
        raise UsageError("--plan has decisions, -p asks for new ones; leave one of them out")
    from .. import api
    from ..deploy.opening import plan_in
    from ..diagnosis import bisection
    from ..runtime.record import record_of
    from .arguments import factory_for

    check_values(passes)
    factory = None if check == VERIFY else factory_for(model)
    original, example_inputs = open_with_inputs(model, weights, inputs, trust, phase, seed)
    if plan is not None:
        decided = plan_in(plan)
    elif passes is None and record_of(original) is not None:
        decided, original = api.plan(original), api.restore(original)
    else:
        decided = api.plan(
            optimized(original, example_inputs, passes, phase, verify=verify, measure=measure, seed=seed)
        )
    with tempfile.TemporaryDirectory(prefix="fxopt-bisect-") as folder:
        judge = (
            bisection.verify_check(original, example_inputs, seed=seed, tolerance=tolerance)
            if check == VERIFY
            else bisection.command_check(check, Path(folder), factory=factory)
        )
        found = bisection.bisect(original, judge, example_inputs, plan=decided, tell=note)
    took("checking")
    show(found.to_json() if as_json else found, as_json)


@app.command(epilog="Example: fxopt reduce fxopt.demo:build --phase eval -p 'prune{amount=0.5}' -o reduced.py")
def reduce(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Write the script here.")],
    passes: Annotated[str, typer.Option("--passes", "-p", metavar="PIPELINE", help="The passes that fail.")],
    weights: Weights = None,
    inputs: Inputs = None,
    phase: Phase = None,
    tolerance: Tolerance = None,
    verify: Verify = None,
    measure: Annotated[bool, typer.Option(help="Keep only rewrites that are faster.")] = False,
    seed: Seed = 0,
    trust: Trust = None,
    as_json: Json = False,
    _timing: Timing = False,
) -> None:
    """Shrink a model on which passes raise, or give something else than it, to a script of a few lines.

    The script raises as long as they fail: that is tried in a new process before it is written. fxopt repro runs it.
    """
    check_pipeline(passes)
    check_tolerance(tolerance)
    check_written("-o", output, model, suffix=".py", kind="script")
    check_written("-o", output.with_suffix(".pt"), kind="numbers")
    check_read(model, weights=weights, inputs=inputs)
    from ..diagnosis.scripts import reduce as write_reduced
    from .arguments import calls_for, script_factory

    check_values(passes)
    opened, example_inputs = open_with_inputs(model, weights, inputs, trust, phase, seed)
    found = write_reduced(
        opened, passes, calls_for(opened, example_inputs), output, verify=verify, measure=measure, tolerance=tolerance,
        seed=seed, factory=script_factory(model), tell=note,
    )  # fmt: skip
    took("reducing")
    show(found.to_json() if as_json else found, as_json)


@app.command(epilog="Example: fxopt repro reduced.py")
def repro(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What reduce wrote, or reproduce.py of a failed pass.")],
    as_json: Json = False,
    _timing: Timing = False,
) -> None:
    """Run a script of reduce, or a reproducer, in a new process; exit with 1 if it still fails."""
    if not file.is_file():
        raise InputError(f"{file}: no such file")
    if b"fxopt" not in file.read_bytes():
        raise InputError(f"{file} calls nothing of fxopt: name what fxopt reduce wrote, or the reproduce.py of a pass")
    from ..diagnosis.scripts import failure_of

    failure = failure_of(file)
    took("running")
    text = f"it still fails: {failure}\n" if failure else "it does not fail any more\n"
    show({"fails": bool(failure), "message": failure} if as_json else text, as_json)
    raise typer.Exit(1 if failure else 0)


@plans.command("show", epilog="Example: fxopt plan show demo.fxopt")
def plan_show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A plan, or a model that optimize saved.")],
    as_json: Json = False,
) -> None:
    """Show the decisions of a plan: what was done where, and what was not and why. Nothing in the file is run."""
    if not file.is_file():
        raise InputError(f"{file}: no such file")
    from ..deploy.opening import plan_in
    from ..reporting.table import PlanTable

    plan = plan_in(file)
    show(plan.to_json() if as_json else PlanTable(plan), as_json)
