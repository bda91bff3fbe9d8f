"""Write the guards of a graph as Python; what many of them read is looked up once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from .guards import NOT_HELD, Guard, Is, IsNot
from .sources import Argument, Constant, Known, Source, Writer

__all__ = ["fits"]


class _Conditions:
    """Write guards in their order: what is read in several places has a name from the first one on."""

    def __init__(self, guards: Sequence[Guard], fresh: Callable[[str], str], name: Callable[[object], str]) -> None:
        self._fresh = fresh
        self.name = name
        self._uses = _uses(guards)
        self._names: dict[Source, str] = {}

    def __call__(self, source: Source) -> str:
        """Return an expression for a source: the name that it has already, or what reads it, and gives it one."""
        known = self._names.get(source)
        if known is not None:
            return known
        text = source.text(self)
        if self._uses[source] < 2 or not source.parts:
            return text
        self._names[source] = name = self._fresh("read")
        return f"({name} := {text})"


def _uses(guards: Sequence[Guard]) -> Counter[Source]:
    """Return how often each source is written; what a repeated one is made of is written once."""
    uses: Counter[Source] = Counter()
    pending = [source for guard in guards for source in (guard.source, *guard.check.parts)]
    while pending:
        source = pending.pop()
        uses[source] += 1
        if uses[source] == 1:
            pending += source.parts
    return uses


def fits(guards: Sequence[Guard], fresh: Callable[[str], str], name: Callable[[object], str]) -> tuple[list[str], str]:
    """Return lines that find out whether all of `guards` hold, and an expression that says so after them.
    `fresh` gives a name that nothing has, from a hint, and `name` one for an object.
    """
    write: Writer = _Conditions(guards, fresh, name)
    text = " and ".join([guard.text(write) for guard in guards])
    if all(map(_always_answers, guards)):
        return [], text
    answer = fresh("fits")
    return [
        "try:",
        f"    {answer} = True if {text} else False",  # a tensor of several elements raises here
        f"except {name(NOT_HELD)}:",
        f"    {answer} = False",
    ], answer


def _always_answers(guard: Guard) -> bool:
    """Say whether a condition can be asked of whatever the arguments are."""
    by_identity = isinstance(guard.check, (Is, IsNot))
    return by_identity and all(isinstance(source, (Argument, Constant, Known)) for source in guard.sources())
