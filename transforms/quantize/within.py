"""Which layers stay in floats, so that the whole model is within the budget: those that cost the most."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from ...errors import CalibrationError, InputError, one_line
from ...passes.kinds import error_of
from ...passes.sites import Refusal, Site
from ...passes.verification import smaller
from ...progress_bar import progress_bar
from ...tracing.examples import Inputs
from ...tracing.isolation import preserved
from ...tracing.program import Program
from ..calibration import run_call
from .options import Options

__all__ = [
    "ComparedRun", "Judge", "Measurement", "costs", "costs_in_groups", "left_in_floats", "left_out", "with_metric",
]  # fmt: skip

Layer = TypeVar("Layer")

Measurement = dict[str, float]
"""A user's metric `before` and `after`, and the `drop` that is allowed."""

_MARGIN = 0.9
"""Of the budget: other calls err by a little more than the first."""

_SURELY = 0.8
"""So much of what is allowed is aimed at: the largest error does not add up quite as squares do."""


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
                return _number(metric, self._model)
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


def left_in_floats(
    program: Program,
    layers: Mapping[nn.Module, nn.Module],
    options: Options,
    base: Mapping[nn.Module, nn.Module] | None = None,
) -> tuple[dict[nn.Module, str], Measurement | None]:
    """Return the layers to leave out, those first that cost most for their size, each with the reason; and the metric
    with the others replaced. What is left out stays as it is, or as `base` has it.
    """
    if not program.whole_calls or not layers:
        return {}, None
    run = ComparedRun[nn.Module](
        program.model,
        program.whole_calls[:1],
        lambda layer: _replaced(layer, layers[layer]),
        {layer: partial(_replaced, layer, other) for layer, other in (base or {}).items()},
    )
    judge = Judge(run, options, _MARGIN)
    lost = judge.loss(list(layers))
    if lost <= judge.allowed:
        return {}, judge.measured(layers)
    replaced = [module for module in program.names.distinct if module in layers]
    sizes = {module: sum(each.numel() for each in module.parameters()) for module in replaced}
    # A metric says nothing of how exact results must be: then each layer is looked at.
    alone = costs_in_groups(sizes, run.on_less().error, judge.allowed if options.metric is None else 0.0)
    density = {layer: cost**2 / sizes[layer] for layer, cost in alone.items()}
    option = "budget" if options.metric is None else "drop"
    left = {
        layer: f"{judge.said(lost)}; this layer alone moves its results by about {alone[layer]:.2g} of their scale; "
        f"raise {option}= to quantize it too"
        for layer in left_out(density, judge.loss, judge.allowed)
    }
    return left, judge.measured(layers.keys() - left.keys())


def costs_in_groups(
    sizes: Mapping[Layer, int], error: Callable[[Sequence[Layer]], float], allowed: float
) -> dict[Layer, float]:
    """Return about what each layer alone costs: the group that costs most for its size is halved till the rest fits."""
    layers = list(sizes)
    groups: list[_Group[Layer]] = [_Group.of(layers, sizes, error)]
    rest = groups[0].cost ** 2
    alone: dict[Layer, float] = {}
    with progress_bar("fxopt: measuring layers", len(layers)) as move:
        while groups and rest > (_SURELY * allowed) ** 2:
            group = groups.pop(max(range(len(groups)), key=lambda number: groups[number].density))
            if len(group.layers) == 1:
                alone[group.layers[0]] = group.cost
                rest -= group.cost**2
                move(1)
                continue
            middle = len(group.layers) // 2
            groups += [_Group.of(half, sizes, error) for half in (group.layers[:middle], group.layers[middle:])]
        move(sum(len(group.layers) for group in groups))
    return alone | {layer: group.cost / math.sqrt(len(group.layers)) for group in groups for layer in group.layers}


@dataclass(frozen=True)
class _Group(Generic[Layer]):
    """Layers, by how much the results are off with all of them in fewer bits, and their size."""

    layers: Sequence[Layer]
    cost: float
    size: int

    @classmethod
    def of(
        cls, layers: Sequence[Layer], sizes: Mapping[Layer, int], error: Callable[[Sequence[Layer]], float]
    ) -> _Group[Layer]:
        return cls(layers, error(layers), sum(sizes[layer] for layer in layers))

    @property
    def density(self) -> float:
        return self.cost**2 / self.size


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
) -> Sequence[Layer]:
    """Return the layers to leave in floats, by what each costs `alone`, so that the others err no more than allowed."""
    order = sorted(alone, key=alone.__getitem__, reverse=True)
    # More layers in floats are taken to err less, so that the count can be found by halving.
    wrong, right = 0, len(order)
    while right - wrong > 1:
        middle = (wrong + right) // 2
        wrong, right = (wrong, middle) if error(order[middle:]) <= allowed else (middle, right)
    return order[:right]


def with_metric(items: Iterable[Site | Refusal], metric: Measurement | None) -> Iterator[Site | Refusal]:
    """Yield sites and refusals; the first site tells, in reports and plans, what all together make of the metric."""
    for item in items:
        if metric is not None and isinstance(item, Site):
            item, metric = replace(item, data={**item.data, "metric": metric}), None
        yield item


def _number(metric: Callable[[nn.Module], Any], model: nn.Module) -> float:
    """Return what a user's metric gives for a model."""
    try:
        found = metric(model)
    except Exception as error:  # whatever the user's function raises
        raise CalibrationError(f"metric= raised {type(error).__name__}: {one_line(error)}") from error
    try:
        value = float(found)
    except (TypeError, ValueError, RuntimeError):
        value = math.nan
    if not math.isfinite(value):
        shown = f"{found}" if isinstance(found, float) else f"a {type(found).__name__}" if found is not None else "None"
        raise CalibrationError(f"metric= returned {shown}; return a finite number, larger for better")
    return value


@contextmanager
def _replaced(layer: nn.Module, other: nn.Module) -> Generator[None]:
    """Let a layer compute what another one does, and not its own, for a while."""
    own = vars(layer)
    before = own.get("forward")
    own["forward"] = other.forward
    try:
        yield
    finally:
        del own["forward"]
        if before is not None:
            own["forward"] = before
