"""Cut a part of a graph out into a child module, a region, and put a child's graph back into its caller's."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import fx, nn

from ...errors import MatchFailure, expect
from ...runtime.graphs import (
    Capture,
    Context,
    Opening,
    Region,
    Specialization,
    Surrounding,
    WrappedRegion,
    add_region,
    install,
    regions_of,
)
from ...runtime.guards import require
from ...runtime.values import Signature, map_leaves
from .inlining import only_graph, reason_against_opening, received, substituted, unmet_guards
from .order import check_runs_as_one
from .tree_edit import TreeEdit

__all__ = ["Region", "RegionContext", "Wrapper", "inline", "outline"]

RegionContext = Context | Surrounding | Callable[[], AbstractContextManager[Any]]
"""What a region runs under: a context of torch by its name, what calls the region itself, or a function that opens one.
"""

Wrapper = Callable[[Region], nn.Module]
"""Makes the module to call in the place of a region, which it calls in turn."""


def outline(
    edit: TreeEdit,
    nodes: Iterable[fx.Node],
    *,
    name: str,
    context: RegionContext | None = None,
    wrapper: Wrapper | None = None,
) -> fx.Node:
    """Move nodes of the site's graph into a new child; see `Edit.outline`."""
    if not callable(context):
        expect(context, (Surrounding, type(None)), "context", "a Context, or a function that returns a context manager")
    wanted = set(nodes)
    chosen = [n for n in edit.graph.nodes if n in wanted and n.op != "get_attr" and n.target is not require]
    if any(node.op in ("placeholder", "output") for node in chosen) or not chosen:
        raise MatchFailure("a region is made of one or more operations, not of inputs and outputs")
    inside = set(chosen)
    _check_convex(chosen, inside)
    _check_decides_nothing(chosen)
    check_runs_as_one(chosen, edit.program, edit.site.owner)
    inputs = list(dict.fromkeys(s for node in chosen for s in node.all_input_nodes if s not in inside))
    results = [node for node in chosen if any(user not in inside for user in node.users)]
    region, graph = _region(edit, chosen, inputs, results, context)
    names = [node.name for node in graph.nodes if node.op == "placeholder"]
    install(region, Capture(type(region), [Specialization((), graph)], Signature.of_names(names)))
    wrapped = region if wrapper is None else wrapper(region)
    expect(wrapped, nn.Module, "what the wrapper returned", "a torch.nn.Module that calls the region")
    child = edit.add_region(region, name=name) if wrapped is region else edit.add_module(wrapped, name=name)
    call = _call_region(edit, child, chosen, inputs, results)
    call.meta["region"] = wrapped is region
    return call


def _check_convex(chosen: Sequence[fx.Node], inside: set[fx.Node]) -> None:
    tainted: set[fx.Node] = set()
    for node in chosen[0].graph.nodes:
        sources = node.all_input_nodes
        outside_path = any(source in tainted or (source in inside and node not in inside) for source in sources)
        if node not in inside and outside_path:
            tainted.add(node)
        elif node in inside and any(source in tainted for source in sources):
            raise MatchFailure(
                f"'{node.name}' needs a value that is computed outside the region from a value inside it"
            )


def _check_decides_nothing(chosen: Sequence[fx.Node]) -> None:
    """Where a check fails, the owner starts over; a region, which has no forward of its own, could not."""
    for node in chosen:
        if any(user.target is require for user in node.users):
            raise MatchFailure(
                f"the module's control flow depends on '{node.name}', which is computed inside the region"
            )


def _region(
    edit: TreeEdit,
    chosen: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    results: Sequence[fx.Node],
    context: RegionContext | None,
) -> tuple[Region, fx.Graph]:
    graph = fx.Graph()
    values = {source: graph.placeholder(source.name) for source in inputs}
    for source, placeholder in values.items():
        placeholder.meta = dict(source.meta)
    for node in chosen:
        values[node] = graph.node_copy(node, values.__getitem__)
        values[node].meta.setdefault("origin", node.name)  # by which verification knows its random draws
    outputs = tuple(values[node] for node in results)
    graph.output(outputs[0] if len(outputs) == 1 else outputs)
    called, within = dict.fromkeys(str(n.target) for n in chosen if n.op == "call_module"), regions_of(edit.owner)
    borrowed = [path for path in called if path not in within]
    if context is None:
        region = Region(edit.owner, borrowed)
    else:
        surrounding = context if isinstance(context, Surrounding) else Opening(context)
        region = WrappedRegion(surrounding, edit.owner, borrowed)
    for name in (name for name in called if name in within):
        add_region(region, name, within[name])
    return region, graph


