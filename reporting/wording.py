"""Figures and decisions in words: what the table, and anything else that is read by people, shows."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..passes.sites import Cause, Goal, Numerics
from ..passes.timing import Interval
from ..runtime.record import REPEATED
from ..storage import byte_text

if TYPE_CHECKING:
    from ..runtime.graphs import Miss
    from ..runtime.record import Decision, Record

__all__ = [
    "Left", "Row", "applied_rows", "counted", "duration", "headline", "left_alone", "located", "phase_of",
    "printable", "several", "slower_sizes", "summary", "turned_away",
]  # fmt: skip

LONGEST_NAME = 60
_PHASES = {"eval": "inference", "train": "training"}
_SPECIALIZATION = re.compile(r"#\d+(?=:|$)")
_NUMBER = re.compile(r"\d+")
_MOST_NAMED = 3  # so many stages are named where a time budget was exceeded
_VISIBLE_SHARE, _VISIBLE_SECONDS = 0.05, 0.05
"""A pass that took less of the time of all passes, or less by itself, is not named: so of a plan that is repeated."""
_LOSES = 0.98
"""What is less than so many times as fast is slower: less is noise."""

_LINE_BREAK = re.compile(r"\s*[\r\n]\s*")


@dataclass(frozen=True)
class Row:
    """One rewrite that stands, or several alike: at equal sites, or at one site in both modes of its module."""

    pass_name: str
    site: str
    lowering: str
    error: str
    speed: str
    time: str
    timed: str


@dataclass(frozen=True)
class Left:
    """A place `refused`, `undone`, `skipped` or `not captured`, or calls that no graph fits: `missed`; and why."""

    status: str
    what: str
    reason: str


def phase_of(record: Record) -> str:
    """Return what the model was optimized for: `inference` or `training`."""
    return _PHASES[record.plan.phase]


def headline(record: Record) -> str:
    """Say in one line how many rewrites stand, for which phase, and how they were checked."""
    # What holds in both modes of a module, each with a graph of its own, is one rewrite to its user.
    # What several calls of optimize left alone, each time, is one place, too.
    places = {
        (d.status, d.step * (d.status == "applied"), d.pass_name, _SPECIALIZATION.sub("", d.key))
        for d in record.plan.decisions
    }
    statuses = [status for status, *_ in places]
    applied = statuses.count("applied")
    others = [f"{statuses.count(s)} {s}" for s in ("undone", "skipped", "refused") if s in statuses]
    standing = f"{counted(applied, 'rewrite')} applied for {phase_of(record)}"
    rewritten = {name for status, _, name, _ in places if status == "applied"} - set(record.finishing)
    return ", ".join([standing, *others]) + (_checked(record.checked) if rewritten else "")


def _checked(ways: str) -> str:
    """Say how rewrites were checked, or that they were not."""
    way, separator, reason = ways.partition("unverified: ")
    if not separator:
        return f"; checked: {ways}"
    return f"; {f'checked: {way}but also ' if way else ''}NOT VERIFIED: {reason}"


def summary(record: Record) -> dict[str, str]:
    """Return the whole model's figures, each under its title."""
    lines = {
        "whole model": _whole_model(record),
        **_other_sizes(record),
        "parameter tensors": f"{record.parameters_before:,} -> {record.parameters_after:,}",
        "captured": printable(record.coverage.partition("\n")[0]),
    }
    if record.memory:
        live, peak = (
            f"{byte_text(record.memory[f'{kind}_before'])} -> {byte_text(record.memory[f'{kind}_after'])}"
            for kind in ("live", "peak")
        )
        lines["memory"] = f"{live} of activations after a forward; {peak} at most in a step"
    if record.finishing:
        lines["finished"] = "; ".join(f"{name}: {printable(said)}" for name, said in record.finishing.items())
    if record.cached:
        lines["from the cache"] = f"decisions and figures are of {record.cached[:10]}; no rewrite was timed now"
    if record.spent:
        lines["time spent"] = _spent(record.spent)
        if record.spent.get("otherwise"):
            lines["for want of time"] = "; ".join(record.spent["otherwise"])
    if took := _took(record):
        lines["passes took"] = took
    return lines


def _took(record: Record) -> str:
    """Say how long each pass ran that took a visible part of the time, those that ran more than once with all runs."""
    runs: dict[str, list[float]] = {}
    for trace in record.traces:
        runs.setdefault(trace.name, []).append(trace.seconds)
    least = max(_VISIBLE_SECONDS, _VISIBLE_SHARE * sum(trace.seconds for trace in record.traces))
    return ", ".join(
        f"{name} {duration(sum(took))}" + (f" in {len(took)} runs" if len(took) > 1 else "")
        for name, took in runs.items()
        if sum(took) >= least
    )


