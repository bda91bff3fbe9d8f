"""Why a point is not better: its layers that take most of the time, and what was refused or undone there."""

from __future__ import annotations

from collections.abc import Mapping

from ..reporting.picture import NodeCost
from ..reporting.report import Report
from ..reporting.wording import clipped, duration, printable
from ..runtime.record import Decision

__all__ = ["held_back"]

_MOST = 6


def held_back(report: Report) -> list[str]:
    """Return the layers of an optimized model that take most of a call, each with what was not done there and why.

    The report has to be made with example inputs.
    """
    if report.profiles is None:
        return []
    before, after = (profile.modules for profile in report.profiles)
    inner = _innermost(after)
    total = sum(after[name].seconds for name in inner) or 1.0
    slowest = sorted(inner, key=lambda name: after[name].seconds, reverse=True)[:_MOST]
    left = [each for each in report.record.plan.decisions if each.status != "applied"]
    return [_line(name, after[name].seconds, total, before.get(name), left) for name in slowest]


def _innermost(modules: Mapping[str, NodeCost]) -> list[str]:
    """Return the modules that call no other."""
    named = [name for name in modules if name]
    return [name for name in named if not any(other.startswith(f"{name}.") for other in named)] or list(modules)


def _line(name: str, seconds: float, total: float, before: NodeCost | None, left: list[Decision]) -> str:
    was = "" if before is None else f", {duration(before.seconds)} before"
    reasons = dict.fromkeys(f"{each.pass_name}: {printable(each.reason)}" for each in left if _is_at(each, name))
    why = "; ".join(reasons) or "nothing was refused there"
    return f"{clipped(name) or '(root)'}: {seconds / total:.0%} of the time ({duration(seconds)}{was}); {why}"


def _is_at(decision: Decision, name: str) -> bool:
    """Say whether a decision is on a layer, or on what it is a part of."""
    label = decision.label.partition(":")[0].strip().replace("(root)", "")
    return label == name or (label != "" and name.startswith(f"{label}."))
