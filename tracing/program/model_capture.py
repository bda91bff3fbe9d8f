"""Capture a whole model: record, trace, install and check, all of it or nothing; let modules run their own forward."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from ...compat import all_modules, has_lazy_parameters, submodule
from ...errors import InputError, ModeError, UsageError
from ...runtime.graphs import (
    Capture,
    Region,
    capture_of,
    compile_postponed,
    context_regions,
    install,
    required_capture,
    uninstall,
)
from ...runtime.values import ModelNames, is_container, is_leaf, is_meta, map_tensors, runs_as_sequential
from ..examples import Generating, Inputs, normalize_inputs
from ..isolation import ModelState, in_phase, moved_to_meta, restoring
from ..reads import checks_exact_types
from ..recording import Recording, disagreeing, expectations, generated_calls, record
from .capturing import Captures, Opaque, capture_modules

__all__ = ["Unchecked", "capture_model", "deactivate", "exact_types", "inputs_for", "with_inactive"]


def inputs_for(model: nn.Module, example_inputs: object) -> tuple[Inputs, ...]:
    """Return the calls meant by `example_inputs`, on the meta device where the model is. UsageError if it is none of
    the forms it may have, InputError if `generate` raises.
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
    moved = map_tensors(moved_to_meta, tuple((call.args, call.kwargs) for call in inputs))
    return tuple(Inputs.of_part(call.module, *a, **kw) for call, (a, kw) in zip(inputs, moved, strict=True))


@dataclass
class Unchecked:
    """A model whose graphs are installed, and what was recorded to check them with."""

    model: nn.Module
    names: ModelNames
    found: Captures
    inputs: tuple[Inputs, ...]
    recording: Recording
    state: ModelState
    training: bool

    def check(self) -> Captures:
        """Check the whole against the original, and let modules whose graphs differ run without them."""
        with in_phase(self.model, self.training):
            for name in self.found.captured:
                uninstall(self.names.modules[name])
            _install_checked(self.model, self.names, self.found, self.inputs, self.recording, self.state)
        self.recording.forget()
        return self.found


def capture_model(
    model: nn.Module, inputs: tuple[Inputs, ...], training: bool, *, checked: bool = True
) -> tuple[Captures, Unchecked | None]:
    """Install a graph on every module of `model` that can be captured, and check the whole against the original.
    Without inputs, forwards are traced without values. If anything raises, the model is as before. A model that had no
    graphs may be left to be `checked` later.
    """
    names = ModelNames(model)
    _check_initialised(names)
    checked = checked or any(capture_of(module) for module in names.distinct)
    with in_phase(model, training):
        state = ModelState(model)
        recording, found = _traced(model, names, inputs, state, exact=False)
        if recording is not None and found.uncertain and not recording.is_exact():
            # Where forwards work in place, the numbers recorded are what became of them.
            recording, found = _traced(model, names, inputs, state, exact=True)
        found.exact_types = exact_types(names)
        found.captured = with_inactive(found.captured, names, found.exact_types)
        if recording is None or not checked:
            _install(names, found)
        else:
            _install_checked(model, names, found, inputs, recording, state)
            recording.forget()
    if recording is None or checked:
        return found, None
    return found, Unchecked(model, names, found, inputs, recording, state, training)


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
        compile_postponed(names.modules[name] for name in found.captured)  # calls are timed
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


def deactivate(modules: Collection[nn.Module]) -> None:
    """Let modules whose graphs are as captured run their original forward, in the user's class; graphs are kept."""
    inactive: dict[int, Capture] = {}
    for module in filter(_may_be_inactive, modules):
        capture = required_capture(module)
        if id(capture) not in inactive:
            inactive[id(capture)] = capture.set_inactive(True)
        install(module, inactive[id(capture)])


def _may_be_inactive(module: nn.Module) -> bool:
    capture = capture_of(module)
    if capture is None or capture.lost or capture.inactive or isinstance(module, Region):
        return False
    return not (capture.rewritten or _is_rewritten_inside(module))


def _is_rewritten_inside(module: nn.Module) -> bool:
    """Say whether a pass changed what the module runs under a context: its original forward would not call that."""
    regions = context_regions(vars(module)).values()
    return any(required_capture(region).rewritten or _is_rewritten_inside(region) for region in regions)


def exact_types(names: ModelNames) -> dict[nn.Module, str]:
    """Return the modules whose exact class may be asked for, by code of theirs or around them, each with where."""
    found: dict[nn.Module, str] = {}
    if checks_exact_types(names.distinct):
        for module in names.distinct:
            place = checks_exact_types([module])
            what = f"module {names.name(module) or '(root)'!r}: its code checks an exact type ({place})"
            why = f"{what}; use isinstance there"
            found = {**dict.fromkeys(all_modules(module) if place else (), why), **found}
    return found


def with_inactive(
    captured: Mapping[str, Capture], names: ModelNames, modules: Collection[nn.Module]
) -> dict[str, Capture]:
    """Return captures by the names of their modules, inactive those of some modules; none is installed yet."""
    inactive = {id(capture): capture.set_inactive(True) for capture in captured.values()} if modules else {}
    return {
        name: inactive[id(capture)] if names.modules[name] in modules else capture for name, capture in captured.items()
    }
