"""The commands that work on models, and those about the installation; torch is imported once there is work for it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..known_passes import PRESETS, entry_points, listing, own_summaries
from .app import (
    BothWeights,
    Cold,
    Html,
    Inputs,
    Json,
    Measure,
    Model,
    Passes,
    Phase,
    PhaseOption,
    PrintAfter,
    Seed,
    TimeBudget,
    Timing,
    Tolerance,
    Trust,
    Verify,
    Weights,
    app,
    hide,
    open_with_inputs,
    optimized,
    show,
    took,
)
from .prechecks import (
    check_cold,
    check_exported,
    check_name,
    check_picture,
    check_pipeline,
    check_print_after,
    check_read,
    check_tolerance,
    check_values,
    check_written,
    complete_name,
)

if TYPE_CHECKING:
    from torch import nn

__all__ = ["cache", "demo", "diff", "doctor", "export", "inspect", "optimize", "passes", "verify"]


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


@app.command(epilog="Example: fxopt optimize fxopt.demo:build -o demo.fxopt --report demo.html")
def optimize(
    model: Model,
    passes: Passes = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Save the result here.")] = None,
    weights: Weights = None,
    inputs: Inputs = None,
    phase: Phase = None,
    plan: Annotated[Path | None, typer.Option(metavar="FILE", help="Repeat the decisions of this plan.")] = None,
    save_plan: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the decisions here.")] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report here, as HTML.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the report here, as PNG.")] = None,
    verify: Verify = None,
    measure: Measure = None,
    cold: Cold = False,
    time_budget: TimeBudget = None,
    print_after: PrintAfter = None,
    seed: Seed = 0,
    trust: Trust = None,
    as_json: Json = False,
    _timing: Timing = False,
) -> None:
    """Optimize a model and report what was done."""
    check_pipeline(passes)
    check_print_after(print_after)
    check_cold(cold, measure)
    check_written("-o", output, model)
    check_written("--save-plan", save_plan)
    check_written("--report", report)
    check_written("--plot", plot, suffix=".png")
    check_read(model, weights=weights, inputs=inputs, plan=plan)
    from .. import files
    from .arguments import factory_for
    from .pictures import note_graphs

    check_values(passes, time_budget, is_plotted=plot is not None)
    factory = None if output is None else factory_for(model)
    original, example_inputs = open_with_inputs(model, weights, inputs, trust, phase, seed)
    fast = optimized(
        original, example_inputs, passes, phase, plan=plan, verify=verify, measure="cold" if cold else measure,
        time_budget=time_budget, seed=seed,
    )  # fmt: skip
    if print_after is not None:
        note_graphs(fast, print_after)
    if output is not None:
        files.save(fast, output, factory=factory)
        took("saving")
    _tell(fast, example_inputs, save_plan, report, plot, as_json)


@app.command(epilog="Example: fxopt export demo.fxopt --trust fxopt -o demo.onnx")
def export(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Write the file here.")],
    form: Annotated[ExportOption | None, typer.Option("--format", help="Default: what the name of FILE says.")] = None,
    weights: Weights = None,
    inputs: Inputs = None,
    dynamic_batch: Annotated[bool, typer.Option(help="Leave the batch size free.")] = True,
    seed: Seed = 0,
    trust: Trust = None,
    as_json: Json = False,
    _timing: Timing = False,
) -> None:
    """Export a model in evaluation mode as a file that runs without the model's code, for torch or other runtimes."""
    check_exported(output, form, model)
    check_read(model, weights=weights, inputs=inputs)
    from .. import files
    from ..reporting.notes import in_one_line

    opened, example_inputs = open_with_inputs(model, weights, inputs, trust, seed=seed)
    with in_one_line():
        error = files.export(opened, output, example_inputs, format=form, dynamic_batch=dynamic_batch)
    took("exporting")
    off = f"; largest difference {error:.0e} of a result's scale" if error else ""
    show({"path": str(output), "error": error} if as_json else f"wrote {output}, equal to the model{off}\n", as_json)


@app.command(epilog="Example: fxopt inspect fxopt.demo:build --html graphs.html")
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
    seed: Seed = 0,
    trust: Trust = None,
    as_json: Json = False,
    _timing: Timing = False,
) -> None:
    """Show which modules can be captured, and what was done to a saved model."""
    check_read(model, weights=weights, inputs=inputs)
    check_picture(model, form, output, html, graph=graph, as_json=as_json)
    from .pictures import inspected, one_graph, write_format

    opened, example_inputs = open_with_inputs(model, weights, inputs, trust, seed=seed)
    if graph is not None:
        text = one_graph(opened, example_inputs, graph)
        took("capturing")
        return show({"graph": text} if as_json else f"{text}\n", as_json)
    found = inspected(opened, example_inputs, costs=html is not None or form is not None)
    took("capturing")
    if html is not None:
        found.write_page(html)
        took("drawing")
    if form is not None:
        text = write_format(found.picture(), form, output)
        if output is None:
            return show(text)
    return show(found.to_json() if as_json else found.text(), as_json)


