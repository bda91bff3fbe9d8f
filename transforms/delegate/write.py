"""Write a module's graph with its regions as calls of an engine."""

from __future__ import annotations

import math
import operator
import warnings
from dataclasses import dataclass, replace

import torch
from torch import fx

from ...errors import EngineWarning, MatchFailure, one_line
from ...layers.delegated import DelegatedRegion
from ...passes.rewriting import Edit
from ...passes.sites import Site
from ...runtime.graphs import required_capture
from ...tracing.isolation import trusted
from .find import Found, look
from .regions import Region

__all__ = ["Way", "write"]


@dataclass(frozen=True)
class Way:
    """How regions are computed: by which engine, in what, and with which error at most."""

    engine: str
    dtype: torch.dtype = torch.float32
    budget: float = math.inf


def write(site: Site, edit: Edit, way: Way, *, in_8_bits: bool) -> None:
    """Put graphs with regions before those that are there; raise MatchFailure where the engine does not take one.

    Where a plan is repeated, such regions compute by their own operations, and one line says so.
    """
    found = site.found if site.found is not None else look(edit.program, site.owner, in_8_bits=in_8_bits)
    written = [(each, _written(each, edit, way)) for each in found if each.cut.regions]
    if not written:
        raise MatchFailure("no region is left for an engine")
    targets = (node.target for _, graph in written for node in graph.nodes)
    if left := next((each.left for each in targets if isinstance(each, DelegatedRegion) and each.left), ""):
        warnings.warn(
            f"the model's own operations run in the place of {way.engine}: {left}", EngineWarning, stacklevel=2
        )
    before = list(required_capture(edit.owner).specializations)
    edit.trainable = True  # where gradients are wanted, regions compute as the model does
    edit.set_specializations(
        [*(replace(each.flat.specialization, graph=graph) for each, graph in written), *before],
        [*(each.number for each, _ in written), *range(len(before))],
    )


def _written(found: Found, edit: Edit, way: Way) -> fx.Graph:
    def call(region: Region) -> DelegatedRegion:
        key = way, found.cut.regions.index(region)
        if key in found.prepared:
            return found.prepared[key]
        delegated = DelegatedRegion(way.engine, region.graph(), len(region.inputs), way.dtype)
        tensors = [operator.attrgetter(str(node.target))(edit.owner) for node in region.tensors]
        try:
            given = found.given(region)
            with trusted():
                delegated.prepare(given, tensors, way.budget)
        except Exception as error:  # engines raise anything
            if not edit.program.replaying:
                raise MatchFailure(f"{way.engine} does not take it: {one_line(error)}") from error
            delegated.leave(error)
        found.prepared[key] = delegated
        return delegated

    return found.cut.written(call)
