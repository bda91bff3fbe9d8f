"""What all commands share: the application, options, errors and exit codes, and what is printed where.

Exit codes: 0 done, 1 a check failed, 2 wrong usage, 3 unreadable or refused input, 4 a pass failed, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextvars import ContextVar
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ..errors import FxoptError, NothingDoneWarning, UnverifiedWarning
from ..interrupts import noting_interrupts, stop_if_interrupted
from ..version import VERSION
from .prechecks import MAKE_INPUTS, complete_pipeline

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "BothWeights", "Cold", "Html", "Inputs", "Json", "Measure", "Model", "Passes", "Phase", "PhaseOption",
    "PrintAfter", "Seed", "TimeBudget", "Timing", "Tolerance", "Trust", "Verify", "Weights", "app", "hide", "main",
    "note", "open_with_inputs", "optimized", "put_in", "show", "took",
]  # fmt: skip

SCHEMA_VERSION = 1
_INTERRUPTED = 130
_IN_TRAINING = "the model is in training mode, so it is optimized for training; for inference give --phase eval"

_OTHER_WORDS = {
    "report": "inspect FILE, or optimize MODEL --report FILE.html", "info": "inspect MODEL", "show": "inspect MODEL",
    "convert": "export MODEL -o FILE", "compare": "verify A B, diff A B, or bench A B",
    "benchmark": "bench A B", "minimize": "reduce MODEL -o FILE.py",
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
    "pickled model. Example: fxopt inspect fxopt.demo:build",
)


# -- what is printed, and where ----------------------------------------------------------------------------------------


class _Output:
    """Where the result of one run of the command line goes, and what its steps took."""

    def __init__(self, around: contextlib.ExitStack) -> None:
        self.stdout, self._around = sys.stdout, around
        self.is_timed = False
        self.seconds = dict[str, float]()
        self._last = time.perf_counter()

    def keep_for_json(self) -> None:
        """Send to standard error what others print from now on, such as the user's own factory."""
        self._around.enter_context(contextlib.redirect_stdout(sys.stderr))

    def took(self, step: str) -> None:
        now = time.perf_counter()
        self.seconds[step] = self.seconds.get(step, 0.0) + now - self._last
        self._last = now


_output: ContextVar[_Output | None] = ContextVar("_output", default=None)


@contextlib.contextmanager
def _printing() -> Generator[_Output]:
    with contextlib.ExitStack() as around:
        output = _Output(around)
        around.callback(_output.reset, _output.set(output))
        yield output


def took(step: str) -> None:
    """Note, for --timing, that what was done since the last step is this one."""
    if (output := _output.get()) is not None:
        output.took(step)


def note(text: str) -> None:
    """Tell something beside the result, on standard error."""
    typer.echo(f"fxopt: {text}", err=True)


def show(value: Any, as_json: bool = False) -> None:
    """Print JSON, or something to read: in colour on a terminal, as plain text elsewhere."""
    output = _output.get()
    file = sys.stdout if output is None else output.stdout
    if as_json:
        timing = {"timing": output.seconds} if output is not None and output.is_timed else {}
        found = {"schema_version": SCHEMA_VERSION, **value, **timing}
        typer.echo(json.dumps(found, indent=2, allow_nan=False), file=file)
    elif file.isatty() and not isinstance(value, str):
        from rich.console import Console

        Console(file=file).print(value)
    else:
        typer.echo(str(value), nl=False, file=file)


def hide(value: Any) -> None:
    """Show nothing: what is shown bit by bit otherwise comes as one piece of JSON."""


def _in_json(wanted: bool) -> bool:
    if wanted and (output := _output.get()) is not None:
        output.keep_for_json()
    return wanted


def _timed(wanted: bool) -> bool:
    if wanted and (output := _output.get()) is not None:
        output.is_timed = True
    return wanted


def _tell_times(seconds: Mapping[str, float]) -> None:
    wide = max(map(len, seconds), default=0)
    for step, each in seconds.items():
        typer.echo(f"{step:<{wide}}  {each:8.2f} s", err=True)


# -- options -----------------------------------------------------------------------------------------------------------


class PhaseOption(StrEnum):
    """What the model is optimized for."""

    TRAIN = "train"
    EVAL = "eval"


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
Phase = Annotated[
    PhaseOption | None, typer.Option(help="Put the model in this mode first; default: the mode it is in.")
]
Verify = Annotated[bool | None, typer.Option(help="Check each rewrite against float64.")]
Measure = Annotated[bool | None, typer.Option(help="Keep only rewrites that are faster.")]
Cold = Annotated[bool, typer.Option("--cold", help="Time with caches emptied, as other work leaves them.")]
Tolerance = Annotated[
    float | None, typer.Option(metavar="ERROR", help="Allow this error, relative to the scale of each tensor.")
]
PrintAfter = Annotated[
    str | None,
    typer.Option(metavar="PASS", help="Print the graphs that this pass changed, on standard error; or 'all'."),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of what factories draw, and of the random numbers of checks.")]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with the graphs here.")]
Json = Annotated[bool, typer.Option("--json", callback=_in_json, help="Print one JSON object on standard output.")]
Timing = Annotated[
    bool, typer.Option("--timing", callback=_timed, help="Tell the seconds of each step, on standard error.")
]


# -- a run -------------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    with noting_interrupts() as interrupts, _printing() as output:
        try:
            app(arguments)
        except BaseException as error:
            if interrupts is not None and interrupts.raised is not None:
                raise SystemExit(_INTERRUPTED) from None
            if not isinstance(error, (FxoptError, OSError)):
                raise
            _complain(error)
            raise SystemExit(error.exit_code if isinstance(error, FxoptError) else 3) from None
        finally:
            if output.is_timed:
                _tell_times(output.seconds)


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


def open_with_inputs(
    model: str,
    weights: Path | None,
    inputs: Path | None,
    trust: Sequence[str] | None,
    phase: PhaseOption | None = None,
    seed: int = 0,
) -> tuple[nn.Module, object]:
    """Return what MODEL means, in the mode of a phase, and its example inputs; say so where there are none."""
    from .arguments import open_model

    took("importing torch")
    opened, example_inputs = open_model(model, weights, inputs, trust, seed)
    stop_if_interrupted()
    took("making the model")
    if example_inputs is None:
        note(f"no example inputs, so nothing can be checked or timed; {MAKE_INPUTS}")
    return put_in(phase, opened), example_inputs


def put_in(phase: PhaseOption | None, model: nn.Module) -> nn.Module:
    """Return a model in the mode of a phase; as it is without one."""
    return model if phase is None else model.train(phase is PhaseOption.TRAIN)


def optimized(
    model: nn.Module, example_inputs: object, passes: str | None, phase: PhaseOption | None, **options: Any
) -> nn.Module:
    """Return what passes, or a plan among the options, make of a model; by default the preset for its mode."""
    from .. import api
    from ..reporting.notes import in_one_line

    if passes is None and options.get("plan") is None:
        passes = _preset_for(model, phase)
    with in_one_line(UnverifiedWarning, NothingDoneWarning):  # the report says so
        fast = api.optimize(model, passes, example_inputs=example_inputs, **options)
    stop_if_interrupted()
    took("optimizing")
    return fast


def _preset_for(model: nn.Module, phase: PhaseOption | None) -> str:
    """Return the preset for the mode that a model is in; say so where that may be a surprise."""
    if model.training and phase is None:
        note(_IN_TRAINING)
    return "training" if model.training else "inference"
