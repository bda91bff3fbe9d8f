"""Find mixtures of experts in a program: calls of modules, written out as they went, that are loops over experts."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from ...compat import modules_by_name, own_children, own_parameters
from ...errors import MatchFailure
from ...layers.moe import FusedExperts
from ...operators import canonical_name, info_of
from ...tracing.graphs import capture_of, required_capture
from ...tracing.program import BY_DATA, Program, Unrolled, Unroller, unrolling
from ...tracing.recording import Call
from ...tracing.values import Untraceable, is_container, is_leaf, tensors_in, user_class
from .decisions import check_decisions, check_loop
from .members import Items, Slices, Source, family_of, find_sources
from .rounds import Loop, find_loop
from .routing import RoutedBy, routing_of
from .template import Template, description, template_of

__all__ = ["Mixture", "find_mixtures", "mixture_at"]


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts.

    Attributes:
        owner: name of the module that computes it.
        unrolled: a call of that module.
        loop: what it does.
        template: what each expert computes.
        routed: where the routing comes from.
        count: how many experts there are.
    """

    owner: str
    unrolled: Unrolled
    loop: Loop
    template: Template
    routed: RoutedBy
    count: int

    @property
    def sources(self) -> list[Source]:
        """Return the families of tensors that the experts have, weight and bias of each linear layer in turn."""
        return [s for layer in self.template.layers for s in (layer.weight, layer.bias) if s is not None]

    @property
    def reached(self) -> set[int]:
        """Return the numbers of the experts that are called."""
        rounds = zip(self.loop.rounds, self.loop.called, strict=True)
        numbers = [each.experts if called < 0 else torch.tensor([called]) for each, called in rounds]
        return {int(number) for number in torch.cat(numbers)}

    def is_like(self, other: Mixture) -> bool:
        """Say whether two calls of one module compute the same with other tokens."""
        mine, theirs = self.routed, other.routed
        if self.loop.rounds[0].scale != other.loop.rounds[0].scale or self.layers != other.layers:
            return False
        pairs = (mine.chosen, theirs.chosen), (mine.weights, theirs.weights)
        return mine.kind == theirs.kind and all(_name(a) == _name(b) for a, b in pairs)

    def reading(self, name: str) -> Mixture:
        """Return it with an earlier node as that of all tokens: where all go to one expert, its rows look so, too."""
        hidden = next(node for node in self.unrolled.graph.nodes if node.name == name or node is self.routed.hidden)
        return dataclasses.replace(self, routed=dataclasses.replace(self.routed, hidden=hidden))

    @property
    def layers(self) -> list[str]:
        """Return what tells one expert's computation from another's."""
        return [
            *(f"{node.op} {node.target} {node.args} {node.kwargs}" for node in self.template.compute.graph.nodes),
            *(
                f"{_family(layer.weight)} {layer.bias and _family(layer.bias)} {layer.transposed}"
                for layer in self.template.layers
            ),
        ]

    @property
    def is_stacked(self) -> bool:
        """Whether all parameters are stacked already."""
        return all(isinstance(source, Slices) for source in self.sources)


_ROUTES = frozenset(("where", "nonzero", "index_add", "index_add_", "any", "one_hot"))
"""Names that occur in loops over experts, where a forward can be known by its names only."""

_NO_CALL = "a loop over experts is read off a call; give example_inputs"


def routings_to(mixture: Mixture, unread: set[int]) -> Iterator[dict[str, Tensor]]:
    """Yield routings that reach experts which have no tokens, while there are any.

    Args:
        mixture: as the example routes its tokens.
        unread: is given the numbers of those experts; whoever runs a routing takes away what it reached.
    """
    unread |= set(range(mixture.count)) - mixture.reached
    chosen = mixture.routed.chosen
    value = mixture.unrolled.values[chosen]
    for _ in range(_MOST_ROUTINGS):
        if not unread:
            return
        order = [*sorted(unread), *(number for number in range(mixture.count) if number not in unread)]
        if mixture.routed.kind in ("chosen", "scores"):
            yield {
                chosen.name: torch.tensor(order)[torch.arange(value.numel()) % len(order)].view(value.shape).to(value)
            }
            continue
        mask = torch.zeros_like(value).view(-1, mixture.count)
        rows = torch.arange(len(mask))
        mask[rows, torch.tensor(order)[rows % len(order)]] = 1
        yield {chosen.name: mask.view(value.shape)}


_MOST_ROUTINGS = 8


