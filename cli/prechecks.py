"""What the command line checks, and completes, before torch is loaded and any work is done."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

from ..deploy.formats.kinds import FORMATS, chosen_format
from ..deploy.script import BY_REDUCE
from ..errors import InputError, UsageError, did_you_mean
from ..known_passes import PRESETS, check_names, pass_names

__all__ = [
    "ALL", "MAKE_INPUTS", "check_cold", "check_exported", "check_name", "check_picture", "check_pipeline",
    "check_print_after", "check_read", "check_tolerance", "check_values", "check_written", "complete_name",
    "complete_pipeline", "times_beside",
]  # fmt: skip

_MARKS = ("manifest.json", "archive_format")
"""What a zip file has, in the root or one folder below, that fxopt or torch.export wrote."""
_EXPORTED = frozenset(("", *(form.suffixes[0] for form in FORMATS.values())))
MAKE_INPUTS = "write example_inputs() beside the factory, or give --inputs FILE"
ALL = "all"
"""Instead of the name of a pass: each."""
_HEAD = 1000
"""So many letters of a page tell whose it is."""


def check_pipeline(text: str | None) -> None:
    """Raise `PipelineError` for an unknown name, `UsageError` where the shell has taken braces away."""
    if text is None:
        return
    if "=" in text and "{" not in text:
        why = "an option without braces; shells take braces away: quote them, as -p 'inference{dtype=bfloat16}'"
        raise UsageError(f"-p {text}: {why}")
    check_names(text)


def check_values(passes: str | None, time_budget: str | None = None, *, is_plotted: bool = False) -> None:
    """Refuse wrong options of passes and budgets, and plots that there cannot be, before the model is built.

    Torch is imported for that.
    """
    from ..passes.pipeline import parse
    from ..passes.timing import BudgetRequest
    from ..reporting.plots import check_matplotlib

    BudgetRequest.of(time_budget)
    if passes:
        parse(passes)
    if is_plotted:
        check_matplotlib()


def check_print_after(name: str | None) -> None:
    """Raise `UsageError` for what is no pass, nor all of them."""
    if name not in (None, ALL, *(known := pass_names())):
        raise UsageError(f"--print-after: unknown pass {name!r}{did_you_mean(str(name), [*known, ALL])}")


def check_name(name: str | None) -> str | None:
    """Return the name of one pass or preset without options; raise `UsageError` if there is none."""
    if name is None:
        return None
    bare = name.partition("{")[0]
    if bare not in (known := {*pass_names(), *PRESETS}):
        raise UsageError(f"unknown pass {name!r}{did_you_mean(name, known)}")
    check_names(name)
    return bare


def check_read(*models: str, **files: Path | None) -> None:
    """Raise `UsageError` for a MODEL, `InputError` for a file of an option, that cannot be there; nothing is read."""
    for model in models:
        _check_model(model)
    for option, path in files.items():
        if path is not None and not path.exists():
            raise InputError(f"--{option} {path}: no such file")
        if path is not None and path.is_dir():
            raise InputError(f"--{option} {path} is a folder; name a file in it")


def _check_model(model: str) -> None:
    path, (place, separator, _) = Path(model), model.rpartition(".py:")
    if path.suffix == ".py" and path.is_file():
        raise UsageError(f"{model!r} is source code; name what builds the model in it: {model}:factory")
    if path.is_dir() or (":" not in model and not path.is_file()):
        what = "a folder" if path.is_dir() else "no file"
        raise UsageError(f"{model!r} is {what}; name a saved model, or write package.module:factory")
    if separator and not Path(f"{place}.py").is_file() and not path.is_file():
        raise UsageError(f"{model!r}: there is no file {place}.py")


def check_written(option: str, path: Path | None, *models: str, suffix: str = "", kind: str = "") -> None:
    """Raise `InputError` unless what an option names can be written, and none of the `models` that are read is lost."""
    if path is None:
        return
    example, kind, is_one = _WRITTEN[kind or option]
    if path.is_dir():
        raise InputError(f"{option} {path} is a folder; name a file in it, as {path / example}")
    if not path.parent.is_dir():
        raise InputError(f"{option} {path}: there is no folder {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{option} {path}: nothing can be written into {path.parent.resolve()}; name another folder")
    if suffix and path.suffix not in ("", suffix):
        raise InputError(f"{option} {path}: this writes {suffix} files; name it {path.with_suffix(suffix)}")
    read = (Path(model.partition(":")[0]) for model in models)
    if path.exists() and any(other.exists() and path.samefile(other) for other in read):
        raise InputError(f"{option} {path} is the model that is read; write to another file")
    if path.exists() and not is_one(path):
        raise InputError(f"{option} {path} is there and is no {kind}; it is not overwritten: write to another file")


def check_exported(path: Path, form: str | None, model: str) -> None:
    """Raise `UsageError` for a format whose packages are missing, `InputError` where it cannot be written."""
    check_written("-o", path, model, kind="export")
    if form is None and path.suffix not in _EXPORTED:
        raise InputError(f"-o {path}: give --format, or name it {path.with_suffix('.pt2')}")
    chosen_format(form, path)


def check_picture(
    model: str, form: str | None, output: Path | None, html: Path | None, *, graph: str | None, as_json: bool
) -> None:
    """Raise `UsageError` for options of `inspect` that contradict each other, `InputError` where nothing is written."""
    if output is not None and form is None:
        raise UsageError("-o needs a format, as --format dot; --html writes a page")
    if graph is not None and (form is not None or html is not None):
        raise UsageError("--graph prints one graph, --format and --html show all; leave --graph out")
    if as_json and form is not None and output is None:
        raise UsageError("--json and --format both say what is printed; leave one out, or add -o FILE")
    check_written("--html", html, model)
    check_written("-o", output, model, kind="picture")
    if output is not None and form == "model-explorer":
        check_written("-o", times_beside(output), model, kind="picture")


def times_beside(path: Path) -> Path:
    """Return where the times of nodes are written, for the file of a model that Model Explorer shows."""
    return path.with_name(f"{path.stem}.time.json")


def check_cold(cold: bool, measure: bool | None) -> None:
    """Raise `UsageError` if nothing is timed, and that with cold caches."""
    if cold and measure is False:
        raise UsageError("--cold says how to time, and --no-measure that nothing is timed; leave one of them out")


def check_tolerance(tolerance: float | None) -> None:
    """Raise `UsageError` if a relative error is no positive number up to 1."""
    if tolerance is not None and not 0 < tolerance <= 1:
        raise UsageError(f"--tolerance {tolerance:g}; give a relative error up to 1, such as 0.05")


def _is_saved_model(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.rpartition("/")[2] in _MARKS for name in archive.namelist())
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
        return False


def _is_export(path: Path) -> bool:
    """Say whether a file may be a model for a runtime: as its name says, a graph of OpenVINO, ONNX, or TorchScript."""
    try:
        with path.open("rb") as file:
            start = file.read(_HEAD)
        if path.suffix == ".xml":
            return b"<net " in start
        if path.suffix == ".onnx":
            return start.startswith(b"\x08")  # the version comes first
        with zipfile.ZipFile(path) as archive:
            return any(name.partition("/")[2].startswith("code/") for name in archive.namelist())
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
        return False


def _is_plan(path: Path) -> bool:
    try:
        found: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and "decisions" in found


def _is_report(path: Path) -> bool:
    from ..reporting.html import PAGE_MARK

    try:
        with path.open(encoding="utf-8") as file:
            return PAGE_MARK in file.read(_HEAD)
    except (OSError, ValueError):
        return False


def _is_plot(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            start = file.read(_HEAD)
    except OSError:
        return False
    return start.startswith(b"\x89PNG") and b"Matplotlib" in start


def _is_picture(path: Path) -> bool:
    try:
        text = path.read_text(encoding="utf-8")
        if text.startswith(("digraph ", "flowchart TD\n")):
            return True
        found: object = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return False
    if not isinstance(found, dict):
        return False
    kept = cast("dict[str, object]", found)
    times = [isinstance(each, dict) and "gradient" in each for each in kept.values()]
    return "graphs" in kept or (bool(times) and all(times))


def _is_script(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8") as file:
            return BY_REDUCE in file.read(_HEAD)
    except (OSError, ValueError):
        return False


def _is_numbers(path: Path) -> bool:
    script = path.with_suffix(".py")
    return script.is_file() and _is_script(script) and repr(path.name) in script.read_text(encoding="utf-8")


_WRITTEN: dict[str, tuple[str, str, Callable[[Path], bool]]] = {
    "-o": ("model.fxopt", "saved model", _is_saved_model),
    "--save-plan": ("plan.json", "plan", _is_plan),
    "--report": ("report.html", "report", _is_report),
    "--plot": ("report.png", "plot of matplotlib", _is_plot),
    "--html": ("graphs.html", "page of fxopt", _is_report),
    "script": ("reduced.py", "script of fxopt", _is_script),
    "numbers": ("reduced.pt", "file of numbers of a script beside it", _is_numbers),
    "export": ("model.pt2", "saved model", lambda path: _is_saved_model(path) or _is_export(path)),
    "picture": ("graphs.dot", "picture of fxopt", _is_picture),
}
"""Option, or kind of file -> a name for what it writes, what that is, and whether a file is one."""


def complete_name(incomplete: str) -> list[str]:
    """Return the passes and presets whose names start so."""
    return [name for name in sorted({*pass_names(), *PRESETS}) if name.startswith(incomplete)]


def complete_pipeline(incomplete: str) -> list[str]:
    """Return a pipeline string with its last name completed."""
    return list(_completed(incomplete))


def _completed(text: str) -> Iterator[str]:
    before, comma, last = text.rpartition(",")
    if text.count("{") > text.count("}"):
        return
    start = last[: len(last) - len(last.lstrip())]
    for name in sorted({*pass_names(), *PRESETS}):
        if name.startswith(last.strip()):
            yield f"{before}{comma}{start}{name}"
