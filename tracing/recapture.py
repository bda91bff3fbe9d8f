"""Calls that no graph fits, once a model is in its user's hands: run the module's own forward, and capture it again."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..compat import is_plainly_eager, own_children, process_count
from ..errors import GuardError, MatchFailure
from .capture import Capture, RegionPlan, Variant, capture_of, required_capture
from .captured import install, own, recompile
from .capturing import further_variant
from .exclusive import alone, are_fixed, turn
from .fallback import Fallback, Repeating, fallback_of
from .generators import announce
from .guards import Guard, Tally, equal, require, same_type
from .leaves import runs_as_sequential
from .live_call import LiveCall
from .names import ModelNames
from .objects import copied_object, is_object
from .observe import FOUND
from .record import Call, Computed
from .recorder import Untraceable
from .rollback import announce_changes
from .selection import call_names, explain_miss
from .sequential import SequentialCaptures
from .shared_slices import unshared
from .sources import Argument, Source, item_of
from .spans import counting
from .structure import map_leaves

__all__ = ["answer", "answer_to_data", "refuse"]

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_COPYABLE = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format,
    enum.Enum,
)  # fmt: skip
"""What an argument may hold besides tensors, and objects that can be copied."""


def answer(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str = "") -> Any:
    """Return what a call gives that none of the module's graphs fits: always what its own forward gives.

    Args:
        module: runs from graphs.
        args, kwargs: of the call.
        reason: what did not hold; by default the guards are asked.

    Raises:
        GuardError: if there are other processes, which would not do the same.
    """
    announce()
    announce_changes()
    capture, fallback = required_capture(module), fallback_of(module)
    forward: Any = cast("Any", module)._fxopt_own
    reason = reason or explain_miss(module, args, kwargs)
    if fallback is None:
        capture.misses[reason] += 1
        _without_graphs(module)
        return forward(*args, **kwargs)
    fallback.misses[reason] += 1
    if process_count() > 1:
        raise GuardError(
            f"{_which(module)} is called as it was not captured: {reason}; the model runs on {process_count()} "
            "processes, which must all do the same. Give fxopt.optimize example_inputs that cover this call too"
        )
    if not fallback.may_capture(reason, len(capture.variants)):
        _without_graphs(module)
        return _own_forward(module, fallback, args, kwargs)
    if are_fixed() or not is_plainly_eager() or not turn.acquire(blocking=False):
        return _own_forward(module, fallback, args, kwargs)
    try:
        _without_graphs(module)
        with unshared():
            return _Again(module, fallback, reason).call(args, kwargs)
    finally:
        turn.release()


def answer_to_data(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str, tally: Tally) -> Any:
    """Return what a call gives whose data decide otherwise than those that the module was captured with.

    Its own forward runs, and nothing is captured: the next call may decide otherwise again. Where most calls do, the
    graph that checks is dropped.

    Args:
        module: runs from graphs.
        args, kwargs: of the call.
        reason: what did not hold.
        tally: of the check.
    """
    announce()
    announce_changes()
    capture, fallback = required_capture(module), fallback_of(module)
    if fallback is None:
        capture.misses[reason] += 1
        return cast("Any", module)._fxopt_own(*args, **kwargs)
    fallback.misses[reason] += 1
    if tally.is_hopeless():
        fallback.failures[reason] = "most calls decide otherwise: the graph was dropped"
        _drop(module, reason)
    return _own_forward(module, fallback, args, kwargs)


def _own_forward(module: nn.Module, fallback: Fallback, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a module's own forward; where it calls members of an ensemble, their tensors are cut all at once."""
    forward = cast("Any", module)._fxopt_own
    if fallback.repeating is None:
        return forward(*args, **kwargs)
    with fallback.slices.during_call():
        return forward(*args, **kwargs)


def _drop(module: nn.Module, reason: str) -> None:
    """Drop the graphs of a module that make a check."""
    with alone():
        capture = own(module)
        checking = [v for v in capture.variants if _checks(v, reason)] or capture.variants  # else a region's graph does
        capture.variants = [v for v in capture.variants if v not in checking]
        capture.dropped = "most calls decided otherwise by the data in a tensor" if capture.variants else ""
        recompile(module)


def _checks(variant: Variant, reason: str) -> bool:
    checks = variant.graph.find_nodes(op="call_function", target=require)
    return any(check.args[2] == reason for check in checks)


