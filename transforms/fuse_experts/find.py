"""Find mixtures of experts in a program: calls of modules, written out as they went, that are loops over experts."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping

from torch import Tensor, fx, nn

from ...compat import modules_by_name, own_children, own_parameters
from ...errors import MatchFailure
from ...layers.moe import FusedExperts
from ...operators import canonical_name, info_of
from ...runtime.graphs import capture_of, required_capture
from ...runtime.values import is_container, is_leaf, qualified, same_kind, tensors_in, user_class
from ...tracing.examples import Untraceable
from ...tracing.program import Program
from ...tracing.recording import Call
from ...tracing.trace import BY_DATA
from .capacity import Bound, bound_of, filled
from .members import Items, family_of, find_sources
from .mixtures import Mixture, check_decisions, check_loop, routing_over, routings_to
from .rounds import Loop, find_loop, is_dropout
from .routing import routing_of
from .template import description, is_grouped_product, template_of
from .unrolling import Unrolled, Unroller, unrolling

__all__ = ["GROUPED", "find_mixtures", "mixture_at"]

GROUPED = "its experts are multiplied together already (grouped_mm)"
"""Why a mixture stays where no lowering is asked for."""

_ROUTES = frozenset(("where", "nonzero", "index_add", "index_add_", "any", "one_hot"))
"""Names that occur in loops over experts, where a forward can be known by its names only."""

_ENDS_EARLY = "its loop breaks, or takes another path, at an expert without tokens; skip that expert (continue)"
_NEVER_FULL = "its experts have a capacity that no call of as many tokens as the examples' fills; give more tokens"
_NOT_LEFT_OUT = "it does more with the tokens beyond an expert's capacity than to leave the last ones out"
_TAKE_PLACE = (
    "the experts' results take the place of rows of a tensor that is not zeros, such as the inputs of tokens that no "
    "expert has room for; assign to zeros, and take those tokens from their inputs by torch.where"
)
_NO_CALL = "a loop over experts is read off a call; give example_inputs"


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
    """Return the mixture in one module, or raise MatchFailure."""
    if not program.inputs:
        raise MatchFailure(_NO_CALL)
    ((_, found),) = _looked_at(program, [owner])
    if not isinstance(found, Mixture):
        raise MatchFailure(found or "there is no loop over experts")
    return found


def _looked_at(program: Program, names: list[str]) -> list[tuple[str, Mixture | str | None]]:
    """Look for a mixture in each of some modules; what has one inside of it is not looked at itself."""
    modules = {name: module for name in names if not _has_layers_only(module := program.module(name))}
    if not modules or not program.inputs:
        return [(name, None) for name in names]
    calls = program.recording(list(modules.values())).calls
    found: dict[str, Mixture | str | None] = {}
    with unrolling(program) as unroller:
        for name in sorted(modules, key=lambda name: -name.count(".") if name else 1):
            inside = [other for other, what in found.items() if what is not None and f"{other}.".startswith(f"{name}.")]
            if calls.get(modules[name]) and not (inside or (not name and any(found.values()))):
                # The largest of several calls says most.
                call = max(calls[modules[name]], key=lambda c: sum(t.numel() for t in tensors_in((c.args, c.kwargs))))
                found[name] = _MixtureReader(program, name, call, unroller).read()
    return [(name, found.get(name)) for name in names]


def _has_layers_only(module: nn.Module) -> bool:
    """Say whether what looks like experts is called one after another, as its graph shows."""
    if capture_of(module) is None or _has_stacks(module):
        return False
    graphs = [each.graph for each in required_capture(module).specializations]
    return not any(find_sources(module, graph, {}) for graph in graphs)


class _MixtureReader:
    """Look for a mixture in one module."""

    def __init__(self, program: Program, name: str, call: Call, unroller: Unroller) -> None:
        self.program, self.name, self.call, self.unroller = program, name, call, unroller
        self.module = program.module(name)

    def read(self) -> Mixture | str | None:
        reason, is_opaque = None, capture_of(self.module) is None
        graphs = () if is_opaque else [each.graph for each in required_capture(self.module).specializations]
        if any(is_grouped_product(node) for graph in graphs for node in graph.nodes):
            return GROUPED
        for opened in self._openings():
            try:
                return self._read(opened)
            except MatchFailure as failure:
                reason = str(failure)
            except Untraceable as error:
                reason = error.reason if is_opaque and _holds_experts(self.module) else None
            except _NoLoopError:
                continue
        return reason

    def _openings(self) -> Iterator[list[nn.Module]]:
        """Yield what to look into: experts, then whatever holds parameters."""
        # A Sequential that runs from a graph has the look of an operation.
        inner = [
            (path, each)
            for path, each in modules_by_name(self.module).items()
            if path and (not is_leaf(each) or isinstance(each, nn.Sequential))
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
        self._check_empty(opened, mixture)
        return mixture if mixture.routed.capacity is None else self._limited(opened, mixture)

    def _limited(self, opened: list[nn.Module], mixture: Mixture) -> Mixture:
        """Return a mixture whose experts have a capacity with the order of its tokens, as a full expert shows."""
        routed, values = mixture.routed, mixture.unrolled.values
        limit: int = values[routed.capacity] if isinstance(routed.capacity, fx.Node) else routed.capacity or 0
        if isinstance(routed.capacity, fx.Node) and routed.capacity not in list(mixture.unrolled.graph.nodes):
            raise MatchFailure(_NEVER_FULL)
        if routed.spare or limit >= mixture.loop.tokens:
            raise MatchFailure(_NEVER_FULL)
        chosen = filled(values[routed.chosen], mixture.count)
        try:
            full = self._read_call(opened, {routed.chosen.name: chosen})
        except (MatchFailure, _NoLoopError) as failure:
            raise MatchFailure(_NOT_LEFT_OUT) from failure
        orders = tuple(each for each in routed.orders if each in full.routed.orders)
        if not full.is_like(mixture) or not orders:
            raise MatchFailure(_NOT_LEFT_OUT)
        return dataclasses.replace(mixture, routed=dataclasses.replace(routed, orders=orders))

    def _check_empty(self, opened: list[nn.Module], mixture: Mixture) -> None:
        """Raise MatchFailure where a loop ends, or counts, by whether an expert has tokens, instead of skipping it."""
        value = mixture.unrolled.values[mixture.routed.chosen]
        asks = any(decided.kind == "emptiness" for decided in mixture.unrolled.decided)
        if not asks or mixture.routed.kind != "chosen" or value.shape[-1] >= mixture.count:
            return
        first, *others = range(mixture.count)
        try:
            without = self._read_call(opened, routing_over(mixture, others))
        except (MatchFailure, _NoLoopError) as failure:
            raise MatchFailure(_ENDS_EARLY) from failure
        if without.reached != set(others):
            raise MatchFailure(_ENDS_EARLY)
        if without.rest != mixture.rest:
            raise MatchFailure(f"its forward uses the number of experts with tokens, seen without expert {first}")

    def _read_call(self, opened: list[nn.Module], overwritten: Mapping[str, Tensor]) -> Mixture:
        try:
            unrolled = self.unroller.unroll(self.name, self.call, opened, overwritten)
        except Untraceable:
            raise
        except Exception as error:  # the module's own code may raise anything on proxies
            raise Untraceable(f"reading its forward raised {type(error).__name__}: {error}", "") from error
        loop = find_loop(unrolled) if unrolled.sources else None
        if loop is None:
            raise _NoLoopError
        check_decisions(unrolled)
        capacity = bound_of(unrolled)
        check_loop(unrolled, loop)
        return _mixture(self.name, unrolled, loop, capacity)


class _NoLoopError(Exception):
    """A module has no loop over experts."""


def _mixture(name: str, unrolled: Unrolled, loop: Loop, capacity: Bound | None) -> Mixture:
    first, *others = loop.rounds
    functions = (node for each in loop.rounds for node in each.nodes if node.op != "call_module")
    drawing = [node for node in functions if bool(info_of(node).random) and not is_dropout(node, unrolled.module)]
    if drawing:
        raise MatchFailure(f"its experts draw random numbers in evaluation, too ({drawing[0].name})")
    wanted = first.scale, description(first, unrolled)
    if any((each.scale, description(each, unrolled)) != wanted for each in others):
        raise MatchFailure(_odd_one(unrolled) or "its experts do not all compute the same")
    template = template_of(first, loop.joined, unrolled.module, unrolled.sources, unrolled.values)
    counts = {s.count for layer in template.layers for s in (layer.weight, layer.bias) if s is not None}
    if len(counts) > 1:
        raise MatchFailure("its experts have different numbers of tensors")
    (count,) = counts
    try:
        routed = routing_of(loop, count, unrolled.values, capacity)
    except MatchFailure as failure:
        raise MatchFailure(_odd_one(unrolled) or str(failure)) from failure
    if loop.replaces and not routed.takes_all(loop.tokens, unrolled.values):
        raise MatchFailure(_TAKE_PLACE)
    return Mixture(name, unrolled, loop, template, routed, count)


def _odd_one(unrolled: Unrolled) -> str | None:
    """Say which expert is another one once more, or of another kind than the others."""
    for container in dict.fromkeys(s.container for s, _ in unrolled.sources.values() if isinstance(s, Items)):
        children = own_children(unrolled.module.get_submodule(container))
        named = [(qualified(container, name), child) for name, child in children.items() if child is not None]
        first, kind = named[0]
        for number, (name, child) in enumerate(named):
            same = next((earlier for earlier, other in named[:number] if other is child), None)
            if same is not None:
                return f"'{name}' is the same module as '{same}', and experts that are shared stay a loop"
            if not same_kind(kind, child):
                of, other = type(child).__name__, type(kind).__name__
                return f"'{name}' is of the class {of}, and '{first}' of {other}: experts of one kind are fused"
    return None


def _may_mix(program: Program, name: str) -> bool:
    """Say whether a module holds what experts have: alike modules in a container, or stacked parameters."""
    module = program.names.modules[name]
    if program.names.name(module) != name or is_leaf(module) or is_container(module):
        return False
    if any(isinstance(child, FusedExperts) for child in _children(module)):
        return False
    # One without a graph may be steered by its data, and hold nothing else of the kind.
    return _holds_experts(module) or (name in program.opaque and program.opaque[name].reason.startswith(BY_DATA))


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
    lists = (nn.ModuleList, nn.ModuleDict)
    if isinstance(module, lists) or _has_stacks(module):
        return True
    return any(isinstance(c, lists) and is_container(c) and len(own_children(c)) > 1 for c in _children(module))


def _children(module: nn.Module) -> list[nn.Module]:
    return [child for child in own_children(module).values() if child is not None]


def _has_stacks(module: nn.Module) -> bool:
    return _has_stack(module) or any(not is_leaf(child) and _has_stack(child) for child in _children(module))


def _has_stack(module: nn.Module) -> bool:
    """Say whether a parameter may be the weights of several experts; one of a single row, such as positions, is not,
    nor one number for each head.
    """
    own = own_parameters(module).values()
    return any(each is not None and each.ndim == 3 and 1 < len(each) < each.numel() for each in own)
