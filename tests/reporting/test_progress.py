"""Progress: one line for those who watch a run that lasts, and nothing for anybody else."""

from __future__ import annotations

import io
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.passes.driver import Progress
from fxopt.reporting import progress
from fxopt.reporting.progress import ProgressLine


class Terminal(io.StringIO):
    """What a terminal was sent, and what it shows."""

    def isatty(self) -> bool:
        return True

    @property
    def shown(self) -> list[str]:
        """Return the line as it stood after each time that the cursor was moved to its beginning."""
        line, lines = "", list[str]()
        for written in self.getvalue().split("\r")[1:]:
            line = written + line[len(written) :]
            lines.append(line.rstrip())
        return lines


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x) for head in self.heads])


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return Terminal()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_FIRST_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_BETWEEN_SECONDS", 0.0)


def line_on(file: io.StringIO | None, seconds: list[float]) -> Callable[[float, Progress], None]:
    line = ProgressLine(file, clock=lambda: seconds[0])

    def show(now: float, said: Progress) -> None:
        seconds[0] = now
        line(said)

    return show


def test_nothing_is_shown_within_a_second_nor_ten_times_in_one(terminal: Terminal) -> None:
    show = line_on(terminal, [0.0])
    show(0.9, Progress("fuse_ensembles", 0, 12))
    assert terminal.getvalue() == ""
    for now, done in ((1.5, 2), (1.51, 3), (4.2, 4)):
        show(now, Progress("fuse_ensembles", done, 12))
    show(5.1, Progress("timing the whole model"))
    assert terminal.shown == [
        "fxopt: fuse_ensembles: 2 of 12 sites, 2 s",
        "fxopt: fuse_ensembles: 4 of 12 sites, 4 s",
        "fxopt: timing the whole model, 5 s",
    ]


def test_the_line_fits_into_a_narrow_terminal(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    line_on(terminal, [0.0])(3.0, Progress("fuse_ensembles", 1, 2))
    assert terminal.shown == ["fxopt: fuse_ensemb…"]


def test_pipes_dumb_terminals_and_nobody_see_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, closed, dumb = io.StringIO(), Terminal(), Terminal()
    closed.close()
    for file in (pipe, closed, None):
        line_on(file, [0.0])(3.0, Progress("fuse_ensembles", 1, 2))
    monkeypatch.setenv("FORCE_COLOR", "1")
    line_on(pipe, [0.0])(3.0, Progress("fuse_ensembles", 1, 2))
    monkeypatch.setenv("TERM", "dumb")
    line_on(dumb, [0.0])(3.0, Progress("fuse_ensembles", 1, 2))
    assert pipe.getvalue() == dumb.getvalue() == ""


def test_a_notebook_gets_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    output = io.StringIO()
    line_on(output, [0.0])(3.0, Progress("inline", 1, 2))
    assert output.getvalue() == "\rfxopt: inline: 1 of 2 sites, 3 s"


def test_names_cannot_move_the_cursor(terminal: Terminal) -> None:
    line_on(terminal, [0.0])(3.0, Progress("a\x1b[2Jb\nc", 1, 2))
    assert terminal.getvalue().isprintable() is False  # the carriage return
    assert terminal.getvalue()[1:].isprintable()


@pytest.mark.usefixtures("at_once")
def test_optimize_shows_its_passes_and_clears_the_line(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", terminal)
    state = random.getstate()
    fxopt.optimize(Net().eval(), "fuse_ensembles", example_inputs=(torch.randn(2, 4),), time_budget=0.2)
    assert terminal.shown[0].startswith("fxopt: fuse_ensembles: 0 of 1 sites")
    assert any("the whole model" in line for line in terminal.shown)
    assert terminal.shown[-1] == ""
    assert random.getstate() == state


@pytest.mark.usefixtures("at_once")
def test_an_interrupt_clears_the_line(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("fxopt.passes.timing.time_candidates", stop)
    with pytest.raises(KeyboardInterrupt):
        fxopt.optimize(Net().eval(), "fuse_ensembles", example_inputs=(torch.randn(2, 4),))
    assert len(terminal.shown) > 1
    assert terminal.shown[-1] == ""


@pytest.mark.usefixtures("at_once")
def test_optimize_into_a_pipe_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr("sys.stderr", pipe)
    fxopt.optimize(Net().eval(), "fuse_ensembles", example_inputs=(torch.randn(2, 4),), measure=False)
    assert pipe.getvalue() == ""
