"""A reduced model as a script: what `reduce` writes and `repro` runs."""

from __future__ import annotations

import io
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..deploy.script import BY_REDUCE, script_text
from ..errors import InputError, UsageError, expect
from ..reporting.wording import counted
from ..settings import on_trial
from ..storage import as_path, write_atomically
from ..tracing.examples import check_whole, normalize_inputs
from .module_text import ModuleText, NotWritten, tensor_text
from .reduction import Case, Failing, reduced

__all__ = ["Reduced", "failure_of", "reduce"]

_SECONDS = 600
"""A script that takes longer is stopped."""
_ERROR = re.compile(r"[\w.]+Error\b")


@dataclass(frozen=True)
class Reduced:
    """What `reduce` wrote.

    Attributes:
        path: of the script.
        failure: the kind of failure, and its `message`.
        operations: how many the model has; None where it is a `part` of the user's model, by its name.
        numbers: the file of the numbers that it fails with, where others do not do.
    """

    path: str
    failure: str
    message: str
    operations: int | None
    part: str | None
    numbers: str | None

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        size = f"{self.part} as it is" if self.operations is None else counted(self.operations, "operation")
        numbers = f", with numbers in {self.numbers}" if self.numbers else ""
        return f"wrote {self.path}: {size}{numbers}; it fails in a new process, too\n"


def reduce(
    model: nn.Module,
    passes: str,
    example_inputs: object,
    path: str | os.PathLike[str],
    *,
    verify: bool | None = None,
    measure: bool = False,
    tolerance: float | None = None,
    seed: int = 0,
    factory: str | None = None,
    tell: Callable[[str], None] | None = None,
) -> Reduced:
    """Shrink a model on which passes raise, or give something else than it, to a script of a few lines.

    The script is written only if it fails in a new process, too.

    Args:
        model: any module, in the mode in which passes fail.
        passes: a pipeline string, as for `fxopt.optimize`.
        example_inputs: as for `optimize`; the first call is taken.
        path: where to; if others than drawn numbers are needed, they are written beside it, as NAME.pt.
        verify: as for `optimize`: with False, rewrites stay that are wrong at their place.
        measure: as for `optimize`.
        tolerance: the error that is allowed, relative to the scale of each result; by default that of rounding.
        seed: of what is drawn.
        factory: `package.module:function` that builds the model, from which the script takes what cannot be written as
            text.
        tell: is called with a line of text at each step.

    Raises:
        InputError: the passes do not fail on the model, or only in this process.
        UsageError: there are no example inputs.
    """
    expect(passes, str, "passes", "a pipeline string")
    target, case = as_path(path), Case(passes, model.training, verify, measure, tolerance, seed)
    calls = normalize_inputs(example_inputs, model)
    if not calls:
        raise UsageError("reduce needs a call on which the passes fail; give example_inputs")
    check_whole(calls)
    with tempfile.TemporaryDirectory(prefix="fxopt-reduce-") as folder, on_trial(Path(folder)):
        return write_script(target, case, reduced(case, model, calls[0], tell or (lambda _: None)), factory)


def write_script(path: Path, case: Case, found: Failing, factory: str | None) -> Reduced:
    """Write a failing model as a script that fails in a new process, too.

    Numbers are drawn where it fails with others; else they stand in a file beside it. What cannot be written as text
    is taken from the user's model.
    """
    reason = "it fails in this process only"
    beside = path.with_suffix(".pt")
    for each, numbers in itertools.product(filter(None, (found, found.origin)), (None, beside)):
        try:
            files = {path: _text(case, each, factory, numbers and numbers.name).encode()}
        except NotWritten as error:
            reason = str(error)
            continue
        if numbers is not None:
            files = {numbers: _numbers(each), **files}
        if each.kind.partition(" of ")[0] in _tried(files, path):
            for file, content in files.items():
                write_atomically(file, content)
            operations, part = (each.nodes, None) if each.path is None else (None, each.path or "(root)")
            return Reduced(str(path), found.kind, found.message, operations, part, numbers and str(numbers))
    raise InputError(f"no script can be written: {reason}")