def _without_graphs(module: nn.Module) -> None:
    """Give a module whose graphs were all dropped its own forward: forwards exist that ask whether theirs is called."""
    if required_capture(module).variants:
        return
    own(module).dropped = ""
    recompile(module)


def refuse(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str = "") -> Any:
    """Count a call that none of the module's graphs fits, where its own forward would be wrong.

    Raises:
        GuardError: always.
    """
    fallback = fallback_of(module)
    reason = reason or explain_miss(module, args, kwargs)
    if fallback is not None:
        fallback.misses[reason] += 1
    raise GuardError(
        f"{_which(module)} is called as it was not captured: {reason}; its own forward would not do, for "
        f"{required_capture(module).lost}. Give fxopt.optimize example_inputs that cover this call too"
    )


def _which(module: nn.Module) -> str:
    fallback = fallback_of(module)
    kind = type(module).__name__
    return f"this {kind}" if fallback is None else f"module {fallback.name or '(root)'!r} ({kind})"


_Found = tuple[Variant, Mapping[str, RegionPlan], Mapping[str, nn.Module]]
"""A graph, and what its module needs for it: regions, and further children by name."""


class _Again:
    """Capture a module for a call that it has no graph for."""

    def __init__(self, module: nn.Module, fallback: Fallback, reason: str) -> None:
        self.module, self.fallback, self.reason = module, fallback, reason

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the module's own forward gives; the next such call runs a graph, if one can be had."""
        forward = cast("Any", self.module)._fxopt_own
        obstacle = _obstacle((args, kwargs))
        if obstacle:
            self.fallback.failures[self.reason] = obstacle
            return forward(*args, **kwargs)
        live = LiveCall(self.module, args, kwargs, deep=self.fallback.repeating is not None)
        output = live.run(forward, args, kwargs)
        try:
            with live.again():
                found = self._captured(live)
            if found is not None:
                self._install(*found)
        except Untraceable as error:
            self.fallback.failures[self.reason] = (
                f"{error.reason} ({error.location})" if error.location else error.reason
            )
        except Exception as error:
            self.fallback.failures[self.reason] = f"tracing it raised {type(error).__name__}: {error}"
        return output

    def _captured(self, live: LiveCall) -> _Found | None:
        """Return a graph for the call that gave what the forward gave; None if another thread changed the module.

        Raises:
            Untraceable: if there is none that would run for this call and give the same.
            Exception: whatever the forward raises when it is run on proxies.
        """
        if live.writes_into_objects:
            raise Untraceable("it changes tensors in an object that it is given")
        capture = required_capture(self.module)
        stand_in = _stand_in(self.module, capture)
        variant, regions = _variant(stand_in, capture, live)
        install(stand_in, Capture(capture.base, [variant], capture.signature, regions=regions))
        names = call_names(stand_in, capture, *live.call.plain_arguments)
        if not variant.fits(names):
            raise Untraceable("its graph would not hold for the same call")
        conditions = frozenset(variant.guards)
        if any(frozenset(known.guards) == conditions for known in capture.variants):
            raise Untraceable("the case shows in the middle of the forward only")
        if not live.gives_the_same(cast("Any", stand_in).forward):
            raise Untraceable("its graph gave another result than its forward")
        children: Mapping[str, nn.Module] = {}
        if self.fallback.repeating is not None:
            variant, children = self._rewritten(self.fallback.repeating, variant, regions, live)
        return (variant, regions, children) if _holds_still(self.module, stand_in, variant) else None

    def _rewritten(
        self, repeating: Repeating, variant: Variant, regions: Mapping[str, RegionPlan], live: LiveCall
    ) -> tuple[Variant, Mapping[str, nn.Module]]:
        """Return the graph as passes rewrite it, and the children that it calls besides.

        Raises:
            Untraceable: if they cannot: the members run as fast from the module's own forward.
        """
        if regions:
            raise Untraceable("it is not rewritten like the others: some of it runs under a context")
        try:
            rewritten, children = repeating(self.module, variant, live.call)
        except MatchFailure as refusal:
            raise Untraceable(f"it is not rewritten like the others: {refusal}") from refusal
        conditions = frozenset(rewritten.guards)
        if any(frozenset(known.guards) == conditions for known in required_capture(self.module).variants):
            raise Untraceable("it is not rewritten like the others: it would hold for the same calls as one of them")
        self.fallback.rewritten[self.reason] += 1
        return rewritten, children

    def _install(self, variant: Variant, regions: Mapping[str, RegionPlan], children: Mapping[str, nn.Module]) -> None:
        capture, more = own(self.module), len(regions) + len(children)
        own_children(self.module).update(children)
        capture.variants = [*(counting(known, more) for known in capture.variants), counting(variant, len(children))]
        capture.regions = {**capture.regions, **regions}
        recompile(self.module)
        self.fallback.captured[self.reason] += 1


