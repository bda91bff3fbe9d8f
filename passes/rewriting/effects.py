"""Which nodes do more than give a value: what may be removed, merged or computed early, and what may not."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx, nn

from ...compat import has_hooks, is_registered_operator
from ...layers.folded import CHECKS
from ...operators import (
    OpInfo,
    canonical_name,
    has_random_effects,
    info_of,
    is_known_function,
    mutates,
    operator_info,
    operator_of_module,
)
from ...runtime.graphs import capture_of, specializations_of
from ...runtime.values import TensorMeta, qualified, user_class
from ...tracing.analyses import StructuralHash
from ...tracing.program import Program
from .inlining import only_graph, unmet_guards

__all__ = ["handed_out", "has_effects", "may_share", "overwrites_unseen", "writes", "written_values"]


class _Known:
    """What was found out about modules and kinds of them, kept until the program changes."""

    def __init__(self, program: Program) -> None:
        self._kinds = program.analyses[StructuralHash]
        self._answers: dict[Hashable, bool] = {}

    @classmethod
    def compute(cls, program: Program) -> _Known:
        return cls(program)

    def of(self, question: Hashable, answer: Callable[[], bool]) -> bool:
        if question not in self._answers:
            self._answers[question] = answer()
        return self._answers[question]

    def of_kind(self, question: Hashable, module: nn.Module, answer: Callable[[], bool]) -> bool:
        """Return the answer to a question about a module, which is the same for all of its kind."""
        return self.of((question, self._kinds.of(module)), answer)


def has_effects(node: fx.Node, program: Program, owner: str) -> bool:
    """Say whether running a node may do more than give its value: write, draw randomly, check, call unknown code."""
    match node.op:
        case "placeholder" | "output":
            return True
        case "get_attr":
            return False
        case "call_module":
            callee = program.callee(owner, node)
            name = qualified(owner, str(node.target))
            return program.analyses[_Known].of_kind(
                "effects", callee, lambda: _holds_of_module(callee, program, name, _leaf_has_effects, has_effects)
            ) or _may_leave_its_graph(node, callee, program)
        case "call_method":
            known = hasattr(torch.Tensor, str(node.target)) and not _is_of_object(node)
            return mutates(node) or has_random_effects(node) or not known
        case _:
            return mutates(node) or has_random_effects(node) or not _only_computes(node) or _renormalises(node)


def _is_of_object(node: fx.Node) -> bool:
    """Say whether a method is that of an object (a cache, say), known by its class only."""
    owner = node.args[0] if node.args else None
    return isinstance(owner, fx.Node) and isinstance(owner.meta.get("val"), type)


def _only_computes(node: fx.Node) -> bool:
    """Say whether a function computes its value and does nothing else."""
    if is_registered_operator(node.target) and node.is_impure():
        return False  # torch was told of side effects that no schema names
    return bool(info_of(node).pure) or (info_of(node).pure is None and is_known_function(node.target))


def _renormalises(node: fx.Node) -> bool:
    """Say whether a look-up in an embedding may write into its weight."""
    name = getattr(node.target, "__name__", "")
    return name in ("embedding", "embedding_bag") and (node.kwargs.get("max_norm") is not None or len(node.args) > 3)


def _may_leave_its_graph(node: fx.Node, module: nn.Module, program: Program) -> bool:
    """Say whether a captured module may run its original forward, of which less is known than of its graph."""
    if capture_of(module) is None:
        return False
    values = [value for value in node.args if type(value) is fx.Node]
    if node.kwargs or len(set(values)) < len(node.args):
        return _is_unlike_its_graph(node, module)
    # Nothing is known of values but which argument each is: for modules of a kind it is the same.
    return program.analyses[_Known].of_kind(("leaves", len(values)), module, lambda: _is_unlike_its_graph(node, module))


def _is_unlike_its_graph(node: fx.Node, module: nn.Module) -> bool:
    found = only_graph(module, node)
    return found is None or bool(unmet_guards(module, *found))


def _holds_of_module(
    module: nn.Module,
    program: Program,
    name: str,
    of_leaf: Callable[[nn.Module], bool],
    of_node: Callable[[fx.Node, Program, str], bool],
) -> bool:
    """Say whether something holds of a module or of a node in it; hooks may do anything."""
    graphs = [each.graph for each in specializations_of(module)]
    if has_hooks(module) or not graphs:
        return has_hooks(module) or of_leaf(module)
    nodes = (node for graph in graphs for node in graph.nodes if node.op not in ("placeholder", "output"))
    return any(of_node(node, program, name) for node in nodes)


def _leaf_has_effects(module: nn.Module) -> bool:
    if getattr(module, "inplace", False):
        return True
    # Modes change after a rewrite: what only draws or counts in training does so whenever the user says train().
    info = _info_of_leaf(module)
    return not info.pure or info.random is not False or getattr(module, "max_norm", None) is not None


def _info_of_leaf(module: nn.Module) -> OpInfo:
    """Return what is known of the operator that a leaf computes."""
    return operator_info(operator_of_module(user_class(type(module))))


def writes(node: fx.Node, program: Program, owner: str) -> bool:
    """Say whether a node may write into memory that other nodes read."""
    if node.op == "call_module":
        callee, name = program.callee(owner, node), qualified(owner, str(node.target))
        # Asked of all after each edit: kinds would take longer to tell.
        return program.analyses[_Known].of(
            callee, lambda: _holds_of_module(callee, program, name, _leaf_writes, writes)
        )
    if node.op not in ("call_function", "call_method") or node.target in CHECKS or _only_normalises(node):
        return False
    return mutates(node) or (has_effects(node, program, owner) and not has_random_effects(node))


def _only_normalises(node: fx.Node) -> bool:
    """Say whether a node calls a batch norm in evaluation, which does not count."""
    training = node.args[5] if len(node.args) > 5 else node.kwargs.get("training")
    return canonical_name(node) == "batch_norm" and training is False


def _leaf_writes(module: nn.Module) -> bool:
    info = _info_of_leaf(module)
    is_idle = (info.pure and info.random) or (info.counts and not module.training)
    return getattr(module, "inplace", False) if is_idle else _leaf_has_effects(module)


def overwrites_unseen(node: fx.Node, program: Program, owner: str) -> bool:
    """Say whether an operation in place does as its functional form: it overwrites no view, and nothing read later."""
    overwritten = node.args[0] if node.args and node.kwargs.get("out") is None else None
    if not isinstance(overwritten, fx.Node) or overwritten.op not in ("call_function", "call_method", "call_module"):
        return False
    if may_share(overwritten, program, owner) or writes(overwritten, program, owner):
        return False
    others = [user for user in overwritten.users if user is not node]
    return all(user < node and user.op != "output" and not may_share(user, program, owner) for user in others)


def written_values(graph: fx.Graph, program: Program, owner: str) -> set[fx.Node]:
    """Return the nodes whose value, or anything computed from it (which may be a view), is written to."""
    written: set[fx.Node] = set()
    writers: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if any(user in written or user in writers for user in node.users):
            written.add(node)
        if writes(node, program, owner):
            writers.add(node)
    return written


def handed_out(graph: fx.Graph, program: Program, owner: str) -> set[fx.Node]:
    """Return the nodes whose value, or what may be a view of it, goes to the module's caller, who may write into it."""
    handed: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if any(user.op == "output" or (user in handed and may_share(user, program, owner)) for user in node.users):
            handed.add(node)
    return handed


