"""Write a module's graph with its regions as calls of an engine."""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch import Tensor, fx

from ...errors import MatchFailure, one_line
from ...layers.delegated import DelegatedRegion
from ...passes.rewriting import Edit
from ...passes.sites import Site
from ...runtime.graphs import required_capture
from ...runtime.values import TensorMeta
from .find import Found, look
from .regions import Region

__all__ = ["write"]


def write(site: Site, edit: Edit, engine: str, dtype: torch.dtype) -> None:
    """Put graphs with regions before those that are there; raise MatchFailure where the engine does not take one."""
    found = site.found if site.found is not None else look(edit.program, site.owner)
    written = [(each, _written(each, edit, engine, dtype)) for each in found if each.cut.regions]
    if not written:
        raise MatchFailure("no region is left for an engine")
    before = list(required_capture(edit.owner).specializations)
    edit.trainable = True  # where gradients are wanted, regions compute as the model does
    edit.set_specializations(
        [*(replace(each.flat.specialization, graph=graph) for each, graph in written), *before],
        [*(each.number for each, _ in written), *range(len(before))],
    )


def _written(found: Found, edit: Edit, engine: str, dtype: torch.dtype) -> fx.Graph:
    def call(region: Region) -> DelegatedRegion:
        key = engine, dtype, found.cut.regions.index(region)
        if key in found.prepared:
            return found.prepared[key]
        delegated = DelegatedRegion(engine, region.graph(), len(region.inputs), dtype)
        tensors = [operator.attrgetter(str(node.target))(edit.owner) for node in region.tensors]
        try:
            delegated.prepare([_example(found.cut.metas[node]) for node in region.inputs], tensors)
        except Exception as error:  # engines raise anything
            raise MatchFailure(f"{engine} does not take it: {one_line(error)}") from error
        found.prepared[key] = delegated
        return delegated

    return found.cut.written(call)


def _example(meta: object) -> Tensor:
    """Return an input such as was recorded: an index of 0 is in every table."""
    if not isinstance(meta, TensorMeta):
        raise MatchFailure("a region is given what is no tensor")
    if meta.dtype.is_floating_point:
        return torch.randn(meta.shape).to(meta.dtype)
    return torch.zeros(meta.shape, dtype=meta.dtype)
