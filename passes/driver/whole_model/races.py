"""Races of the whole model, as it was and as it is: of all its calls, and of a prompt and a step by themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ... import timing

__all__ = ["Race", "all_slower", "as_timings", "together"]

_BEFORE, _AFTER = "before", "after"


@dataclasses.dataclass(frozen=True)
class Race:
    """Hold what was timed once, by the label of a kind of calls: "" where nothing tells the calls apart."""

    kinds: Mapping[str, timing.Timings]

    @property
    def whole(self) -> timing.Timings:
        """Return the timings of all calls together, in as many rounds as each kind has."""
        first, *others = self.kinds.values()
        if not others:
            return first
        complete = ([taken for taken in each.rounds if len(taken) == 2] for each in self.kinds.values())
        rounds = [
            {name: sum(taken[name] for taken in of_kinds) for name in (_BEFORE, _AFTER)}
            for of_kinds in zip(*complete, strict=False)  # some kinds were told apart in fewer rounds
        ]
        in_one_thread = any(each.in_one_thread for each in self.kinds.values())
        return dataclasses.replace(first, rounds=rounds, in_one_thread=in_one_thread)

    @property
    def speed(self) -> timing.Interval:
        """Return how many times as fast all calls together are."""
        return self.whole.ratio(_BEFORE, _AFTER)

    def speed_of(self, label: str) -> timing.Interval:
        """Return how many times as fast the calls of a kind are; "" stands for all calls."""
        return self.kinds[label].ratio(_BEFORE, _AFTER) if label else self.speed

    def of(self, name: str) -> Race:
        """Return the race of one of several models that were raced beside the one that was before."""
        return Race({label: _alone(timings, name) for label, timings in self.kinds.items()})

    def figures(self) -> dict[str, Any]:
        """Return what the report says: of all calls and, under "calls", of each kind that has a label."""
        kinds = {label: _figures(timings) for label, timings in self.kinds.items() if label}
        return _figures(self.whole) | ({"calls": kinds} if kinds else {})


def _alone(timings: timing.Timings, name: str) -> timing.Timings:
    rounds = [{_BEFORE: each[_BEFORE], _AFTER: each[name]} for each in timings.rounds if {_BEFORE, name} <= each.keys()]
    return dataclasses.replace(timings, rounds=rounds)


def together(races: Sequence[Race]) -> Race:
    """Return the rounds of all races as one."""
    last = races[-1].kinds
    return Race(
        {
            label: dataclasses.replace(last[label], rounds=[r for race in races for r in race.kinds[label].rounds])
            for label in last
        }
    )


def all_slower(races: Sequence[Race]) -> str | None:
    """Return the label of what is surely slower, "" for all calls together, as every race says, or all of them as one;
    None where nothing is.
    """
    labels, ways = dict.fromkeys(["", *races[0].kinds]), (races, [together(races)])
    return next((label for label in labels for way in ways if all(race.speed_of(label).loses for race in way)), None)


def _figures(timings: timing.Timings) -> dict[str, Any]:
    return as_timings(timing.timing_figures(timings))


def as_timings(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the report says of figures of a plan."""
    named = ("speedup", "speedup_low", "speedup_high", "threads", "cold")
    speeds = {name: figures[name] for name in named if name in figures}
    return {"before_ms": figures["before_us"] / 1e3, "after_ms": figures["after_us"] / 1e3, **speeds}
