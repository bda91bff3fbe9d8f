"""A reduced model as a script: what `reduce` writes and `repro` runs."""

from __future__ import annotations

import builtins
import importlib
import io
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..errors import InputError
from ..storage import write_atomically
from .prechecks import BY_REDUCE
from .reduction import Case, Failing

__all__ = ["failure_of", "write_script"]

_MOST_NUMBERS = 64
"""So many numbers of a tensor of integers are written out."""
_SECONDS = 600
_ERROR = re.compile(r"[\w.]+Error\b")

_SCRIPT = '''\
"""{summary}

{mark} `fxopt repro FILE`, or `python FILE`, runs it: it raises as long as this fails.
"""

{imports}

import fxopt
from fxopt.testing import assert_equivalent

PASSES = {passes!r}


{model}

def example_inputs():
    torch.manual_seed({seed})
    return {inputs}


def main():
    model = build()
    fast = fxopt.optimize(model, PASSES, example_inputs=example_inputs(){options})
    assert_equivalent(model, fast, example_inputs(){judgement})


if __name__ == "__main__":
    main()
'''


class _NotWritten(Exception):
    """Something cannot be written as text; the message says what."""


def write_script(path: Path, case: Case, found: Failing, factory: str | None) -> dict[str, Any]:
    """Write a failing model as a script that fails in a new process, too; return what is in it.

    Numbers are drawn where it fails with others; else they stand in a file beside it. What cannot be written as text
    is taken from the user's model.
    """
    reason = "it fails in this process only"
    beside = path.with_suffix(".pt")
    for each, numbers in itertools.product(filter(None, (found, found.origin)), (None, beside)):
        try:
            files = {path: _text(case, each, factory, numbers and numbers.name).encode()}
        except _NotWritten as error:
            reason = str(error)
            continue
        if numbers is not None:
            files = {numbers: _numbers(each), **files}
        if each.kind.partition(" of ")[0] in _tried(files, path):
            for file, content in files.items():
                write_atomically(file, content)
            operations, part = (each.nodes, None) if each.path is None else (None, each.path or "(root)")
            return {"path": str(path), "operations": operations, "part": part, "numbers": numbers and str(numbers)}
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
    # The user's own file, which is to be run.
    try:
        done = subprocess.run(  # noqa: S603
            [sys.executable, str(path)], capture_output=True, text=True, check=False, timeout=_SECONDS, errors="replace"
        )
    except subprocess.TimeoutExpired:
        raise InputError(f"{path} was stopped after {_SECONDS} s; run it by python to see what it does") from None
    if done.returncode == 0:
        return ""
    said = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
    return next((line for line in reversed(said) if _ERROR.match(line)), said[-1])  # notes may stand behind it


# -- the text ----------------------------------------------------------------------------------------------------------


def _text(case: Case, found: Failing, factory: str | None, numbers: str | None) -> str:
    writer = _Writer()
    try:
        made = [f"model = {writer.module(found.model)}"]
    except _NotWritten:
        if found.path is None:
            raise
        writer = _Writer()
        made = _taken(factory, found.path)
        writer.imports |= {"import sys": None, "from fxopt.deploy.factory import build_model": None}
    built = [*writer.classes, _build(made, numbers, case)]
    if numbers:
        inputs = "fxopt.Inputs(*NUMBERS['inputs'][0], **NUMBERS['inputs'][1])"
        file = f"NUMBERS = torch.load(Path(__file__).with_name({numbers!r}), weights_only=True)"
        writer.imports |= {"from pathlib import Path": None}
        built.insert(0, file)
    else:
        values = [_tensor_text(each) for each in found.call.args]
        named = [f"{name}={_tensor_text(each)}" for name, each in found.call.kwargs.items()]
        inputs = f"fxopt.Inputs({', '.join([*values, *named])})"
    return _SCRIPT.format(
        mark=BY_REDUCE, seed=case.seed,
        summary=f"{found.kind}: {found.message}".replace("\\", "/").replace('"""', "'''"),
        imports="\n".join(["import torch", "from torch import nn", *writer.imports]), passes=case.passes,
        model="\n\n\n".join(built) + "\n", inputs=inputs, options=_keywords(case.options),
        judgement=_keywords(case.judgement),
    )  # fmt: skip


def _keywords(given: Mapping[str, Any]) -> str:
    return "".join(f", {name}={f'fxopt.{each}' if name == 'numerics' else repr(each)}" for name, each in given.items())


def _build(made: Sequence[str], numbers: str | None, case: Case) -> str:
    lines = [f"torch.manual_seed({case.seed})", *made]
    lines += ["model.load_state_dict(NUMBERS['state'])"] if numbers else []
    lines += [f"return model.{'train' if case.training else 'eval'}()"]
    return "\n".join(["def build():", *(f"    {line}" for line in lines)])


