"""The commands that look closer: how fast a model is, which rewrite is at fault, what a plan says."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

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
    open_with_inputs,
    show,
    took,
)
from .prechecks import check_pipeline, check_read, check_tolerance, check_values, check_written

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
    from .speeds import in_threads, pair_of, race

    took("importing torch")
    check_values(passes)
    with in_threads(threads):
        models, calls = pair_of(
            a, b, passes=passes, weights=weights, inputs=inputs, phase=phase, rows=batch, cold=cold, seed=seed,
            trust=trust,
        )  # fmt: skip
        took("making the models" if b is not None else "optimizing")
        found = race(models, calls, phase, cold=cold)
    took("timing")
    show(found.to_json() if as_json else found, as_json)


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
    from .arguments import factory_for
    from .bisection import Bisection, command_check, decided, plan_in, verify_check

    check_values(passes)
    factory = None if check == VERIFY else factory_for(model)
    opened, example_inputs = open_with_inputs(model, weights, inputs, trust, phase, seed)
    given = None if plan is None else plan_in(plan)
    options = {"verify": verify, "measure": measure, "seed": seed}
    original, calls, given = decided(opened, example_inputs, passes, given, phase, options)
    took("optimizing")
    with tempfile.TemporaryDirectory(prefix="fxopt-bisect-") as folder:
        judge = (
            verify_check(original, calls, seed, tolerance)
            if check == VERIFY
            else command_check(check, factory, Path(folder))
        )
        found = Bisection(original, given, calls, judge).run()
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
    from ..reporting.wording import counted
    from ..settings import on_trial
    from .arguments import calls_for, script_factory
    from .reduction import Case, reduced
    from .scripts import write_script

    check_values(passes)
    opened, example_inputs = open_with_inputs(model, weights, inputs, trust, phase, seed)
    case = Case(passes, opened.training, verify, measure, tolerance, seed)
    call, *_ = calls_for(opened, example_inputs)
    with tempfile.TemporaryDirectory(prefix="fxopt-reduce-") as folder, on_trial(Path(folder)):
        found = reduced(case, opened, call)
        took("reducing")
        written = write_script(output, case, found, script_factory(model))
        took("replaying")
    if as_json:
        return show({**written, "failure": found.kind, "message": found.message}, as_json)
    size = counted(written["operations"], "operation") if written["part"] is None else f"{written['part']} as it is"
    numbers = f", with numbers in {written['numbers']}" if written["numbers"] else ""
    return show(f"wrote {output}: {size}{numbers}; it fails in a new process, too\n")


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
    from .scripts import failure_of

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
    from .bisection import PlanTable, plan_in

    plan = plan_in(file)
    show(plan.to_json() if as_json else PlanTable(plan), as_json)