def _whole_model(record: Record) -> str:
    timings, phase = record.timings, phase_of(record)
    applied = [decision for decision in record.plan.decisions if decision.status == "applied"]
    if not applied:
        return "as it was"
    if not timings:
        if REPEATED in record.checked and any(decision.measured.saved_us is not None for decision in applied):
            return "not timed now; speeds and times below are those of the plan"
        others = dict.fromkeys(d.pass_name for d in applied)
        aimed_elsewhere = all(d.goal in (Goal.SIZE.value, Goal.MEMORY.value) for d in applied)
        verb = "is" if len(others) == 1 else "are"
        return f"not timed: {', '.join(others)} {verb} not for speed" if aimed_elsewhere else "not timed"
    before, after = timings["before_ms"] / 1e3, timings["after_ms"] / 1e3
    speed = f"{timings['speedup']:.3g}x in {phase}{_of_kinds(timings)}"
    return f"{duration(before)} -> {duration(after)}, {speed}{_how_timed(timings)}{_where_faster(record)}"


def _where_faster(record: Record) -> str:
    """Say that the model gains on this size alone, or not on all others."""
    others, slower = (record.timings or {}).get("sizes", {}), slower_sizes(record)
    if not slower:
        return ""
    is_only_here = not any(Interval.of(figures).gains() for figures in others.values())
    return ", faster for this size only" if is_only_here else ", not faster for all sizes"


def _other_sizes(record: Record) -> dict[str, str]:
    """Say what the model gains on other sizes and layouts, where it is slower, and which were not timed."""
    timings = record.timings or {}
    sizes, slower = timings.get("sizes", {}), slower_sizes(record)
    said = [
        f"{label}: {figures['speedup']:.3g}x" + (" (slower)" if label in slower else "")
        for label, figures in sizes.items()
    ]
    said += [f"{label}: not timed ({printable(reason)})" for label, reason in timings.get("untimed_sizes", {}).items()]
    return {"other sizes": "; ".join(said)} if said else {}


def slower_sizes(record: Record) -> dict[str, float]:
    """Return the sizes and layouts on which the model is clearly slower than before, with the ratios, where it is
    faster on those of the example: what is slower there saves something else than time.
    """
    timings = record.timings or {}
    if not timings or timings["speedup"] <= 1.0:
        return {}
    sizes: Mapping[str, Mapping[str, float]] = timings.get("sizes", {})
    return {
        label: figures["speedup"]
        for label, figures in sizes.items()
        if Interval.of(figures).loses and figures["speedup"] < _LOSES
    }


def _of_kinds(timings: Mapping[str, Any]) -> str:
    """Return the speed of each kind of calls that has a label."""
    kinds = [f"{label} {each['speedup']:.3g}x" for label, each in timings.get("calls", {}).items()]
    return f" ({', '.join(kinds)})" if kinds else ""


def _spent(spent: Mapping[str, Any]) -> str:
    seconds, forward = spent["seconds"], spent["forward_ms"] / 1e3
    limit = f" of {duration(spent['budget_s'])}" if math.isfinite(spent["budget_s"]) else ""
    forwards = seconds / forward
    how_many = f"{forwards:.3g}" if forwards < 1000 else f"{forwards:,.0f}"
    return f"{duration(seconds)}{limit}, as long as {how_many} forwards of the model{_excess(spent)}"


def _excess(spent: Mapping[str, Any]) -> str:
    """Say by how much a time budget was exceeded, and what took the longest."""
    beyond, stages = spent["seconds"] - spent["budget_s"], spent.get("stages", {})
    if beyond <= 0.0 or not stages:
        return ""
    longest = sorted(stages, key=lambda stage: -stages[stage])[:_MOST_NAMED]
    took = ", ".join(f"{stage} took {duration(stages[stage])}" for stage in longest)
    return f"; that is {duration(beyond)} more than the time budget: {took}"


def applied_rows(record: Record) -> list[Row]:
    """Return the rewrites that stand, in the order of their making; equal ones in one row with their number."""
    alike: dict[tuple[object, ...], list[Decision]] = {}
    for decision in record.plan.decisions:
        if decision.status == "applied":
            alike.setdefault(_likeness(decision), []).append(decision)
    whole_us = (record.timings or {}).get("before_ms", 0.0) * 1e3
    rows = [
        _row(
            each, earlier=each[0].step < record.earlier_passes,
            compared=record.finishing.get(each[0].pass_name, ""), part=_part(each, whole_us),
        )
        for each in alike.values()
    ]  # fmt: skip
    return rows + _optimizer_rows(record.optimizer)


def _part(decisions: Sequence[Decision], whole_us: float) -> str:
    """Say which part of the model's time sites take, where that is neither little nor almost all of it."""
    taken_us = sum(each.figures.get("before_us") or 0.0 for each in decisions)
    part = taken_us / whole_us if whole_us else 0.0
    return f", of {part:.0%} of the model" if _VISIBLE_SHARE <= part <= 1.0 - _VISIBLE_SHARE else ""


