"""Run a model on its example inputs and record how each of its modules is called."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...compat import all_modules, has_pre_hooks, modules_by_name, own_parameters
from ...errors import InputError
from ...runtime.values import (
    Absent,
    ChangeCounts,
    aliased,
    are_plain,
    change_count,
    copied,
    held_tensors,
    map_leaves,
    map_tensors,
    objects_in,
)
from ..examples import Inputs
from ..isolation import AutocastState, ModelState, autocast_state_now, memory_of, patching, redirect, restoring

__all__ = ["Call", "Computed", "Recording", "calls_intercepted", "copy_inputs", "record"]


@dataclass(frozen=True, slots=True)
class Computed:
    """Wrap a number or size among a call's arguments that the caller computed: it differs from call to call."""

    value: Any


@dataclass(slots=True, eq=False)
class Call:
    """One call of a module: what it was given and what it gave back, as the caller saw it, hooks included."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    # the arguments of `forward` itself, where forward pre-hooks may have changed them
    received: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    autocast_state: AutocastState | None = None  # the autocast that it ran under, if any
    # the modules that it called directly, in order
    children: list[tuple[nn.Module, Call]] = field(default_factory=lambda: [])  # noqa: PIE807  `list[...]()` is slow
    # the objects among its arguments, as it left them
    after: list[Any] = field(default_factory=lambda: [])  # noqa: PIE807  `list[...]()` is slow
    spare: bool = False  # nobody needs the numbers in its tensors: they may be worked on in place
    # of the module and those inside it, what the model had set otherwise than before it ran
    attributes: dict[tuple[nn.Module, str], Any] = field(default_factory=lambda: {})  # noqa: PIE807

    def example(self, value: Any) -> Any:
        """Return one of the recorded values to trace with: the forward may change it."""
        return aliased(value) if self.spare else copied(value)

    def note_computed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Wrap the arguments that `args` and `kwargs`, which are as the caller's trace has them, wrap."""
        self.args, self.kwargs = _wrapped(args, self.args), _wrapped(kwargs, self.kwargs)

    @property
    def plain_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of `forward` as they were, nothing wrapped."""
        return map_leaves(
            lambda leaf: leaf.value if isinstance(leaf, Computed) else leaf, self.forward_arguments, Computed
        )

    @property
    def forward_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.received or (self.args, self.kwargs)


def _wrapped(marks: Any, values: Any) -> Any:
    if isinstance(marks, Computed):
        return values if isinstance(values, Computed) else Computed(values)
    if type(marks) is not type(values):
        return values
    if isinstance(marks, dict):
        pairs = cast("dict[Any, Any]", marks)
        return {key: _wrapped(pairs.get(key), value) for key, value in values.items()}
    if type(marks) in (tuple, list) and len(marks) == len(values):
        return type(values)(_wrapped(mark, value) for mark, value in zip(marks, values, strict=True))
    return values


@dataclass(eq=False)
class Recording:
    """Hold every call of every module, keyed by the module object."""

    calls: dict[nn.Module, list[Call]] = field(default_factory=dict[nn.Module, list[Call]])
    # those whose buffers, or parameters past the count of changes, a call changed
    changed: set[nn.Module] = field(default_factory=set[nn.Module])
    # those whose own attributes a call set, or what is in them changed, and which
    assigning: dict[nn.Module, frozenset[str]] = field(default_factory=dict[nn.Module, frozenset[str]])
    outputs: list[Any] = field(default_factory=list[Any])  # what the model gave for each of the inputs
    grad: bool = False  # whether it was run with gradients
    # the tensors that were recorded without a copy, and how often each had been changed by then
    lent: list[tuple[Tensor, int | None]] = field(default_factory=list[tuple[Tensor, "int | None"]])

    def forget(self) -> None:
        """Let go of all values now, and not when Python's collector finds that nobody needs them."""
        for call in (call for calls in self.calls.values() for call in calls):
            call.args, call.kwargs, call.output, call.received, call.children = (), {}, None, None, []
        for held in (self.calls, self.outputs, self.lent):
            held.clear()

    def is_exact(self) -> bool:
        """Tell whether all tensors still hold what they held when they were recorded; those that cannot tell do not."""
        return all(count is not None and change_count(tensor) == count for tensor, count in self.lent)


