"""What `bench` does: two models, timed side by side on the same calls, and what they take in memory."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text
from torch import nn

from .. import api
from ..errors import NothingDoneWarning, UnverifiedWarning, UsageError
from ..interrupts import stop_if_interrupted
from ..passes.timing import Interval, Runner, held_memory, time_candidates
from ..passes.verification import with_rows
from ..reporting.notes import in_one_line
from ..reporting.table import plain_text
from ..reporting.wording import counted, duration, printable
from ..runtime.record import record_of
from ..storage import byte_text
from ..tracing.examples import Inputs
from ..tracing.isolation import in_phase
from .app import PhaseOption, preset_for, took
from .arguments import calls_for, open_both, open_model

__all__ = ["Race", "in_threads", "pair_of", "race"]

_SECONDS, _ROUNDS = 2.0, 50
"""Calls are sampled for so long, short ones in so many rounds at least: an interval of a percent or two."""
_STATUS, _FORGET_PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class _Side:
    """One of two models: its time in microseconds, the bytes that it holds, and those a call takes at most besides."""

    model: str
    us: float
    held_bytes: int
    peak_bytes: int | None


@dataclass(frozen=True)
class Race:
    """What was measured of two models."""

    before: _Side
    after: _Side
    speed: Interval
    calls: int
    training: bool
    threads: int
    cold: bool

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return {
            "before": asdict(self.before), "after": asdict(self.after), **self.speed.figures, "calls": self.calls,
            "phase": "train" if self.training else "eval", "threads": self.threads, "cold": self.cold,
        }  # fmt: skip

    def __str__(self) -> str:
        return plain_text(self, width=200)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        low, high = self.speed.low, self.speed.high
        doubt = "; no difference is shown" if low <= 1.0 <= high else ""
        yield Text(f"{self.speed.mid:.3g}x as fast, 95% interval {low:.3g}x to {high:.3g}x{doubt}", style="bold")
        how = [
            "training (forward and backward)" if self.training else "inference", counted(self.threads, "thread"),
            *(["cold caches"] if self.cold else []), *([f"{self.calls} calls together"] if self.calls > 1 else []),
        ]  # fmt: skip
        yield Text(", ".join(how))
        table = Table(box=box.SIMPLE_HEAD if options.is_terminal else box.MARKDOWN)
        for title in ("model", "time", "memory held", "more in a call"):
            table.add_column(title, overflow="fold")
        for side in (self.before, self.after):
            more = "not known here" if side.peak_bytes is None else byte_text(side.peak_bytes)
            table.add_row(Text(printable(side.model)), duration(side.us / 1e6), byte_text(side.held_bytes), more)
        yield table


def pair_of(
    a: str,
    b: str | None,
    *,
    passes: str | None,
    weights: Path | None,
    inputs: Path | None,
    phase: PhaseOption | None,
    rows: int | None,
    cold: bool,
    seed: int,
    trust: Sequence[str] | None,
) -> tuple[dict[str, nn.Module], Sequence[Inputs]]:
    """Return two models by name, or one before and after, and the calls to time them on."""
    if b is not None:
        before, after, calls = open_both(a, b, weights, inputs, trust, seed)
        return {a: before, b if a != b else f"{b}, again": after}, _with_rows(calls, rows)
    model, example_inputs = open_model(a, weights, inputs, trust, seed)
    calls = _with_rows(calls_for(model, example_inputs), rows)
    took("making the model")
    if phase is not None:
        model.train(phase is PhaseOption.TRAIN)
    if passes is None and record_of(model) is not None:
        return {f"{a}, as it was": api.restore(model), a: model}, calls
    with in_one_line(UnverifiedWarning, NothingDoneWarning):
        fast = api.optimize(
            model, passes or preset_for(model, phase), example_inputs=list(calls), measure="cold" if cold else None,
            seed=seed,
        )  # fmt: skip
    stop_if_interrupted()
    return {a: model, f"{a}, optimized": fast}, calls


def race(models: dict[str, nn.Module], calls: Sequence[Inputs], phase: PhaseOption | None, *, cold: bool) -> Race:
    """Time two models on calls, interleaved, then measure the memory of each; by default in the mode of the optimized
    one, or of the first.
    """
    of_mode = next((each for each in models.values() if record_of(each) is not None), next(iter(models.values())))
    training = of_mode.training if phase is None else phase is PhaseOption.TRAIN
    with ExitStack() as modes:
        for model in models.values():
            modes.enter_context(in_phase(model, training))
        runs = {name: Runner(model, calls, training=training) for name, model in models.items()}
        before, after = runs
        timings = time_candidates(runs, seconds=_SECONDS, least_rounds=_ROUNDS, cold=cold, clear=math.inf)
        speed = timings.ratio(before, after)
        times = {before: timings.microseconds(before), after: timings.microseconds(before) / speed.mid}
        one, other = (_Side(name, times[name], held_memory(models[name]), _peak(run)) for name, run in runs.items())
    threads = 1 if timings.in_one_thread else torch.get_num_threads()
    return Race(one, other, speed, len(calls), training, threads, cold)


def _with_rows(calls: Sequence[Inputs], rows: int | None) -> Sequence[Inputs]:
    """Return the calls with so many rows each; as they are for None."""
    if rows is None:
        return calls
    made = [with_rows((call.args, call.kwargs), rows) for call in calls]
    if None in made:
        raise UsageError("--batch: the example inputs have no tensor with rows; leave it out")
    return [Inputs(*args, **kwargs) for args, kwargs in filter(None, made)]


@contextmanager
def in_threads(count: int | None) -> Generator[None]:
    """Let torch compute in so many threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _peak(run: Runner) -> int | None:
    """Return the bytes that a call takes at most beside what is there: of a GPU, or of the process where Linux tells;
    else None.
    """
    with run.leaving_no_trace():
        if run.gpus:
            return _peak_on_gpus(run)
        return _peak_of_process(run) if sys.platform == "linux" else None


def _peak_on_gpus(run: Runner) -> int:
    before = sum(torch.cuda.memory_allocated(gpu) for gpu in run.gpus)
    for gpu in run.gpus:
        torch.cuda.reset_peak_memory_stats(gpu)
    run()
    return sum(torch.cuda.max_memory_allocated(gpu) for gpu in run.gpus) - before


def _peak_of_process(run: Callable[[], None]) -> int | None:
    """Return how far the memory of the process grows in a call, once the allocator has given back what is free."""
    run()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        _FORGET_PEAK.write_text("5", encoding="ascii")
        before = _status("VmRSS")
        run()
        return max(0, _status("VmHWM") - before)
    except (OSError, AttributeError, KeyError):  # no such files in some containers, no such function in some libraries
        return None


def _status(name: str) -> int:
    lines = (line.partition(":") for line in _STATUS.read_text(encoding="ascii").splitlines())
    return int({key: value for key, _, value in lines}[name].split()[0]) * 1024