def _call_region(
    edit: TreeEdit, child: str, chosen: Sequence[fx.Node], inputs: Sequence[fx.Node], results: Sequence[fx.Node]
) -> fx.Node:
    anchor = _first_place(chosen, inputs)
    call = edit.call(child, *inputs, before=anchor)
    call.meta["val"] = tuple(node.meta.get("val") for node in results)
    call.meta["draws"] = min((node.meta["draws"] for node in chosen if "draws" in node.meta), default="")
    replacements: dict[fx.Node, fx.Node] = {results[0]: call} if len(results) == 1 else {}
    if not replacements:
        for position, node in enumerate(results):
            replacements[node] = edit.call(operator.getitem, call, position, before=anchor)
    else:
        call.meta["val"] = results[0].meta.get("val")
    inside = set(chosen)
    for node, replacement in replacements.items():
        replacement.meta.setdefault("val", node.meta.get("val"))
        replacement.meta["replaces"] = (node.name, *node.meta.get("replaces", ()))
        node.replace_all_uses_with(replacement, delete_user_cb=lambda user: user not in inside)
    for node in reversed(chosen):
        edit.graph.erase_node(node)
    edit.move_users_behind(list(replacements.values()))
    return call


def _first_place(chosen: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> fx.Node:
    """Return the node before which the call goes: behind the last input, and not before the first chosen node."""
    order = {node: number for number, node in enumerate(chosen[0].graph.nodes)}
    last_input = max((order[source] for source in inputs), default=-1)
    place = max(last_input + 1, order[chosen[0]])
    return next(node for node, number in order.items() if number == place)


def inline(edit: TreeEdit, call: fx.Node) -> list[fx.Node]:
    """Put the graph of a captured child in the place of a call of it; see `Edit.inline`."""
    module = edit.program.callee(edit.site.owner, call)
    found = only_graph(module, call)
    if found is None:
        raise MatchFailure(f"'{call.target}' has no single graph to inline")
    _check_always_runs(module, *found, str(call.target))
    graph, inputs = found[0].graph, received(*found, fx.Node)
    if inputs is None:
        raise MatchFailure(f"'{call.name}' passes its arguments in a form that cannot be inlined")
    values: dict[fx.Node, Any] = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
    new: list[fx.Node] = []
    with edit.graph.inserting_before(call):
        for node in graph.nodes:
            if node.op == "placeholder" or node.op == "output":
                continue
            values[node] = edit.graph.node_copy(node, values.__getitem__)
            if not isinstance(module, Region):  # the draws of its nodes were those of the call
                values[node].meta["origin"] = call.meta.get("origin", call.name)
            if node.op in ("call_module", "get_attr") and not isinstance(module, Region):
                values[node].target = f"{call.target}.{node.target}"
            new.append(values[node])
    _hand_over(edit, call, substituted(graph.output_node().args[0], values))
    if isinstance(module, Region):
        edit.remove_region(str(call.target))
    return new


def _check_always_runs(module: nn.Module, specialization: Specialization, given: Mapping[str, Any], name: str) -> None:
    """Make sure that calling the module means running its graph, and that alone."""
    reason = reason_against_opening(module)
    if reason is not None:
        raise MatchFailure(f"'{name}' must stay one call: {reason}")
    for guard in unmet_guards(module, specialization, given):
        raise MatchFailure(f"the graph of '{name}' holds only where {guard} ({guard.reason})")
    if specialization.graph.find_nodes(op="call_function", target=require):
        raise MatchFailure(f"the graph of '{name}' checks values on the way")


def _hand_over(edit: TreeEdit, call: fx.Node, result: Any) -> None:
    """Let the users of the call read the inlined result; items of a structure are picked at once."""
    if isinstance(result, fx.Node):
        call.replace_all_uses_with(result)
        edit.graph.erase_node(call)
        return
    for user in list(call.users):
        if user.op == "output":
            user.args = map_leaves(lambda leaf: result if leaf is call else leaf, user.args)
            continue
        if user.target is not operator.getitem or user.args[0] is not call:
            raise MatchFailure(f"'{user.name}' takes the whole result of '{call.name}', which is a structure")
        user.replace_all_uses_with(result[user.args[1]])
        edit.graph.erase_node(user)
    edit.graph.erase_node(call)
