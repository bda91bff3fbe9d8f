"""Training on several ranks that ends on all: where one raises, is killed or hangs, the others say which it was."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Literal

from ...compat.distributed import is_of_a_collective
from ...errors import StateError, one_line
from .ranks import Ranks, named, ranks

__all__ = ["ending_together"]

_SOON = timedelta(seconds=5)
"""How long a rank whose collective failed waits for the others to say the same: they fail together, or were killed."""

Said = tuple[Literal["finished", "failed", "stopped"], str]
"""What came of a rank, with its error: it is `stopped` where a collective failed, so that another one is the cause."""


@contextmanager
def ending_together() -> Generator[None]:
    """End a block of a training script on all ranks, or fail on all, with the rank that is the cause in the message.

    Put `optimize` and the training loop into it, on every rank of the default process group. PyTorch's own errors
    say that a connection was closed, or that an operation timed out, and not by which rank. In one process it does
    nothing.

    Raises StateError where another rank raised, was killed, hangs, or left the block while this one waited for it: a
    few seconds after the connection breaks, otherwise after the timeout of the process group.
    """
    group = ranks()
    if group is None:
        yield
        return
    try:
        yield
    except BaseException as error:
        stopped = is_of_a_collective(error)
        with suppress(RuntimeError):  # the store may be gone with the rank that holds it
            _say(group, ("stopped" if stopped else "failed", f"{type(error).__name__}: {one_line(error)}"))
        cause = _cause(group, _SOON) if stopped else ""
        if cause:
            raise StateError(cause) from error
        raise
    _say(group, ("finished", ""))
    cause = _cause(group, None)
    if cause:
        raise StateError(cause)


def _say(group: Ranks, said: Said) -> None:
    group.store.set(f"ended/{group.rank}", json.dumps(said))


def _cause(group: Ranks, patience: timedelta | None) -> str:
    """Return which rank is the cause of what, or "" where all finished, or none knows; None: as patient as torch."""
    try:
        said = _heard(group, patience)
    except RuntimeError as error:
        return f"the store of the process group, which rank 0 or torchrun holds, is gone: {one_line(error)}"
    for rank, (kind, error) in said.items():
        if kind == "failed":
            return f"rank {rank} failed: {error}"
    silent = [rank for rank in range(group.size) if rank not in said]
    if silent:
        return f"{named(silent)} did not answer: killed, or it hangs; see the last lines of its output"
    finished = [rank for rank, (kind, _) in said.items() if kind == "finished"]
    if not finished or len(finished) == group.size:
        return ""
    stopped = [rank for rank in said if rank not in finished]
    return f"{named(finished)} had ended while {named(stopped)} went on; give all ranks equally many steps"


def _heard(group: Ranks, patience: timedelta | None) -> dict[int, Said]:
    """Return what each rank says came of it, once all did or the time is over."""
    keys = {rank: f"ended/{rank}" for rank in range(group.size)}
    with suppress(RuntimeError):  # what is missing then is seen below
        group.store.wait(list(keys.values()), *([] if patience is None else [patience]))
    return {rank: json.loads(group.store.get(key)) for rank, key in keys.items() if group.store.check([key])}
