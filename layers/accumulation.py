"""Gradient accumulation over several processes, of replicated and of sharded models alike."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import nn

from .replica import REPLICA, Replica

__all__ = ["no_sync"]


@contextmanager
def no_sync(model: nn.Module) -> Generator[None]:
    """Accumulate gradients in each process by itself: nothing is sent in backward passes whose forward runs in here.

    For all batches but the last one before an optimizer step. In one process, or of a model that is neither
    replicated nor sharded, it does nothing.

    Args:
        model: what `fxopt.optimize` returned, with `ddp` or `fsdp` among the passes or not.
    """
    replica: Replica | None = vars(model).get(REPLICA)
    sharded: Any = getattr(model, "set_requires_gradient_sync", None)
    synced = replica.syncs if replica is not None else True
    _set_sync(replica, sharded, False)
    try:
        yield
    finally:
        _set_sync(replica, sharded, synced)


def _set_sync(replica: Replica | None, sharded: Any, syncs: bool) -> None:
    if replica is not None:
        replica.syncs = syncs
    if sharded is not None:
        sharded(syncs)
