"""Fused ensembles whose members can be split over processes, and how they are split."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from ...compat import own_parameters
from ...layers import batched_layers, ensemble
from ...layers.distributed import (
    AllMembers,
    Crossing,
    Layout,
    MeanOfMembers,
    OwnMembers,
    SharedByMembers,
    SumOfMembers,
    deal_parameter,
)
from ...layers.members import FusedMembers
from ...layers.moe import FusedExperts
from ...layers.slices import MEMBERS
from ...layers.vectorized import VectorizedMembers
from ...operators import canonical_name, info_of, mutates
from ...passes.sites import Refusal
from ...runtime.graphs import copy_graph, own, recompile, specializations_of
from ...runtime.values import qualified
from ...tracing.program import Program, TensorReads
from .counts import why_not_dealt

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ensembles_in", "split_ensembles"]

_ALL_READ = (ensemble.stack_members, ensemble.concatenate_members, ensemble.unbind_members)
_OWN = (ensemble.gather_members, ensemble.select_members)
_PLAIN = (batched_layers.member_dim, batched_layers.member_numel, batched_layers.member_size)
"""What is asked of members, and is the same for some of them as for all."""

_ALONG = frozenset(
    "amax amin cat chunk contiguous dropout flatten getitem log_softmax logsumexp mean narrow permute softmax split "
    "squeeze stack sum to transpose unflatten unsqueeze".split()
)
"""Operators of torch that fused ensembles have, each along a dimension that is not the members'."""


def ensembles_in(program: Program, processes: int) -> tuple[list[dict[str, Any]], list[Refusal]]:
    """Return the fused ensembles of a model, by the module whose graphs compute them; and those that stay whole."""
    found, refusals = list[dict[str, Any]](), list[Refusal]()
    for owner in program.captures:
        stacks = _stacks(program, owner)
        reason = _reason_against(program, owner, stacks, processes) if stacks else ""
        if reason:
            refusals.append(Refusal(reason, owner or "(root)"))
        elif stacks:
            found.append({"owner": owner, "tensors": [qualified(owner, name) for name in stacks]})
    return found, refusals


def _stacks(program: Program, owner: str) -> dict[str, int]:
    """Return the stacked tensors that a module's graphs read, by name there, and of how many members; no experts'."""
    module, stacks = program.module(owner), dict[str, int]()
    for node in (node for each in specializations_of(module) for node in each.graph.find_nodes(op="get_attr")):
        holder, _, last = str(node.target).rpartition(".")
        store = module.get_submodule(holder)
        if isinstance(store, FusedMembers) and not _is_of_experts(module, node):
            stacks[str(node.target)] = vars(store).get(MEMBERS, {}).get(last) or getattr(store, last).shape[0]
    return stacks


def _is_of_experts(module: nn.Module, node: fx.Node) -> bool:
    users = [user for each in node.users for user in (each, *each.users)]
    return any(u.op == "call_module" and isinstance(module.get_submodule(str(u.target)), FusedExperts) for u in users)


def _reason_against(program: Program, owner: str, stacks: Mapping[str, int], processes: int) -> str:
    module, uneven = program.module(owner), (why_not_dealt(n, "members", processes) for n in stacks.values())
    if reason := next(filter(None, uneven), ""):
        return reason
    for name in stacks:
        holder, _, last = name.rpartition(".")
        parameter = own_parameters(module.get_submodule(holder)).get(last)
        if parameter is None:
            return f"the members have statistics or other buffers ('{last}')"
        others = set(program.analyses[TensorReads].readers_of(parameter)) - {owner or "(root)"}
        if others:
            return f"'{min(others)}' reads '{last}' of all members, too"
    for each in specializations_of(module):
        stop = _Members.of(each.graph, module, stacks).stop
        if stop:
            return f"'{stop}' needs all members of an ensemble"
    return ""