def _variant(stand_in: nn.Module, capture: Capture, live: LiveCall) -> tuple[Variant, Mapping[str, RegionPlan]]:
    if runs_as_sequential(stand_in):
        return SequentialCaptures().capture(stand_in, live.call).variants[0], {}
    call, names = live.call, ModelNames(stand_in)
    plain = call.args, call.kwargs
    _mark_values(call, capture)
    try:
        return further_variant(names, capture.parameters, call, live.changed, live.assigning)
    except Exception:
        # A forward may do with plain numbers what no graph can say of values.
        call.args, call.kwargs = plain
        return further_variant(names, capture.parameters, call, live.changed, live.assigning)


def _stand_in(module: nn.Module, capture: Capture) -> nn.Module:
    """Return a module with the same attributes, tensors and children, which other threads do not know of."""
    new = nn.Module.__new__(capture.base)
    kept = {name: value for name, value in module.__dict__.items() if name not in _OURS}
    new.__dict__.update(kept, _modules=dict(own_children(module)))
    return new


_OURS = ("_fxopt_capture", "_fxopt_fallback", FOUND)


def _holds_still(module: nn.Module, stand_in: nn.Module, variant: Variant) -> bool:
    """Say whether what the graph took from the module's attributes is still there: other threads may set them."""
    now = {**own_children(module), **module.__dict__}
    before = {**own_children(stand_in), **stand_in.__dict__}
    return all(now.get(name) is before.get(name) for name in variant.reads) and capture_of(module) is not None


def _obstacle(arguments: _Arguments) -> str:
    """Return why a call's arguments cannot be copied, or nothing."""
    unknown: list[str] = []

    def note(leaf: Any) -> Any:
        plain = type(leaf) in (Tensor, nn.Parameter) if isinstance(leaf, Tensor) else isinstance(leaf, _COPYABLE)
        if not plain and not (is_object(leaf) and copied_object(leaf) is not leaf):
            unknown.append(type(leaf).__name__)
        return leaf

    map_leaves(note, arguments)
    return f"an argument is a {unknown[0]}" if unknown else ""


def _mark_values(call: Call, capture: Capture) -> None:
    """Wrap the numbers among the arguments that are not to be part of the graph.

    These are those that another graph takes as values, and those that are not what another graph has them for: once a
    number has changed, it may change again.
    """
    known = {source for variant in capture.variants for source in variant.arguments.values()}
    bound = {guard for variant in capture.variants for guard in variant.guards}
    names = [p.name for p in capture.parameters.parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]

    def marked(value: Any, source: Source) -> Any:
        if type(value) in (int, float, torch.Size):
            return Computed(value) if source in known or _has_changed(value, source, bound) else value
        if type(value) in (tuple, list):
            items = [marked(held, item_of(source, index)) for index, held in enumerate(cast("Sequence[Any]", value))]
            return tuple(items) if type(value) is tuple else items
        if type(value) is dict:
            pairs = cast("Mapping[Any, Any]", value).items()
            return {key: marked(held, item_of(source, key)) for key, held in pairs}
        return value

    call.args = tuple(marked(v, Argument(names[i] if i < len(names) else "")) for i, v in enumerate(call.args))
    call.kwargs = {name: marked(value, Argument(name)) for name, value in call.kwargs.items()}


def _has_changed(value: Any, source: Source, bound: Collection[Guard]) -> bool:
    """Say whether a number may differ from call to call: any integer may; a float where no graph is for this one."""
    is_int = same_type(source, 0, "") in bound
    if type(value) is not float:
        return is_int
    known = equal(source, value, "")
    return (is_int or same_type(source, 0.0, "") in bound) and known not in bound
