"""How a vocabulary is split: its embeddings, and the graphs that read the logits of its heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from ...compat import all_modules, own_parameters
from ...layers.distributed import Gathered, SplitColumns, SplitCrossEntropy, SplitEmbedding, Words
from ...runtime.graphs import own
from ...tracing.program import Program
from .prepare import become, run_from_graphs, write_number

__all__ = ["Places", "places_of", "split_vocabulary"]

Places = Sequence[tuple[nn.Module, str]]
"""Modules, each with its name of a parameter."""


def places_of(program: Program, name: str) -> Places:
    """Return where the weight of a module is."""
    weight = own_parameters(program.module(name))["weight"]
    held = (
        (module, last, tensor)
        for module in all_modules(program.model)
        for last, tensor in own_parameters(module).items()
    )
    return [(module, last) for module, last, tensor in held if tensor is weight]


def split_vocabulary(program: Program, block: Mapping[str, Any], places: Places, mesh: DeviceMesh) -> None:
    """Split the embeddings of a vocabulary, whose heads are split already; `places`: of its weight, heads among them.

    The weight stays one parameter. Graphs go on with the logits that the process has, as far as they can.
    """
    embeddings = [cast("nn.Embedding", program.module(name)) for name in block["embeddings"]]
    weight = embeddings[0].weight
    share = Words(mesh, weight.shape[0])
    held = (cast("nn.Parameter", own_parameters(module)[last]) for module, last in places)
    split = next((tensor for tensor in held if tensor is not weight), None)
    if split is None:
        part = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)
        split = nn.Parameter(part, requires_grad=weight.requires_grad)
    vars(split).update(vars(weight))
    for module, last in places:
        own_parameters(module)[last] = split
    for module in embeddings:
        become(module, SplitEmbedding, share)
    heads = [program.module(name) for name in block["columns"]]
    for module in heads:
        become(module, SplitColumns, share)
    for owner, graphs in block["logits"].items():
        _follow(program.module(owner), graphs, heads, share)


def _follow(
    owner: nn.Module, graphs: Mapping[str, Mapping[str, Any]], heads: Sequence[nn.Module], share: Words
) -> None:
    """Let a module's graphs go on with a share of logits; its own forward gets all from its head."""
    capture = own(owner)
    for number, edits in graphs.items():
        graph = capture.specializations[int(number)].graph
        nodes = {node.name: node for node in graph.nodes}
        for call in graph.find_nodes(op="call_module"):
            if owner.get_submodule(str(call.target)) in heads:
                call.kwargs = {**call.kwargs, "part": True}
        for name in edits.get("losses", ()):
            _compute_loss(nodes[name], owner, share)
        for name, paths in edits.get("numbers", {}).items():
            for path in paths:
                write_number(nodes[name], path, share.end - share.start)
        for name, users in edits.get("gathers", {}).items():
            with graph.inserting_after(nodes[name]):
                whole = graph.call_function(Gathered(share), (nodes[name],))
            whole.meta["val"] = nodes[name].meta.get("val")
            for user in users:
                nodes[user].replace_input_with(nodes[name], whole)
    run_from_graphs(owner)


def _compute_loss(node: fx.Node, owner: nn.Module, share: Words) -> None:
    """Let a node compute the loss of all words from those of each process."""
    if node.op == "call_module":
        module = cast("nn.CrossEntropyLoss", owner.get_submodule(str(node.target)))
        node.kwargs = {**node.kwargs, "ignore_index": module.ignore_index, "reduction": module.reduction}
    node.op, node.target = "call_function", SplitCrossEntropy(share)
