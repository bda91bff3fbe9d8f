"""Which convolutions a model has, where their inputs come from, and who needs images in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import fx, nn

from ...passes.rewriting import obstacle_to_inlining
from ...passes.sites import Refusal, Site
from ...runtime.graphs import Region
from ...runtime.values import qualified, user_class
from ...tracing.program import Program
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
        reason = _obstacle(found.module)
        if reason:
            yield Refusal(reason, found.name)
        else:
            calls.setdefault(place, []).append(found)
    if calls:
        yield _site(program, calls)


def _site(program: Program, calls: Mapping[Place, list[_Convolution]]) -> Site:
    """Return the site: the convolutions, and who needs images in order."""
    read = readers_in(program, {place: {each.node for each in found} for place, found in calls.items()})
    parts: list[Site] = []
    for owner, number in dict.fromkeys((*calls, *read)):
        place, prefix = (owner, number), f"{len(parts)}."
        given = {f"conv.{n}": each.node.name for n, each in enumerate(calls.get(place, []))}
        labels = {f"{prefix}{label}": name for label, name in {**given, **read.get(place, {})}.items()}
        parts.append(Site(program, owner, labels, number))
    count = len({each.name for found in calls.values() for each in found})
    return Site.over(program, *parts, detail=f"{count} convolution{'s' * (count > 1)}")


def _calls(program: Program) -> Iterator[tuple[Place, _Convolution]]:
    for owner, capture in program.captures.items():
        if isinstance(program.module(owner), Region):
            continue
        for number, specialization in enumerate(capture.specializations):
            for node in specialization.graph.find_nodes(op="call_module"):
                module = program.callee(owner, node)
                if isinstance(module, _CONVOLUTIONS) and len(node.all_input_nodes) == 1:
                    yield (owner, number), _Convolution(node, module, qualified(owner, str(node.target)))


def _obstacle(module: nn.Module) -> str:
    """Return why a convolution stays as it is, or ""."""
    reason, kind = obstacle_to_inlining(module), user_class(type(module))
    if reason is not None:
        return reason
    if kind not in _CONVOLUTIONS or type(module) is not kind:
        return f"it is a {kind.__name__}, which may compute something else than a convolution of torch.nn"
    return ""
