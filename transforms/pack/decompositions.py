"""Activations that a module writes out in several operations: the GELU of GPT-2, say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from torch import fx

from ...cuda_ops import KERNELS
from ...layers.packed import Activation, known_activations
from ...operators import canonical_name
from ...passes.rewriting import Pattern, lasting_guards, only_graph, reason_against_inlining
from ...runtime.graphs import Specialization
from ...runtime.values import TensorMeta
from ...tracing.program import Program
from ..swap_kernels import spelled

__all__ = ["SpelledActivation", "spelled_at", "written_out"]

_NAMES = {"gelu_tanh": ("gelu", "tanh"), "gelu": ("gelu", "none"), "silu": ("silu", None)}
"""What `bias_act` calls them -> operator and `approximate`."""


def written_out(program: Program, owner: str, user: fx.Node, x: fx.Node) -> Activation | None:
    """Return the activation that a called module computes of `x` in several operations; None for anything else."""
    if user.op != "call_module" or user.args != (x,) or user.kwargs:
        return None
    module = program.callee(owner, user)
    found = only_graph(module, user)
    if found is None or reason_against_inlining(module) or lasting_guards(module, *found):
        return None
    inner = program.name_of(module)
    return next((each for pattern, each in _spellings() if _fits(pattern, found[0], program, inner)), None)


@dataclass(frozen=True)
class SpelledActivation:
    """An activation of `x` that a module, or several operations of a graph, write out."""

    activation: Activation
    x: fx.Node
    computed: tuple[fx.Node, ...]


def spelled_at(program: Program, owner: str, node: fx.Node) -> SpelledActivation | None:
    """Return the activation of floats that a node gives, written out in several operations; None for anything else."""
    x, found = node.args[0] if len(node.args) == 1 else None, None
    if node.op != "call_module":
        found = _of_operations(program, owner, node)
    elif isinstance(x, fx.Node) and (activation := written_out(program, owner, node, x)) is not None:
        found = SpelledActivation(activation, x, (node,))
    meta = None if found is None else found.x.meta.get("val")
    return found if isinstance(meta, TensorMeta) and meta.dtype.is_floating_point else None


def _of_operations(program: Program, owner: str, node: fx.Node) -> SpelledActivation | None:
    if node.op not in ("call_function", "call_method") or canonical_name(node) != "mul":
        return None
    for pattern, activation in _spellings():
        for found in pattern.at(program, owner, node):
            within, x = set(found.computed), found.nodes.get("x")
            if x is not None and all(within.issuperset(each.users) for each in within - {node}):
                return SpelledActivation(activation, x, found.computed)
    return None


@cache
def _spellings() -> tuple[tuple[Pattern, Activation], ...]:
    return tuple(_known())


def _known() -> Iterator[tuple[Pattern, Activation]]:
    """Yield the decompositions of one operand that `bias_act` knows, as patterns."""
    kernel = next(each for each in KERNELS if each.name == "bias_act")
    for spelling in kernel.decompositions:
        names, found = spelling.__annotations__, spelled(spelling)
        operator, kind = _NAMES.get(str(found.settings.get("activation")), ("", None))
        activation = next((a for a in known_activations() if a.operator == operator and a.kind == (kind or "")), None)
        if activation is not None and set(names) == {"x", "activation", "return"}:
            yield found.pattern, activation


def _fits(pattern: Pattern, specialization: Specialization, program: Program, owner: str) -> bool:
    """Say whether a graph computes a pattern of its argument, and nothing else."""
    graph = specialization.graph
    given, result = graph.find_nodes(op="placeholder"), graph.output_node().args[0]
    calls = {node for node in graph.nodes if node.op not in ("placeholder", "output")}
    if len(given) != 1 or not isinstance(result, fx.Node):
        return False
    fits = (each for each in pattern.at(program, owner, result) if each.nodes.get("x") is given[0])
    return any(set(each.computed) == calls for each in fits)