def _optimizer_rows(chosen: Mapping[str, Any]) -> list[Row]:
    """Return the row of an optimizer whose steps have another form now."""
    if not chosen.get("form"):
        return []
    error = "unverified" if chosen["error"] is None else f"{chosen['error']:.1e}"
    speed = f"{chosen['speedup']:.3g}x in optimizer.step()" if chosen["speedup"] else ""
    return [Row("optimizer", chosen["kind"], chosen["form"], error, speed, "", "")]


def _optimizer_left(chosen: Mapping[str, Any]) -> list[Left]:
    """Say why an optimizer that was given takes its steps as before."""
    if not chosen or chosen["form"]:
        return []
    forms = ", ".join(f"{form} {ratio:.3g}x" for form, ratio in chosen["forms"].items())
    status, rest = ("undone", f" ({forms})") if forms else ("skipped", "; its steps keep their form")
    return [Left(status, f"optimizer {chosen['kind']}", printable(chosen["reason"]) + rest)]


def _likeness(decision: Decision) -> tuple[object, ...]:
    """Return what rows are merged by: the rewrite, how it was checked, and the place but for its numbers."""
    figures: Mapping[str, Any] = decision.figures
    place = _NUMBER.sub("#", str(figures.get("as") or decision.label))
    checked = figures.get("checked"), figures.get("hurried"), _shared(figures)
    return decision.step, decision.pass_name, decision.choice, decision.detail, place, checked


def _row(decisions: Sequence[Decision], *, earlier: bool, compared: str, part: str) -> Row:
    decision, figures, every = decisions[0], decisions[0].figures, [decision.figures for decision in decisions]
    times = [time for time in dict.fromkeys(map(_time, every)) if time] or [""]
    hurried = next((f" ({each['hurried']})" for each in every if each.get("hurried")), "")
    site = several([decision.label for decision in decisions])
    detail = decision.detail.removesuffix(f" of {decision.label}")  # the place is named before it
    if decision.site and decision.site.get("data", {}).get("norms"):
        detail += "; norms run over what is kept, not over zeros"
    moved = [moves for each in decisions if (moves := _moves_results(each)) is not None]
    if moved:
        most = " at most" if len(moved) > 1 else ""
        detail += f"; alone it moves results by{most} {max(moved):.2g} of their scale"
    return Row(
        pass_name=decision.pass_name + (" (earlier call)" if earlier else ""),
        site=printable(site + (f": {detail}" if detail else "")),
        lowering=decision.choice or "",
        error=printable(compared)
        or _largest_errors(every, is_lossy=decision.numerics == Numerics.APPROXIMATE.value) + hurried,
        speed=_speeds(every) + _how_timed(figures) + _shared(figures),
        time=times[0] + (" (the first)" if len(times) > 1 else "") + part,
        timed=_timed(figures.get("lowerings") or {}, decision.choice),
    )


def _moves_results(decision: Decision) -> float | None:
    """Return by how much of their scale the model's results move by a place alone, where its pass has looked."""
    data: Mapping[str, Any] = (decision.site or {}).get("data", {})
    return data.get("sensitivity", {}).get("moves_results") if decision.pass_name == "prune" else None  # noqa: S105


def _largest_errors(figures: Sequence[Mapping[str, Any]], *, is_lossy: bool) -> str:
    """Return the largest errors of equal rewrites, or why they were not checked; that of a lossy one is one number."""
    meaning, precision = _largest(figures, "meaning_error"), _largest(figures, "precision_error")
    if meaning is None:
        checked = str(figures[0].get("checked", "unverified"))
        kind = ", within its budget" if is_lossy else " in its own type"
        return checked if precision is None else f"{precision:.1e}{kind} ({checked})"
    jump = _largest(figures, "gradient_jump")
    jumping = "" if jump is None else f", gradients {jump:.1e} where those of the original jump, too"
    if is_lossy and precision is not None:
        return f"{max(meaning, precision):.1e}, within its budget{jumping}"
    return f"{meaning:.1e}" + ("" if precision is None else f" / {precision:.1e}") + jumping


