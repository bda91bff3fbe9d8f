"""Modules that run from a graph and are still the user's own: same class name, attributes, methods and hooks."""

from __future__ import annotations

import copy
import inspect
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import fx, nn

from ...compat import own_children
from ...errors import CaptureError, GuardError, ModeError
from ..guards import Guard, GuardMiss
from ..values import ANNOUNCES, announce, announce_changes, class_recipe, same_kind, user_class
from .capture import Capture, Specialization, capture_of, check_picklable, forget_derived, required_capture
from .compiled_class import dynamic_class
from .inactive import FOUND, note_found
from .items import EXTRA, item_methods
from .misses import handler_of, keeping
from .regions import ContextRegion, Region, add_region, context_regions, regions_of, remove_region, replicate_regions
from .selection import explain_miss, select
from .source import generate

__all__ = [
    "EVAL_ONLY", "Capture", "Captured", "Guard", "Specialization", "capture_of", "class_for", "deactivate_again",
    "drop_specializations", "install", "own", "own_class", "recompile", "select", "uninstall",
]  # fmt: skip


if TYPE_CHECKING:
    _Module = nn.Module
else:
    _Module = object
"""What `Captured` is mixed into; it is no module itself, so that the user's class comes second."""


EVAL_ONLY = "_fxopt_eval_only"
"""In a module's `__dict__`: names of the passes whose rewrites of it are valid in evaluation mode only."""


class Captured(_Module):
    """Mix into the class of a module that runs from graphs, made on the fly and named like the user's own, its base.
    Classes are shared by modules with equal code, and never change; an edited graph makes a new one (`recompile`).
    """

    _fxopt_own: Callable[..., Any]
    """The forward of the class below, the module's own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "_fxopt_capture" not in self.__dict__:
            # Someone called type(model)(...): a new model, of the user's class, that was never captured.
            cast("Any", self).__class__ = user_class(type(self))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep the user's own hook for subclasses (registries, say) from seeing the classes made here."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "training" and value:
            _refuse_training(self)
        if _sets_buffer(self, name, value, super().__setattr__):
            # As torch does, which would ask for the signature of what is not its own: some forwards do it at each call.
            self.register_buffer(name, value, name not in self._non_persistent_buffers_set)
            return
        before = _child(self, name)
        super().__setattr__(name, value)
        if not same_kind(before, value):
            _drop_readers(self, name, "set")
        if name == "_modules":
            replicate_regions(self)
        elif name == "training":
            for region in regions_of(self).values():
                region.training = value

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        _drop_readers(self, name, "deleted")

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter; graphs that found none of that name are dropped."""
        super().register_parameter(name, param)
        _drop_readers(self, name, "registered")

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        """Register a buffer; graphs that found none of that name are dropped."""
        # The class's own may know nothing of buffers that are not persistent.
        super().register_buffer(name, tensor, *(() if persistent else (False,)))
        _drop_readers(self, name, "registered")

    # Setting a buffer, torch asks for the signature of what is not its own: in a forward that is at each call.
    register_buffer.__signature__ = inspect.signature(register_buffer)  # pyright: ignore[reportFunctionMemberAccess]

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Register a child; graphs that found none of that name are dropped."""
        before = _child(self, name)
        super().add_module(name, module)
        if not same_kind(before, module):
            _drop_readers(self, name, "registered")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if capture_of(self) is not None:
            recompile(self)

    def __reduce__(self) -> tuple[Any, ...]:
        check_picklable(_under(type(self)))
        return _rebuild_module, class_recipe(_under(type(self))), self.__getstate__()

    def train(self, mode: bool = True) -> Any:
        """Set training mode, unless rewrites are valid in evaluation only; what was derived of tensors is made anew."""
        if mode:
            _refuse_training(self)
        forget_derived(self)
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Convert or move tensors (`.to()`, `.half()`, `share_memory()`), and hold none that were derived of them."""
        forget_derived(self)
        return super()._apply(*args, **kwargs)

    def _fxopt_miss(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the module's original forward where no specialization's guards hold."""
        return _answered(cast("nn.Module", self), args, kwargs)

    def _fxopt_restart(self, miss: GuardMiss, /, *args: Any, **kwargs: Any) -> Any:
        """Run the module's original forward after an assumption failed in the middle of a graph."""
        return _answered(cast("nn.Module", self), args, kwargs, miss)

    def _fxopt_passed(self, miss: GuardMiss, /) -> None:
        """Tell of an assumption that failed in the middle of a graph, where the next graph is tried."""
        if not torch.compiler.is_compiling():
            handler_of(cast("nn.Module", self)).passed(cast("nn.Module", self), str(miss), miss.tally)

    def _fxopt_refuse(self, /, *args: Any, **kwargs: Any) -> Any:
        """Raise GuardError where no specialization's guards hold, and the original forward would be wrong."""
        _refuse(cast("nn.Module", self), args, kwargs)

    def _fxopt_refuse_restart(self, miss: GuardMiss, /, *args: Any, **kwargs: Any) -> Any:
        """Raise GuardError after an assumption failed in the middle of a graph."""
        _refuse(cast("nn.Module", self), args, kwargs, miss)


def _answered(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], miss: GuardMiss | None = None) -> Any:
    """Return what the module's original forward gives for a call that no graph fits."""
    forward: Callable[..., Any] = cast("Any", module)._fxopt_own
    if torch.compiler.is_compiling():
        return forward(*args, **kwargs)
    announce()
    announce_changes()
    reason = explain_miss(module, args, kwargs) if miss is None else str(miss)
    handler_of(module).note(module, args, kwargs, reason, None if miss is None else miss.tally)
    _without_graphs(module)
    with keeping(module):
        return forward(*args, **kwargs)


