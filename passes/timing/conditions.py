"""By which clock, in how many threads, and with which caches something is timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch

__all__ = [
    "Clock", "Eviction", "is_work_of_this_thread", "last_level_bytes", "one_thread", "race_clock", "seconds_of",
]  # fmt: skip

Clock = Callable[[], float]
_FINE_SECONDS = 1e-5  # a clock of coarser steps tells little of samples of 200 microseconds
_ELSEWHERE = 0.5
"""Where other threads of the process work for half as long as the calling one, they may do the model's work."""
_LAST_LEVEL = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
_LARGE_CACHE = 64 * 2**20  # bytes of a last-level cache that is not told
_BEYOND = 1.5
"""So many times as much is written: what a cache drops to make room is chosen by rules that are only near to age."""


def race_clock(*, waits_for_gpu: bool = False) -> Clock:
    """Return the clock by which candidates are compared: processor time, which other programs do not disturb.

    Several threads wait for each other, and for a GPU: they need the clock on the wall.
    """
    is_coarse = time.get_clock_info("thread_time").resolution > _FINE_SECONDS
    several = waits_for_gpu or torch.get_num_threads() > 1
    return time.perf_counter if is_coarse or several else time.thread_time


def is_work_of_this_thread(here: float, in_process: float) -> bool:
    """Say whether the calling thread did what took so many seconds of its time: others of the process did little."""
    return in_process - here <= _ELSEWHERE * here


def seconds_of(run: Callable[[], object]) -> float:
    """Return what a run takes: by the clock of races where this thread does the work, else by that on the wall."""
    clocks = race_clock(), time.perf_counter, time.thread_time, time.process_time
    begun = [clock() for clock in clocks]
    run()
    raced, wall, here, in_process = (clock() - start for clock, start in zip(clocks, begun, strict=True))
    return raced if is_work_of_this_thread(here, in_process) else wall


@contextmanager
def one_thread() -> Generator[None]:
    """Let torch compute in one thread for a while."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# -- as between other work: what a call needs must come from memory again ----------------------------------------------


class Eviction:
    """Push all else out of the caches of the CPU, and of GPUs, by writing buffers larger than they are."""

    def __init__(self, gpus: Iterable[torch.device] = ()) -> None:
        sizes = {torch.device("cpu"): last_level_bytes(), **{gpu: _bytes_of(gpu) for gpu in gpus}}
        self._buffers = [
            torch.zeros(int(_BEYOND * size), dtype=torch.uint8, device=device) for device, size in sizes.items()
        ]

    def __call__(self) -> None:
        for buffer in self._buffers:
            buffer.add_(1)
            if buffer.is_cuda:
                torch.cuda.synchronize(buffer.device)


def last_level_bytes(told: Path = _LAST_LEVEL) -> int:
    """Return the size of the CPU's last-level cache, in bytes, as Linux tells it."""
    try:
        text = told.read_text(encoding="ascii").strip()
        return int(text.removesuffix("K")) * 1024
    except (OSError, ValueError):
        return _LARGE_CACHE


def _bytes_of(gpu: torch.device) -> int:
    properties = cast("Any", torch.cuda).get_device_properties(gpu)
    return int(properties.L2_cache_size)
