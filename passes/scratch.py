"""A copy of a rewritten module as it was before its rewrites, to work on while the user goes on with the module."""

from __future__ import annotations

import dataclasses
import importlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, fx, nn

from ..compat import HOOK_REGISTRIES, all_modules, has_hooks, modules_by_name, own_buffers, submodule
from ..errors import MatchFailure
from ..tracing.captured import Capture, Variant, capture_of, install, own_class
from ..tracing.capturing import variants_of_call
from ..tracing.fallback import hold
from ..tracing.leaves import is_container, is_leaf, is_library, runs_as_sequential
from ..tracing.portable import copy_graph
from ..tracing.program import Program
from ..tracing.record import Call
from ..tracing.selection import call_names
from .copying import twin
from .state_map import Stack

if TYPE_CHECKING:
    from .base import Pass
    from .state_map import StateStep

__all__ = ["as_before", "refuse_own_forwards"]


def as_before(
    module: nn.Module, variant: Variant, call: Call, done: Sequence[tuple[Pass, Sequence[StateStep]]]
) -> nn.Module:
    """Return a copy of a module as it was before its rewrites, with one graph, and children captured for its calls.

    Args:
        module: is only read.
        variant: a graph of it.
        call: that the graph was captured for, with all calls inside it.
        done: the passes that rewrote the module, and what they did to its tensors, in their order.

    Raises:
        MatchFailure: if the rewrites cannot be taken back.
    """
    copy = twin(module)
    vars(copy).update({name: type(hooks)() for name, hooks in vars(copy).items() if name in HOOK_REGISTRIES})
    hold(copy)
    _separate_buffers(copy)
    for pass_, steps in reversed(done):
        pass_.revert(copy, steps)
    for inner in all_modules(copy):
        known = capture_of(inner)
        if known is not None and known.resting:
            install(inner, known.set_to_rest(False))
    now, graph = capture_of(copy), copy_graph(variant.graph)
    _read_members(graph, [step for _, steps in done for step in steps])
    install(copy, Capture(own_class(copy), [dataclasses.replace(variant, graph=graph)], now and now.signature))
    _capture_inside(call, {inner: submodule(copy, name) for name, inner in modules_by_name(module).items()})
    return copy


def _separate_buffers(copy: nn.Module) -> None:
    """Give a copy buffers of its own: other threads use the model's while the copy runs."""
    clones: dict[int, Tensor] = {}
    for module in all_modules(copy):
        buffers = own_buffers(module)
        for name, buffer in buffers.items():
            if buffer is not None:
                buffers[name] = clones.setdefault(id(buffer), buffer.detach().clone())


def _read_members(graph: fx.Graph, steps: Iterable[StateStep]) -> None:
    """Let a graph read tensors of members where it was traced to read slices of the stacked ones."""
    members = {step.targets[0]: step.sources for step in steps if isinstance(step, Stack)}
    for stacked in graph.find_nodes(op="get_attr"):
        names = members.get(str(stacked.target), ())
        for item in list(stacked.users):
            place = item.args[1] if item.target is operator.getitem else None
            if isinstance(place, int) and 0 <= place < len(names):
                with graph.inserting_before(item):
                    member = graph.get_attr(names[place])
                member.meta = dict(item.meta)
                item.replace_all_uses_with(member)
                graph.erase_node(item)
        if names and not stacked.users:
            graph.erase_node(stacked)


_Same = Mapping[nn.Module, nn.Module | None]
"""A module -> the one in its place in a copy, if that has one."""


def _capture_inside(call: Call, same: _Same) -> None:
    """Capture the children of a copy whose graphs do not hold for how the call called them: they ran their own code."""
    for child, inner in call.children:
        _capture_inside(inner, same)
        module = same.get(child)
        known = None if module is None else capture_of(module)
        if module is None or known is None or _holds(module, known, inner):
            continue
        try:
            variants = variants_of_call(module, known.parameters, _translated(inner, same))
        except Exception:  # noqa: S112 - the child keeps its graph, which does not fit: that is told as the reason
            continue
        install(module, Capture(own_class(module), variants or known.variants, known.signature))


def _holds(module: nn.Module, capture: Capture, call: Call) -> bool:
    args, kwargs = call.plain_arguments
    names = call_names(module, capture, args, kwargs)
    return any(variant.fits(names) for variant in capture.variants)


def _translated(call: Call, same: _Same) -> Call:
    """Return a call of a module as one of its copy."""
    children = [(same.get(child) or child, _translated(inner, same)) for child, inner in call.children]
    return dataclasses.replace(call, children=children)


def refuse_own_forwards(program: Program) -> None:
    """Refuse modules that run code of the user's, which was run for this call already.

    Raises:
        MatchFailure: naming the module.
    """
    inlining = importlib.import_module("..transforms.fuse_ensembles.inlining", __package__)
    for operation in inlining.expand(program, "").operations:
        if operation.kind == "call_module":
            name = str(operation.target)
            called = submodule(program.model, name)
            if called is None or not all(map(_runs_no_own_code, all_modules(called))):
                raise MatchFailure(f"'{name}' runs code that is no graph, which must not run twice for one call")


def _runs_no_own_code(module: nn.Module) -> bool:
    if has_hooks(module) or "forward" in vars(module):
        return False
    if capture_of(module) is not None or is_container(module) or runs_as_sequential(module):
        return True
    return is_leaf(module) and any(map(is_library, type(module).__mro__))
