"""Why a place was left as it was, as a value: who decided, what for, and by which values; `reporting/` makes words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

__all__ = ["Cause", "Reason"]


class Cause(StrEnum):
    """The stage of a run that decided, and a code: `stage.code`. Plans and reports keep it beside the reason."""

    NOT_APPLICABLE = "find.not_applicable"
    """The pass found that it cannot, or need not, do anything there."""
    JUDGED_WRONG = "find.differs"
    """The pass compared this kind of layer by itself before it wrote anything."""
    JUDGED_SLOWER = "find.no_faster"
    """The pass timed this kind of layer by itself before it wrote anything."""
    IN_TRAINING = "filter.in_training"
    """The rewrite is for evaluation, and the model is in training."""
    VOLATILE = "filter.volatile"
    """The module is made anew in each call."""
    EXACT_TYPE = "filter.exact_type"
    """Code around it may compare exact classes."""
    OVERTAKEN = "filter.overtaken"
    """It overlaps with a place that was rewritten before it."""
    TOO_COSTLY = "budget.too_costly"
    """Checking it would take most of the time that is left."""
    TOO_LONG = "budget.too_long"
    """Writing it would take much longer than what is left."""
    NOT_CHECKED = "budget.not_checked"
    """No time was left to check it."""
    NOT_TIMED = "budget.not_timed"
    """No time was left to choose among its lowerings."""
    NO_MATCH = "rewrite.no_match"
    """The pass could not write it."""
    DIFFERS = "verify.differs"
    """It was compared by itself: it gives something else, or raises."""
    NO_FASTER = "timing.no_faster"
    """It was timed by itself, and took as long or longer."""
    NOT_CLEARLY_FASTER = "timing.not_clearly_faster"
    """It was timed by itself; it seemed to take less, but that may be noise."""
    MODEL_DIFFERS = "final_check.differs"
    """The finished model gives something else with it, or raises."""
    MODEL_SLOWER = "whole_model.slower"
    """The finished model is slower with it, or may be."""
    FASTER_WITHOUT = "whole_model.faster_without"
    """Without it, passes behind it make the finished model faster, or as fast."""
    RAISED_WITHOUT = "whole_model.raised_without"
    """Run again without what a pass before it took, it raised: that model was not compared with the finished one."""
    DEPENDENT = "whole_model.dependent"
    """It stood on a rewrite that was undone."""
    PLAN = "plan.absent"
    """The plan names it, and it is not there, or cannot be written there."""

    @classmethod
    def _missing_(cls, value: object) -> Cause:
        """Take what no member stands for as a pass's own: the cause of a plan of another release, or of none."""
        return cls.NOT_APPLICABLE

    @property
    def stage(self) -> str:
        """Return who decided."""
        return self.value.partition(".")[0]

    @property
    def is_speed(self) -> bool:
        """Say whether it was left since it is no faster."""
        return self in _OF_SPEED

    @property
    def is_measured(self) -> bool:
        """Say whether its reasons have figures, other ones at each place."""
        return self.is_speed or self.value.endswith(".differs")


_OF_SPEED = (
    Cause.JUDGED_SLOWER, Cause.NO_FASTER, Cause.NOT_CLEARLY_FASTER, Cause.MODEL_SLOWER, Cause.FASTER_WITHOUT,
)  # fmt: skip


@dataclass(frozen=True)
class Reason:
    """A cause with the plain values that led to it, which plans keep; `reporting/reasons.py` makes the words.

    `text`: words of a pass or of verification, which name parts of the user's model: they are the value then.
    """

    cause: Cause
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    text: str = ""

    @classmethod
    def of(cls, cause: Cause, text: str = "", **values: Any) -> Reason:
        """Return a reason with its values given by name."""
        return cls(cause, values, text)
