"""What sites tell the report: what was asked, what the model costs before and after, and each site's share in it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from ....passes.sites import Site
from ....runtime.values import qualified
from ..settings import Settings
from .costs import Cost, elements_left, shapes_left
from .sites import Chosen

__all__ = ["display_name"]


def display_name(
    model: nn.Module, chosen: Sequence[Chosen], sites: Sequence[Site], wanted: Settings, cost: Cost
) -> Iterator[Site]:
    """Yield the sites with what they save, should one be undone; the first one also with what all of them are for.

    Args:
        model: the whole one.
        chosen: what is kept of each group.
        sites: that remove the rest.
        wanted: what was asked.
        cost: of the target.
    """
    shapes = shapes_left(model, chosen)
    before, after = elements_left(model, ()), {name: math.prod(shape) for name, shape in shapes.items()}
    sizes = {name: parameter.element_size() for name, parameter in model.named_parameters()}
    units: list[float] = [sum(each.group.size for each in chosen), sum(len(each.kept) for each in chosen)]
    costs: dict[str, list[float]] = {
        "units": units,
        "parameters": [sum(before.values()), sum(after.values())],
        "bytes": [sum(sizes[name] * count for name, count in left.items()) for left in (before, after)],
    }
    if wanted.target not in costs:
        whole = [Chosen(each.group, tuple(range(each.group.size))) for each in chosen]
        costs[wanted.target] = [cost(whole), cost(chosen)]
    of_all = {"costs": costs, "asked": [wanted.amount, wanted.target]}
    for number, site in enumerate(sites):
        saves = {"saves": _saved(site, shapes, sizes)}
        yield replace(site, data={**site.data, **saves, **({} if number else of_all)})


def _saved(site: Site, left: Mapping[str, Sequence[int]], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return what a site saves where all others stand.

    Args:
        site: says what it cuts.
        left: the shape of each parameter once all sites stand.
        sizes: bytes of an element of each.
    """
    without: dict[str, list[int]] = {}
    for name, dim, size, _ in site.data["tensors"]:
        path = qualified(site.owner, name)
        if path in left:
            without.setdefault(path, list(left[path]))[dim] = size
    more = {path: math.prod(shape) - math.prod(left[path]) for path, shape in without.items()}
    return {
        "units": sum(size - len(kept) for _, size, kept in site.data["units"].values()),
        "parameters": sum(more.values()),
        "bytes": sum(sizes[path] * count for path, count in more.items()),
    }
