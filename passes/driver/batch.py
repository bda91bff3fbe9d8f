"""Several groups of one pass that are written, judged, and kept or undone together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ...errors import CaptureError, MatchFailure, PassError
from ..contract import Pass
from ..rewriting import Edit
from ..sites import Cause, Reason
from ..verification import Verdict
from .groups import Candidate, Group
from .tuner import Tuner

__all__ = ["Batch"]


@dataclass
class Batch:
    """Groups of one pass that stand in the program together, and those that cannot be written."""

    tuner: Tuner
    pass_: Pass
    written: list[tuple[Group, Edit]] = field(default_factory=list[tuple[Group, Edit]])
    refused: list[Candidate] = field(default_factory=list[Candidate])

    @classmethod
    def of(cls, tuner: Tuner, pass_: Pass, groups: Iterable[Group]) -> Batch:
        """Write groups; what the pass raises undoes them all."""
        batch = cls(tuner, pass_)
        try:
            for group in groups:
                try:
                    batch.written.append((group, tuner.apply(pass_, group)))
                except (MatchFailure, CaptureError) as failure:
                    batch.refused.append(Candidate(group, Reason.of(Cause.NO_MATCH, str(failure))))
        except PassError:
            batch.undo()
            raise
        return batch

    @property
    def groups(self) -> list[Group]:
        """Return the groups that were written."""
        return [group for group, _ in self.written]

    @property
    def edits(self) -> list[Edit]:
        return [edit for _, edit in self.written]

    def undo(self) -> None:
        """Take all of them out of the program."""
        for edit in reversed(self.edits):
            edit.undo()

    def keep(self, verdict: Verdict, **figures: Any) -> list[Group]:
        """Note that all of them stand, as one verdict says; return them."""
        checked = {
            "checked": verdict.checked_in, "meaning_error": verdict.meaning_error,
            "precision_error": verdict.precision_error, "checked_together": len(self.written),
        }  # fmt: skip
        for group, edit in self.written:
            candidate = Candidate(group, verdict=verdict, edit=edit, figures={**checked, **figures})
            self.tuner.context.history.keep(self.pass_, candidate, edit)
        return self.groups
