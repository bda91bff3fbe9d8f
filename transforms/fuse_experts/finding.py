"""Find mixtures of experts in a program: calls of modules, written out as they went, that are loops over experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import nn

from ...compat import own_children, own_parameters
from ...errors import MatchFailure
from ...tracing.graphs import capture_of
from ...tracing.program import Program, Unrolled, Unroller, unrolling
from ...tracing.recording import Call
from ...tracing.values import Untraceable, is_container, is_leaf
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
    def is_stacked(self) -> bool:
        """Whether all parameters are stacked already."""
        return all(isinstance(source, Slices) for source in self.sources)


_KNOWN: WeakKeyDictionary[Program, dict[str, Mixture]] = WeakKeyDictionary()
"""What was found in programs that are being rewritten."""


def find_mixtures(program: Program) -> Iterator[Mixture | tuple[str, str]]:
    """Yield mixtures; where there is one that cannot be computed otherwise, name of the module and why."""
    known = _KNOWN[program] = {}
    names = [name for name in program.names.modules if _may_mix(program, name)]
    for name, found in _looked_at(program, names):
        if isinstance(found, Mixture):
            known[name] = found
            yield found
        elif found is not None:
            yield name, found


def mixture_at(program: Program, owner: str) -> Mixture:
    """Return the mixture in one module.

    Raises:
        MatchFailure: if there is none.
    """
    known = _KNOWN.setdefault(program, {})
    if owner not in known:
        if not program.inputs:
            raise MatchFailure("a loop over experts is read off a call; give example_inputs")
        ((_, found),) = _looked_at(program, [owner])
        if not isinstance(found, Mixture):
            raise MatchFailure(found or "there is no loop over experts")
        known[owner] = found
    return known[owner]


def _looked_at(program: Program, names: list[str]) -> list[tuple[str, Mixture | str | None]]:
    if not names or not program.inputs:
        return []
    modules = [program.module(name) for name in names]
    calls = program.recording(modules).calls
    with unrolling(program) as unroller:
        return [
            (name, _mixture(program, name, module, calls[module][0], unroller))
            for name, module in zip(names, modules, strict=True)
            if calls.get(module)
        ]


def _mixture(program: Program, name: str, module: nn.Module, call: Call, unroller: Unroller) -> Mixture | str | None:
    try:
        unrolled = unroller.unroll(name, call, _opened(module))
    except Untraceable as error:
        return error.reason if _is_opaque(program, name) else None
    except Exception as error:  # the module's own code may raise anything on proxies
        return f"reading its forward raised {type(error).__name__}: {error}" if _is_opaque(program, name) else None
    sources = find_sources(module, unrolled.graph, unrolled.values)
    try:
        loop = find_loop(module, unrolled.graph, unrolled.values, sources) if sources else None
        return None if loop is None else _read(name, module, unrolled, loop, sources)
    except MatchFailure as failure:
        return str(failure)


def _read(name: str, module: nn.Module, unrolled: Unrolled, loop: Loop, sources: Mapping[object, object]) -> Mixture:
    first, *others = loop.rounds
    if any(description(each, module, sources) != description(first, module, sources) for each in others):
        raise MatchFailure("its experts do not all compute the same")
    template = template_of(first, module, sources, unrolled.values)
    counts = {s.count for layer in template.layers for s in (layer.weight, layer.bias) if s is not None}
    if len(counts) > 1:
        raise MatchFailure("its experts have different numbers of tensors")
    (count,) = counts
    return Mixture(name, unrolled, loop, template, routing_of(loop, count, unrolled.values), count)


def _is_opaque(program: Program, name: str) -> bool:
    return capture_of(program.module(name)) is None


def _may_mix(program: Program, name: str) -> bool:
    """Say whether a module holds what experts have: alike modules in a container, or stacked parameters."""
    module = program.names.modules[name]
    if program.names.name(module) != name or is_leaf(module) or is_container(module):
        return False
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) or _has_stack(module):
        return True
    children = [child for child in own_children(module).values() if child is not None]
    return any(_has_family(child) or (not is_leaf(child) and _has_stack(child)) for child in children)


def _has_stack(module: nn.Module) -> bool:
    return any(parameter is not None and parameter.ndim == 3 for parameter in own_parameters(module).values())


def _has_family(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and is_container(module) and len(own_children(module)) > 1


def _opened(module: nn.Module) -> list[nn.Module]:
    """Return the modules inside whose calls are read: experts, and what takes their parameters."""
    found: list[nn.Module] = []
    for path, inner in module.named_modules():
        if path and not is_leaf(inner) and (family_of(module, path) is not None or not own_children(inner)):
            found.append(inner)
    return found


def members_of(mixture: Mixture) -> list[Items]:
    """Return the families of tensors that are not stacked yet."""
    return [source for source in mixture.sources if isinstance(source, Items)]
