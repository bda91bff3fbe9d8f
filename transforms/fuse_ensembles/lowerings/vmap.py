"""Write an ensemble as one `torch.func.vmap` over a graph of a single member."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import fx, nn

from ....errors import MatchFailure
from ....layers import batched_layers
from ....layers.vectorized import VectorizedMembers, graph_of_member
from ....operators import function_of, operator_info
from ..search import Operand, Pack
from .batching_rules import call, filled
from .rebuilding import Unit, Writer
from .units import Task, keys_of, members_dims, order_of, stacked, template_of

__all__ = ["vmapped"]


def vmapped(task: Task) -> list[Unit]:
    """Return the one unit of graph that computes the ensemble as one `torch.func.vmap`."""
    packs = task.ensemble.packs
    outer = list(dict.fromkeys(o for pack in packs for o in pack.operands if not isinstance(o, Pack)))
    inside = {member for pack in packs for member in pack.members}
    exits = [pack for pack in packs if any(u not in inside for m in pack.members for u in m.users)]  # read outside

    def emit(writer: Writer) -> None:
        name = task.add_module(_vectorized(packs, outer, exits))
        values = [stacked(operand, task.ensemble.size, task, writer) for operand in outer]
        result = writer.graph.call_module(name, tuple(values))
        result.meta["origin"] = writer.origin_of(packs[0].members)
        for position, pack in enumerate(exits):
            picked = (
                result if len(exits) == 1 else writer.graph.call_function(function_of("getitem"), (result, position))
            )
            writer.values[pack] = picked

    needs = [key for operand in outer for key in keys_of(operand)]
    return [Unit(min(order_of(pack) for pack in packs), needs, list(exits), emit)]


def _vectorized(packs: Sequence[Pack], outer: Sequence[Operand], exits: Sequence[Pack]) -> nn.Module:
    graph, templates = fx.Graph(), dict[str, nn.Module]()
    values: dict[Operand, fx.Node] = {operand: graph.placeholder(f"operand_{i}") for i, operand in enumerate(outer)}
    for number, pack in enumerate(packs):
        slots = [values[operand] for operand in pack.operands]
        if pack.operator == "module":
            templates[f"template_{number}"] = template_of(pack)
            values[pack] = graph.call_module(f"template_{number}", tuple(slots))
            continue
        args, kwargs = filled(pack, slots)
        values[pack] = _write_member(pack, slots, args, kwargs, graph)
    if any(pack.result == "common" for pack in exits):
        raise MatchFailure("another operation reads a number that the members compute")
    results = tuple(values[pack] for pack in exits)
    graph.output(results[0] if len(results) == 1 else results)
    structured = any(pack.operator == "module" for pack in exits)
    return VectorizedMembers(graph_of_member(templates, graph), members_dims(outer), structured)


def _write_member(
    pack: Pack, slots: Sequence[fx.Node], args: tuple[Any, ...], kwargs: dict[str, Any], graph: fx.Graph
) -> fx.Node:
    """Write what one member computes."""
    if pack.operator == "batch_norm":
        state = dict(zip(pack.state, slots[-len(pack.state) :], strict=True))
        names = ("running_mean", "running_var", "weight", "bias", "num_batches_tracked", "training")
        options = (pack.options["momentum"], pack.options["eps"])
        return graph.call_function(
            batched_layers.normalize_member, (slots[0], *(state.get(name) for name in names), *options)
        )
    if pack.operator == "linear":
        return graph.call_function(F.linear, args, kwargs)
    if operator_info(pack.operator).elementwise:
        return graph.call_function(function_of(pack.operator, keywords=bool(kwargs)), args, kwargs)
    if pack.operator == "derived":
        return graph.call_function(cast("Callable[..., Any]", pack.members[0].node.target), args, kwargs)
    if pack.operator == "view" and not any(isinstance(argument, torch.dtype) for argument in args):
        return graph.call_method("reshape", args, kwargs)  # members may lie among one another in memory
    if pack.function:
        return call(pack.function, args, kwargs, graph)
    raise MatchFailure(f"'{pack.operator}' has no batching rule")
