"""The command that finds pipelines for a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..errors import UsageError
from ..storage import as_folder
from .app import Inputs, Json, Model, Seed, Timing, Trust, Weights, app, note, open_with_inputs, show, took
from .prechecks import check_read, check_written

__all__ = ["search"]


@app.command(epilog="Example: fxopt search fxopt.demo:build --time-budget '1 min' --constraint error=0.02")
def search(
    model: Model,
    evaluate: Annotated[
        str | None, typer.Option(metavar="FUNCTION", help="package.module:function that says what a model is worth.")
    ] = None,
    minimize: Annotated[bool, typer.Option("--minimize", help="Less of what --evaluate returns is better.")] = False,
    objective: Annotated[str, typer.Option(help="latency, throughput, memory, size, or training_step.")] = "latency",
    constraint: Annotated[
        list[str] | None, typer.Option(metavar="NAME=LIMIT", help="As metric=-1% or memory='500 MB'; may be repeated.")
    ] = None,
    time_budget: Annotated[str, typer.Option(metavar="TIME", help="Seconds, or a time such as '10 min'.")] = "10 min",
    trials: Annotated[int | None, typer.Option(min=1, help="Make at most this many trials.")] = None,
    finetune: Annotated[
        str | None, typer.Option(metavar="FUNCTION", help="package.module:function that trains a pruned model.")
    ] = None,
    storage: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Keep trials here, and go on from them.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FOLDER", help="Save the front here.")
    ] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the trials here, as HTML.")] = None,
    weights: Weights = None,
    inputs: Inputs = None,
    seed: Seed = 0,
    trust: Trust = None,
    as_json: Json = False,
    _timing: Timing = False,
) -> None:
    """Find the pipelines that are best for a target."""
    _check_folders(report, {"--output": output, "--storage": storage})
    check_read(model, weights=weights, inputs=inputs)
    limits = _limits(constraint, objective, time_budget, minimize=minimize, has_metric=evaluate is not None)
    from ..deploy.factory import find_function
    from ..searching import search as find

    original, example_inputs = open_with_inputs(model, weights, inputs, trust, seed=seed)
    front = find(
        original, example_inputs=example_inputs, evaluate=None if evaluate is None else find_function(evaluate),
        minimize=minimize, objective=objective, constraints=limits, time_budget=time_budget, trials=trials,
        finetune=None if finetune is None else find_function(finetune), storage=storage, seed=seed,
    )  # fmt: skip
    took("searching")
    if output is not None:
        front.save(output)
        note(f"wrote {output}")
    if report is not None:
        front.to_html(report)
        note(f"wrote {report}")
    show(front.to_json() if as_json else front, as_json)


def _check_folders(report: Path | None, folders: Mapping[str, Path | None]) -> None:
    """Refuse what cannot be written to, before any work."""
    check_written("--report", report)
    for option, folder in folders.items():
        if folder is not None:
            as_folder(folder, option)


def _limits(
    constraint: Sequence[str] | None, objective: str, time_budget: str, *, minimize: bool, has_metric: bool
) -> dict[str, str]:
    """Read the constraints; refuse what a search cannot be asked for, before the model is built."""
    limits = dict(map(_limit, constraint or ()))
    from ..searching import Demands, check_optuna

    check_optuna()
    Demands.read(objective, limits, time_budget, minimize=minimize, has_metric=has_metric)
    return limits


def _limit(text: str) -> tuple[str, str]:
    name, equals, limit = text.partition("=")
    if not equals:
        raise UsageError(f"--constraint {text}: write NAME=LIMIT, as metric=-1%")
    return name.strip(), limit