def _largest(figures: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return max((each[name] for each in figures if each.get(name) is not None), default=None)


def _speeds(figures: Sequence[Mapping[str, Any]]) -> str:
    """Return the speed that equal rewrites have in common, or the smallest and the largest."""
    found = {figure["speedup"] for figure in figures if figure.get("speedup") is not None}
    low, high = (f"{extreme(found):.3g}x" for extreme in (min, max)) if found else ("", "")
    return _speed(figures[0]) if low == high else f"{low} to {high}"


def _speed(figures: Mapping[str, Any]) -> str:
    if figures.get("speedup") is None:
        return "not timed" + (f": {printable(str(figures['untimed']))}" if "untimed" in figures else "")
    low, high = figures.get("speedup_low"), figures.get("speedup_high")
    return f"{figures['speedup']:.3g}x" + ("" if low is None or high is None else f" ({low:.3g} to {high:.3g})")


def _shared(figures: Mapping[str, Any]) -> str:
    """Say that the figures are those of a group of several sites of one graph."""
    count = figures.get("group_size", 1)
    return f", group of {count} sites" if isinstance(count, int) and count > 1 else ""


def _how_timed(figures: Mapping[str, Any]) -> str:
    """Say that calls were timed in one thread, where more had stalled on a busy machine, or with caches emptied."""
    threads = ", timed in one thread" if figures.get("threads") == 1 else ""
    return threads + (", cold (caches emptied before each call)" if figures.get("cold") else "")


def _time(figures: Mapping[str, Any]) -> str:
    before, after = figures.get("before_us"), figures.get("after_us")
    return "" if before is None or after is None else f"{duration(before / 1e6)} -> {duration(after / 1e6)}"


def _timed(lowerings: Mapping[str, float], choice: str | None) -> str:
    """Return the time of each lowering, and why another than the fastest of them was taken, if so."""
    if len(lowerings) < 2:
        return ""
    fastest_first = sorted(lowerings.items(), key=lambda item: item[1])
    times = ", ".join(f"{name} {duration(us / 1e6)}" for name, us in fastest_first)
    is_close = choice in lowerings and choice != fastest_first[0][0]
    return times + (f"; noise does not tell them apart, so {choice} was taken, which comes first" if is_close else "")


def left_alone(record: Record) -> list[Left]:
    """Return what was not rewritten, equal reasons together, and what was not captured."""
    alike: dict[tuple[str, ...], list[Decision]] = {}
    for decision in record.plan.decisions:
        if decision.status != "applied":
            alike.setdefault(_kind_of_reason(decision), []).append(decision)
    decided = [
        Left(status, f"{_named(record, decisions)} at {several(each.label for each in decisions)}", _reason(decisions))
        for (status, *_), decisions in alike.items()
    ]
    opaque = [
        Left("not captured", (clipped(name) or "(root)") + located(location), printable(reason))
        for name, location, reason in record.opaque
    ]
    return decided + _optimizer_left(record.optimizer) + opaque


def _named(record: Record, decisions: Sequence[Decision]) -> str:
    """Return the name of a pass; with its options where they tell it from another of its name."""
    name, texts = decisions[0].pass_name, record.plan.pipeline
    forms = dict.fromkeys(text for text in texts if text.partition("{")[0] == name)
    mine = dict.fromkeys(texts[each.step] for each in decisions if each.step < len(texts))
    return " and ".join(mine) if len(forms) > 1 and mine else name


def _kind_of_reason(decision: Decision) -> tuple[str, ...]:
    """Return what places are named together by: a pass's own reason, or the cause and, if measured, the place."""
    cause = Cause(decision.cause)
    place = decision.label.rpartition(".")[0] or decision.label if cause.is_measured else ""
    reason = decision.reason if cause is Cause.NOT_APPLICABLE else cause
    return decision.status, decision.pass_name, reason, _NUMBER.sub("#", place)


def _reason(decisions: Sequence[Decision]) -> str:
    reasons = list(dict.fromkeys(decision.reason for decision in decisions))
    return printable(reasons[0]) + (" (the first)" if len(reasons) > 1 else "")


def located(location: str) -> str:
    """Return a source line in parentheses, or nothing where none is known."""
    return f" ({printable(location)})" if location else ""


def turned_away(missed: Sequence[Miss]) -> list[Left]:
    """Return the guards that calls failed since the model was handed over, with what was done instead."""
    return [Left("missed", clipped(miss.module) or "(root)", printable(str(miss))) for miss in missed]


def several(labels: Iterable[str]) -> str:
    """Name the first of several places, and count the others; a place with two graphs is one."""
    first, *others = dict.fromkeys(labels)
    shown = clipped(first) or "(root)"
    return f"{shown} and {len(others)} more" if others else shown


def duration(seconds: float) -> str:
    """Write a time with three figures and a unit that suits it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def clipped(name: str) -> str:
    """Return a printable name, without its middle where it is very long."""
    half = (LONGEST_NAME - 3) // 2
    clean = printable(name)
    return clean if len(clean) <= LONGEST_NAME else f"{clean[:half]}...{clean[-half:]}"


def printable(text: str) -> str:
    """Return one line in which nothing can move the cursor or change colours: names come from other people's models."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in _LINE_BREAK.sub(" ", text))


def counted(number: int, thing: str) -> str:
    """Return a number with a noun, in the plural unless it is 1."""
    return f"{number} {thing}" + ("" if number == 1 else "s")
