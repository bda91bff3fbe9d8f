"""Modules that run from a graph and are still the user's own: same class name, attributes, methods and hooks."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import fx, nn

from ..errors import CaptureError, ModeError
from .dynamic import class_recipe, dynamic_class, user_class
from .guards import Guard
from .portable import PortableGraph, copy_graph
from .signature import Signature, signature_of
from .source import generate

__all__ = [
    "Capture",
    "Captured",
    "Guard",
    "ModelRecord",
    "Variant",
    "capture_of",
    "class_for",
    "install",
    "own",
    "recompile",
    "select",
    "uninstall",
    "with_graph",
]


class ModelRecord(Protocol):
    """What a root module keeps, as `_fxopt_record`, about what was done to it; `Captured` reads this much of it."""

    eval_only: Sequence[str]
    """Names of the passes whose rewrites are valid in evaluation mode only."""


@dataclass
class Variant:
    """One graph of a module, and when it holds.

    Attributes:
        guards: conditions over the forward's arguments and `self`, all of which must hold.
        graph: placeholders are the tensors among the arguments.
        arguments: name of a placeholder -> Python for it over the forward's arguments ("inputs[0]").
        reads: plain attributes of the module whose value is part of the graph.
    """

    guards: tuple[Guard, ...]
    graph: fx.Graph
    arguments: Mapping[str, str] = field(default_factory=lambda: {})
    reads: frozenset[str] = frozenset()


@dataclass(eq=False)
class Capture:
    """The graphs of one module, or of several equal ones.

    Attributes:
        base: the class that the module has without its graphs.
        variants: the first whose guards hold is run; with none the module runs its own forward.
        signature: arguments of the forward, where they differ from those of `base.forward`.
        misses: reason -> how often no variant held and the module's own forward ran instead.
    """

    base: type[nn.Module]
    variants: list[Variant]
    signature: Signature | None = None
    misses: Counter[str] = field(default_factory=lambda: Counter())
    _owner: weakref.ref[nn.Module] | None = None
    _class: type[nn.Module] | None = None
    _parameters: Signature | None = None
    _rebased: dict[type[nn.Module], Capture] = field(default_factory=lambda: {})

    @property
    def parameters(self) -> Signature:
        """Return the arguments of the forward."""
        if self._parameters is None:
            self._parameters = self.signature or signature_of(self.base.forward)
        return self._parameters

    @property
    def reads(self) -> frozenset[str]:
        """Return the plain attributes whose values are part of a graph: setting one drops that graph."""
        return frozenset().union(*(variant.reads for variant in self.variants))

    def copy(self) -> Capture:
        """Return a capture of the same graphs; both count as shared from now on."""
        self._owner = None
        return Capture(self.base, list(self.variants), self.signature, Counter(self.misses), None, self._class)

    def rebased(self, base: type[nn.Module]) -> Capture:
        """Return a capture of the same graphs for another class; modules that share this one share that one too."""
        if self._owner is None and base in self._rebased:
            return self._rebased[base]
        shared = self._owner is None
        new = self.copy()
        new.base, new._class, new._parameters = base, None, None
        if shared:
            self._rebased[base] = new
        return new

    def private(self) -> Capture:
        """Return a capture of copies of the graphs; names and meta are kept."""
        variants = [Variant(v.guards, copy_graph(v.graph), dict(v.arguments), v.reads) for v in self.variants]
        return Capture(self.base, variants, self.signature, Counter(self.misses), None, self._class)

    def __deepcopy__(self, memo: dict[int, Any]) -> Capture:
        memo[id(self)] = new = self.copy()
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        variants = [(v.guards, PortableGraph(v.graph), dict(v.arguments), v.reads) for v in self.variants]
        return _rebuild_capture, (class_recipe(self.base), variants, self.signature, self.misses)


def _rebuild_capture(
    recipe: tuple[Callable[..., type[nn.Module]], tuple[Any, ...]],
    variants: list[tuple[tuple[Guard, ...], PortableGraph, dict[str, str], frozenset[str]]],
    signature: Signature | None,
    misses: Counter[str],
) -> Capture:
    make, given = recipe
    rebuilt = [Variant(guards, graph.graph(), arguments, reads) for guards, graph, arguments, reads in variants]
    return Capture(make(*given), rebuilt, signature, misses)


class Captured:
    """Mix into the class of a module that runs from graphs.

    A captured module's class is made on the fly and named like the user's own, from which it derives. Classes are
    shared by modules with equal code, and never change once made; an edited graph makes a new one (`recompile`).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "_fxopt_capture" not in self.__dict__:
            # Someone called type(model)(...): a new model, of the user's class, that was never captured.
            self.__class__ = type(self)._fxopt_base

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep the user's own hook for subclasses (registries, say) from seeing the classes made here."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        capture = self.__dict__.get("_fxopt_capture")
        if capture is not None and name in capture.reads:
            _drop_variants(cast("nn.Module", self), name)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        recompile(cast("nn.Module", self))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_module, class_recipe(_under(type(self))), self.__getstate__()

    def train(self, mode: bool = True) -> Any:
        """Set training mode, unless the model holds rewrites that are valid in evaluation mode only."""
        record = cast("ModelRecord | None", self.__dict__.get("_fxopt_record"))
        if mode and record is not None and record.eval_only:
            raise ModeError(
                f"the model was rewritten for evaluation by {', '.join(record.eval_only)}; to train it, "
                "optimize with phase='train' or leave that pass out"
            )
        return super().train(mode)

    def _fxopt_miss(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward where no variant's guards hold, and count the reason."""
        if not torch.compiler.is_compiling():
            capture = self.__dict__["_fxopt_capture"]
            capture.misses[explain_miss(cast("nn.Module", self), args, kwargs)] += 1
        return self._fxopt_own(*args, **kwargs)

    def _fxopt_restart(self, reason: str, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward after an assumption failed in the middle of a graph."""
        if not torch.compiler.is_compiling():
            self.__dict__["_fxopt_capture"].misses[reason] += 1
        return self._fxopt_own(*args, **kwargs)


def _rebuild_module(make: Callable[..., type[nn.Module]], arguments: tuple[Any, ...]) -> nn.Module:
    base = make(*arguments)
    return nn.Module.__new__(_bare_class(base))


def _under(cls: type) -> type[nn.Module]:
    """Return the class below the mixin in a captured class."""
    return cls.__bases__[1]


def _is_captured_class(cls: type) -> bool:
    return cls.__bases__[:1] == (Captured,)


def capture_of(module: nn.Module) -> Capture | None:
    """Return the graphs that `module` runs from, or None."""
    return module.__dict__.get("_fxopt_capture")


def install(module: nn.Module, capture: Capture) -> None:
    """Make `module` run from the graphs of `capture`, which other modules may share.

    Raises:
        CaptureError: if the class of the module was changed by something else since it was captured.
    """
    base = _base_of(module)
    if capture.base is not base:
        capture = capture.rebased(base)
    module.__dict__["_fxopt_capture"] = capture
    module.__class__ = class_for(capture)


def uninstall(module: nn.Module) -> None:
    """Give `module` its own forward back; nothing happens if it has it."""
    if "_fxopt_capture" in module.__dict__:
        module.__class__ = _base_of(module)
        del module.__dict__["_fxopt_capture"]


def own(module: nn.Module) -> Capture:
    """Return the module's capture for editing: where it is shared, the module gets a private copy first.

    Raises:
        CaptureError: if the module has no graph.
    """
    capture = _required(module)
    if capture._owner is None or capture._owner() is not module:
        capture = capture.private()
        capture._owner = weakref.ref(module)
        module.__dict__["_fxopt_capture"] = capture
    return capture


def with_graph(module: nn.Module, variant: int, graph: fx.Graph | None = None) -> None:
    """Give `module` graphs of its own: copies, or in the place of one of them another graph; see `recompile`.

    Raises:
        CaptureError: if the module has no graph.
    """
    capture = _required(module)
    variants = [
        Variant(v.guards, copy_graph(v.graph) if graph is None or number != variant else graph, dict(v.arguments), v.reads)
        for number, v in enumerate(capture.variants)
    ]
    new = Capture(capture.base, variants, capture.signature, Counter(capture.misses))
    new._owner = weakref.ref(module)
    module.__dict__["_fxopt_capture"] = new


def recompile(module: nn.Module) -> None:
    """Make `module` run from its graphs as they are now.

    Raises:
        CaptureError: if the module has no graph, or its class was changed by something else.
    """
    capture = _required(module)
    if capture._owner is not None and capture._owner() is module:
        capture._class = None
    install(module, capture)


def select(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Variant, list[Any]] | None:
    """Return the variant that a call would run, and the values of its placeholders; None if none holds."""
    capture = _required(module)
    names = _call_names(module, capture, args, kwargs)
    for variant in capture.variants:
        if all(guard.holds(names) for guard in variant.guards):
            return variant, [_argument(variant, node, names) for node in variant.graph.find_nodes(op="placeholder")]
    return None


def _argument(variant: Variant, placeholder: fx.Node, names: Mapping[str, Any]) -> Any:
    expression = variant.arguments.get(placeholder.name, str(placeholder.target))
    # The expression names an argument, or a place inside one; the tracer wrote it.
    return eval(expression, {}, dict(names))  # noqa: S307


def explain_miss(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return why no variant holds for a call: the first guard of each that fails."""
    capture = _required(module)
    names = _call_names(module, capture, args, kwargs)
    failed = (next((g for g in variant.guards if not g.holds(names)), None) for variant in capture.variants)
    return "; ".join(f"{guard.expression} ({guard.reason})" for guard in failed if guard is not None)


def _call_names(module: nn.Module, capture: Capture, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {"self": module, **capture.parameters.bind(args, dict(kwargs))}


def _required(module: nn.Module) -> Capture:
    capture = capture_of(module)
    if capture is None:
        raise CaptureError(f"this {type(module).__name__} has no graph: it was not captured, or it is a leaf")
    return capture


def _base_of(module: nn.Module) -> type[nn.Module]:
    cls = type(module)
    if _is_captured_class(cls):
        return _under(cls)
    if issubclass(cls, Captured):
        raise CaptureError(
            f"the class of this captured {cls.__name__} was changed after capture (by FSDP or a parametrization, say); "
            "rewrite the model first, then shard or parametrize it"
        )
    return cls


def _drop_variants(module: nn.Module, attribute: str) -> None:
    """Drop the graphs that the old value of an attribute is part of."""
    capture = own(module)
    capture.misses[f"attribute {attribute!r} was set after capture"] += 1
    capture.variants = [variant for variant in capture.variants if attribute not in variant.reads]
    recompile(module)


def class_for(capture: Capture) -> type[nn.Module]:
    """Return the class of the modules that run from `capture`; equal code gives the same class."""
    if capture._class is None:
        if not capture.variants:
            capture._class = _bare_class(capture.base)
        else:
            source = generate(capture.parameters, capture.variants)
            capture._class = dynamic_class(capture.base, Captured, source, capture.parameters, _fxopt_names(capture.base))
    return capture._class


def _bare_class(base: type[nn.Module]) -> type[nn.Module]:
    return dynamic_class(base, Captured, None, None, _fxopt_names(base))


def _fxopt_names(base: type[nn.Module]) -> dict[str, Any]:
    return {"_fxopt_base": user_class(base), "_fxopt_own": base.forward}
