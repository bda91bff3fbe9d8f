"""Which outputs of a module a value can receive gradients from."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from ..tracing.regions import Region
from .expansion import Expansion, Operation

if TYPE_CHECKING:
    from ..tracing.program import Program

__all__ = ["differentiable_outputs", "reached_outputs", "used_by"]

_STOPS = frozenset(
    "detach detach_ argmax argmin argsort bitwise_and bitwise_or bitwise_xor bitwise_not eq ne lt le gt ge isnan isinf "
    "isfinite logical_and logical_or logical_xor logical_not signbit item tolist numpy size dim numel shape".split()
)


def differentiable_outputs(expansion: Expansion) -> dict[Operation, int]:
    """Return for each operation a bit mask of the module's output leaves that it can receive gradients from.

    A call that is not understood is taken to pass gradients on.
    """
    reach: dict[Operation, int] = {}
    leaves = _output_leaves(expansion)
    for operation in reversed(expansion.operations):
        mask = leaves.get(operation, 0)
        for user in operation.users:
            if not _stops_gradients(user):
                mask |= reach.get(user, 0)
        reach[operation] = mask
    return reach


def reached_outputs(expansion: Expansion, groups: Sequence[Collection[str]]) -> list[int]:
    """Return for each group of parameters a bit mask of the outputs that it can receive gradients from."""
    group_of = {name: number for number, names in enumerate(groups) for name in names}
    reach = differentiable_outputs(expansion)
    masks = [0] * len(groups)
    for operation in expansion.operations:
        target = str(operation.target)
        if operation.kind == "get_attr" and target in group_of:
            masks[group_of[target]] |= reach[operation]
        elif operation.kind == "call_module":
            for number in {number for name, number in group_of.items() if name.startswith(f"{target}.")}:
                masks[number] |= reach[operation]
    return masks


def used_by(program: Program, home: str, names: Collection[str]) -> str | None:
    """Return which module outside of `home` calls a part of it, or reads a tensor, that concerns these parameters.

    Args:
        program: the model.
        home: the qualified name of a module.
        names: of parameters, qualified from `home`.
    """
    inside = f"{home}." if home else ""
    concerned = [inside + name for name in names]
    region = _region_with(program, concerned)
    if region is not None:
        return f"region '{region}'"
    for place, graph in program.graphs.items() if home else ():
        other = place.partition("#")[0]
        if other == home or other.startswith(inside):
            continue
        for node in (*graph.find_nodes(op="call_module"), *graph.find_nodes(op="get_attr")):
            target = f"{other}.{node.target}" if other else str(node.target)
            if target.startswith(inside) and any(f"{name}.".startswith(f"{target}.") for name in concerned):
                return f"module '{other or '(root)'}'"
    return None


def _region_with(program: Program, names: Sequence[str]) -> str | None:
    """Return a region that calls a module which concerns these parameters; its home's graph does not show that."""
    for name, module in program.names.modules.items():
        for child in module.children() if isinstance(module, Region) else ():
            target = program.name_of(child)
            if any(f"{parameter}.".startswith(f"{target}.") for parameter in names):
                return name
    return None


def _output_leaves(expansion: Expansion) -> dict[Operation, int]:
    output = next(op for op in reversed(expansion.operations) if op.kind == "output")
    leaves: dict[Operation, int] = {}
    for number, operation in enumerate(output.inputs):
        leaves[operation] = leaves.get(operation, 0) | 1 << number
    return leaves


def _stops_gradients(operation: Operation) -> bool:
    if operation.node.meta.get("detached"):
        return True
    name: Any = operation.operator or getattr(operation.target, "__name__", operation.target)
    return str(name) in _STOPS
