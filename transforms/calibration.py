"""The range of what comes into each layer, by running a model on data: `quantize` and `qat` calibrate with it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..compat.quantized import Observer
from ..errors import CalibrationError, FxoptError, one_line
from ..layers.quantized import Range
from ..progress_bar import progress_bar
from ..tracing.examples import Inputs, call_of_batch
from ..tracing.isolation import preserved
from ..tracing.program import Program
from ..tracing.recording import copy_inputs

__all__ = ["calls", "check_finite", "observed", "ranges_of", "replayable", "run_call"]

_SAMPLE = 1 << 16
"""Of an activation so many elements are looked at, besides the smallest and the largest: histograms are slow."""


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
    """Run a model on a copy of a call, which may hold a cache that grows; an error becomes a `CalibrationError`."""
    try:
        return copy_inputs(call).run(model)
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


def ranges_of(
    program: Program, layers: Mapping[str, nn.Module], calls: Sequence[Inputs], kind: str,
    factors: Mapping[str, Tensor] | None = None,
) -> dict[str, Range]:  # fmt: skip
    """Return the range of the input of each layer that the calls reach, by a kind of observer; of some layers the range
    of the input times `factors`, [inputs].
    """
    observers, scaled = {name: Observer(kind) for name in layers}, factors or {}

    def see(name: str, x: Tensor) -> None:
        observers[name].see(_sample(name, x * scaled[name].to(x.device) if name in scaled else x))

    seen = observed(program, layers, calls, see)
    return {name: Range(*observers[name].scale_and_zero_point()) for name in layers if name in seen}


def observed(
    program: Program, layers: Mapping[str, nn.Module], calls: Sequence[Inputs], see: Callable[[str, Tensor], None]
) -> set[str]:
    """Let `see` have the input of each layer, by its name and in float32, in each call; return the layers reached."""
    seen: set[str] = set()

    def note(name: str, x: Tensor) -> None:
        seen.add(name)
        see(name, x)

    watched = _watched(layers, note)
    with torch.no_grad(), preserved(program.model), watched, progress_bar("fxopt: calibrating", len(calls)) as move:
        for number, call in enumerate(calls):
            run_call(program.model, call, number)
            move(1)
    return seen


@contextmanager
def _watched(layers: Mapping[str, nn.Module], note: Callable[[str, Tensor], None]) -> Generator[None]:
    def watch(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x: Tensor = args[0] if args else kwargs["input"]
        if x.numel():
            note(name, x.detach().float())

    handles = [
        layer.register_forward_pre_hook(partial(watch, name), with_kwargs=True) for name, layer in layers.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def check_finite(name: str, *found: Tensor) -> None:
    """Raise a CalibrationError where what was found of the input of a layer is not finite."""
    if not all(each.isfinite().all() for each in found):
        what = f"the input of '{name}' is not finite on the calibration data"
        raise CalibrationError(f"{what}; check the data, and the weights before it")


def _sample(name: str, x: Tensor) -> Tensor:
    low, high = torch.aminmax(x)
    check_finite(name, low, high)
    flat = x.reshape(-1)
    return torch.cat([flat[:: max(1, -(-x.numel() // _SAMPLE))], low.reshape(1), high.reshape(1)])
