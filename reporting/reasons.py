"""Why a place was left as it was, in words: each cause with the values that led to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..passes.sites import Cause, Reason
from ..passes.verification import OVER_BUDGET

__all__ = ["in_words"]

_Values = Mapping[str, Any]


def in_words(reason: Reason) -> str:
    """Return what plans and reports say of a reason; of one that has a text, that."""
    if reason.text:
        return reason.text
    if reason.cause.is_speed:
        return _no_faster(reason.cause, reason.values)
    words = _WORDS.get(reason.cause, "")
    return words if isinstance(words, str) else words(reason.values)


def _errs(values: _Values) -> str:
    if "budget" in values:
        return f"it errs by {values['error']:.2g} of its scale, more than the budget of {values['budget']:g}"
    own = f"where the layer itself is off by {values['own_error']:.1e}"
    return f"{values['lowering']}, it is off by {values['error']:.1e} of the scale, {own}"


def _no_faster(cause: Cause, values: _Values) -> str:
    """Say how fast the whole model or a place is that was timed; before that, which faster ways were wrong there."""
    speed = f"{values['speedup']:.3g}x"
    if cause is Cause.FASTER_WITHOUT:
        return f"without it, the passes behind it make the whole model {speed} as fast"
    if cause is Cause.MODEL_SLOWER:
        what = f"the {values['calls']} of the model" if values["calls"] else "the whole model"
        came_out = "slower" if values["speedup"] < 1.0 else "not clearly faster"
        if "budget" in values:  # and so not only what was most doubtful was taken back
            return f"{what} was {came_out} ({speed}), and {_time(values)} was spent"
        return f"{what} was {came_out} with it ({speed})"
    gain = "no faster" if values["speedup"] <= 1.0 else "not clearly faster"
    by_itself = " by itself" if cause is Cause.JUDGED_SLOWER else ""
    than = f" than in {values['baseline']}" if "baseline" in values else ""
    lowering = f" as {values['lowering']}" if "lowering" in values else ""
    timed = f"{gain}{by_itself}{than}: {speed} ({values['low']:.3g} to {values['high']:.3g}){lowering}"
    return "; ".join((*values.get("wrong", ()), timed))


def _model_differs(values: _Values) -> str:
    problem: str = values["problem"]
    wrong = f"the model as handed over is {'' if problem.startswith(OVER_BUDGET) else 'wrong with it: '}{problem}"
    if "budget" not in values:
        return wrong
    unknown = "no time was left to find which rewrite it is, so all unproven ones were undone"
    return f"{wrong}; {unknown}; give a larger time_budget"


def _time(values: _Values) -> str:
    return f"{'its part of ' if values['in_part'] else ''}the time budget of {values['budget']:.3g} s"


_WORDS: Mapping[Cause, str | Callable[[_Values], str]] = {
    Cause.JUDGED_WRONG: _errs,
    Cause.IN_TRAINING: "it is for evaluation, and the model is in training; call model.eval() first",
    Cause.OVERTAKEN: "a site of this pass that overlaps with it was rewritten first",
    Cause.TOO_COSTLY: "to verify it would take most of the time that is left; allow more by time_budget",
    Cause.TOO_LONG: lambda values: (
        f"to write it would take about {values['needs']:.2g} s, and {values['spent']:.2g} s of {_time(values)} were "
        "spent; allow more by time_budget"
    ),
    Cause.NOT_CHECKED: lambda values: f"not checked: {_time(values)} was spent; allow more by time_budget",
    Cause.NOT_TIMED: lambda values: (
        f"not timed: its share of the time budget of {values['budget']:.3g} s is too short to tell; "
        "give a larger time_budget"
    ),
    Cause.MODEL_DIFFERS: _model_differs,
    Cause.RAISED_WITHOUT: lambda values: (
        f"run again without what {values['without']} took, it raised: {values['problem']}; "
        "the model stays as it was before that"
    ),
    Cause.DEPENDENT: lambda values: ": ".join(["it depended on a rewrite that was undone", *values.values()]),
}
"""The other causes have reasons with a text: the words name parts of the model."""
