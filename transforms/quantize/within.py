"""Which layers stay in floats, so that the whole model is within the budget: those that cost the most."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import nn

from ...progress_bar import progress_bar
from ...tracing.program import Program
from ...tracing.recording import preserved
from .judging import error_of

__all__ = ["costs", "left_in_floats", "left_out"]

Layer = TypeVar("Layer")

_MARGIN = 0.9
"""Of the budget: other calls err by a little more than the first."""


def left_in_floats(program: Program, layers: Mapping[nn.Module, nn.Module], budget: float) -> dict[nn.Module, float]:
    """Return the layers to leave out, each with what it alone moves the model's results by; none where none must be.

    Args:
        program: of the model, which is left as it is.
        layers: each layer, and what would stand in its place.
        budget: the error that is allowed, relative to the scale of the results.
    """
    if not program.whole_calls or not layers:
        return {}
    run, allowed = _Run(program, layers), _MARGIN * budget
    if run.error(list(layers)) <= allowed:
        return {}
    alone = costs(layers, run.error)
    left, _ = left_out(alone, run.error, allowed)
    return {layer: alone[layer] for layer in left}


def costs(layers: Iterable[Layer], error: Callable[[Sequence[Layer]], float]) -> dict[Layer, float]:
    """Return by how much a model's results are off where one layer alone computes in fewer bits."""
    every = list(layers)
    alone: dict[Layer, float] = {}
    with progress_bar("fxopt: measuring layers", len(every)) as move:
        for layer in every:
            alone[layer] = error([layer])
            move(1)
    return alone


def left_out(
    alone: Mapping[Layer, float], error: Callable[[Sequence[Layer]], float], allowed: float
) -> tuple[Sequence[Layer], float]:
    """Return the layers to leave in floats, the most costly first, and the error with all others in fewer bits.

    Args:
        alone: what each costs by itself; together they err by more than is allowed.
        error: of some of them.
        allowed: how much that may be.
    """
    order = sorted(alone, key=alone.__getitem__, reverse=True)
    # More layers in floats are taken to err less, so that the count can be found by halving.
    wrong, right, least = 0, len(order), 0.0
    while right - wrong > 1:
        middle = (wrong + right) // 2
        found = error(order[middle:])
        wrong, right, least = (wrong, middle, found) if found <= allowed else (middle, right, least)
    return order[:right], least


class _Run:
    """Run a model on its first call with some layers replaced, and compare."""

    def __init__(self, program: Program, layers: Mapping[nn.Module, nn.Module]) -> None:
        self._model, self._layers, self._call = program.model, layers, program.whole_calls[0]
        self._expected = self._run()

    def error(self, replaced: Sequence[nn.Module]) -> float:
        """Return by how much the results are off, relative to their scale."""
        with ExitStack() as stack:
            for layer in replaced:
                stack.callback(layer.register_forward_hook(self._instead, with_kwargs=True).remove)
            return error_of(self._expected, self._run())

    def _run(self) -> Any:
        with torch.no_grad(), preserved(self._model):
            return self._call.run(self._model)

    def _instead(self, layer: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
        return self._layers[layer](*args, **kwargs)
