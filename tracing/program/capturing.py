"""Capture every module of a model, one by one; what cannot be captured is kept with its reason."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ...compat import all_modules, is_torch_wrapper, own_buffers
from ...runtime.graphs import Capture, Specialization, capture_of, install, required_capture, uninstall
from ...runtime.guards import SELF, Argument, Guard, Source, require
from ...runtime.values import (
    ModelNames,
    Signature,
    is_container,
    is_leaf,
    meta_key,
    meta_of,
    runs_as_sequential,
    signature_of,
)
from ..analyses import HashLevel, StructuralHash, numbers_of
from ..examples import Untraceable
from ..isolation import compiles, is_in_compiled
from ..reads import raised_at
from ..recording import Call, Recording
from ..rules import SequentialCaptures, tracing_session
from ..trace import ModuleTracer, TracingSession, with_regions
from .further_guards import ExtraArguments, Traced, told_apart

__all__ = ["Captures", "Opaque", "capture_modules"]

_MAX_VARIANTS = 8
"""Graphs kept for one module that is called in several ways."""

_MAX_COMPARED = 4
"""Modules called more often are traced by themselves."""

_COMPILED = "torch.compile runs it from code of its own: optimize the model first, then compile what optimize returns"

_MAX_STATES = 2
"""So often a module that sets its own attributes is traced again with those that it leaves."""


@dataclass(frozen=True)
class Opaque:
    """A module that runs its original forward: which, where it could not be captured, and why."""

    name: str
    location: str
    reason: str

    def __str__(self) -> str:
        place = f" ({self.location})" if self.location else ""
        return f"{self.name or '(root)'}{place}: {self.reason}"


@dataclass
class Captures:
    """What capturing a model gave, by the modules' names; `leaves` are never looked into. It is `uncertain` whether
    other numbers might have given more: a forward failed, or decided by data. `names`: of the model's modules, if they
    are still all there. See `Program` for the rest.
    """

    captured: dict[str, Capture]
    opaque: dict[str, Opaque]
    leaves: list[str]
    uncertain: bool = False
    names: ModelNames | None = None
    exact_types: dict[nn.Module, str] = field(default_factory=dict[nn.Module, str])
    seconds: float = 0.0


def capture_modules(names: ModelNames, recording: Recording | None) -> Captures:
    """Trace every module but leaves and containers, on recorded calls or without values; nothing is installed yet."""
    result = Captures({}, {}, [])
    with tracing_session(names.modules.values()) as session:
        capturer = _Capturer(names, recording, session)
        for module in dict.fromkeys(names.modules.values()):
            name = names.name(module)
            if is_container(module) or is_in_compiled(name):
                continue
            if is_leaf(module):
                result.leaves.append(name)
            else:
                found = capturer.capture(name, module)
                if isinstance(found, Capture):
                    result.captured[name] = found
                elif found is not None:
                    result.opaque[name] = found
        capturer.extra.relax(result.captured)
        result.uncertain = capturer.uncertain
    return result


@dataclass
class _Case:
    """What a trace is to find: answers of switches, and attributes that calls have set; `depth` calls ago."""

    answers: Mapping[Source, bool]
    attributes: Mapping[tuple[nn.Module, str], Any] = field(compare=False)
    depth: int = 0


class _Capturer:
    def __init__(self, names: ModelNames, recording: Recording | None, session: TracingSession) -> None:
        self._names = names
        self._recording = recording
        self._session = session
        self._sequentials = SequentialCaptures()
        self._stateful: dict[nn.Module, bool] = {}
        self._signatures: dict[Any, list[Signature]] = {}
        self._alike: dict[Hashable, list[tuple[nn.Module, Capture]]] = {}
        self._hash = StructuralHash(HashLevel.NUMBERED)
        self._active: dict[int, tuple[Capture, Capture]] = {}
        self._longer: dict[int, tuple[Capture, Capture]] = {}
        self.uncertain = False
        self.extra = ExtraArguments(names)
        self._kinds = Counter(type(module) for module in set(names.modules.values()))

    def capture(self, name: str, module: nn.Module) -> Capture | Opaque | None:
        """Return the capture of one module, or why there is none; None for a Sequential that only holds others."""
        present = capture_of(module)
        if present is not None:
            return self._extended(name, module, self._woken(present))
        reason = _refusal(module)
        if reason is not None:
            return Opaque(name, "", reason)
        calls: Sequence[Call | None] = (None,)
        if self._recording is not None:
            calls = self._recording.calls.get(module, [])
            if not calls:
                return None if runs_as_sequential(module) else Opaque(name, "", "the example inputs never call it")
        if runs_as_sequential(module):
            return self._sequentials.capture(module, calls[0])
        return (
            self._traced(name, module, calls) if self._kinds[type(module)] == 1 else self._shared(name, module, calls)
        )

    def _shared(self, name: str, module: nn.Module, calls: Sequence[Call | None]) -> Capture | Opaque:
        """Return the capture of a module that is alike, where there is one."""
        key = self._key(module, calls)
        alike = [] if key is None else self._alike.setdefault(key, [])
        known = next((capture for first, capture in alike if _reads_same(capture, first, module)), None)
        if known is not None:
            return known
        found = self._traced(name, module, calls)
        if isinstance(found, Capture):
            alike.append((module, found))
        return found

    def _key(self, module: nn.Module, calls: Sequence[Call | None]) -> Hashable | None:
        """Return everything that the trace of a module may depend on, or None if that cannot be said."""
        if len(calls) > _MAX_COMPARED or any(call is not None and call.attributes for call in calls):
            return None
        described = self._hash.whole(module)
        return described.key, tuple(None if call is None else _call_key(call, described.paths) for call in calls)

    def _woken(self, capture: Capture) -> Capture:
        """Return the capture itself, or where modules are inactive, one that the same modules share and run from."""
        if not capture.inactive:
            return capture
        known = self._active.setdefault(id(capture), (capture, capture.set_inactive(False)))
        return known[1]

    def _extended(self, name: str, module: nn.Module, present: Capture) -> Capture:
        """Return a capture that has graphs for the recorded calls, too, that none of its own is for."""
        known = self._longer.get(id(present), (present, present))[1]
        calls = [] if self._recording is None else self._recording.calls.get(module, [])
        if known.lost or runs_as_sequential(module) or not any(_is_new(module, known, call) for call in calls):
            return known
        longer = list(known.specializations)
        with _own_forward(module):
            for call in calls:
                if len(longer) < _MAX_VARIANTS and _is_new(module, replace(known, specializations=longer), call):
                    longer += self._more(name, known.parameters, call, longer)
        cut, regions = with_regions(module, longer)
        if len(cut) == len(known.specializations) or regions:  # graphs may count the regions that there are
            return known
        extended = replace(known.copy(), specializations=cut, compiled=None)
        self._longer[id(present)] = present, extended
        return extended

    def _traced(self, name: str, module: nn.Module, calls: Sequence[Call | None]) -> Capture | Opaque:
        try:
            signature, specializations = self._first(name, module, calls)
        except Untraceable as error:
            self.uncertain = True
            return Opaque(name, error.location or _defined_at(module), error.reason)
        except Exception as error:
            self.uncertain = True
            first_line = str(error).strip().partition("\n")[0]
            reason = f"tracing it raised {type(error).__name__}: {first_line}"
            return Opaque(name, raised_at(error) or _defined_at(module), reason)
        traced: Traced = [(calls[0], each) for each in specializations]
        for call in calls[1:]:
            known = [each for _, each in traced]
            if len(known) < _MAX_VARIANTS and not _covered(module, signature, known, call):
                traced += [(call, each) for each in self._more(name, signature, call, known)]
        specializations = told_apart(traced, signature)
        usual = self._signatures[type(module).forward][0]
        specializations, regions = with_regions(module, specializations)
        own = None if signature is usual else signature
        return Capture(type(module), specializations, own, regions=regions, _parameters=signature)

    def _first(
        self, name: str, module: nn.Module, calls: Sequence[Call | None]
    ) -> tuple[Signature, list[Specialization]]:
        """Return the graphs of a module's first call, and the signature that they are for."""
        fitting = self._fitting(module, calls)
        try:
            return fitting[0], list(self.specializations(name, fitting[0], calls[0]))
        except TypeError:
            if len(fitting) == 1:
                raise
        # The decorator hands arguments on to a function that has other names for them.
        return fitting[1], list(self.specializations(name, fitting[1], calls[0]))

    def _more(
        self, name: str, signature: Signature, call: Call | None, known: Sequence[Specialization]
    ) -> list[Specialization]:
        """Return the specializations of a further call; one that cannot be traced runs the original forward."""
        cases = set(map(_case, known))
        try:
            found = list(self.specializations(name, signature, call))
        except Exception:
            self.uncertain = True
            return []
        return [specialization for specialization in found if _case(specialization) not in cases]

    def specializations(self, name: str, signature: Signature, call: Call | None) -> Iterator[Specialization]:
        """Yield the graph of a call, and those for other answers of switches, and for what the call leaves set."""
        pending: list[_Case] = [_Case({}, {} if call is None else call.attributes)]
        tried: list[_Case] = []
        assigned = {} if self._recording is None else self._recording.assigning
        while pending and len(tried) < _MAX_VARIANTS:
            case = pending.pop(0)
            tried.append(case)
            rest = self._is_stateful, assigned, case.answers, case.attributes

            def traced(call: Call | None, rest: Any = rest) -> tuple[ModuleTracer, Specialization]:
                tracer = ModuleTracer(self._session, self._names, name, call, *rest)
                return tracer, tracer.trace(signature)

            try:
                tracer, specialization = traced(call)
                self.extra.ask(self._names.modules[name], signature, call, specialization, lambda c: traced(c)[1])
                self.uncertain |= bool(tracer.decisions.by_data)
                yield specialization
            except Exception:
                if len(tried) == 1:
                    raise
                self.uncertain = True
                continue
            flipped = [{**case.answers, f: not answer} for f, answer in tracer.decisions.flags.items()]
            found = [_Case(answers, case.attributes) for answers in flipped if answers.keys() != case.answers.keys()]
            if tracer.assignments.left is not None and case.depth < _MAX_STATES:
                found.append(_Case(case.answers, tracer.assignments.left, case.depth + 1))
            pending += [case for case in found if case not in tried and case not in pending]

    def _fitting(self, module: nn.Module, calls: Sequence[Call | None]) -> list[Signature]:
        """Return the signatures that the recorded calls fit: the function's under a decorator, then the decorator's."""
        forward = type(module).forward
        if forward not in self._signatures:
            follow = signature_of(forward)
            outer = signature_of(forward, follow_wrapped=False)
            plain = inspect.unwrap(forward) is forward
            self._signatures[forward] = [follow] if plain else [follow, outer] if follow.decorated else [outer]
        candidates = self._signatures[forward]
        return [s for s in candidates if all(_fits(s, call) for call in calls)] or candidates[-1:]

    def _is_stateful(self, module: nn.Module) -> bool:
        known = self._stateful.get(module)
        if known is None:
            changed = set[nn.Module]() if self._recording is None else self._recording.changed
            known = self._stateful[module] = any(
                inner in changed or getattr(inner, "inplace", False) or (bool(own_buffers(inner)) and is_leaf(inner))
                for inner in all_modules(module)
            )
        return known


