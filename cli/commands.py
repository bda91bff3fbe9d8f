"""The `fxopt` command: it parses, calls the library and prints; torch is imported only once there is work for it.

Exit codes: 0 done, 1 a check failed, 2 wrong usage, 3 unreadable or refused input, 4 a pass failed, 130 interrupted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ..errors import FxoptError, NothingDoneWarning, UnverifiedWarning
from ..known_passes import PRESETS, entry_points, listing, own_summaries
from ..version import VERSION
from .interrupts import noting_interrupts, stop_if_interrupted
from .prechecks import (
    check_cold,
    check_exported,
    check_name,
    check_picture,
    check_pipeline,
    check_read,
    check_tolerance,
    check_written,
    complete_name,
    complete_pipeline,
)

if TYPE_CHECKING:
    from torch import nn

__all__ = ["app", "main"]

SCHEMA_VERSION = 1
_INTERRUPTED = 130
_MAKE_INPUTS = "write example_inputs() beside the factory, or give --inputs FILE"
_IN_TRAINING = "fxopt: the model is in training mode, so it is optimized for training; for inference give --phase eval"

_OTHER_WORDS = {
    "report": "inspect FILE, or optimize MODEL --report FILE.html", "info": "inspect MODEL", "show": "inspect MODEL",
    "convert": "export MODEL -o FILE", "compare": "verify A B, or diff A B",
}  # fmt: skip
"""What users may call a command -> what it is here."""


class _Commands(TyperGroup):
    """Name the command that is meant, where the nearest by its letters is another."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in _OTHER_WORDS:
            ctx.fail(f"No such command {args[0]!r}; use fxopt {_OTHER_WORDS[args[0]]}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="fxopt",
    cls=_Commands,
    help="Rewrite PyTorch models with torch.fx: checked, measured, reversible.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="MODEL is package.module:factory or path/to/file.py:factory, with example_inputs() beside the factory, a "
    "configuration such as transformers:BertConfig, a file saved by fxopt, a .pt2 file, or, with --trust all, a "
    "pickled model. Example: fxopt inspect transformers:BertConfig",
)


class PhaseOption(StrEnum):
    """What the model is optimized for."""

    TRAIN = "train"
    EVAL = "eval"


class ExportOption(StrEnum):
    """As what a model is exported."""

    PT2 = "pt2"
    ONNX = "onnx"
    OPENVINO = "openvino"
    AOTI = "aoti"
    TORCHSCRIPT = "torchscript"


class FormatOption(StrEnum):
    """How graphs are written for other tools."""

    DOT = "dot"
    MERMAID = "mermaid"
    JSON = "json"
    MODEL_EXPLORER = "model-explorer"


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="package.module:factory, file.py:factory, transformers:NAMEConfig, or a file with a model.",
    ),
]
Passes = Annotated[
    str | None,
    typer.Option(
        "--passes", "-p", metavar="PIPELINE", help="Passes or a preset; quote braces.", autocompletion=complete_pipeline
    ),
]
TimeBudget = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="The time from the capture to the result: seconds, or '100 forwards'."),
]
Weights = Annotated[Path | None, typer.Option(metavar="FILE", help="Load these weights (safetensors, .pt) first.")]
BothWeights = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Load these weights into each model that has no file of its own.")
]
Inputs = Annotated[Path | None, typer.Option(metavar="FILE", help="Example inputs (safetensors, .pt); see the docs.")]
Trust = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PACKAGE", help="Allow a saved MODEL to import this package; all: any code. May be given again."
    ),
]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with the graphs here.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    with noting_interrupts() as interrupts:
        try:
            app(arguments)
        except BaseException as error:
            if interrupts.heard:
                raise SystemExit(_INTERRUPTED) from None
            if not isinstance(error, (FxoptError, OSError)):
                raise
            _complain(error)
            raise SystemExit(error.exit_code if isinstance(error, FxoptError) else 3) from None