def find_mixtures(program: Program) -> Iterator[Mixture | tuple[str, str]]:
    """Yield mixtures; where there is one that cannot be computed otherwise, name of the module and why."""
    names = [name for name in program.names.modules if _may_mix(program, name)]
    if not program.inputs:
        yield from ((name, _NO_CALL) for name in names if _adds_by_expert(program, name))
    for name, found in _looked_at(program, names):
        if isinstance(found, Mixture):
            yield found
        elif found is not None:
            yield name, found


def mixture_at(program: Program, owner: str) -> Mixture:
    """Return the mixture in one module.

    Raises:
        MatchFailure: if there is none.
    """
    if not program.inputs:
        raise MatchFailure(_NO_CALL)
    ((_, found),) = _looked_at(program, [owner])
    if not isinstance(found, Mixture):
        raise MatchFailure(found or "there is no loop over experts")
    return found


def _looked_at(program: Program, names: list[str]) -> list[tuple[str, Mixture | str | None]]:
    """Look for a mixture in each of some modules; what has one inside of it is not looked at itself."""
    if not names or not program.inputs:
        return []
    modules = {name: program.module(name) for name in names}
    calls = program.recording(list(modules.values())).calls
    found: dict[str, Mixture | str | None] = {}
    with unrolling(program) as unroller:
        for name in sorted(names, key=lambda name: -name.count(".") if name else 1):
            inside = [other for other, what in found.items() if what is not None and f"{other}.".startswith(f"{name}.")]
            if calls.get(modules[name]) and not (inside or (not name and any(found.values()))):
                found[name] = _Reader(program, name, max(calls[modules[name]], key=_size), unroller).read()
    return [(name, found.get(name)) for name in names]


def _size(call: Call) -> int:
    """Return how many numbers a call was given: the largest of several says most."""
    return sum(tensor.numel() for tensor in tensors_in((call.args, call.kwargs)))


class _Reader:
    """Look for a mixture in one module."""

    def __init__(self, program: Program, name: str, call: Call, unroller: Unroller) -> None:
        self.program, self.name, self.call, self.unroller = program, name, call, unroller
        self.module = program.module(name)

    def read(self) -> Mixture | str | None:
        reason = None
        if self._has_layers_only():
            return None
        if not self._is_opaque and any(_groups(each.graph) for each in required_capture(self.module).specializations):
            return "its experts are multiplied together already (grouped_mm)"
        for opened in self._openings():
            try:
                return self._read(opened)
            except MatchFailure as failure:
                reason = str(failure)
            except Untraceable as error:
                reason = error.reason if self._is_opaque and _holds_experts(self.module) else None
            except _NoLoopError:
                continue
        return reason

    def _has_layers_only(self) -> bool:
        """Say whether what looks like experts is called one after another, as its graph shows."""
        if self._is_opaque or _has_stacks(self.module):
            return False
        graphs = [each.graph for each in required_capture(self.module).specializations]
        return not any(find_sources(self.module, graph, {}) for graph in graphs)

    @property
    def _is_opaque(self) -> bool:
        return capture_of(self.module) is None

    def _openings(self) -> Iterator[list[nn.Module]]:
        """Yield what to look into: experts, then whatever holds parameters."""
        inner = [
            (path, each) for path, each in modules_by_name(self.module).items() if path and not _is_operation(each)
        ]
        experts = [each for path, each in inner if family_of(self.module, path) is not None]
        yield experts
        others = [each for _, each in inner if each not in experts and not is_container(each)]
        holders = [each for each in others if own_parameters(each) or capture_of(each) is None]
        if holders:
            yield [*experts, *holders]
        if len(holders) < len(others) and _holds_experts(self.module):
            yield [*experts, *others]

    def _read(self, opened: list[nn.Module]) -> Mixture:
        mixture, unread = self._read_call(opened, {}), set[int]()
        for routing in routings_to(mixture, unread):
            other = self._read_call(opened, routing)
            if not other.is_like(mixture):
                raise MatchFailure(
                    f"experts without tokens in the examples compute something else, such as {min(unread)}"
                )
            unread -= other.reached
            mixture = mixture.reading(other.routed.hidden.name)
        if unread:
            raise MatchFailure(
                f"the examples leave expert {min(unread)} without tokens, and what it computes is not known"
            )
        return mixture

    def _read_call(self, opened: list[nn.Module], overwritten: Mapping[str, Tensor]) -> Mixture:
        unrolled = self._unrolled(opened, overwritten)
        sources = find_sources(self.module, unrolled.graph, unrolled.values)
        loop = find_loop(self.module, unrolled.graph, unrolled.values, sources) if sources else None
        if loop is None:
            raise _NoLoopError
        check_decisions(unrolled)
        check_loop(unrolled, loop)
        return _mixture(self.name, self.module, unrolled, loop, sources)

    def _unrolled(self, opened: list[nn.Module], overwritten: Mapping[str, Tensor]) -> Unrolled:
        try:
            return self.unroller.unroll(self.name, self.call, opened, overwritten)
        except Untraceable:
            raise
        except Exception as error:  # the module's own code may raise anything on proxies
            raise Untraceable(f"reading its forward raised {type(error).__name__}: {error}", "") from error