def _reads_same(capture: Capture, first: nn.Module, module: nn.Module) -> bool:
    """Tell whether graphs of the first module hold for one that may differ from it in whole numbers."""
    ours, theirs = numbers_of(first), numbers_of(module)
    if any(ours.get(name) != theirs.get(name) for name in capture.reads):
        return False
    of_self = {
        guard: _arguments(guard)
        for each in capture.specializations
        for guard in each.guards
        if SELF in _arguments(guard)
    }
    if any(len(arguments) > 1 for arguments in of_self.values()):
        return False  # it compares what the module has with what it is given
    return all(guard.holds({"self": first}) == guard.holds({"self": module}) for guard in of_self)


def _arguments(guard: Guard) -> set[Source]:
    return {part for source in guard.sources() for part in source.all() if isinstance(part, Argument)}


def _fits(signature: Signature, call: Call | None) -> bool:
    if call is None:
        return True
    args, kwargs = call.forward_arguments
    try:
        signature.bind(args, dict(kwargs))
    except TypeError:
        return False
    return True


def _case(specialization: Specialization) -> Hashable:
    """Return what tells graphs of a module apart: when they hold, and what they check on the way."""
    checks = specialization.graph.find_nodes(op="call_function", target=require)
    return frozenset(specialization.guards), tuple(check.args[2] for check in checks)