def _numbers(found: Failing) -> bytes:
    file = io.BytesIO()
    torch.save({"state": found.model.state_dict(), "inputs": (found.call.args, found.call.kwargs)}, file)
    return file.getvalue()


def _tried(files: Mapping[Path, bytes], script: Path) -> str:
    """Run a script with its files elsewhere, and return what it raises: what is wrong never has their names."""
    with tempfile.TemporaryDirectory(prefix="fxopt-reduce-") as folder:
        for file, content in files.items():
            (Path(folder) / file.name).write_bytes(content)
        return failure_of(Path(folder) / script.name)


def failure_of(path: Path) -> str:
    """Run a script in a new process; return what it raises, in one line, or "" where that is nothing."""
    command = [sys.executable, str(path)]  # the user's own file, which is to be run
    with tempfile.TemporaryDirectory(prefix="fxopt-repro-") as folder, on_trial(Path(folder)):
        try:
            done = subprocess.run(  # noqa: S603
                command, capture_output=True, text=True, check=False, timeout=_SECONDS, errors="replace"
            )
        except subprocess.TimeoutExpired:
            raise InputError(f"{path} was stopped after {_SECONDS} s; run it by python to see what it does") from None
    if done.returncode == 0:
        return ""
    said = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
    return next((line for line in reversed(said) if _ERROR.match(line)), said[-1])  # notes may stand behind it


# -- the text ----------------------------------------------------------------------------------------------------------


def _text(case: Case, found: Failing, factory: str | None, numbers: str | None) -> str:
    text, imports = ModuleText(), ["import torch", "from torch import nn"]
    try:
        made = [f"model = {text.module(found.model)}"]
    except NotWritten:
        if found.path is None:
            raise
        text, made = ModuleText(), _taken(factory, found.path)
        imports += ["import sys", "from fxopt.deploy.factory import build_model"]
    definitions = [f"PASSES = {case.passes!r}", *text.classes, _build(made, numbers, case)]
    if numbers:
        inputs = "fxopt.Inputs(*NUMBERS['inputs'][0], **NUMBERS['inputs'][1])"
        definitions[0] += f"\nNUMBERS = torch.load(Path(__file__).with_name({numbers!r}), weights_only=True)"
        imports.append("from pathlib import Path")
    else:
        values = [tensor_text(each) for each in found.call.args]
        named = [f"{name}={tensor_text(each)}" for name, each in found.call.kwargs.items()]
        inputs = f"fxopt.Inputs({', '.join([*values, *named])})"
    definitions.append(f"def example_inputs():\n    torch.manual_seed({case.seed})\n    return {inputs}")
    options = {name: repr(value) for name, value in case.options.items()}
    judgement = {
        name: f"fxopt.{value}" if name == "numerics" else repr(value) for name, value in case.judgement.items()
    }
    summary = f"{found.kind}: {found.message}"
    return script_text(summary, BY_REDUCE, [*imports, *text.imports], definitions, options, judgement)


def _build(made: Sequence[str], numbers: str | None, case: Case) -> str:
    lines = [f"torch.manual_seed({case.seed})", *made]
    lines += ["model.load_state_dict(NUMBERS['state'])"] if numbers else []
    lines += [f"return model.{'train' if case.training else 'eval'}()"]
    return "\n".join(["def build():", *(f"    {line}" for line in lines)])


def _taken(factory: str | None, path: str) -> list[str]:
    """Return the lines that make a part of the user's model."""
    if factory is None:
        raise NotWritten("it needs code that the file of the model does not name")
    root = getattr(sys.modules.get(factory.partition(":")[0].partition(".")[0]), "__file__", None)
    folder = Path(root or "").resolve().parent
    folder = folder.parent if root is not None and Path(root).stem == "__init__" else folder
    part = f".get_submodule({path!r})" if path else ""
    return [f"sys.path.insert(0, {str(folder)!r})", f"model = build_model({factory!r}){part}"]