@app.command(epilog="Example: fxopt diff fxopt.demo:build demo.fxopt --trust fxopt --html changes.html")
def diff(
    a: Model,
    b: Model,
    weights: BothWeights = None,
    inputs: Inputs = None,
    html: Html = None,
    seed: Seed = 0,
    trust: Trust = None,
    as_json: Json = False,
    _timing: Timing = False,
) -> None:
    """Compare the graphs of two models; exit with 1 if they differ."""
    check_read(a, b, weights=weights, inputs=inputs)
    check_written("--html", html, a, b)
    from ..reporting.diff import diff_graphs
    from .arguments import program_of, weights_of_both
    from .pictures import write_comparison

    state = weights_of_both(a, b, weights)
    before, after = (program_of(*open_with_inputs(model, state[model], inputs, trust, seed=seed)) for model in (a, b))
    took("capturing")
    graphs = [{name: str(graph) for name, graph in each.graphs.items()} for each in (before, after)]
    text = diff_graphs(*graphs)
    if html is not None:
        write_comparison(html, f"{a} and {b}", before, after, text)
    show({"equal": not text, "diff": text} if as_json else text or "no difference\n", as_json)
    raise typer.Exit(1 if text else 0)


@app.command(epilog="Example: fxopt verify fxopt.demo:build demo.fxopt --trust fxopt")
def verify(
    a: Model,
    b: Model,
    weights: BothWeights = None,
    inputs: Inputs = None,
    gradients: Annotated[bool, typer.Option("--gradients", help="Compare gradients too.")] = False,
    phase: Annotated[PhaseOption, typer.Option(help="The mode to compare in.")] = PhaseOption.EVAL,
    seed: Seed = 0,
    tolerance: Tolerance = None,
    trust: Trust = None,
    as_json: Json = False,
    _timing: Timing = False,
) -> None:
    """Run two models on the same inputs and compare their results, in float64 too; exit with 1 if they differ.

    The inputs of A are used; if A has none, those of B.
    """
    check_tolerance(tolerance)
    check_read(a, b, weights=weights, inputs=inputs)
    from ..reporting.verdicts import compare_models
    from .arguments import open_both

    before, after, calls = open_both(a, b, weights, inputs, trust, seed)
    took("making the models")
    training = phase is PhaseOption.TRAIN
    comparison = compare_models(
        before, after, calls, gradients=gradients, training=training, seed=seed, tolerance=tolerance
    )
    took("comparing")
    show(comparison.to_json() if as_json else comparison, as_json)
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

        show(catalogue_json(name) if as_json else catalogue(name), as_json)
    else:
        show(listing(name, own_summaries()))


@app.command(epilog="Example: fxopt doctor --json")
def doctor(as_json: Json = False) -> None:
    """Check the installation; exit with 1 if something that fxopt needs is missing."""
    from ..reporting.environment import checks

    found = checks()
    lines = [f"{'  ' if check.ok else '! '}{check.name:<28}{check.found}\n" for check in found]
    show({"checks": [vars(check) for check in found]} if as_json else "".join(lines), as_json)
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
        show({"folder": folder and str(folder), "entries": count, "bytes": size, "cleared": clear}, as_json)
    elif folder is None:
        show("the cache is off: nothing is kept\n")
    else:
        show(f"{'removed' if clear else 'cached'} decisions: {count}, {byte_text(size)} in {folder}\n")


@app.command(epilog="Example: fxopt demo --heads 8 --steps 2")
def demo(
    compile_: Annotated[bool, typer.Option("--compile", help="Also time torch.compile; this takes a minute.")] = False,
    heads: Annotated[int, typer.Option(min=1, help="Members of the ensemble.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Rows of the input.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 20,
    as_json: Json = False,
) -> None:
    """Make an ensemble of 128 heads faster, and show that nothing else changed."""
    from ..demo import Demo

    result = Demo(heads, batch, steps, compile_, show=hide if as_json else show).run()
    if as_json:
        show(result, as_json)
    raise typer.Exit(0 if all(result["checks"].values()) else 1)


def _tell(
    fast: nn.Module, inputs: object, plan: Path | None, report: Path | None, plot: Path | None, as_json: bool
) -> None:
    """Write and print what was done to a model; pages and plots also have what its nodes cost on the example inputs."""
    from .. import api
    from .pictures import write_plot

    done = api.report(fast, None if report is None and plot is None else inputs)
    if plan is not None:
        api.plan(fast).save(plan)
    if report is not None:
        done.to_html(report)
    if plot is not None:
        write_plot(done, plot)
    took("reporting")
    show(done.to_json() if as_json else done.table(), as_json)
