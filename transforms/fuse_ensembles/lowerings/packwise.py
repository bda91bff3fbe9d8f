"""Write an ensemble pack by pack, each as one batched operation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.node import Argument

from ....layers import ensemble as batched
from ....layers.vectorized import VectorizedMembers
from ....operators import function_of, operator_info
from ..search import Operand, Pack, Parameters, Shared, is_stacked
from .batching_rules import filled, write_layer
from .rebuilding import Unit, Writer
from .units import Task, keys_of, members_dims, order_of, stacked, template_of

__all__ = ["Packwise"]


@dataclass(frozen=True)
class Packwise:
    """Write an ensemble pack by pack; its linear layers become one function or another of `layers.ensemble`."""

    of_one_input: Callable[..., Tensor]  # what linears become that all read one input
    of_own_inputs: Callable[..., Tensor]  # what other linears become

    def __call__(self, task: Task) -> list[Unit]:
        """Return a unit for each pack; those that may write to the same buffers keep their order."""
        last: dict[Operand, Pack] = {}
        units: list[Unit] = []
        for pack in task.ensemble.packs:
            state = [o for o in pack.operands if isinstance(o, Parameters)] if pack.state else []
            before = {last[operand] for operand in state if operand in last}
            last.update(dict.fromkeys(state, pack))
            units.append(self._unit(pack, before, task))
        return units

    def _unit(self, pack: Pack, before: Collection[Pack], task: Task) -> Unit:
        def emit(writer: Writer) -> None:
            flat = pack.operator == "linear" and not isinstance(pack.operands[1], Shared)
            operands = enumerate(pack.operands)  # linears take their biases flat
            values = [stacked(each, pack.size, task, writer, flat=flat and slot == 2) for slot, each in operands]
            node = self._written(pack, values, task, writer)
            node.meta["origin"] = writer.origin_of(pack.members)
            writer.values[pack] = node

        return Unit(order_of(pack), [*before, *(key for o in pack.operands for key in keys_of(o))], [pack], emit)

    def _written(self, pack: Pack, values: Sequence[fx.Node], task: Task, writer: Writer) -> fx.Node:
        if pack.operator == "linear":
            x, weight, *_ = pack.operands
            own = self.of_one_input if isinstance(x, Shared) else self.of_own_inputs
            bias = values[2] if len(values) > 2 else None
            return writer.graph.call_function(F.linear if isinstance(weight, Shared) else own, (*values[:2], bias))
        if operator_info(pack.operator).elementwise:
            args, kwargs = filled(pack, [_aligned(slot, pack, values, writer) for slot in range(len(values))])
            return writer.graph.call_function(function_of(pack.operator, keywords=bool(kwargs)), args, kwargs)
        if pack.operator != "module":
            return write_layer(pack, values, writer.graph)
        vectorized = VectorizedMembers(template_of(pack), members_dims(pack.operands), structured=True)
        return writer.graph.call_module(task.add_module(vectorized), tuple(values))


def _aligned(slot: int, pack: Pack, values: Sequence[fx.Node], writer: Writer) -> fx.Node:
    """Give a stacked operand as many dimensions as the widest operand has, behind the members' dimension."""
    if not is_stacked(pack.operands[slot]):
        return values[slot]
    own = pack.operand_ranks[slot]
    flat = not own  # as a parameter of one dimension: anything may be wider
    wider = [i for i, ranks in enumerate(pack.operand_ranks) if i != slot and (flat or not ranks <= own)]
    if not pack.has_dimensions(slot):
        wider = [i for i, ranks in enumerate(pack.operand_ranks) if i != slot and (not ranks or not ranks <= own)]
    stacked = [values[i] for i in wider if is_stacked(pack.operands[i])]
    # A shared vector is no wider than members with a dimension of their own.
    vectors = not any(pack.has_dimensions(i) for i, operand in enumerate(pack.operands) if is_stacked(operand))
    shared = [values[i] for i in wider if _may_be_wider(pack.operands[i], pack.operand_ranks[i], vectors)]
    if not stacked and not shared:
        return values[slot]
    kwargs: dict[str, Argument] = {"shared": tuple(shared)} if shared else {}
    return writer.graph.call_function(batched.align_members, (values[slot], *stacked), kwargs)


def _may_be_wider(operand: Operand, ranks: frozenset[object], vectors: bool) -> bool:
    if not isinstance(operand, Shared):
        return False
    is_number = isinstance(operand.operation.example, (int, float))
    return bool(ranks) or (vectors and not is_number)
