"""What a module in the user's hands did where no graph fitted a call: its original forward ran, and that is counted."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from ...compat import all_modules
from ...errors import GuardWarning
from ..guards import Tally, require
from ..values import ModelNames, has_attributes, map_leaves
from .capture import Specialization, capture_of, required_capture
from .captured import drop_specializations, uninstall
from .misses import HANDLER, Miss

__all__ = ["CACHES", "attach", "detach", "fallback_of", "misses_in"]

CACHES = ("past_key_values", "cache_params")
"""By these names a forward takes what earlier steps have computed."""

_ADD = "Add this call to example_inputs, or record it with fxopt.recording"
_ADD_INNER = "Add a call of the model that leads to this one to example_inputs, or record it with fxopt.recording"
_AGAIN = "Set it before fxopt.optimize or fxopt.capture"
_GENERATING = (
    "Give fxopt.Inputs.generating(ids, ...) as example_inputs, with all that generate is given, "
    "such as cache_implementation='static'"
)
_OF_CACHE = "it was called with a cache that no example had"
_MEANS = "The result is right, but the module gains nothing there. fxopt.report lists all such modules"
_OF_MODULE = re.compile(r"(not |'\w+' not in )?(\w+\()*self\b|not _has_any_global_hook")
"""How conditions begin that ask for nothing that is given in a call."""
_CACHE = re.compile(rf"\b({'|'.join(CACHES)})\b")
_DROPPED = "most calls had tensor data that the graph does not fit, so it was dropped"


@dataclass
class Fallback:
    """Count what happened to one module since the model was handed over, and warn of it once for the model."""

    name: str
    warned: set[str]
    generates: bool = False

    # Most modules never need any of these: they are made on first use.

    @cached_property
    def misses(self) -> Counter[str]:
        """Count the calls that ran the module's original forward, by the guards that failed."""
        return Counter()

    @cached_property
    def refused(self) -> Counter[str]:
        """Count the calls that raised GuardError, by the guards that failed."""
        return Counter()

    @cached_property
    def others(self) -> Counter[str]:
        """Count the calls whose data did not fit one graph, and for which another was tried, by the checks."""
        return Counter()

    @cached_property
    def notes(self) -> dict[str, str]:
        """Hold what came of misses besides, by the guards that failed."""
        return {}

    def note(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], reason: str, tally: Tally | None
    ) -> None:
        """Count a call, and warn of the model's first for that reason; a graph goes whose check of data mostly misses.
        No warning tells of a mode that no graph is for, such as training after norms were folded: no call to add.
        """
        self.misses[reason] += 1
        if tally is not None and tally.is_hopeless():
            self._drop(module, reason)
        elif tally is None and reason not in self.warned:
            graphs = required_capture(module).specializations
            if graphs and not any(graph.runs_in_mode(module) for graph in graphs):
                return
            self.warned.add(reason)
            if self.generates and graphs and _is_of_cache(reason, (*args, *kwargs.values())):
                if _OF_CACHE not in self.warned:  # inside of the model it has many names
                    self.warned.add(_OF_CACHE)
                    told = f"{self._which(module)} used its original forward: {_OF_CACHE}. {_MEANS}. {_GENERATING}"
                    warnings.warn(told, GuardWarning, 7)
                return
            settles = graphs and not _OF_MODULE.match(reason)  # what a module holds comes with no call
            advice = f"{_ADD_INNER if self.name else _ADD}: {_described(args, kwargs)}" if settles else _AGAIN
            why = f"its graphs are for calls in which {reason}" if graphs else reason
            told = f"{self._which(module)} used its original forward: {why}. {_MEANS}. {advice}"
            warnings.warn(told, GuardWarning, 7)

    def passed(self, module: nn.Module, reason: str, tally: Tally | None) -> None:
        """Count a call whose data another graph is tried for; a graph goes whose check of data mostly misses."""
        if tally is None:
            return
        self.others[reason] += 1
        if tally.is_hopeless():
            self._drop(module, reason)

    def _drop(self, module: nn.Module, reason: str) -> None:
        self.notes[reason] = _DROPPED
        drop_specializations(module, lambda specialization: _checks(specialization, reason), _DROPPED)

    def refuse(self, module: nn.Module, reason: str) -> str:
        """Count a call that raises GuardError, and return what to call the module."""
        self.refused[reason] += 1
        return self._which(module)

    def _which(self, module: nn.Module) -> str:
        return f"module {self.name or '(root)'!r} ({type(module).__name__})"

    def report(self) -> Iterator[Miss]:
        """Yield what happened, by guard."""
        for guard, calls in self.misses.items():
            yield Miss(self.name, guard, calls, note=self.notes.get(guard, ""))
        for guard, calls in self.others.items():
            yield Miss(self.name, guard, calls, note=self.notes.get(guard, ""), passed=True)
        for guard, calls in self.refused.items():
            yield Miss(self.name, guard, calls, refused=True)


def _is_of_cache(reason: str, given: Sequence[Any]) -> bool:
    """Say whether a call is given a cache, and was turned away for it."""
    return bool(_CACHE.search(reason)) and any(map(has_attributes, given))


def _checks(specialization: Specialization, reason: str) -> bool:
    checks = specialization.graph.find_nodes(op="call_function", target=require)
    return any(check.args[2] == reason for check in checks)


def _described(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the arguments of a call in short, tensors as their shapes."""
    positional, named = map_leaves(_Short, (tuple(args), dict(kwargs)))
    return f"({', '.join([*map(repr, positional), *(f'{name}={value!r}' for name, value in named.items())])})"


class _Short:
    """Print a value in a few letters."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __repr__(self) -> str:
        if isinstance(self._value, Tensor):
            return f"{type(self._value).__name__}{list(self._value.shape)}"
        plain = isinstance(self._value, (bool, int, float, str, type(None)))
        text = repr(self._value) if plain else type(self._value).__name__
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


_LONGEST = 40


def fallback_of(module: nn.Module) -> Fallback | None:
    """Return what happened to a module since its model was handed over; None before, and for what has no graph."""
    return module.__dict__.get(HANDLER)


def detach(names: ModelNames) -> None:
    """Hand a model over to its user: from now on its modules tell of calls that they have no graph for."""
    warned: set[str] = set()
    generates = callable(getattr(names.modules[""], "generate", None))
    for name, module in names.modules.items():
        if capture_of(module) is not None and names.name(module) == name:
            module.__dict__[HANDLER] = Fallback(name, warned, generates)


def attach(model: nn.Module) -> None:
    """Take a model back from its user; drop what its modules told, and graphs that inactive ones no longer fit."""
    for module in all_modules(model):
        module.__dict__.pop(HANDLER, None)
        if capture_of(module) is None:
            uninstall(module)


def misses_in(modules: Iterable[nn.Module]) -> list[Miss]:
    """Return what happened in modules, in their order."""
    found = map(fallback_of, modules)
    return [miss for fallback in found if fallback is not None for miss in fallback.report()]
