"""Work in several threads, and a group of one process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import distributed


def run_in_threads(work: Callable[[Any], object], arguments: Iterable[Any]) -> None:
    """Call a function with each argument, all at once, and wait for the last."""
    threads = [threading.Thread(target=work, args=(argument,)) for argument in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextlib.contextmanager
def group_of_one_process() -> Iterator[None]:
    """Be the only process of a group, or one of those that there are."""
    if distributed.is_initialized():
        yield
        return
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()
