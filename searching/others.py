"""What became of the trials that are no points of a front."""

from __future__ import annotations

from collections.abc import Collection

from .demands import QUANTITIES
from .points import Point, numbered
from .saved import Findings

__all__ = ["others"]


def others(found: Findings, points: Collection[int]) -> tuple[list[str], list[list[str]]]:
    """Return titles and rows: each trial but those of these numbers, what it costs and loses, what became of it."""
    compared = (found.aim.objective, found.aim.lost)
    rows = [
        [str(each.number), each.pipeline or "as it was", *(_cell(each, name) for name in compared),
         _became(found, each)]
        for each in found.trials if each.number not in points
    ]  # fmt: skip
    return ["trial", "pipeline", *compared, "what became of it"], rows


def _cell(trial: Point, name: str) -> str:
    return QUANTITIES[name].written(trial.figures[name]) if name in trial.figures else "-"


def _became(found: Findings, trial: Point) -> str:
    """Say why a trial is no point of the front."""
    aim, every = found.aim, (found.original, *found.trials)
    if said := trial.reason or trial.repeated:
        return said
    lacks = [bound.said(trial.figures, aim.original) for bound in aim.lacks(trial.figures)]
    better = (each.number for each in aim.unbeaten(every) if aim.beats(each.figures, trial.figures))
    return "; ".join(lacks) or f"beaten by {numbered(next(better, found.original.number))}"
