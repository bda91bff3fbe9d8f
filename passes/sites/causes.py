"""Why a place was left as it was, as a value: who decided, and what for. Words for it are made in `reporting`."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Cause"]


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
    NOT_CHECKED = "budget.not_checked"
    """No time was left to check it."""
    NOT_TIMED = "budget.not_timed"
    """No time was left to choose among its lowerings."""
    NO_MATCH = "rewrite.no_match"
    """The pass could not write it."""
    DIFFERS = "verify.differs"
    """It was compared by itself: it gives something else, or raises."""
    NO_FASTER = "timing.no_faster"
    """It was timed by itself."""
    MODEL_DIFFERS = "final_check.differs"
    """The finished model gives something else with it, or raises."""
    MODEL_SLOWER = "whole_model.slower"
    """The finished model is slower with it, or may be."""
    DEPENDENT = "whole_model.dependent"
    """It stood on a rewrite that was undone."""
    PLAN = "plan.absent"
    """The plan names it, and it is not there, or cannot be written there."""

    @property
    def stage(self) -> str:
        """Return who decided."""
        return self.value.partition(".")[0]

    @property
    def is_speed(self) -> bool:
        """Say whether it was left since it is no faster."""
        return self in (Cause.JUDGED_SLOWER, Cause.NO_FASTER, Cause.MODEL_SLOWER)
