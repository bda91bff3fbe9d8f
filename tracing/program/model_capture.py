"""Capture a whole model: record, trace, install and check; all of it, or nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from ...compat import has_lazy_parameters, submodule
from ...errors import InputError, ModeError, UsageError
from ...runtime.graphs import Capture, capture_of, install, required_capture, uninstall
from ...runtime.values import ModelNames, is_container, is_leaf, is_meta, map_tensors, runs_as_sequential
from ..examples import Generating, Inputs, normalize_inputs
from ..isolation import ModelState, in_phase, restoring
from ..recording import Recording, disagreeing, expectations, generated_calls, record
from .capturing import Captures, Opaque, capture_modules
from .inactive_modules import exact_types, with_inactive

__all__ = ["capture_model", "inputs_for"]


def inputs_for(model: nn.Module, example_inputs: object) -> tuple[Inputs, ...]:
    """Return the calls meant by `example_inputs`; those of a model on the meta device are moved there.

    Raises:
        UsageError: if `example_inputs` is none of the forms it may have.
        InputError: if `generate` raises on an `Inputs.generating`.
    """
    inputs = tuple(
        call
        for each in normalize_inputs(example_inputs, model)
        for call in (generated_calls(model, each) if isinstance(each, Generating) else [each])
    )
    for call in inputs:
        if submodule(model, call.module) is None:
            raise UsageError(f"example_inputs has a call of {call.module!r}, which is no part of the model")
    if inputs and all(call.module for call in inputs):
        raise UsageError("example_inputs has calls of parts of the model only; give a call of the model itself, too")
    if not is_meta(model):
        return inputs

    def to_meta(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("meta")

    moved = map_tensors(to_meta, tuple((call.args, call.kwargs) for call in inputs))
    return tuple(Inputs.of_part(call.module, *a, **kw) for call, (a, kw) in zip(inputs, moved, strict=True))


def capture_model(model: nn.Module, inputs: tuple[Inputs, ...], training: bool) -> Captures:
    """Install a graph on every module of `model` that can be captured, and check the whole against the original.

    Without inputs, forwards are traced without values. If anything raises, the model is as before.
    """
    names = ModelNames(model)
    _check_initialised(names)
    with in_phase(model, training):
        state = ModelState(model)
        recording, found = _traced(model, names, inputs, state, exact=False)
        if recording is not None and found.uncertain and not recording.is_exact():
            # Where forwards work in place, the numbers recorded are what became of them.
            recording, found = _traced(model, names, inputs, state, exact=True)
        found.exact_types = exact_types(names)
        found.captured = with_inactive(found.captured, names, found.exact_types)
        if recording is None:
            _install(names, found)
            return found
        _install_checked(model, names, found, inputs, recording, state)
        recording.forget()
    return found


def _traced(
    model: nn.Module, names: ModelNames, inputs: tuple[Inputs, ...], state: ModelState, *, exact: bool
) -> tuple[Recording | None, Captures]:
    recording = record(model, inputs, state=state, exact=exact) if inputs else None
    if recording is not None:
        _record_other_mode(model, names, inputs, recording)
    with restoring(state):
        return recording, capture_modules(names, recording)


def _record_other_mode(model: nn.Module, names: ModelNames, inputs: tuple[Inputs, ...], recording: Recording) -> None:
    """Record the modules that are called in the other mode only, where the model runs in that mode at all."""
    # A sequence whose children others call has no code of its own.
    idle = (m for m in names.distinct if m not in recording.calls and not (is_leaf(m) or is_container(m)))
    uncalled = [m for m in idle if not (runs_as_sequential(m) and all(c in recording.calls for c in m.children()))]
    if uncalled:
        with in_phase(model, not model.training), contextlib.suppress(InputError, ModeError):
            recording.calls.update(record(model, inputs, uncalled, exact=False).calls)


def _install(names: ModelNames, found: Captures) -> None:
    for name, capture in found.captured.items():
        install(names.modules[name], capture)
    found.names = None if any(capture.regions for capture in found.captured.values()) else names


def _install_checked(
    model: nn.Module,
    names: ModelNames,
    found: Captures,
    inputs: tuple[Inputs, ...],
    recording: Recording,
    state: ModelState,
) -> None:
    expected = expectations(model, found.captured, inputs, recording, state)
    present = {name: capture_of(names.modules[name]) for name in found.captured}
    with _undone_on_error(names, present):
        _install(names, found)
        state.accept_graphs()
        for name in disagreeing(model, found.captured, expected, state, grad=recording.grad):
            _give_up(found, name, names.modules[name], present[name])
    found.seconds = sum(
        min(each.seconds, default=0.0)
        for each in expected
        if each.training is model.training and not each.inputs.module
    )
    for capture in found.captured.values():
        capture.misses.clear()


def _give_up(found: Captures, name: str, module: nn.Module, before: Capture | None) -> None:
    """Let a module whose graphs do not agree with its forward run without those that it did not have before."""
    _put_back(module, before)
    if before is not None and len(before.specializations) < len(found.captured[name].specializations):
        found.captured[name] = required_capture(module)
        return
    uninstall(module)
    del found.captured[name]
    found.opaque[name] = Opaque(name, "", "its graph gives another result than its forward")


def _put_back(module: nn.Module, before: Capture | None) -> None:
    if before is None:
        uninstall(module)
    else:
        install(module, before)


@contextmanager
def _undone_on_error(names: ModelNames, present: Mapping[str, Capture | None]) -> Generator[None]:
    try:
        yield
    except BaseException:
        for name, before in present.items():
            _put_back(names.modules[name], before)
        raise


def _check_initialised(names: ModelNames) -> None:
    for name, module in names.modules.items():
        if has_lazy_parameters(module):
            raise InputError(
                f"module {name!r} ({type(module).__name__}) has lazy parameters that were never initialised; "
                "run the model once on real inputs first"
            )
