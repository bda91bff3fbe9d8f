"""Compute at export what an exported program computes of its parameters alone, so that it does not at each call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx.node import map_arg

from ..operators import has_random_effects, reached

__all__ = ["fold_parameters"]

_STORED = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
_VIEWS = frozenset(
    "alias detach expand flatten getitem permute reshape select slice squeeze t transpose unflatten unsqueeze "
    "view".split()
)
_ASSERTIONS = frozenset({"_assert_tensor_metadata"})
_KEPT = frozenset({"dequantize_per_channel", "dequantize_per_tensor"})
"""Of weights in few bits: floats of them would take more room, and hide from runtimes what they are."""


def fold_parameters(program: ExportedProgram) -> None:
    """Replace what a program computes of parameters, buffers and constants by what that gives, in place. What is larger
    than all that it is made of, only another view, random or in few bits, stays as it is.
    """
    stored = _stored(program)
    made, asserted = _made_of(program.graph, stored)
    values = dict(stored)
    with torch.no_grad():
        for node in made:
            args, kwargs = map_arg((node.args, node.kwargs), lambda operand: values[operand])
            values[node] = cast("Any", node.target)(*args, **kwargs)
    for node in asserted:
        program.graph.erase_node(node)
    folded = [node for node in made if _is_edge(node, made) and _is_worth(node, values, made)]
    for number, node in enumerate(folded):
        _store(program, node, values[node].detach().clone(memory_format=torch.contiguous_format), f"folded_{number}")
    program.graph.eliminate_dead_code()
    _drop_unused(program)
    program.graph.lint()
    program.graph_module.recompile()


def _stored(program: ExportedProgram) -> dict[fx.Node, Tensor]:
    """Return the placeholders of a program that stand for tensors which it keeps as they are, with these."""
    changed = set(program.graph_signature.buffers_to_mutate.values())
    held: dict[str, Any] = {**program.state_dict, **program.constants}
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs if spec.kind in _STORED}
    return {
        node: held[str(specs[node.name].target)]
        for node in program.graph.find_nodes(op="placeholder")
        if node.name in specs and specs[node.name].target not in changed
    }


def _made_of(graph: fx.Graph, stored: Mapping[fx.Node, Tensor]) -> tuple[dict[fx.Node, bool], list[fx.Node]]:
    """Return the nodes that need nothing but stored tensors, and whether more than a view is made; and assertions of
    these.
    """
    made: dict[fx.Node, bool] = {}
    asserted: list[fx.Node] = []
    for node in graph.nodes:
        operands = node.all_input_nodes
        if node.op != "call_function" or not operands or not all(each in stored or each in made for each in operands):
            continue
        name = _name(node)
        if name in _ASSERTIONS:
            asserted.append(node)
        elif name not in _KEPT and isinstance(node.meta.get("val"), Tensor) and _is_pure(node):
            made[node] = name not in _VIEWS or any(made.get(each, False) for each in operands)
    return made, asserted


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", "").partition(".")[0]


def _is_pure(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and not schema.is_mutable and not has_random_effects(node)


def _is_edge(node: fx.Node, made: Mapping[fx.Node, bool]) -> bool:
    """Say whether others read what is made, and none writes there: it would be another at the next call."""
    readers = [user for user in node.users if user not in made]
    return made[node] and bool(readers) and not any(_writes(user) for user in readers)


def _writes(node: fx.Node) -> bool:
    return bool(getattr(getattr(node.target, "_schema", None), "is_mutable", False))


def _is_worth(node: fx.Node, values: Mapping[fx.Node, Tensor], made: Mapping[fx.Node, bool]) -> bool:
    """Say whether what a node gives takes no more bytes than what it is made of."""
    sources = reached([node], lambda each: each.all_input_nodes if each in made else ())
    return values[node].nbytes <= sum(values[each].nbytes for each in sources if each not in made)


def _store(program: ExportedProgram, node: fx.Node, value: Tensor, name: str) -> None:
    """Give a program a buffer, and let what used a node read that."""
    graph = program.graph
    with graph.inserting_before(next(iter(graph.nodes))):
        placeholder = graph.placeholder(f"b_{name}")
    placeholder.meta = {"val": node.meta["val"].contiguous()}
    node.replace_all_uses_with(placeholder)
    spec = InputSpec(InputKind.BUFFER, TensorArgument(placeholder.name), name, persistent=True)
    program.graph_signature.input_specs.insert(0, spec)
    program.state_dict[name] = value


def _drop_unused(program: ExportedProgram) -> None:
    """Take tensors out of a program that nothing in it reads any more."""
    unused = {node.name: node for node in program.graph.find_nodes(op="placeholder") if not node.users}
    specs = program.graph_signature.input_specs
    for spec in [each for each in specs if each.kind in _STORED and each.arg.name in unused]:
        program.graph.erase_node(unused[spec.arg.name])
        specs.remove(spec)
    kept = {spec.target for spec in specs}
    for held in (program.state_dict, program.constants):
        for name in [name for name in held if name not in kept]:
            del held[name]
    for name, tensor in program.state_dict.items():  # a part of a larger tensor, which may be gone
        if tensor.numel() * tensor.itemsize < tensor.untyped_storage().nbytes():
            own = tensor.detach().clone(memory_format=torch.contiguous_format)
            is_parameter = isinstance(tensor, nn.Parameter)
            program.state_dict[name] = nn.Parameter(own, tensor.requires_grad) if is_parameter else own