def record(
    model: nn.Module,
    inputs: Sequence[Inputs],
    modules: Collection[nn.Module] | None = None,
    *,
    grad: bool = False,
    state: ModelState | None = None,
    exact: bool = True,
) -> Recording:
    """Run `model` once for each of `inputs`, return how its modules (None: all) were called, and put back `state`. If
    not `exact`, tensors changed in place have later numbers, and it runs once. With `grad`, or where it needs gradients
    to run, outputs are attached. InputError, chained, names the innermost module that raises.
    """
    state = state or ModelState(model)
    try:
        return _record(model, inputs, modules, state, grad=grad, exact=exact)
    except InputError as error:
        if grad or error.__cause__ is None:
            raise
        try:
            return _record(model, inputs, modules, state, grad=True, exact=exact)
        except InputError:
            raise error from error.__cause__


def _record(
    model: nn.Module,
    inputs: Sequence[Inputs],
    modules: Collection[nn.Module] | None,
    state: ModelState,
    *,
    grad: bool,
    exact: bool,
) -> Recording:
    recorder = _Recorder(modules, copying=False, spare=not exact)
    for copying in (False, True):
        recorder = _Recorder(modules, copying=copying, spare=not exact)
        recorder.run_preserved(model, inputs, state, grad=grad)
        if not exact or recorder.recording.is_exact():
            break
    if modules is None and recorder.recording.assigning:
        watched = recorder.recording.assigning
        recorder = _Recorder(None, copying=recorder.copying, spare=not exact, watched=watched)
        recorder.run_preserved(model, inputs, state, grad=grad)
    return recorder.recording


class _AttributeWatch:
    """Hold what some attributes of modules are now, to see later which have been set."""

    def __init__(self, watched: Mapping[nn.Module, Collection[str]]) -> None:
        self._start = {(m, name): m.__dict__.get(name, Absent) for m, names in watched.items() for name in names}
        self._inside: dict[nn.Module, list[tuple[nn.Module, str]]] = {}

    def seen_from(self, module: nn.Module) -> dict[tuple[nn.Module, str], Any]:
        """Return what has been set in a module and those inside it: (module, name) -> value, tensors copied."""
        places = self._inside.get(module)
        if places is None:
            inside = set(module.modules())
            places = self._inside[module] = [place for place in self._start if place[0] in inside]
        now = {place: place[0].__dict__.get(place[1], Absent) for place in places}
        return {p: copied(v) if isinstance(v, Tensor) else v for p, v in now.items() if v is not self._start[p]}


