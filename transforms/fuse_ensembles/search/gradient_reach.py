"""Which outputs of a module a value can receive gradients from."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import reduce
from typing import Self

from ....compat import children_of
from ....operators import operator_info
from ....runtime.graphs import Region
from ....runtime.state import holder_of
from ....tracing.program import Program
from ..inlining import InlinedGraph, Known, Operation

__all__ = ["GradientReach", "used_by"]


def differentiable_outputs(inlined: InlinedGraph) -> dict[Operation, int]:
    """Return for each operation a bit mask of the output leaves that it may receive gradients from."""
    reach: dict[Operation, int] = {}
    leaves: dict[Operation, int] = {}
    for number, leaf in enumerate(inlined.operations[-1].inputs):
        leaves[leaf] = leaves.get(leaf, 0) | 1 << number
    for operation in reversed(inlined.operations):
        mask = leaves.get(operation, 0)
        for user in operation.users:
            if not user.node.meta.get("detached") and operator_info(user.operator).differentiable:
                mask |= reach.get(user, 0)
        reach[operation] = mask
    return reach


class GradientReach(Known[int, tuple[InlinedGraph, dict[str, int], bool]]):
    """Which outputs each tensor can receive gradients from, by the identity of the inlined graph."""

    def reached(self, inlined: InlinedGraph, groups: Sequence[Collection[str]]) -> list[int]:
        """Return for each group of parameters a bit mask of the outputs that it can receive gradients from."""
        if id(inlined) not in self:
            reach, found = differentiable_outputs(inlined), dict[str, int]()
            for operation in inlined.operations:
                if operation.kind in ("get_attr", "call_module"):
                    target = str(operation.target)
                    found[target] = found.get(target, 0) | reach[operation]
            self[id(inlined)] = inlined, found, any(each.kind == "call_module" for each in inlined.operations)
        _, masks, calls = self[id(inlined)]
        # A module that is called may read any of its tensors.
        wanted = [[path for name in names for path in _paths(name)] for names in groups] if calls else groups
        return [reduce(lambda one, other: one | other, (masks.get(path, 0) for path in paths), 0) for paths in wanted]


def _paths(name: str) -> Iterator[str]:
    """Yield a name and those of the modules around it."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def used_by(program: Program, owner: str, names: Collection[str]) -> str | None:
    """Return what outside of `owner` calls a part of it, or reads a tensor, that concerns these parameters of it."""
    borrowers, holder = program.analyses[_Borrowers], holder_of(program.model, owner)
    if not owner and not borrowers:
        return None
    users = program.analyses[_Users]
    paths = dict.fromkeys(path for name in names for path in _paths(holder.qualified(name)))
    borrowing = (region for path in paths for region in borrowers.get(path, ()))
    region = next((region for region in borrowing if region not in holder.names), None)
    if region is not None:
        return f"region '{region}'"
    if holder.regions:
        return _used_beside(users, owner, [path for path in paths if path.startswith(holder.inside)])
    inside = f"{owner}." if owner else ""
    for path in paths if owner else ():
        for other in users.get(path, ()):
            if path.startswith(inside) and other != owner and not other.startswith(inside):
                return f"module '{other or '(root)'}'"
    return None


def _used_beside(users: _Users, owner: str, paths: Sequence[str]) -> str | None:
    """Return what uses one of these modules or tensors beside `owner` and those among them that are around it."""
    for path in paths:
        for other in users.get(path, ()):
            if other != owner and not (other in paths and path.startswith(f"{other}.")):
                return f"module '{other or '(root)'}'"
    return None


class _Borrowers(Known[str, list[str]]):
    """The regions that borrow a module, by its qualified name."""

    @classmethod
    def compute(cls, program: Program) -> Self:
        regions = cls()
        for name, module in program.names.modules.items():
            for child in children_of(module).values() if isinstance(module, Region) else ():
                if child is not None:
                    regions.setdefault(program.name_of(child), []).append(name)
        return regions


class _Users(Known[str, dict[str, None]]):
    """The modules whose graphs call a module or read a tensor, by its qualified name."""

    @classmethod
    def compute(cls, program: Program) -> Self:
        users = cls()
        for place, graph in program.graphs.items():
            other = place.partition("#")[0]
            holder = holder_of(program.model, other)
            for node in (*graph.find_nodes(op="call_module"), *graph.find_nodes(op="get_attr")):
                users.setdefault(holder.qualified(str(node.target)), {})[other] = None
        return users
