"""The help of each command: it ends with an example, and the examples run one after another."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from fxopt.cli import app

Fxopt = Callable[..., Any]


def commands(group: Any, *before: str) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *before, name)
        else:
            yield (*before, name)


def test_each_help_ends_with_an_example_that_runs(fxopt: Fxopt, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    for name, value in {"CACHE": str(tmp_path / "decisions"), "VERIFY": "0", "MEASURE": "0"}.items():
        monkeypatch.setenv(f"FXOPT_{name}", value)
    for names in commands(typer.main.get_command(app)):
        shown = " ".join(fxopt(*names, "--help").out.split())
        found = re.search(r"Example: fxopt (.*)\Z", shown)
        assert found is not None, names
        arguments = shlex.split(found[1])
        assert tuple(arguments[: len(names)]) == names
        if names == ("repro",):  # reduce has run it in a new process
            assert (tmp_path / arguments[-1]).is_file()
            continue
        done = fxopt(*arguments)
        assert done.code == (1 if names == ("diff",) else 0), (found[1], done.err)
