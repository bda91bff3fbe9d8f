"""What a way makes of a model."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Inputs", "Prepared", "Way", "called", "finished", "first_tensor"]

Inputs = dict[str, Any] | tuple[Any, ...]


@dataclass(frozen=True)
class Prepared:
    """A model that was made small or fast.

    Attributes:
        model: to be called.
        seconds: what it took, with the first call.
        size: in bytes on disk.
    """

    model: Callable[..., Any]
    seconds: float
    size: int


Way = Callable[[nn.Module, Inputs], Prepared]
"""From a float32 model in evaluation mode, which stays as it is, and its inputs."""


def called(model: Callable[..., Any], inputs: Inputs) -> Any:
    """Call a model without gradients."""
    with torch.no_grad():
        return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def first_tensor(result: Any) -> Tensor:
    """Return the first tensor of a result."""
    return result if isinstance(result, Tensor) else next(iter(result.values()))


def finished(start: float, model: Any, inputs: Inputs, *, compiled: bool = False, size: int = 0) -> Prepared:
    """Call a model for the first time; without a size, that of its state dict counts."""
    run: Callable[..., Any] = torch.compile(model) if compiled else model
    called(run, inputs)
    return Prepared(run, time.perf_counter() - start, size or _saved(model))


def _saved(model: nn.Module) -> int:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return len(file.getvalue())
