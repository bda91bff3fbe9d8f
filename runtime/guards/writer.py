"""The code of guards: what several of them read has a name, which the code behind them may use, too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from .guards import NOT_HELD, Guard, Is, IsNot
from .sources import Argument, Constant, Known, Source

__all__ = ["SourceWriter", "fits"]


class SourceWriter:
    """Write what guards read, in their order, and what is read `afterwards`: what is read in several places has a name
    from the first one on.
    """

    def __init__(
        self, guards: Sequence[Guard], fresh: Callable[[str], str], name: Callable[[object], str],
        afterwards: Sequence[Source] = (),
    ) -> None:  # fmt: skip
        self.fresh = fresh
        self.name = name
        self._uses = _uses([*(each for guard in guards for each in (guard.source, *guard.check.parts)), *afterwards])
        self._names: dict[Source, str] = {}

    def __call__(self, source: Source) -> str:
        """Return an expression for a source: the name that it has already, or what reads it, and gives it one."""
        known = self._names.get(source)
        if known is not None:
            return known
        if not self._is_shared(source):
            return source.text(self)
        name, text = self._named(source)
        return f"({name} := {text})"

    def assigned(self, source: Source) -> list[str]:
        """Return the line that gives a source a name, if it is read in several places and has none yet."""
        if source in self._names or not self._is_shared(source):
            return []
        name, text = self._named(source)
        return [f"{name} = {text}"]

    def _is_shared(self, source: Source) -> bool:
        return self._uses[source] >= 2 and bool(source.parts)

    def _named(self, source: Source) -> tuple[str, str]:
        """Give a source a name; return it, and what reads the source."""
        text = source.text(self)  # what it is made of has its names first
        self._names[source] = name = self.fresh("read")
        return name, text


def _uses(sources: Iterable[Source]) -> Counter[Source]:
    """Return how often each source is written; what a repeated one is made of is written once."""
    uses: Counter[Source] = Counter()
    pending = [*sources]
    while pending:
        source = pending.pop()
        uses[source] += 1
        if uses[source] == 1:
            pending += source.parts
    return uses


def fits(guards: Sequence[Guard], write: SourceWriter) -> tuple[list[str], str]:
    """Return lines that find out whether all of `guards` hold, and an expression that says so after them."""
    text = " and ".join([guard.text(write) for guard in guards])
    if all(map(_always_answers, guards)):
        return [], text
    answer = write.fresh("fits")
    return [
        "try:",
        f"    {answer} = True if {text} else False",  # a tensor of several elements raises here
        f"except {write.name(NOT_HELD)}:",
        f"    {answer} = False",
    ], answer


def _always_answers(guard: Guard) -> bool:
    """Say whether a condition can be asked of whatever the arguments are."""
    by_identity = isinstance(guard.check, (Is, IsNot))
    return by_identity and all(isinstance(source, (Argument, Constant, Known)) for source in guard.sources())