def _taken(factory: str | None, path: str) -> list[str]:
    """Return the lines that make a part of the user's model."""
    if factory is None:
        raise _NotWritten("it needs code that the file of the model does not name")
    root = getattr(sys.modules.get(factory.partition(":")[0].partition(".")[0]), "__file__", None)
    folder = Path(root or "").resolve().parent
    folder = folder.parent if root is not None and Path(root).stem == "__init__" else folder
    part = f".get_submodule({path!r})" if path else ""
    return [f"sys.path.insert(0, {str(folder)!r})", f"model = build_model({factory!r}){part}"]


class _Writer:
    """Write modules as text: classes for graphs, expressions for layers of torch."""

    def __init__(self) -> None:
        self.imports = dict[str, None]()
        self.classes = list[str]()

    def module(self, module: nn.Module) -> str:
        """Return the expression that makes a module."""
        kind = type(module)
        if isinstance(module, fx.GraphModule):
            return f"{self._class(module)}()"
        children = dict(module.named_children())
        if kind in (nn.Sequential, nn.ModuleList) and list(children) == [str(i) for i in range(len(children))]:
            return f"nn.{kind.__name__}({self._listed(kind, children)})"
        if children and kind in (nn.Module, nn.ModuleDict) and not list(module.parameters(recurse=False)):
            parts = ", ".join(f"{name!r}: {self.module(child)}" for name, child in children.items())
            return f"nn.ModuleDict({{{parts}}})"
        return _layer(module)

    def _listed(self, kind: type[nn.Module], children: Mapping[str, nn.Module]) -> str:
        parts = ", ".join(map(self.module, children.values()))
        return f"[{parts}]" if kind is nn.ModuleList else parts

    def _class(self, module: fx.GraphModule) -> str:
        made = [f"self.add_module({name!r}, {self.module(child)})" for name, child in module.named_children()]
        made += [
            f"self.{name} = nn.Parameter({_tensor_text(each)})" for name, each in module.named_parameters(recurse=False)
        ]
        made += [
            f"self.register_buffer({name!r}, {_tensor_text(each)})"
            for name, each in module.named_buffers(recurse=False)
        ]
        code = module.graph.python_code("self")
        for name, value in code.globals.items():
            if re.search(rf"\b{name}\b", code.src):  # torch.fx names some that most graphs do not need
                self._import(name, value)
        forward = code.src.strip().splitlines()
        name = f"Reduced{len(self.classes) or ''}"
        body = ["def __init__(self):", "    super().__init__()", *(f"    {line}" for line in made), "", *forward]
        indented = (f"    {line}".rstrip() for line in body)
        self.classes.append("\n".join([f"class {name}(nn.Module):", *indented]))
        return name

    def _import(self, name: str, value: Any) -> None:
        """Note how a name in the code of a graph is imported."""
        if name == "torch" or getattr(builtins, name, None) is value:
            return
        if isinstance(value, ModuleType):
            self.imports[f"import {value.__name__} as {name}"] = None
        elif isinstance(value, float):
            self.imports[f"from math import {name}"] = None
        elif name == "device":
            self.imports["from torch import device"] = None
        elif value is type(None):
            self.imports["from types import NoneType"] = None
        else:
            self.imports[f"from {_home(value)} import {getattr(value, '__name__', '')} as {name}"] = None


def _home(value: Any) -> str:
    """Return the module that has a function under its name."""
    name, home = getattr(value, "__name__", ""), getattr(value, "__module__", None) or ""
    try:
        found = getattr(importlib.import_module(home), name, None)
    except (ImportError, ValueError):
        found = None
    if found is not value:
        raise _NotWritten(f"{value!r} cannot be imported by its name")
    return home


def _layer(module: nn.Module) -> str:
    """Return what makes a layer of torch: what it prints, where that makes one of the same tensors."""
    text = f"nn.{' '.join(repr(module).split())}"
    dtypes = {each.dtype for each in module.parameters() if each.dtype is not torch.float32}
    text += f".to({dtypes.pop()})" if len(dtypes) == 1 else ""
    try:
        if type(module) is not getattr(nn, type(module).__name__, None):
            raise TypeError
        made: Any = eval(text, {"nn": nn, "torch": torch})  # noqa: S307  what torch prints of its own layer
    except Exception:
        raise _NotWritten(f"a {type(module).__module__}.{type(module).__name__} cannot be written as text") from None
    if _form(made) != _form(module):
        raise _NotWritten(f"a {type(module).__name__} has other tensors than one that is made by {text}")
    return text


def _form(module: nn.Module) -> dict[str, Any]:
    return {name: (each.shape, each.dtype) for name, each in module.state_dict().items()}


def _tensor_text(value: Any) -> str:
    """Return what makes a tensor like this one: floats are drawn, a few integers are written out."""
    if not isinstance(value, Tensor):
        if value is None or type(value) in (bool, int, float, str):
            return repr(value)
        raise _NotWritten(f"an argument of type {type(value).__name__} cannot be written as text")
    if value.is_floating_point() or value.is_complex():
        return f"torch.randn({list(value.shape)}, dtype={value.dtype})"
    if value.numel() <= _MOST_NUMBERS:
        return f"torch.tensor({value.tolist()}, dtype={value.dtype})"
    raise _NotWritten("a tensor of integers is too large to be written out")