def may_share(node: fx.Node, program: Program, owner: str) -> bool:
    """Say whether the value of a node may lie in the memory of an operand."""
    if "val" in node.meta and not _holds_tensors(node.meta["val"]):
        return False
    if node.op != "call_module":
        is_fresh = info_of(node).fresh and not mutates(node)
        return not is_fresh or not isinstance(node.meta.get("val"), TensorMeta)  # lists can be added, too
    callee = program.callee(owner, node)
    name = qualified(owner, str(node.target))
    return program.analyses[_Known].of_kind(
        "shares", callee, lambda: has_hooks(callee) or _kind_shares(callee, program, name)
    ) or _may_leave_its_graph(node, callee, program)


def _holds_tensors(described: Any) -> bool:
    """Say whether a value, of which a description is given, may be or hold tensors."""
    if isinstance(described, (tuple, list)):
        return any(map(_holds_tensors, cast("Sequence[Any]", described)))
    return isinstance(described, (TensorMeta, Mapping, type))


def _kind_shares(module: nn.Module, program: Program, name: str) -> bool:
    """Say whether a module without hooks may return what lies in the memory of an argument."""
    graphs = [each.graph for each in specializations_of(module)]
    if not graphs:
        return not _info_of_leaf(module).fresh or getattr(module, "inplace", False)
    return any(node.op == "placeholder" for graph in graphs for node in handed_out(graph, program, name))
