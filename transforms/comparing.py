"""Run a model with some of its parts replaced for a while, and compare its results, or a metric of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from ..errors import CalibrationError, InputError, one_line
from ..passes.kinds import error_of
from ..passes.verification import smaller
from ..tracing.examples import Inputs
from ..tracing.isolation import preserved
from .calibration import run_call

__all__ = ["ComparedRun", "computing", "number_of"]

Part = TypeVar("Part")


class ComparedRun(Generic[Part]):
    """Run a model on calls with some of its parts replaced, and compare; `replaced` replaces one for a while.
    `base` says what is in the place of the others, where they are not as they were.
    """

    def __init__(
        self,
        model: nn.Module,
        calls: Sequence[Inputs],
        replaced: Callable[[Part], AbstractContextManager[object]],
        base: Mapping[Part, Callable[[], AbstractContextManager[object]]] | None = None,
    ) -> None:
        self._model, self._calls, self._replaced, self._base = model, calls, replaced, base or {}
        self._expected = self._run()

    def on_less(self) -> ComparedRun[Part]:
        """Return the same on the first call alone, a smaller one if the model takes it."""
        first = self._calls[0]
        for args, kwargs in (*smaller((first.args, first.kwargs)), (first.args, first.kwargs)):
            with suppress(CalibrationError):
                return ComparedRun(self._model, [Inputs(*args, **kwargs)], self._replaced, self._base)
        return self

    def error(self, parts: Iterable[Part]) -> float:
        """Return by how much the results are off where these parts are replaced, relative to their scale."""
        with self._all_replaced(parts):
            return max(map(error_of, self._expected, self._run()))

    def measured(self, metric: Callable[[nn.Module], float], parts: Iterable[Part] = ()) -> float:
        """Return a user's metric of the model where these parts are replaced."""
        with self._all_replaced(parts):
            return number_of(metric, self._model)

    @contextmanager
    def _all_replaced(self, parts: Iterable[Part]) -> Generator[None]:
        some = list(parts)
        with ExitStack() as stack:
            for part in some:
                stack.enter_context(self._replaced(part))
            for part, other in self._base.items():
                if part not in some:
                    stack.enter_context(other())
            yield

    def _run(self) -> list[Any]:
        with torch.no_grad(), preserved(self._model):
            return [run_call(self._model, call, number) for number, call in enumerate(self._calls)]


@contextmanager
def computing(module: nn.Module, other: nn.Module) -> Generator[None]:
    """Let a module compute what another one does, and not its own, for a while."""
    own = vars(module)
    before = own.get("forward")
    own["forward"] = other.__call__
    try:
        yield
    finally:
        del own["forward"]
        if before is not None:
            own["forward"] = before


def number_of(metric: Callable[[nn.Module], Any], model: nn.Module, name: str = "metric=") -> float:
    """Return what a user's metric, the argument of this name, gives for a model, without gradients. What it changes is
    put back; CalibrationError if it gives no number, or changes parameters.
    """
    try:
        with torch.no_grad(), preserved(model):
            return _number_of(metric, model, name)
    except CalibrationError:
        raise
    except InputError as error:
        said = f"{name} changes parameters of the model in place; let it only run the model, or change a copy"
        raise CalibrationError(said) from error


def _number_of(metric: Callable[[nn.Module], Any], model: nn.Module, name: str) -> float:
    try:
        found = metric(model)
    except Exception as error:  # whatever the user's function raises
        raise CalibrationError(f"{name} raised {type(error).__name__}: {one_line(error)}") from error
    try:
        value = float(found)
    except (TypeError, ValueError, RuntimeError):
        value = math.nan
    if not math.isfinite(value):
        is_number = isinstance(found, float) or (isinstance(found, Tensor) and found.numel() == 1)
        shown = f"{value}" if is_number else f"a {type(found).__name__}" if found is not None else "None"
        raise CalibrationError(f"{name} returned {shown}; return a finite number, larger for better")
    return value
