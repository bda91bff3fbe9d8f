"""By which clock, and in how many threads, something is timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch

__all__ = ["Clock", "is_work_of_this_thread", "one_thread", "race_clock"]

Clock = Callable[[], float]
_FINE_SECONDS = 1e-5  # a clock of coarser steps tells little of samples of 200 microseconds
_ELSEWHERE = 0.5
"""Where other threads of the process work for half as long as the calling one, they may do the model's work."""


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


@contextmanager
def one_thread() -> Generator[None]:
    """Let torch compute in one thread for a while."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
