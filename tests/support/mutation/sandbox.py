"""Run code in a child process whose fxopt has one fault in it."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import IO, Any

import torch
from torch import nn

SECONDS = 90
"""How long a child may take before it counts as hanging."""


class MutantLoader(importlib.machinery.SourceFileLoader):
    """Load one module of fxopt from another syntax tree than its file has."""

    def __init__(self, fullname: str, path: str, tree: ast.Module) -> None:
        super().__init__(fullname, path)
        self.tree = tree

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.tree, self.path, "exec", dont_inherit=True)


class MutantFinder:
    """Find that module before anybody else does."""

    def __init__(self, name: str, path: Path, tree: ast.Module) -> None:
        self.name, self.path, self.tree = name, path, tree

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:
        if fullname != self.name:
            return None
        loader = MutantLoader(fullname, str(self.path), self.tree)
        return importlib.util.spec_from_file_location(fullname, self.path, loader=loader)


def warm_up() -> None:
    """Import once what every child needs of other packages, and forget fxopt again; torch imports much on first use."""
    from . import judge
    from .zoo import zoo

    entry = next(entry for entry in zoo() if "vmap" in entry.passes and not entry.training)
    with torch.no_grad():
        judge.complaint(entry, entry.model(), judge.fxopt.optimize(entry.model(), "inference", verify=False))
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.SGD([weight]).step()
    for module in [module for name, module in sys.modules.items() if name.startswith("fxopt.cuda_ops")]:
        for library in [value for value in vars(module).values() if isinstance(value, torch.library.Library)]:
            library._destroy()  # its operators are registered again; torch does so by itself for `custom_op`
    for name in [name for name in sys.modules if name.partition(".")[0] == "fxopt" or name == judge.__name__]:
        del sys.modules[name]
    delattr(sys.modules[__package__], "judge")


def install(root: Path, path: str, tree: ast.Module) -> None:
    """Let the file `path` of the package be what `tree` says, in this process."""
    name = ".".join(("fxopt", *Path(path).with_suffix("").parts))
    sys.meta_path.insert(0, MutantFinder(name, root / path, tree))


class LinesRun:
    """Note which lines of some files of the package run; use as a context."""

    def __init__(self, root: Path, paths: Iterable[str]) -> None:
        self.paths = {str(root / path): path for path in paths}
        self.lines = set[tuple[str, int]]()

    def __enter__(self) -> LinesRun:
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, _: object) -> Any:
        path, lines = self.paths.get(frame.f_code.co_filename), self.lines
        if path is None or frame.f_code.co_name == "<module>":
            return None

        def step(frame: FrameType, event: str, _: object) -> Any:
            if event == "line":
                lines.add((path, frame.f_lineno))
            return step

        return step(frame, event, _)


def in_children(tasks: Sequence[Callable[[], Any]], jobs: int) -> Iterator[tuple[int, Any]]:
    """Run tasks in forked children, `jobs` at a time; yield (number, result as JSON gives it), as they finish."""
    waiting, running = list(enumerate(tasks))[::-1], dict[int, tuple[int, IO[str]]]()
    while waiting or running:
        while waiting and len(running) < jobs:
            number, task = waiting.pop()
            file = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - it is closed once it was read
            running[_start(task, file)] = number, file
        process, status = os.wait()
        number, file = running.pop(process)
        with file:
            file.seek(0)
            text = file.read()
        yield number, json.loads(text) if text and status == 0 else {"outcome": "hung", "detail": f"status {status}"}


def _start(task: Callable[[], Any], file: IO[str]) -> int:
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    signal.alarm(SECONDS)
    try:
        text = json.dumps(task())
    except BaseException:
        text = json.dumps({"outcome": "failed", "detail": traceback.format_exc()})
    file.write(text)
    file.flush()
    os._exit(0)


def package_root() -> Path:
    """Return the folder of the package, without importing it here."""
    spec = importlib.util.find_spec("fxopt")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("fxopt is not installed; pip install -e .")
    return Path(spec.origin).parent


def sources(root: Path, paths: Sequence[str]) -> Mapping[str, str]:
    return {path: (root / path).read_text(encoding="utf-8") for path in paths}
