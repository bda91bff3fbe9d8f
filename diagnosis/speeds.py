"""Two models, timed side by side on the same calls, and what they take in memory."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text
from torch import nn

from ..errors import UsageError
from ..freed_memory import give_memory_back
from ..passes.timing import Interval, Runner, held_memory, time_candidates
from ..reporting.table import plain_text
from ..reporting.wording import counted, duration, printable
from ..runtime.record import record_of
from ..storage import byte_text
from ..tracing.examples import check_whole, normalize_inputs
from ..tracing.isolation import in_phase

__all__ = ["Race", "race"]

_SECONDS, _ROUNDS = 2.0, 50
"""Calls are sampled for so long, short ones in so many rounds at least: an interval of a percent or two."""
_STATUS, _FORGET_PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Side:
    """One of two models: its time in microseconds, the bytes that it holds, and those a call takes at most besides."""

    model: str
    us: float
    held_bytes: int
    peak_bytes: int | None


@dataclass(frozen=True)
class Race:
    """What was measured of two models.

    Attributes:
        before: the first model.
        after: the second one.
        speed: how many times as fast the second is, with an interval of 95%.
        calls: so many calls were timed together.
        training: whether a call is a forward with its backward.
        threads: so many threads computed.
        cold: whether caches were emptied before each call.
    """

    before: Side
    after: Side
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


def race(
    before: nn.Module,
    after: nn.Module,
    example_inputs: object,
    *,
    names: tuple[str, str] = ("before", "after"),
    training: bool | None = None,
    cold: bool = False,
) -> Race:
    """Time two models on the same calls, interleaved, then measure the memory of each; `print` shows a table.

    Args:
        before: the model that the other is compared with.
        after: the other one.
        example_inputs: as for `fxopt.optimize`.
        names: what the table calls the models.
        training: time a forward with its backward, in training mode. By default in the mode of the optimized model, or
            of the first.
        cold: empty the caches before each call, as other work does.

    Raises:
        UsageError: there are no example inputs.
    """
    calls = normalize_inputs(example_inputs, before)
    if not calls:
        raise UsageError("models are timed on example inputs, and there are none; give example_inputs (--inputs)")
    check_whole(calls)
    models = dict(zip(names, (before, after), strict=True))
    if training is None:
        training = next((each for each in models.values() if record_of(each) is not None), before).training
    with ExitStack() as modes:
        for model in models.values():
            modes.enter_context(in_phase(model, training))
        runs = {name: Runner(model, calls, training=training) for name, model in models.items()}
        first, second = names
        timings = time_candidates(runs, seconds=_SECONDS, least_rounds=_ROUNDS, cold=cold, clear=math.inf)
        speed = timings.ratio(first, second)
        times = {first: timings.microseconds(first), second: timings.microseconds(first) / speed.mid}
        one, other = (Side(name, times[name], held_memory(models[name]), _peak(run)) for name, run in runs.items())
    threads = 1 if timings.in_one_thread else torch.get_num_threads()
    return Race(one, other, speed, len(calls), training, threads, cold)


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
    if not give_memory_back():
        return None
    try:
        _FORGET_PEAK.write_text("5", encoding="ascii")
        before = _status("VmRSS")
        run()
        return max(0, _status("VmHWM") - before)
    except (OSError, KeyError):  # no such files in some containers
        return None


def _status(name: str) -> int:
    lines = (line.partition(":") for line in _STATUS.read_text(encoding="ascii").splitlines())
    return int({key: value for key, _, value in lines}[name].split()[0]) * 1024
