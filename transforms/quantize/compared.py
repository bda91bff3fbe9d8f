"""A model on one call with some of its layers replaced, beside the model as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from ...errors import CalibrationError
from ...passes.verification import smaller
from ...tracing.examples import Inputs
from ...tracing.isolation import preserved
from ..calibration import run_call
from .judging import error_of

__all__ = ["ComparedRun"]

Layer = TypeVar("Layer")


class ComparedRun(Generic[Layer]):
    """Run a model on a call with some of its layers replaced, and compare.

    Args:
        model: is left as it is.
        call: of it.
        replaced: lets a layer compute something else for a while.
    """

    def __init__(
        self, model: nn.Module, call: Inputs, replaced: Callable[[Layer], AbstractContextManager[object]]
    ) -> None:
        self._model, self._call, self._replaced = model, call, replaced
        self._expected = self._run()

    def on_less(self) -> ComparedRun[Layer]:
        """Return the same on a smaller call, if the model takes one."""
        for args, kwargs in smaller((self._call.args, self._call.kwargs)):
            with suppress(CalibrationError):
                return ComparedRun(self._model, Inputs(*args, **kwargs), self._replaced)
        return self

    def error(self, layers: Iterable[Layer]) -> float:
        """Return by how much the results are off where these layers are replaced, relative to their scale."""
        with ExitStack() as stack:
            for layer in layers:
                stack.enter_context(self._replaced(layer))
            return error_of(self._expected, self._run())

    def _run(self) -> Any:
        with torch.no_grad(), preserved(self._model):
            return run_call(self._model, self._call, 0)