def _complain(error: BaseException) -> None:
    lines = [f"fxopt: error: {error}", *getattr(error, "__notes__", ())]
    typer.echo("\n".join(lines), err=True)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fxopt {VERSION}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Hold the options that stand before the command."""


@app.command(epilog="Example: fxopt optimize transformers:BertConfig -o bert.fxopt --report bert.html")
def optimize(
    model: Model,
    passes: Passes = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Save the result here.")] = None,
    weights: Weights = None,
    inputs: Inputs = None,
    phase: Annotated[
        PhaseOption | None, typer.Option(help="Put the model in this mode first; default: the mode it is in.")
    ] = None,
    plan: Annotated[Path | None, typer.Option(metavar="FILE", help="Repeat the decisions of this plan.")] = None,
    save_plan: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the decisions here.")] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report here, as HTML.")] = None,
    verify: Annotated[bool | None, typer.Option(help="Check each rewrite against float64.")] = None,
    measure: Annotated[bool | None, typer.Option(help="Keep only rewrites that are faster.")] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Time with caches emptied, as other work leaves them.")] = False,
    time_budget: TimeBudget = None,
    seed: Annotated[int, typer.Option(help="Seed of verification's random inputs.")] = 0,
    trust: Trust = None,
    as_json: Json = False,
) -> None:
    """Optimize a model and report what was done."""
    check_pipeline(passes)
    check_cold(cold, measure)
    check_written("-o", output, model)
    check_written("--save-plan", save_plan)
    check_written("--report", report)
    check_read(model, weights=weights, inputs=inputs, plan=plan)
    from .. import api
    from ..reporting.notes import in_one_line
    from .arguments import factory_for

    _check_values(passes, time_budget)
    factory = None if output is None else factory_for(model)
    original, example_inputs = _open(model, weights, inputs, trust, phase)
    preset = _preset_for(original, phase) if passes is None and plan is None else None
    with in_one_line(UnverifiedWarning, NothingDoneWarning):  # the report says so
        fast = api.optimize(
            original,
            preset if passes is None else passes,
            example_inputs=example_inputs,
            verify=verify,
            measure="cold" if cold else measure,
            time_budget=time_budget,
            plan=plan,
            seed=seed,
        )
    stop_if_interrupted()
    if output is not None:
        api.save(fast, output, factory=factory)
    _tell(fast, example_inputs, save_plan, report, as_json)


def _check_values(passes: str | None, time_budget: str | None) -> None:
    """Refuse wrong options and budgets before the model is built."""
    from ..passes.pipeline import parse
    from ..passes.timing import BudgetRequest

    BudgetRequest.of(time_budget)
    if passes:
        parse(passes)


@app.command(epilog="Example: fxopt export bert.fxopt --trust transformers -o bert.onnx")
def export(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Write the file here.")],
    form: Annotated[
        ExportOption | None, typer.Option("--format", help="Default: what the name of FILE says, else pt2.")
    ] = None,
    weights: Weights = None,
    inputs: Inputs = None,
    dynamic_batch: Annotated[bool, typer.Option(help="Leave the batch size free.")] = True,
    trust: Trust = None,
    as_json: Json = False,
) -> None:
    """Export a model in evaluation mode as a file that runs without the model's code, for torch or other runtimes."""
    check_exported(output, form, model)
    check_read(model, weights=weights, inputs=inputs)
    from .. import api
    from ..reporting.notes import in_one_line

    opened, example_inputs = _open(model, weights, inputs, trust)
    with in_one_line():
        error = api.export(opened, output, example_inputs, format=form, dynamic_batch=dynamic_batch)
    off = f"; largest difference {error:.0e} of a result's scale" if error else ""
    _show({"path": str(output), "error": error} if as_json else f"wrote {output}, equal to the model{off}\n", as_json)


