"""How much of its criterion each site takes away, and by how much the model's results move by that alone."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from ...compat import all_modules, own_buffers, own_parameters, tensor_at
from ...errors import CalibrationError
from ...passes.sites import Site
from ...tracing.isolation import shallow_clone
from ...tracing.program import Program, deactivate
from ..comparing import ComparedRun, computing
from .write import reference

__all__ = ["share_gone", "with_sensitivity"]

_SECONDS = 1.0
"""What a report says of layers is worth so much time; where it takes more, results are not compared."""


def share_gone(scores: Sequence[tuple[Tensor, Tensor]]) -> float | None:
    """Return how much of all scores is gone, given each tensor of scores and what stays of it; None if some are below
    zero, or all are zero.
    """
    total = sum(float(score.sum()) for score, _ in scores)
    if total <= 0 or any(bool((score < 0).any()) for score, _ in scores):
        return None
    return 1 - sum(float(score[stays].sum()) for score, stays in scores) / total


def with_sensitivity(program: Program, sites: Sequence[Site], shares: Sequence[float | None]) -> list[Site]:
    """Return the sites with what is known of how sensitive the model is to each: its share of the criterion, and by how
    much of their scale results move by it alone.
    """
    moves = _moves(program, sites)
    return [
        _told(site, {"criterion_gone": share, "moves_results": moved})
        for site, share, moved in zip(sites, shares, moves, strict=True)
    ]


def _told(site: Site, figures: Mapping[str, float | None]) -> Site:
    known = {name: float(f"{value:.3g}") for name, value in figures.items() if value is not None}
    return replace(site, data={**site.data, "sensitivity": known}) if known else site


def _moves(program: Program, sites: Sequence[Site]) -> list[float | None]:
    """Return by how much the model's results move by each site alone; None where that is not known."""
    unknown: list[float | None] = [None] * len(sites)
    if not program.whole_calls or not sites:
        return unknown
    model, start, found = shallow_clone(program.model).eval(), time.perf_counter(), list[float | None]()
    deactivate(all_modules(model))
    try:
        run = ComparedRun[Site](model, program.whole_calls[:1], partial(_pruned, model)).on_less()
        for site in sites:
            moved = run.error([site])
            found.append(moved if math.isfinite(moved) else None)
            if (time.perf_counter() - start) * len(sites) > _SECONDS * len(found):
                return unknown
    except CalibrationError:  # it does not run so
        return unknown
    return found


@contextmanager
def _pruned(model: nn.Module, site: Site) -> Generator[None]:
    """Let a model compute without what a site takes away, for a while."""
    module = model.get_submodule(site.owner)
    other = shallow_clone(module)
    names = site.data["gone"] if "gone" in site.data else [name for name, *_ in site.data["tensors"]]
    changed = {id(tensor): tensor.detach().clone() for name in names if (tensor := tensor_at(other, name)) is not None}
    for inner in all_modules(other):
        for registry in cast("tuple[dict[str, Any], ...]", (own_parameters(inner), own_buffers(inner))):
            new = {name: changed[id(old)] for name, old in registry.items() if id(old) in changed}
            registry |= {name: _in_kind(value, registry[name]) for name, value in new.items()}
    with computing(module, reference(site, other)):
        yield


def _in_kind(tensor: Tensor, like: Tensor) -> Tensor:
    return nn.Parameter(tensor, requires_grad=False) if isinstance(like, nn.Parameter) else tensor
