"""The private names of `torch.utils.checkpoint` that fxopt uses."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch.utils.checkpoint
from torch.utils.checkpoint import checkpoint as _checkpoint  # pyright: ignore[reportUnknownVariableType]

__all__ = ["checkpoint", "checkpoint_generator", "is_reentrant_checkpoint", "reentrant_checkpoints_off"]


def checkpoint(function: Callable[..., Any], args: tuple[Any, ...], settings: Mapping[str, Any]) -> Any:
    """Call a function whose intermediate values are computed again for the backward pass; torch's is not typed."""
    return cast("Any", _checkpoint(function, *args, use_reentrant=False, **settings))


def checkpoint_generator() -> tuple[Any, str]:
    """Return owner and name of the function that checkpoints without reentering: a generator that yields once."""
    return torch.utils.checkpoint, "_checkpoint_without_reentrant_generator"


@contextmanager
def reentrant_checkpoints_off() -> Generator[None]:
    """Let functions that are checkpointed by reentering just run: `torch.autograd.grad` does not get through them."""

    def apply(function: Callable[..., Any], _: Any, *args: Any) -> Any:
        return function(*args)

    reentrant = torch.utils.checkpoint.CheckpointFunction
    reentrant.apply = staticmethod(apply)
    try:
        yield
    finally:
        del reentrant.apply


def is_reentrant_checkpoint(function: type) -> bool:
    """Say whether an autograd function is the one behind `checkpoint(..., use_reentrant=True)`."""
    return issubclass(function, torch.utils.checkpoint.CheckpointFunction)