@app.command(epilog="Example: fxopt inspect transformers:ViTConfig --html vit.html")
def inspect(
    model: Model,
    weights: Weights = None,
    inputs: Inputs = None,
    graph: Annotated[
        str | None, typer.Option(metavar="NAME", help="Print the graph of this module; (root) is the model itself.")
    ] = None,
    html: Html = None,
    form: Annotated[FormatOption | None, typer.Option("--format", help="Print all graphs in this format.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write what --format gives here.")
    ] = None,
    trust: Trust = None,
    as_json: Json = False,
) -> None:
    """Show which modules can be captured, and what was done to a saved model."""
    check_read(model, weights=weights, inputs=inputs)
    check_picture(model, form, output, html, graph=graph, as_json=as_json)
    from .pictures import inspected, one_graph, write_format

    opened, example_inputs = _open(model, weights, inputs, trust)
    if graph is not None:
        text = one_graph(opened, example_inputs, graph)
        return _show({"graph": text} if as_json else f"{text}\n", as_json)
    found = inspected(opened, example_inputs, costs=html is not None or form is not None)
    if html is not None:
        found.write_page(html)
    if form is not None:
        text = write_format(found.picture(), form, output)
        if output is None:
            return _show(text)
    return _show(found.to_json() if as_json else found.text(), as_json)


@app.command(epilog="Example: fxopt diff transformers:BertConfig bert.fxopt --trust transformers --html changes.html")
def diff(
    a: Model,
    b: Model,
    weights: BothWeights = None,
    inputs: Inputs = None,
    html: Html = None,
    trust: Trust = None,
    as_json: Json = False,
) -> None:
    """Compare the graphs of two models; exit with 1 if they differ."""
    check_read(a, b, weights=weights, inputs=inputs)
    check_written("--html", html, a, b)
    from ..reporting.diff import diff_graphs
    from .arguments import program_of, weights_of_both
    from .pictures import write_comparison

    state = weights_of_both(a, b, weights)
    before, after = (program_of(*_open(model, state[model], inputs, trust)) for model in (a, b))
    graphs = [{name: str(graph) for name, graph in each.graphs.items()} for each in (before, after)]
    text = diff_graphs(*graphs)
    if html is not None:
        write_comparison(html, f"{a} and {b}", before, after, text)
    _show({"equal": not text, "diff": text} if as_json else text or "no difference\n", as_json)
    raise typer.Exit(1 if text else 0)


@app.command(epilog="Example: fxopt verify transformers:BertConfig bert.fxopt --trust transformers")
def verify(
    a: Model,
    b: Model,
    weights: BothWeights = None,
    inputs: Inputs = None,
    gradients: Annotated[bool, typer.Option("--gradients", help="Compare gradients too.")] = False,
    phase: Annotated[PhaseOption, typer.Option(help="The mode to compare in.")] = PhaseOption.EVAL,
    seed: Annotated[int, typer.Option(help="Seed of the noise, the upstream gradients and the random numbers.")] = 0,
    tolerance: Annotated[
        float | None, typer.Option(metavar="ERROR", help="Allow this error, relative to the scale of each tensor.")
    ] = None,
    trust: Trust = None,
    as_json: Json = False,
) -> None:
    """Run two models on the same inputs and compare their results, in float64 too; exit with 1 if they differ.

    The inputs of A are used; if A has none, those of B.
    """
    check_tolerance(tolerance)
    check_read(a, b, weights=weights, inputs=inputs)
    from ..errors import UsageError
    from ..reporting.verdicts import compare_models
    from ..tracing.examples import check_whole, normalize_inputs
    from .arguments import open_model, weights_of_both

    state = weights_of_both(a, b, weights)
    before, own = open_model(a, state[a], inputs, trust)
    after, others = open_model(b, state[b], None, trust)
    calls = normalize_inputs(others if own is None else own, before)
    if not calls:
        raise UsageError(f"neither model has example inputs; {_MAKE_INPUTS}")
    check_whole(calls)
    training = phase is PhaseOption.TRAIN
    comparison = compare_models(
        before, after, calls, gradients=gradients, training=training, seed=seed, tolerance=tolerance
    )
    _show(comparison.to_json() if as_json else comparison, as_json)
    raise typer.Exit(0 if comparison.equal else 1)


@app.command(epilog="Example: fxopt passes fuse_ensembles")
def passes(
    name: Annotated[
        str | None, typer.Argument(metavar="PASS", help="Describe this pass or preset.", autocompletion=complete_name)
    ] = None,
    as_json: Json = False,
) -> None:
    """List the passes and presets, or describe one."""
    name = check_name(name)
    if as_json or name not in (None, *PRESETS) or entry_points():
        from ..reporting.catalogue import catalogue, catalogue_json

        _show(catalogue_json(name) if as_json else catalogue(name), as_json)
    else:
        _show(listing(name, own_summaries()))


