"""What was verified in a small twin says what holds in a model that has no data."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from ...runtime.record import Decision, Plan

__all__ = ["as_in_twin"]

_META = "unverified: meta"


def as_in_twin(plan: Plan, twin: Plan) -> Plan:
    """Return the plan of a model on the meta device, with what was verified or undone in its twin.

    For a site that the twin has not (a seventh layer), all whose names differ in numbers alone have to be right.
    """
    exact: dict[tuple[int, str], list[Decision]] = {}
    alike: dict[tuple[int, str], list[Decision]] = {}
    for decision in twin.decisions:
        if decision.status in ("applied", "undone"):
            exact.setdefault((decision.step, decision.key), []).append(decision)
            alike.setdefault((decision.step, _without_numbers(decision.key)), []).append(decision)
    return dataclasses.replace(plan, decisions=tuple(_borne_out(d, exact, alike) for d in plan.decisions))


def _borne_out(
    decision: Decision,
    exact: Mapping[tuple[int, str], Sequence[Decision]],
    alike: Mapping[tuple[int, str], Sequence[Decision]],
) -> Decision:
    if decision.status != "applied" or decision.figures.get("checked") != _META:
        return decision
    known = exact.get((decision.step, decision.key)) or alike.get((decision.step, _without_numbers(decision.key)), ())
    wrong = next((each for each in known if each.status == "undone"), None)
    if wrong is not None:
        reason = f"in the twin, at {wrong.label}: {wrong.reason}"
        return dataclasses.replace(decision, status="undone", reason=reason, cause=wrong.cause, values=wrong.values)
    checked = next((each.figures.get("checked", "") for each in known), "")
    if not checked or checked.startswith("unverified"):
        return decision
    return dataclasses.replace(decision, figures={**decision.figures, "checked": f"{checked}, in the twin"})


def _without_numbers(key: str) -> str:
    return re.sub(r"\d+", "*", key)
