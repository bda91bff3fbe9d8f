"""Which layers stay in floats, so that the whole model is within the budget: those that cost the most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ...progress_bar import progress_bar
from ...tracing.program import Program
from ...tracing.recording import preserved
from .judging import error_of

__all__ = ["left_in_floats"]

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
    run = _Run(program, layers)
    every, allowed = list(layers), _MARGIN * budget
    if run.error(every) <= allowed:
        return {}
    alone: dict[nn.Module, float] = {}
    with progress_bar("fxopt: measuring layers", len(every)) as move:
        for layer in every:
            alone[layer] = run.error([layer])
            move(1)
    order = sorted(every, key=alone.__getitem__, reverse=True)
    # More layers in floats are taken to err less, so that the count can be found by halving.
    wrong, right = 0, len(order)
    while right - wrong > 1:
        middle = (wrong + right) // 2
        wrong, right = (wrong, middle) if run.error(order[middle:]) <= allowed else (middle, right)
    return {layer: alone[layer] for layer in order[:right]}


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