@app.command(epilog="Example: fxopt doctor --json")
def doctor(as_json: Json = False) -> None:
    """Check the installation; exit with 1 if something that fxopt needs is missing."""
    from ..reporting.environment import checks

    found = checks()
    lines = [f"{'  ' if check.ok else '! '}{check.name:<28}{check.found}\n" for check in found]
    _show({"checks": [vars(check) for check in found]} if as_json else "".join(lines), as_json)
    raise typer.Exit(0 if all(check.ok for check in found) else 1)


@app.command(epilog="Example: fxopt cache --clear")
def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove all that are kept.")] = False,
    as_json: Json = False,
) -> None:
    """Show how many decisions of earlier runs are kept for models that are optimized again, or remove them."""
    from ..decision_files import DecisionFiles
    from ..settings import current
    from ..storage import byte_text

    folder = current().cache
    files = None if folder is None else DecisionFiles(folder)
    count, size = (0, 0) if files is None else files.clear() if clear else files.usage()
    if as_json:
        _show({"folder": folder and str(folder), "entries": count, "bytes": size, "cleared": clear}, as_json)
    elif folder is None:
        _show("the cache is off: nothing is kept\n")
    else:
        _show(f"{'removed' if clear else 'cached'} decisions: {count}, {byte_text(size)} in {folder}\n")


@app.command(epilog="Example: fxopt demo --compile")
def demo(
    compile_: Annotated[bool, typer.Option("--compile", help="Also time torch.compile; this takes a minute.")] = False,
    heads: Annotated[int, typer.Option(min=1, help="Members of the ensemble.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Rows of the input.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 20,
    as_json: Json = False,
) -> None:
    """Make an ensemble of 128 heads faster, and show that nothing else changed."""
    from ..demo import Demo

    result = Demo(heads, batch, steps, compile_, show=_hide if as_json else _show).run()
    if as_json:
        _show(result, as_json)
    raise typer.Exit(0 if all(result["checks"].values()) else 1)


def _open(
    model: str,
    weights: Path | None,
    inputs: Path | None,
    trust: Sequence[str] | None,
    phase: PhaseOption | None = None,
) -> tuple[nn.Module, object]:
    """Return what MODEL means, in the mode of a phase, and its example inputs; say so where there are none."""
    from .arguments import open_model

    opened, example_inputs = open_model(model, weights, inputs, trust)
    stop_if_interrupted()
    if phase is not None:
        opened.train(phase is PhaseOption.TRAIN)
    if example_inputs is None:
        typer.echo(f"fxopt: no example inputs, so nothing can be checked or timed; {_MAKE_INPUTS}", err=True)
    return opened, example_inputs


def _preset_for(model: nn.Module, phase: PhaseOption | None) -> str:
    """Return the preset for the mode that a model is in; say so where that may be a surprise."""
    if model.training and phase is None:
        typer.echo(_IN_TRAINING, err=True)
    return "training" if model.training else "inference"


def _tell(fast: nn.Module, inputs: object, plan: Path | None, report: Path | None, as_json: bool) -> None:
    """Write and print what was done to a model; a page also has what its nodes cost on the example inputs."""
    from .. import api

    done = api.report(fast, None if report is None else inputs)
    if plan is not None:
        api.plan(fast).save(plan)
    if report is not None:
        done.to_html(report)
    _show(done.to_json() if as_json else done.table(), as_json)


def _hide(value: Any) -> None:
    """Show nothing: what is shown bit by bit otherwise comes as one piece of JSON."""


def _show(value: Any, as_json: bool = False) -> None:
    """Print JSON, or something to read: in colour on a terminal, as plain text elsewhere."""
    if as_json:
        typer.echo(json.dumps({"schema_version": SCHEMA_VERSION, **value}, indent=2, allow_nan=False))
    elif sys.stdout.isatty() and not isinstance(value, str):
        from rich.console import Console

        Console().print(value)
    else:
        typer.echo(str(value), nl=False)
