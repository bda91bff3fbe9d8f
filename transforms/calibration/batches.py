"""The calls that a model is calibrated on: of a loader, an iterator, or the example inputs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from torch import Tensor, nn

from ...errors import CalibrationError, FxoptError, one_line
from ...tracing.examples import Inputs, call_of_batch
from ...tracing.program import Program

__all__ = ["calls", "replayable", "run_call"]


def calls(given: Any, count: int, program: Program, what: str) -> Sequence[Inputs]:
    """Return at most `count` calls to calibrate `what` on; without data the example inputs."""
    if given is None:
        if not program.whole_calls:
            raise CalibrationError(f"{what} has no calibration data; give calibration=, or example_inputs")
        return program.whole_calls
    found = list(_taken(_batches(given), count, program.model))
    if not found:
        raise CalibrationError("calibration= has no batches; give a loader that has some, or a fresh iterator")
    return found


def _batches(given: Any) -> Iterable[Any]:
    if isinstance(given, (Tensor, Inputs, dict, tuple)):
        return [given]
    if not hasattr(given, "__iter__") or isinstance(given, str):
        kind = type(given).__name__
        raise CalibrationError(f"calibration= is of type {kind}; give a loader, an iterator, or a list of batches")
    return cast("Iterable[Any]", given)


def _taken(batches: Iterable[Any], count: int, model: nn.Module) -> Iterator[Inputs]:
    try:
        for batch in itertools.islice(batches, count):
            yield call_of_batch(batch, model)
    except FxoptError as error:
        raise CalibrationError(f"calibration=: {error}") from error
    except Exception as error:  # whatever the user's data raises
        raise CalibrationError(f"calibration= raised {type(error).__name__}: {one_line(error)}") from error


def run_call(model: nn.Module, call: Inputs, number: int) -> Any:
    """Run a model on a call; what it raises becomes a `CalibrationError`."""
    try:
        return call.run(model)
    except CalibrationError:
        raise
    except Exception as error:  # whatever the user's forward raises
        text = f"the model does not take calibration batch {number}: {type(error).__name__}: {one_line(error)}"
        raise CalibrationError(text) from error


class _Kept:
    """Go through an iterator, and what was taken out of it before, as often as is wanted."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source, self._taken = source, list[Any]()

    def __iter__(self) -> Iterator[Any]:
        yield from self._taken
        for item in self._source:
            self._taken.append(item)
            yield item


def replayable(data: Any) -> Any:
    """Return data that can be gone through several times: an iterator keeps what is taken out of it."""
    return _Kept(cast("Iterator[Any]", data)) if hasattr(data, "__next__") else data
