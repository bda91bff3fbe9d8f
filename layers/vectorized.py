"""Any computation for N members at once, by `torch.func.vmap`; one by one under autocast, which it would switch off."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from ..operators import resolve
from ..runtime.graphs import PortableGraph
from ..runtime.values import map_leaves
from .batched_layers import results_of_member

__all__ = ["Slot", "Template", "VectorizedMembers", "graph_of_member", "vectorize_members"]


@dataclass(frozen=True)
class Slot:
    """A place in a call's arguments that an operand fills."""

    index: int


class Template(nn.Module):
    """Call a module that no graph says, its tensors and training flags (`state`) being the last operands."""

    def __init__(self, module: nn.Module, arguments: Any, state: tuple[str, ...]) -> None:
        super().__init__()
        # Not registered: its tensors are placeholders, no part of the model's state.
        self.__dict__["template"] = copy.deepcopy(module).to("meta")
        self.arguments, self.state = arguments, state

    def forward(self, *operands: Any) -> Any:
        """Return what the module gives; buffers that it writes are written in the operands."""
        inputs = len(operands) - len(self.state)
        args, kwargs = map_leaves(
            lambda leaf: operands[leaf.index] if isinstance(leaf, Slot) else leaf, self.arguments, Slot
        )
        tensors: dict[str, Tensor] = {}
        for name, value in zip(self.state, operands[inputs:], strict=True):
            if isinstance(value, Tensor):
                tensors[name] = value
            else:
                self.__dict__["template"].get_submodule(name.rpartition(".")[0]).training = value
        # The fused inference kernels of attention have no batching rule.
        fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with sdpa_kernel(SDPBackend.MATH):
                return torch.func.functional_call(self.__dict__["template"], tensors, args, kwargs)
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)

    def extra_repr(self) -> str:
        return type(self.__dict__["template"]).__name__


class VectorizedMembers(nn.Module):
    """Compute all members at once over a graph of a single one, a pure function without parameters.
    `in_dims` is 0 where members have a value each, None where they share it; `structured` ones return more than
    tensors.
    """

    def __init__(self, member: nn.Module, in_dims: tuple[int | None, ...], structured: bool = False) -> None:
        super().__init__()
        self.member = member
        self.in_dims = in_dims
        self.structured = structured

    def forward(self, *operands: Tensor) -> Any:
        """Return the members' results, each [N, ...]; members draw their own random numbers."""
        if not self.structured:
            return _for_members(self.member, self.in_dims, operands)
        others: dict[int, Any] = {}
        structures: list[pytree.TreeSpec] = []

        def tensors_of_member(*values: Any) -> list[Tensor]:
            leaves, structure = pytree.tree_flatten(self.member(*values))
            structures.append(structure)
            others.update({number: leaf for number, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)})
            return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

        tensors = iter(_for_members(tensors_of_member, self.in_dims, operands))
        structure = structures[0]
        numbers = range(structure.num_leaves)
        return pytree.tree_unflatten([others[n] if n in others else next(tensors) for n in numbers], structure)

    def __getstate__(self) -> dict[str, Any]:
        """Keep the member's graph node by node: pickle would trace its code again, through decisions inside of it."""
        state = dict(self.__dict__)
        if isinstance(self.member, fx.GraphModule):
            state["_modules"] = {name: child for name, child in self._modules.items() if name != "member"}
            state["_member"] = dict(self.member.named_children()), PortableGraph(self.member.graph)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        children, graph = state.pop("_member", (None, None))
        super().__setstate__(state)
        if graph is not None:
            self.member = graph_of_member(cast("dict[str, nn.Module]", children), graph.graph()).train(self.training)

    def extra_repr(self) -> str:
        return f"in_dims={self.in_dims}"


def graph_of_member(children: dict[str, nn.Module], graph: fx.Graph) -> fx.GraphModule:
    """Return a graph of one member as a module that `VectorizedMembers` takes; the graph calls `children`."""
    root = nn.Module()
    for name, child in children.items():
        root.add_module(name, child)
    return fx.GraphModule(root, graph, "Member")


def vectorize_members(path: str, stacked: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute the operator at `path` for all members; `stacked` says which arguments are the members'."""
    own, structure = pytree.tree_flatten(stacked)
    leaves = structure.flatten_up_to((args, kwargs))

    def compute(*values: Tensor) -> Any:
        rest = iter(values)
        filled = [next(rest) if is_own else leaf for leaf, is_own in zip(leaves, own, strict=True)]
        positional, named = pytree.tree_unflatten(filled, structure)
        return resolve(path)(*positional, **named)

    operands = [leaf for leaf, is_own in zip(leaves, own, strict=True) if is_own]
    return _for_members(compute, (0,) * len(operands), operands)


def _for_members(compute: Callable[..., Any], in_dims: tuple[int | None, ...], operands: Sequence[Any]) -> Any:
    """Return what a function of one member's operands gives, stacked; where `in_dims` is None all share an operand."""
    tensors = [leaf for leaf in pytree.tree_leaves(tuple(operands)) if isinstance(leaf, Tensor)]
    if not tensors or not torch.is_autocast_enabled(tensors[0].device.type):
        return torch.func.vmap(compute, in_dims=in_dims, randomness="different")(*operands)
    given = list(zip(operands, in_dims, strict=True))
    count = next(pytree.tree_leaves(operand)[0].shape[0] for operand, dim in given if dim is not None)
    results = [
        compute(*(operand if dim is None else results_of_member(operand, index) for operand, dim in given))
        for index in range(count)
    ]
    return pytree.tree_map(lambda *parts: torch.stack(parts), *results)
