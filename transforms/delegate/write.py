"""Write a module's graph with its regions as calls of an engine."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, fx

from ...errors import EngineWarning, MatchFailure, one_line
from ...layers.delegated import DelegatedRegion
from ...passes.rewriting import Edit
from ...passes.sites import Site
from ...runtime.graphs import required_capture
from ...runtime.values import TensorMeta
from .find import Found, look
from .regions import Region

__all__ = ["write"]


def write(site: Site, edit: Edit, engine: str, dtype: torch.dtype) -> None:
    """Put graphs with regions before those that are there; raise MatchFailure where the engine does not take one.

    Where a plan is repeated, such regions compute by their own operations, and one line says so.
    """
    found = site.found if site.found is not None else look(edit.program, site.owner)
    written = [(each, _written(each, edit, engine, dtype)) for each in found if each.cut.regions]
    if not written:
        raise MatchFailure("no region is left for an engine")
    if left := next(iter(_reasons_of(written)), ""):
        warnings.warn(f"the model's own operations run in the place of {engine}: {left}", EngineWarning, stacklevel=2)
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
            inputs = [_example(found.cut.metas[node]) for node in region.inputs]
            delegated.prepare(inputs, tensors, judged=edit.program.recalling)
        except Exception as error:  # engines raise anything
            if not edit.program.replaying:
                raise MatchFailure(f"{engine} does not take it: {one_line(error)}") from error
            delegated.leave(error)
        found.prepared[key] = delegated
        return delegated

    return found.cut.written(call)


def _reasons_of(written: Iterable[tuple[Found, fx.Graph]]) -> Iterator[str]:
    """Yield why regions do without their engine."""
    targets = (node.target for _, graph in written for node in graph.nodes)
    yield from (each.left for each in targets if isinstance(each, DelegatedRegion) and each.left)


def _example(meta: object) -> Tensor:
    """Return an input such as was recorded: an index of 0 is in every table."""
    if not isinstance(meta, TensorMeta):
        raise MatchFailure("a region is given what is no tensor")
    if meta.dtype.is_floating_point:
        return torch.randn(meta.shape).to(meta.dtype)
    return torch.zeros(meta.shape, dtype=meta.dtype)