def _call_key(call: Call, paths: Mapping[nn.Module, str]) -> Hashable:
    """Return what a trace may depend on of a call: its arguments, and what the modules inside gave that it called."""
    args, kwargs = call.forward_arguments
    children = tuple((paths.get(child), _key_of(inner.output)) for child, inner in call.children)
    return _key_of(args), tuple((name, _key_of(value)) for name, value in kwargs.items()), children


def _key_of(value: object) -> Hashable:
    return type(value), meta_key(meta_of(value))


def _is_new(module: nn.Module, capture: Capture, call: Call) -> bool:
    """Tell whether a module that has graphs has none for a call, by their guards."""
    args, kwargs = call.plain_arguments
    try:
        names = {"self": module, **capture.parameters.bind(args, dict(kwargs))}
    except TypeError:
        return False
    return not any(specialization.fits(names) for specialization in capture.specializations)


@contextmanager
def _own_forward(module: nn.Module) -> Generator[None]:
    """Give a module that runs from graphs its own forward while inside."""
    capture = required_capture(module)
    uninstall(module, keep_regions=True)
    try:
        yield
    finally:
        install(module, capture)


def _covered(
    module: nn.Module, signature: Signature, specializations: Sequence[Specialization], call: Call | None
) -> bool:
    """Tell whether a graph holds for a call, whatever it may come to check on the way."""
    if call is None:
        return True
    args, kwargs = call.plain_arguments
    names = {"self": module, **signature.bind(args, dict(kwargs))}
    sure = [v for v in specializations if not v.graph.find_nodes(op="call_function", target=require)]
    return any(specialization.fits(names) for specialization in sure)


def _refusal(module: nn.Module) -> str | None:
    """Return why a module is not even tried."""
    if compiles(module):
        return _COMPILED
    if isinstance(module, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        return "it is a TorchScript module"
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance"
    if is_torch_wrapper(type(module)):
        return f"it is a {type(module).__name__} wrapper"
    if not inspect.isfunction(type(module).forward):
        return "its forward is not a plain function"
    return None


def _defined_at(module: nn.Module) -> str:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None:
        return ""
    return f"{code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}"
