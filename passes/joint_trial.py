"""Try several sites of one graph as one: which pay together, each with which lowering, and whether that is right.

All are written at once, verified at once and timed at once. Only where that fails are they taken apart.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import MatchFailure
from .base import Site
from .edit import Edit
from .site_trial import Attempt, Failed, Race, SiteTrial, Written, label
from .together import classes_of, identity, left_of, others, parts_of, resolved, together

__all__ = ["JointTrial", "Outcome"]

_MOST_VARIATIONS = 12
"""So many changes to the best common lowering are timed beside it."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of several sites that were tried as one.

    Attributes:
        site: what was written: some of the sites, each with its choice; None where all are left as they were.
        edit: the rewrite, which is in the program.
        figures: of all together.
        reason: why all are left as they were, or "".
        apart: groups of sites that are to be decided by themselves, after this.
    """

    site: Site | None = None
    edit: Edit | None = None
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    reason: str = ""
    apart: Sequence[Site] = ()


class JointTrial(SiteTrial):
    """Try the sites that are the parts of one; see `SiteTrial`.

    Lowerings are timed before they are verified, since only one combination has to be: the one to be kept.
    """

    def decide(self) -> Outcome:
        """Write the best combination, or say why there is none and what is to be decided apart."""
        attempts, wrong, _ = self.run()
        if not attempts:
            return self._divided(wrong) if wrong else Outcome(apart=self.site.parts)
        kept, figures, reason = self.choose(attempts)
        if reason is not None:
            return Outcome(figures=figures, reason=reason)
        written = self.written(kept.site)
        if isinstance(written, Failed):
            return self._without(self.guilty(parts_of(kept.site)))
        figures = {**figures, **self.figures(written.verdict)}
        return Outcome(kept.site, written.edit, figures, apart=left_of(self.site, kept.site))

    # -- combinations ----------------------------------------------------------------------------------------------

    def attempt(self, choice: str | None) -> Attempt | Failed:
        """Write all sites that can be with one lowering, or each with its first; nothing is verified yet."""
        return self.combination(self._common(choice))

    def applied(self, choice: str | None) -> tuple[Site, Edit] | Failed:
        """Write all sites that can be with one lowering, or each with its first; it stands."""
        return self._applied(self._common(choice))

    def _common(self, choice: str | None) -> list[Site]:
        return [resolved(part, choice) for part in self.site.parts]

    def combination(self, parts: Sequence[Site]) -> Attempt | Failed:
        """Write sites with the lowerings that they have, without those that cannot be; everything is left as it was."""
        found = self._applied(parts)
        if isinstance(found, Failed):
            return found
        site, edit = found
        try:
            runnable = self.runnable()
        finally:
            edit.undo()
        try:
            if runnable is not None:
                self.runner(runnable)
        except Exception as error:  # whatever a wrong rewrite raises: it is the reason not to keep it
            return Failed(f"the rewritten module raises {type(error).__name__}: {error}", unsuitable=False)
        return Attempt(site, None, runnable)

    def _applied(self, parts: Sequence[Site]) -> tuple[Site, Edit] | Failed:
        """Write sites, without those that cannot be; return what was written, which stands."""
        left, reasons = list(parts), dict[str, None]()
        while left:
            site = together(left)
            try:
                return site, self.apply(self.pass_, site)
            except MatchFailure as refusal:
                reasons[str(refusal)] = None
                remaining = [part for part in left if not _is_like(part, refusal.site)]
                left = remaining if len(remaining) < len(left) else []  # a refusal may name none of them
        return Failed("; ".join(reasons), unsuitable=True)

    # -- the best of them ------------------------------------------------------------------------------------------

    def race(self, attempts: Mapping[str | None, Attempt]) -> Race:
        """Time common lowerings, then what becomes of the best one where a class of sites does otherwise."""
        first = super().race(attempts)
        best = first.attempts[first.best]
        classes = classes_of(parts_of(best.site))
        if len(classes) < 2 or self.site.required:
            return first
        varied = self._varied(best, classes, list(attempts))
        timings = self.timings({first.best: best, **{name: attempt for name, (_, attempt) in varied.items()}})
        better: dict[int, Attempt] = {}
        for number in range(len(classes)):
            names = [name for name, (changed, _) in varied.items() if changed == number]
            fastest = timings.fastest(prefer=[label(first.best), *names])
            if fastest in varied:
                better[number] = varied[fastest][1]
        mixed = self._mixed(best, classes, better) if better else None
        if not isinstance(mixed, Attempt):
            return first
        both = {first.best: best, "mixed": mixed}
        timings = self.timings(both)
        return Race(both, timings, self.fastest(both, timings))

    def _varied(
        self, best: Attempt, classes: Sequence[Sequence[Site]], choices: Sequence[str | None]
    ) -> dict[str, tuple[int, Attempt]]:
        """Return combinations in which one class of sites is left out or has another lowering, with its number."""
        varied: dict[str, tuple[int, Attempt]] = {}
        for number, changed in itertools.islice(_changes(classes, choices), _MOST_VARIATIONS):
            attempt = self.combination(_replaced(parts_of(best.site), classes[number], changed))
            if isinstance(attempt, Attempt):
                varied[f"change {len(varied)}"] = number, attempt
        return varied

    def _mixed(
        self, best: Attempt, classes: Sequence[Sequence[Site]], better: Mapping[int, Attempt]
    ) -> Attempt | Failed:
        """Return the combination in which several classes do what was better for each of them."""
        parts = parts_of(best.site)
        for number, attempt in better.items():
            known = {identity(site): site for site in parts_of(attempt.site)}
            changed = [known[identity(site)] for site in classes[number] if identity(site) in known]
            parts = _replaced(parts, classes[number], changed)
        return self.combination(parts)

    # -- taking apart ----------------------------------------------------------------------------------------------

    def guilty(self, parts: Sequence[Site]) -> list[Site]:
        """Return those of several sites that are wrong by themselves; all, where they are wrong only together."""
        if len(parts) == 1:
            return list(parts)
        half = len(parts) // 2
        wrong = [some for some in (parts[:half], parts[half:]) if self._is_wrong(some)]
        return [site for some in wrong for site in self.guilty(some)] or list(parts)

    def _is_wrong(self, parts: Sequence[Site]) -> bool:
        written = self.written(together(parts))
        if isinstance(written, Written):
            written.edit.undo()
        return isinstance(written, Failed)

    def _divided(self, wrong: Mapping[str | None, str]) -> Outcome:
        """Tell the sites apart that make every combination raise."""
        choice = next(iter(wrong))
        if not self.references:
            return Outcome(reason="; ".join(dict.fromkeys(wrong.values())))
        return self._without(self.guilty([resolved(part, choice) for part in self.site.parts]))

    def _without(self, guilty: Sequence[Site]) -> Outcome:
        """Decide anew without some sites, and each of these by itself."""
        rest = others(self.site.parts, guilty)
        return Outcome(apart=[*([together(rest)] if rest else []), *others(self.site.parts, rest)])


def _is_like(part: Site, other: object) -> bool:
    """Say whether what holds of another site holds of a part, too; of every one, where it is not known of which."""
    if not isinstance(other, Site):
        return True
    return part == other or (part.kind is not None and part.kind == other.kind and part.choice == other.choice)


def _changes(classes: Sequence[Sequence[Site]], choices: Sequence[str | None]) -> Iterator[tuple[int, list[Site]]]:
    """Yield the number of a class and what may become of it: nothing of it is rewritten, or by another lowering."""
    yield from ((number, list[Site]()) for number in range(len(classes)))
    for choice in choices:
        for number, sites in enumerate(classes):
            changed = [resolved(site, choice) for site in sites]
            if changed != sites and all(site.choice == choice for site in changed):
                yield number, changed


def _replaced(parts: Sequence[Site], old: Sequence[Site], new: Sequence[Site]) -> list[Site]:
    """Return `parts` with some of them changed, or without them."""
    changed = {identity(site): site for site in new}
    gone = {identity(site) for site in old} - changed.keys()
    return [changed.get(identity(part), part) for part in parts if identity(part) not in gone]