def _refuse(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], miss: GuardMiss | None = None) -> None:
    """Count a call that no graph fits, and raise a GuardError: the module's original forward would be wrong."""
    reason = explain_miss(module, args, kwargs) if miss is None else str(miss)
    which = handler_of(module).refuse(module, reason)
    why = f"its graphs are for calls in which {reason}" if required_capture(module).specializations else reason
    raise GuardError(
        f"no graph of {which} fits this call: {why}. The original forward would be wrong: "
        f"{required_capture(module).lost}. Add this call to example_inputs, or record it with fxopt.recording"
    )


def _without_graphs(module: nn.Module) -> None:
    """Give a module whose graphs were all dropped the original forward: some forwards ask whether theirs is called."""
    if not required_capture(module).specializations:
        own(module).dropped = ""
        recompile(module)


def _refuse_training(module: _Module) -> None:
    passes = cast("Sequence[str]", module.__dict__.get(EVAL_ONLY, ()))
    if passes:
        raise ModeError(
            f"this {type(module).__name__} was rewritten for evaluation by {', '.join(passes)}; to train it, "
            "optimize with phase='train' or leave that pass out"
        )


def _sets_buffer(module: _Module, name: str, value: Any, setter: Any) -> bool:
    """Say whether torch's own way of setting an attribute puts a tensor where a buffer is."""
    if type(value) is not torch.Tensor or name not in module.__dict__.get("_buffers", ()):
        return False
    registered: Any = module.register_buffer
    is_torchs = getattr(setter, "__func__", None) is nn.Module.__setattr__
    return is_torchs and getattr(registered, "__func__", None) is Captured.register_buffer


def _child(module: _Module, name: str) -> nn.Module | None:
    """Return a child; a module that is being made may have no registry yet."""
    return cast("dict[str, nn.Module | None]", module.__dict__.get("_modules", {})).get(name)


def _rebuild_module(make: Callable[..., type[nn.Module]], arguments: tuple[Any, ...]) -> nn.Module:
    base = make(*arguments)
    return nn.Module.__new__(_bare_class(base))


def _under(cls: type) -> type[nn.Module]:
    """Return the class below the mixin in a captured class."""
    return cls.__bases__[1]


def _is_captured_class(cls: type) -> bool:
    return cls.__bases__[:1] == (Captured,)


def install(module: nn.Module, capture: Capture, base: type[nn.Module] | None = None) -> Capture:
    """Make `module` run from the graphs of `capture`, or of one rebased to `base`; return what it runs from now.
    Raises a CaptureError if its class was changed by something else since it was captured.
    """
    base = base or own_class(module)
    if capture.base is not base:
        capture = capture.rebased(base)
    module.__dict__["_fxopt_capture"] = capture
    module.__dict__.pop(FOUND, None)
    plain = capture.inactive and user_class(base) is base and not {EVAL_ONLY, EXTRA} & module.__dict__.keys()
    cls = base if plain else class_for(capture)
    object.__setattr__(module, "__class__", cls)  # no module's own way of setting attributes is asked
    _add_regions(module, capture)
    if plain:
        note_found(module, capture.reads)
    return capture


