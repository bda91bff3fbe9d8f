"""Find the range of what comes into each layer, by running the model on data and watching."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...compat.quantized import Observer
from ...errors import CalibrationError
from ...layers.quantized import Range
from ...progress_bar import progress_bar
from ...tracing.examples import Inputs
from ...tracing.isolation import preserved
from ...tracing.program import Program
from .batches import run_call

__all__ = ["ranges_of"]

_SAMPLE = 1 << 16
"""Of an activation so many elements are looked at, besides the smallest and the largest: histograms are slow."""


def ranges_of(
    program: Program, layers: Mapping[str, nn.Module], calls: Sequence[Inputs], kind: str
) -> dict[str, Range]:
    """Return the range of the input of each layer that the calls reach, by a kind of observer."""
    observers = {name: Observer(kind) for name in layers}
    seen: set[str] = set()
    watched = _watched(layers, observers, seen)
    with torch.no_grad(), preserved(program.model), watched, progress_bar("fxopt: calibrating", len(calls)) as move:
        for number, call in enumerate(calls):
            run_call(program.model, call, number)
            move(1)
    return {name: Range(*observers[name].scale_and_zero_point()) for name in layers if name in seen}


@contextmanager
def _watched(layers: Mapping[str, nn.Module], observers: Mapping[str, Observer], seen: set[str]) -> Generator[None]:
    def watch(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x: Tensor = args[0] if args else kwargs["input"]
        if x.numel():
            seen.add(name)
            observers[name].see(_sample(name, x.detach().float()))

    handles = [
        layer.register_forward_pre_hook(partial(watch, name), with_kwargs=True) for name, layer in layers.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _sample(name: str, x: Tensor) -> Tensor:
    low, high = torch.aminmax(x)
    if not (low.isfinite() and high.isfinite()):
        raise CalibrationError(f"what comes into '{name}' is not finite on the calibration data; look there first")
    flat = x.reshape(-1)
    return torch.cat([flat[:: max(1, -(-x.numel() // _SAMPLE))], low.reshape(1), high.reshape(1)])
