"""What a module in the user's hands did where no graph fitted a call, and what it may still do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from torch import nn

from ..compat import all_modules
from .capture import Variant, capture_of
from .captured import uninstall
from .names import ModelNames
from .record import Call
from .shared_slices import SharedSlices

__all__ = ["Fallback", "Miss", "Repeating", "fallback_of", "hold", "misses_in", "release"]

_KEY = "_fxopt_fallback"


@dataclass(frozen=True)
class Miss:
    """The calls that one guard turned away from a module's graphs.

    Attributes:
        module: its qualified name.
        guard: the conditions that did not hold.
        calls: how many; each ran the module's own forward.
        captured: how many of them gave the module a further graph.
        failure: why the module could not be captured for such a call; empty where it was, or was not tried.
        rewritten: how many of the further graphs have the rewrites that the module's first graphs have.
    """

    module: str
    guard: str
    calls: int
    captured: int
    failure: str
    rewritten: int = 0

    @property
    def fallbacks(self) -> int:
        """Return how many of the calls ran the module's own forward and left no graph behind."""
        return self.calls - self.captured

    def __str__(self) -> str:
        rewritten = f" and {self.rewritten} rewritten" if self.rewritten else ""
        what = [f"{self.captured} captured again{rewritten}"] if self.captured else []
        what += [f"{self.fallbacks} ran its own forward"] if self.fallbacks else []
        why = f" ({self.failure})" if self.failure else ""
        return f"{self.guard}: {', '.join(what)}{why}"


class Repeating(Protocol):
    """Do to a further graph of a module what passes did to its first ones."""

    def __call__(self, module: nn.Module, variant: Variant, call: Call) -> tuple[Variant, Mapping[str, nn.Module]]:
        """Return the rewritten graph, and the children by name that the module has to have for it.

        Args:
            module: is only read.
            variant: of the module, as it was captured.
            call: one that it holds for, with all calls inside it; it is not changed.

        Raises:
            MatchFailure: if the graph must stay as it is.
            Exception: whatever goes wrong in the user's code or in a pass.
        """
        ...


@dataclass
class Fallback:
    """Count what happened to one module since the model was handed over.

    Attributes:
        name: the module's qualified name.
        graphs: how many graphs it may have; a call that none fits makes one more up to there.
        repeating: rewrites further graphs as the first ones were; None where no pass left what can be repeated.
    """

    name: str
    graphs: int
    repeating: Repeating | None = None

    # Most modules never need any of these: they are made on first use.

    @cached_property
    def misses(self) -> Counter[str]:
        """Count calls by the guards that failed."""
        return Counter()

    @cached_property
    def captured(self) -> Counter[str]:
        """Count the graphs made for such calls, by the guards that failed."""
        return Counter()

    @cached_property
    def rewritten(self) -> Counter[str]:
        """Count those of these graphs that were rewritten, by the guards that failed."""
        return Counter()

    @cached_property
    def failures(self) -> dict[str, str]:
        """Hold why capturing such a call failed, by the guards that failed; it is not tried again."""
        return {}

    @cached_property
    def slices(self) -> SharedSlices:
        """Hold slices of stacked tensors, for calls in which the members run one by one."""
        return SharedSlices()

    def may_capture(self, reason: str, present: int) -> bool:
        """Say whether a call that failed for `reason` may make a graph, the module having `present` of them.

        Graphs that were dropped again count: an attribute that is set before each call would make one each time.
        """
        return reason not in self.failures and max(present, self.captured.total()) < self.graphs

    def report(self) -> Iterator[Miss]:
        """Yield what happened, by guard."""
        for guard, calls in self.misses.items():
            failure = self.failures.get(guard, "")
            yield Miss(self.name, guard, calls, self.captured[guard], failure, self.rewritten[guard])


def fallback_of(module: nn.Module) -> Fallback | None:
    """Return what happened to a module since its model was handed over; None before, and for what has no graph."""
    return module.__dict__.get(_KEY)


def release(names: ModelNames, graphs: int) -> None:
    """Hand a model over to its user: from now on its modules capture what they have no graph for.

    Args:
        names: of the model, captured, and rewritten as far as it will be.
        graphs: how many graphs a module may have.
    """
    for name, module in names.modules.items():
        if capture_of(module) is not None and names.name(module) == name:
            module.__dict__[_KEY] = Fallback(name, graphs)


def hold(model: nn.Module) -> dict[nn.Module, Repeating]:
    """Take a model back from its user, to work on it: its modules capture nothing by themselves any more.

    Graphs of modules at rest go where they are not what these would run from any more.

    Returns:
        What was repeated on the further graphs of each module, so far.
    """
    repeated: dict[nn.Module, Repeating] = {}
    for module in all_modules(model):
        fallback: Fallback | None = module.__dict__.pop(_KEY, None)
        if fallback is not None and fallback.repeating is not None:
            repeated[module] = fallback.repeating
        if capture_of(module) is None:
            uninstall(module)
    return repeated


def misses_in(modules: Iterable[nn.Module]) -> list[Miss]:
    """Return what happened in modules, in their order."""
    found = map(fallback_of, modules)
    return [miss for fallback in found if fallback is not None for miss in fallback.report()]