def _name(node: fx.Node | None) -> str | None:
    return None if node is None else node.name


def _family(source: Source) -> str:
    return f"{source.family} {source.inside}" if isinstance(source, Items) else source.family


def _is_operation(module: nn.Module) -> bool:
    """Say whether a module is never looked into; a Sequential that runs from a graph has the look of one."""
    return is_leaf(module) and not isinstance(module, nn.Sequential)


def _groups(graph: fx.Graph) -> bool:
    return any("grouped_mm" in getattr(node.target, "__name__", "") for node in graph.nodes)


class _NoLoopError(Exception):
    """A module has no loop over experts."""


def _mixture(
    name: str, module: nn.Module, unrolled: Unrolled, loop: Loop, sources: Mapping[fx.Node, tuple[Source, int]]
) -> Mixture:
    first, *others = loop.rounds
    if any(node.op != "call_module" and info_of(node).random for each in loop.rounds for node in each.nodes):
        raise MatchFailure(
            "its experts call dropout as a function, which draws random numbers in training; with nn.Dropout they are "
            "computed together in evaluation"
        )
    wanted = first.scale, description(first, module, sources)
    if any((each.scale, description(each, module, sources)) != wanted for each in others):
        raise MatchFailure("its experts do not all compute the same")
    template = template_of(first, loop, module, sources, unrolled.values)
    counts = {s.count for layer in template.layers for s in (layer.weight, layer.bias) if s is not None}
    if len(counts) > 1:
        raise MatchFailure("its experts have different numbers of tensors")
    (count,) = counts
    return Mixture(name, unrolled, loop, template, routing_of(loop, count, unrolled.values), count)


def _may_mix(program: Program, name: str) -> bool:
    """Say whether a module holds what experts have: alike modules in a container, or stacked parameters."""
    module = program.names.modules[name]
    if program.names.name(module) != name or is_leaf(module) or is_container(module):
        return False
    if any(isinstance(child, FusedExperts) for child in _children(module)):
        return False
    return _holds_experts(module) or _is_steered(program, name)


def _adds_by_expert(program: Program, name: str) -> bool:
    """Say whether a module that holds experts adds to rows or, for all that is known, decides by data."""
    module = program.module(name)
    if not _holds_experts(module):
        return False
    if capture_of(module) is None:
        code = getattr(inspect.unwrap(user_class(type(module)).forward), "__code__", None)
        return code is not None and not _ROUTES.isdisjoint(code.co_names)
    graphs = [each.graph for each in required_capture(module).specializations]
    written = any(canonical_name(node) in ("index_add", "setitem") for graph in graphs for node in graph.nodes)
    return written and any(find_sources(module, graph, {}) for graph in graphs)


def _holds_experts(module: nn.Module) -> bool:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return True
    return any(map(_has_family, _children(module))) or _has_stacks(module)


def _children(module: nn.Module) -> list[nn.Module]:
    return [child for child in own_children(module).values() if child is not None]


def _has_stacks(module: nn.Module) -> bool:
    return _has_stack(module) or any(not is_leaf(child) and _has_stack(child) for child in _children(module))


def _is_steered(program: Program, name: str) -> bool:
    """Say whether a module has no graph because its data decide, and holds no others of the kind."""
    return name in program.opaque and program.opaque[name].reason.startswith(BY_DATA)


def _has_stack(module: nn.Module) -> bool:
    return any(parameter is not None and parameter.ndim == 3 for parameter in own_parameters(module).values())


def _has_family(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and is_container(module) and len(own_children(module)) > 1


def members_of(mixture: Mixture) -> list[Items]:
    """Return the families of tensors that are not stacked yet."""
    return [source for source in mixture.sources if isinstance(source, Items)]
