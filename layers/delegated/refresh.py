"""The regions of a whole model: what engines hold for them, and taking its numbers anew."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

from torch import Tensor, fx, nn

from ...compat import modules_by_name
from ...runtime.graphs import specializations_of
from ...runtime.values import qualified
from .region import DelegatedRegion

__all__ = ["fix_regions", "fixed_regions", "held_bytes", "refresh", "regions_of", "tensors_of"]


def refresh(model: nn.Module) -> None:
    """Let engines take the parameters and buffers of a model as they are now."""
    for region, names in regions_of(model):
        region.refresh(tensors_of(model, names))


def fixed_regions(model: nn.Module) -> tuple[bool, ...]:
    """Say of each call of a region whether its engine holds it for the shapes of the example alone, too."""
    return tuple(region.is_fixed for region, _ in regions_of(model))


def fix_regions(model: nn.Module, fixed: Sequence[bool]) -> None:
    """Repeat what `fixed_regions` said of an equal model; raise ValueError where that has other regions."""
    for (region, _), is_fixed in zip(regions_of(model), fixed, strict=True):
        region.repeat_choice(fixed=is_fixed)


def held_bytes(model: nn.Module) -> dict[str, tuple[int, bool]]:
    """Return about how many bytes each engine holds beside the tensors of a model, by its name, and whether a part of
    them is there twice, for the shapes of the example alone, too.
    """
    sizes, found = dict[str, tuple[int, bool]](), {id(region): region for region, _ in regions_of(model)}
    for region in found.values():
        size, is_twice = sizes.get(region.engine, (0, False))
        sizes[region.engine] = size + region.held_bytes, is_twice or region.is_held_twice
    return sizes


def regions_of(model: nn.Module) -> Iterator[tuple[DelegatedRegion, list[str]]]:
    """Yield each call of a region in a model's graphs, and the names of the tensors of the model that it is given."""
    for owner, module in modules_by_name(model).items():
        for node in (node for each in specializations_of(module) for node in each.graph.nodes):
            if isinstance(node.target, DelegatedRegion):
                read = [each for each in node.args[node.target.inputs :] if isinstance(each, fx.Node)]
                yield node.target, [qualified(owner, str(each.target)) for each in read]


def tensors_of(model: nn.Module, names: Sequence[str]) -> list[Tensor]:
    """Return the tensors of these names."""
    return [operator.attrgetter(name)(model) for name in names]
