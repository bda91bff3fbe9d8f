"""What a model is worth with some of its layers replaced: by its results, or by a metric of the user."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from ...passes.sites import Refusal, Site
from ..comparing import ComparedRun
from .options import Options

__all__ = ["Judge", "Measurement", "with_metric"]

Layer = TypeVar("Layer")

Measurement = dict[str, float]
"""A user's metric `before` and `after`, and the `drop` that is allowed."""


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
