"""Which convolutions a model has, where their inputs come from, and who needs images in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, fx, nn

from ...compat import own_parameters
from ...operators import CHANNELS_LAST
from ...passes.rewriting import obstacle_to_inlining
from ...passes.sites import Refusal, Site
from ...passes.verification import TensorOwners
from ...tracing.graphs import Region
from ...tracing.program import Program
from ...tracing.values import qualified, user_class
from ..pack.views import readers_in

__all__ = ["found_in"]

_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)
Place = tuple[str, int]
"""Owner of a graph, and which one of its graphs it is."""


@dataclass(frozen=True, eq=False)
class _Convolution:
    """A call of a convolution.

    Attributes:
        node: the call.
        module: what is called.
        name: of the module, qualified.
    """

    node: fx.Node
    module: nn.Module
    name: str


def found_in(program: Program) -> Iterator[Site | Refusal]:
    """Yield all convolutions of a model as one site, and those that stay as they are."""
    calls: dict[Place, list[_Convolution]] = {}
    for place, found in _calls(program):
        reason = _obstacle(program, found)
        if reason:
            yield Refusal(reason, found.name)
        else:
            calls.setdefault(place, []).append(found)
    if calls:
        yield _site(program, calls)


def _site(program: Program, calls: Mapping[Place, list[_Convolution]]) -> Site:
    """Return the site: where nobody needs images in order weights are laid channels last, else images alone.

    Where the original forward runs for a call that no graph fits, convolutions on such weights give what a `.view` in
    it refuses.
    """
    read = readers_in(program, {place: {each.node for each in found} for place, found in calls.items()})
    weights = [] if read else sorted({each.name for found in calls.values() for each in found})
    parts: list[Site] = []
    for owner, number in dict.fromkeys((*calls, *read)):
        place, prefix = (owner, number), f"{len(parts)}."
        given = {f"conv.{n}": each.node.name for n, each in enumerate(calls.get(place, []))}
        labels = {f"{prefix}{label}": name for label, name in {**given, **read.get(place, {})}.items()}
        parts.append(Site(program, owner, labels, number))
    count = len({each.name for found in calls.values() for each in found})
    detail = f"{count} convolution{'s' * (count > 1)}" + ("" if weights else ", weights as they were")
    return Site.over(program, *parts, detail=detail, data={"weights": weights})


def _calls(program: Program) -> Iterator[tuple[Place, _Convolution]]:
    for owner, capture in program.captures.items():
        if isinstance(program.module(owner), Region):
            continue
        for number, specialization in enumerate(capture.specializations):
            for node in specialization.graph.find_nodes(op="call_module"):
                module = program.callee(owner, node)
                if isinstance(module, _CONVOLUTIONS) and len(node.all_input_nodes) == 1:
                    yield (owner, number), _Convolution(node, module, qualified(owner, str(node.target)))


def _obstacle(program: Program, found: _Convolution) -> str:
    """Return why a convolution stays as it is, or ""."""
    weight, kind = own_parameters(found.module).get("weight"), user_class(type(found.module))
    reason = obstacle_to_inlining(found.module)
    if reason is not None:
        return reason
    if kind not in _CONVOLUTIONS or type(found.module) is not kind:
        return f"it is a {kind.__name__}, which may compute something else than a convolution of torch.nn"
    if type(weight) not in (Tensor, nn.Parameter) or cast("Tensor", weight).dim() not in CHANNELS_LAST:
        return "its weight is no plain parameter of its own"
    if cast("Tensor", weight).layout is not torch.strided:
        return "its weight is not dense"
    names = program.analyses[TensorOwners].names(f"{program.name_of(found.module)}.weight")
    return f"its weight is tied to '{names[1]}'" if len(names) > 1 else ""