@dataclass
class _Members:
    """The nodes of a graph that have something for each member, and those that join them."""

    inside: dict[fx.Node, None]
    joins: list[fx.Node]
    stop: str = ""  # what is neither

    @classmethod
    def of(cls, graph: fx.Graph, module: nn.Module, stacks: Mapping[str, int]) -> _Members:
        found = cls({}, [])
        for node in graph.nodes:
            if node.op == "get_attr" and node.target in stacks:
                found.inside[node] = None
            elif found.inside.keys().isdisjoint(node.all_input_nodes) or _is_the_same_for_some(node):
                continue
            elif node.target in _ALL_READ or node.target is ensemble.sum_members:
                found.joins.append(node)
            elif _is_by_member(node, module):
                found.inside[node] = None
            else:
                found.stop = found.stop or node.name
        return found

    def entries(self) -> Iterator[fx.Node]:
        """Yield what nodes for each member read from outside."""
        seen = dict.fromkeys(given for node in self.inside for given in node.all_input_nodes)
        yield from (node for node in seen if node not in self.inside)


def _is_the_same_for_some(node: fx.Node) -> bool:
    return node.target in _PLAIN or (node.target is getattr and node.args[1] in ("device", "dtype"))


def _is_by_member(node: fx.Node, module: nn.Module) -> bool:
    """Say whether a node computes each member's result from that member's values."""
    if node.op == "call_module":
        return isinstance(module.get_submodule(str(node.target)), VectorizedMembers)
    if node.op not in ("call_function", "call_method") or mutates(node):
        return False
    if getattr(node.target, "__module__", "").startswith(ensemble.__name__.rpartition(".")[0]):
        return True
    return info_of(node).elementwise or canonical_name(node) in _ALONG


def split_ensembles(program: Program, ensembles: Sequence[Mapping[str, Any]], mesh: DeviceMesh, layout: Layout) -> None:
    """Let each process of a mesh compute some members of ensembles, of the same inputs."""
    for each in ensembles:
        owner = program.module(each["owner"])
        prefix = len(each["owner"]) + 1 if each["owner"] else 0
        stacks = {name[prefix:]: 0 for name in each["tensors"]}
        capture = own(owner)
        capture.specializations = [
            dataclasses.replace(found, graph=_split(found.graph, owner, stacks, mesh))
            for found in capture.specializations
        ]
        capture.lost = "it has an ensemble, of which each process computes some members"
        recompile(owner)
        for name in each["tensors"]:
            holder, _, last = name.rpartition(".")
            deal_parameter(program.module(holder), last, layout, (owner,))


def _split(graph: fx.Graph, module: nn.Module, stacks: Mapping[str, int], mesh: DeviceMesh) -> fx.Graph:
    graph = copy_graph(graph)
    members = _Members.of(graph, module, stacks)
    for node in list(members.entries()):
        crossing = OwnMembers if node.target in _OWN else SharedByMembers
        _cross(graph, node, crossing(mesh), [user for user in node.users if user in members.inside])
    for node in members.joins:
        if node.target is ensemble.sum_members:
            _cross(graph, node, SumOfMembers(mesh), list(node.users))
        elif node.users and all(_is_mean_of(user, node) for user in node.users):
            for mean in list(node.users):
                _cross(graph, mean, MeanOfMembers(mesh), list(mean.users))
        else:
            _cross(graph, node.all_input_nodes[0], AllMembers(mesh), [node])
    return graph


def _is_mean_of(node: fx.Node, stacked: fx.Node) -> bool:
    """Say whether a node is the mean over members along the dimension that they were stacked along."""
    if stacked.target is not ensemble.stack_members or canonical_name(node) != "mean" or node.args[0] is not stacked:
        return False
    dims: list[object] = [each.args[1] if len(each.args) > 1 else each.kwargs.get("dim") for each in (stacked, node)]
    return isinstance(dims[1], int) and (dims[0] or 0) == dims[1]


def _cross(graph: fx.Graph, node: fx.Node, crossing: Crossing, users: Sequence[fx.Node]) -> None:
    """Let users of a node have what a crossing makes of it."""
    place = node if node.op != "placeholder" else graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(place):
        crossed = graph.call_function(crossing, (node,))
    for user in users:
        user.replace_input_with(node, crossed)