class _Recorder:
    """Record calls: of some modules, with copies of tensors or tensors lent, and what `watched` attributes are. Lent
    tensors that are `spare` may be worked on in place, so they are aliases, and those of the model are copied.
    """

    def __init__(
        self,
        modules: Collection[nn.Module] | None,
        *,
        copying: bool,
        spare: bool,
        watched: Mapping[nn.Module, Collection[str]] | None = None,
    ) -> None:
        self.recording = Recording()
        self._watch = _AttributeWatch(watched) if watched else None
        self.only = None if modules is None else set(modules)
        self.copying = copying
        self.spare = spare
        self.error: BaseException | None = None
        self.culprit: nn.Module | None = None
        self._stack: list[Call] = []
        self._own: set[int] = set()
        self._known: dict[int, tuple[int | None, Tensor]] = {}
        self._thread = threading.get_ident()

    def run_preserved(self, model: nn.Module, inputs: Sequence[Inputs], state: ModelState, *, grad: bool) -> None:
        """Run the model on all inputs, and put back what that changes."""
        with restoring(state, self.recording.assigning):
            self.run(model, inputs, state, grad=grad)
            self.note_changed(model, state.data.changed())
            state.check_parameters(model)

    def run(self, model: nn.Module, inputs: Sequence[Inputs], state: ModelState, *, grad: bool) -> None:
        """Run the model on all inputs; `state` is that of the model."""
        counts = {module: ChangeCounts(held_tensors(module)) for module in state.modules}
        if self.spare:
            self._own = set(map(memory_of, state.tensors))
        for module in state.modules:
            if has_pre_hooks(module):
                module.__dict__["forward"] = self._receiving(module.forward)
        with calls_intercepted(self._call), torch.set_grad_enabled(grad):
            for call in inputs:
                self._run_once(model, copy_inputs(call, grad=grad))
        self.recording.grad = grad
        self.recording.changed = {module for module, each in counts.items() if each.changed()}

    def note_changed(self, model: nn.Module, parameters: set[int]) -> None:
        """Note the modules whose parameters, given by their ids, hold something else than before."""
        if parameters:
            own = ((module, own_parameters(module).values()) for module in all_modules(model))
            self.recording.changed |= {module for module, held in own if not parameters.isdisjoint(map(id, held))}

    def _run_once(self, model: nn.Module, call: Inputs) -> None:
        try:
            output = call.run(model)
            self.recording.outputs.append(copied(output) if self.spare else self._kept(output))
        except (Exception, SystemExit) as error:
            culprit = self.culprit if error is self.error and self.culprit is not None else model
            raise InputError(_failure(model, culprit, error)) from error

    def _call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return original(module, *args, **kwargs)
        # To trace with, what is called inside counts as well; else what nobody asked for is not kept.
        wanted = self.only is None or module in self.only
        is_kept = wanted or self.spare
        call = Call(
            self._kept(args) if is_kept else (),
            self._kept(kwargs) if kwargs and is_kept else {},
            None,
            autocast_state=autocast_state_now(),
            spare=self.spare,
        )
        if self._watch is not None:
            call.attributes = self._watch.seen_from(module)
        if wanted:
            self.recording.calls.setdefault(module, []).append(call)
        if self._stack and is_kept:
            self._stack[-1].children.append((module, call))
        self._stack.append(call)
        try:
            output = original(module, *args, **kwargs)
        except (Exception, SystemExit) as error:
            if error is not self.error:
                self.error, self.culprit = error, module
            raise
        finally:
            self._stack.pop()
        if not is_kept:
            return output
        call.output = self._kept(output)
        if kwargs or not are_plain(args):
            call.after = [self._kept(item) for item in objects_in((args, kwargs))]
        return output

    def _receiving(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the forward of a module with pre-hooks, to see what they made of its arguments."""

        def receive(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == self._thread:
                self._stack[-1].received = (self._kept(args), self._kept(kwargs))
            return forward(*args, **kwargs)

        return receive

    def _kept(self, value: Any) -> Any:
        if self.copying:
            return copied(value)
        return map_tensors(self._lent, value, self._noted)

    def _lent(self, tensor: Tensor) -> Tensor:
        if not self.spare:
            return self._noted(tensor)
        known, count = self._known.get(id(tensor)), change_count(tensor)
        if known is not None and count == known[0]:
            return known[1]
        if type(tensor) is not Tensor or count is None or memory_of(tensor) in self._own:
            return copied(tensor)
        self.recording.lent.append((tensor, count))
        alias = tensor.detach()
        self._known[id(tensor)] = count, alias
        return alias

    def _noted(self, tensor: Tensor) -> Tensor:
        self.recording.lent.append((tensor, change_count(tensor)))
        return tensor


@contextmanager
def calls_intercepted(handler: Callable[[Callable[..., Any], nn.Module, Any, Any], Any]) -> Generator[None]:
    """Send every module call, in any thread, through `handler(original, module, args, kwargs)`."""

    def intercepted(original: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return handler(original, module, args, kwargs)

    with patching:
        end = redirect(cast("Any", nn.Module.__call__), intercepted)
        try:
            yield
        finally:
            end()


def copy_inputs(call: Inputs, *, grad: bool = False) -> Inputs:
    """Copy the tensors of a call, each once, so that a forward that works in place does not change them."""

    def copy(tensor: Tensor) -> Tensor:
        return copied(tensor).requires_grad_(grad and tensor.requires_grad)

    args, kwargs = map_tensors(copy, (call.args, call.kwargs))
    return Inputs.of_part(call.module, *args, **kwargs)


def _failure(model: nn.Module, culprit: nn.Module, error: BaseException) -> str:
    name = next((name for name, module in modules_by_name(model).items() if module is culprit), "")
    where = f"module {name!r} ({type(culprit).__name__})" if name else f"the model ({type(model).__name__})"
    return f"{where} raised {type(error).__name__} on the example inputs: {error}"