def _add_regions(module: nn.Module, capture: Capture) -> None:
    """Give a module the regions that its graphs call, where it has not got them."""
    for name, plan in capture.regions.items():
        if name not in regions_of(module):
            region = ContextRegion(plan.context, module, plan.borrowed)
            install(region, plan.capture)
            add_region(module, name, region)


def uninstall(module: nn.Module, *, keep_regions: bool = False) -> None:
    """Give `module` its original forward back, if it has graphs, and take its regions away unless these are to stay."""
    if "_fxopt_capture" in module.__dict__:
        object.__setattr__(module, "__class__", own_class(module))
        del module.__dict__["_fxopt_capture"]
        module.__dict__.pop(FOUND, None)
        if not keep_regions:
            for name in context_regions(vars(module)):
                remove_region(module, name)
            for name in module.__dict__.pop(EXTRA, ()):
                own_children(module).pop(name, None)


def own(module: nn.Module) -> Capture:
    """Return the module's capture for editing: where it is shared, the module gets a private copy first."""
    capture = required_capture(module)
    if capture.owner is None or capture.owner() is not module:
        capture = capture.private()
        capture.owner = weakref.ref(module)
        module.__dict__["_fxopt_capture"] = capture
    return capture


def recompile(module: nn.Module) -> None:
    """Make `module` run from its graphs as they are now; raise a CaptureError if something else changed its class."""
    capture = required_capture(module)
    if capture.owner is not None and capture.owner() is module:
        capture.compiled = None
    install(module, capture)


def deactivate_again(module: nn.Module) -> None:
    """Give an inactive module the class that it should have there, and take its attributes as they are."""
    capture: Capture | None = module.__dict__.get("_fxopt_capture")
    if capture is not None and capture.inactive:
        install(module, capture)


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that `module` has without its graphs; raise a CaptureError if something else changed it."""
    cls = type(module)
    if _is_captured_class(cls):
        return _under(cls)
    if issubclass(cls, Captured):
        raise CaptureError(
            f"the class of this captured {cls.__name__} was changed after capture (for example by FSDP or a "
            "parametrization); rewrite the model first, then shard or parametrize it"
        )
    return cls


def _drop_readers(module: nn.Module, attribute: str, done: str) -> None:
    """Drop the graphs that the old value of an attribute is part of; `done` says what became of it."""
    capture = capture_of(module)
    if capture is None or not any(attribute in specialization.reads for specialization in capture.specializations):
        return
    drop_specializations(
        module,
        lambda specialization: attribute in specialization.reads,
        f"attribute {attribute!r} was {done} after capture",
    )


def drop_specializations(module: nn.Module, chosen: Callable[[Specialization], bool], why: str) -> None:
    """Drop the graphs of `module` that are `chosen`, or all where none is; `why` is told at the next call."""
    with _dropping:
        capture = own(module)
        left = [specialization for specialization in capture.specializations if not chosen(specialization)]
        capture.specializations = [] if len(left) == len(capture.specializations) else left
        capture.dropped = why
        recompile(module)


_dropping = threading.RLock()


def class_for(capture: Capture) -> type[nn.Module]:
    """Return the class of the modules that run from `capture`; equal code gives the same class."""
    if capture.compiled is None:
        if capture.inactive or not (capture.specializations or capture.dropped):
            capture.compiled = _bare_class(capture.base)
        else:
            restarts = not issubclass(capture.base, Region)
            source = generate(capture.parameters, capture.specializations, restarts=restarts, refuse=bool(capture.lost))
            capture.compiled = dynamic_class(
                capture.base, Captured, source, capture.parameters,
                lambda: {**_fxopt_names(capture.base), ANNOUNCES: True},
            )  # fmt: skip
    return capture.compiled


def _bare_class(base: type[nn.Module]) -> type[nn.Module]:
    return dynamic_class(base, Captured, None, None, lambda: _fxopt_names(base))


def _fxopt_names(base: type[nn.Module]) -> dict[str, Any]:
    names = {"_fxopt_base": user_class(base), "_fxopt_own": base.forward, **item_methods(base)}
    return {**names, "__deepcopy__": _copied_as_module} if issubclass(base, fx.GraphModule) else names


def _copied_as_module(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy a captured `GraphModule` as any other module: its own way would compile the old code anew."""
    memo[id(module)] = copied = _rebuild_module(*class_recipe(_under(type(module))))
    copied.__setstate__(copy.deepcopy(module.__getstate__(), memo))
    return copied
