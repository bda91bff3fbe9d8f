"""What a model is worth with some of its layers replaced: by its results, or by a metric of the user."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from ...errors import CalibrationError, InputError, one_line
from ...passes.kinds import error_of
from ...passes.sites import Refusal, Site
from ...passes.verification import smaller
from ...tracing.examples import Inputs
from ...tracing.isolation import preserved
from ..calibration import run_call
from .options import Options

__all__ = ["ComparedRun", "Judge", "Measurement", "number_of", "with_metric"]

Layer = TypeVar("Layer")

Measurement = dict[str, float]
"""A user's metric `before` and `after`, and the `drop` that is allowed."""


class ComparedRun(Generic[Layer]):
    """Run a model on calls with some of its layers replaced, and compare; `replaced` replaces one for a while.
    `base` says what is in the place of the others, where they are not as they were.
    """

    def __init__(
        self,
        model: nn.Module,
        calls: Sequence[Inputs],
        replaced: Callable[[Layer], AbstractContextManager[object]],
        base: Mapping[Layer, Callable[[], AbstractContextManager[object]]] | None = None,
    ) -> None:
        self._model, self._calls, self._replaced, self._base = model, calls, replaced, base or {}
        self._expected = self._run()

    def on_less(self) -> ComparedRun[Layer]:
        """Return the same on the first call alone, a smaller one if the model takes it."""
        first = self._calls[0]
        for args, kwargs in (*smaller((first.args, first.kwargs)), (first.args, first.kwargs)):
            with suppress(CalibrationError):
                return ComparedRun(self._model, [Inputs(*args, **kwargs)], self._replaced, self._base)
        return self

    def error(self, layers: Iterable[Layer]) -> float:
        """Return by how much the results are off where these layers are replaced, relative to their scale."""
        with self._all_replaced(layers):
            return max(map(error_of, self._expected, self._run()))

    def measured(self, metric: Callable[[nn.Module], float], layers: Iterable[Layer] = ()) -> float:
        """Return a user's metric of the model where these layers are replaced."""
        try:
            with torch.no_grad(), preserved(self._model), self._all_replaced(layers):
                return number_of(metric, self._model)
        except CalibrationError:
            raise
        except InputError as error:
            said = "metric= changes parameters of the model in place; let it only run the model, or change a copy"
            raise CalibrationError(said) from error

    @contextmanager
    def _all_replaced(self, layers: Iterable[Layer]) -> Generator[None]:
        some = list(layers)
        with ExitStack() as stack:
            for layer in some:
                stack.enter_context(self._replaced(layer))
            for layer in self._base.keys() - set(some):
                stack.enter_context(self._base[layer]())
            yield

    def _run(self) -> list[Any]:
        with torch.no_grad(), preserved(self._model):
            return [run_call(self._model, call, number) for number, call in enumerate(self._calls)]


class Judge(Generic[Layer]):
    """Say what a model is worth with some of its layers replaced: by its results, or by the user's metric."""

    def __init__(self, run: ComparedRun[Layer], options: Options, margin: float = 1.0) -> None:
        self.run, self._metric, self._options = run, options.metric, options
        self.before = 0.0 if self._metric is None else run.measured(self._metric)
        self.allowed = margin * options.error_budget if self._metric is None else options.allowed_drop
        self._after = {frozenset[Layer](): self.before}  # the metric, by the layers that were replaced

    def loss(self, layers: Sequence[Layer]) -> float:
        """Return what is lost where these layers are replaced; no more than `allowed` may be."""
        if self._metric is None:
            return self.run.error(layers)
        after = self._after[frozenset(layers)] = self.run.measured(self._metric, layers)
        return self.before - after

    def measured(self, layers: Iterable[Layer]) -> Measurement | None:
        """Return the user's metric before and where these layers are replaced, which `loss` was asked for."""
        if self._metric is None:
            return None
        return {"before": self.before, "after": self._after[frozenset(layers)], "drop": self.allowed}

    def said(self, loss: float) -> str:
        """Return what is lost in words."""
        if self._metric is None:
            return f"the whole model would err by {loss:.2g} of its scale; the budget is {self._options.error_budget:g}"
        after = self.before - loss
        return f"the metric would fall from {self.before:.4g} to {after:.4g}; the allowed drop is {self.allowed:g}"


def with_metric(items: Iterable[Site | Refusal], metric: Measurement | None) -> Iterator[Site | Refusal]:
    """Yield sites and refusals; the first site tells, in reports and plans, what all together make of the metric."""
    for item in items:
        if metric is not None and isinstance(item, Site):
            item, metric = replace(item, data={**item.data, "metric": metric}), None
        yield item


def number_of(metric: Callable[[nn.Module], Any], model: nn.Module, name: str = "metric=") -> float:
    """Return what a user's metric, the argument of this name, gives for a model; CalibrationError if that is none."""
    try:
        found = metric(model)
    except Exception as error:  # whatever the user's function raises
        raise CalibrationError(f"{name} raised {type(error).__name__}: {one_line(error)}") from error
    try:
        value = float(found)
    except (TypeError, ValueError, RuntimeError):
        value = math.nan
    if not math.isfinite(value):
        shown = f"{found}" if isinstance(found, float) else f"a {type(found).__name__}" if found is not None else "None"
        raise CalibrationError(f"{name} returned {shown}; return a finite number, larger for better")
    return value
