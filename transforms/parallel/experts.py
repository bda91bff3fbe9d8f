"""Mixtures whose experts can be dealt to processes, and how they are dealt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import fx, nn

from ...compat import own_parameters, own_tensor
from ...layers.distributed import Layout, deal_parameter
from ...layers.ensemble import split_vectors
from ...layers.moe import ExpertPlacement, FusedExperts, MixtureOfExperts
from ...operators import canonical_name
from ...passes.sites import Refusal
from ...runtime.graphs import own, recompile, specializations_of
from ...runtime.values import qualified
from ...tracing.program import Program, TensorOwners, TensorReads
from .counts import why_not_dealt

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["deal_experts", "mixtures_in"]

_CASTS = ("bfloat16", "double", "float", "half", "to")
"""What may stand between a parameter and the experts that it is given to."""

_HARMLESS = ("dtype", "device", "requires_grad")
"""What may be asked of a parameter that a process has in part."""


def mixtures_in(program: Program, processes: int) -> tuple[list[dict[str, Any]], list[Refusal]]:
    """Return the mixtures of a model: the layer that applies experts, what reads its parameters, and their names; and
    those whose experts stay whole.
    """
    found, refusals = list[dict[str, Any]](), list[Refusal]()
    for layer, reader, tensors in (*_layers(program), *_fused(program)):
        others = [each for name in tensors for each in _others(program, name, reader)]
        count = 0 if others else program.model.get_parameter(tensors[0]).shape[0]
        if others:
            refusals.append(Refusal(f"{others[0]} needs the weights of all experts", layer))
        elif reason := why_not_dealt(count, "experts", processes):
            refusals.append(Refusal(reason, layer))
        else:
            found.append({"layer": layer, "reader": reader, "tensors": tensors})
    return found, refusals


def _layers(program: Program) -> Iterator[tuple[str, str, list[str]]]:
    for name, module in program.names.modules.items():
        if isinstance(module, MixtureOfExperts) and program.name_of(module) == name:
            held = own_parameters(module).items()
            yield name, name, [qualified(name, own) for own, tensor in held if tensor is not None]


def _fused(program: Program) -> Iterator[tuple[str, str, list[str]]]:
    seen = set[str]()
    for owner in program.captures:
        module = program.module(owner)
        for node in (node for each in specializations_of(module) for node in each.graph.find_nodes(op="call_module")):
            layer = qualified(owner, str(node.target))
            if layer not in seen and isinstance(program.module(layer), FusedExperts):
                seen.add(layer)
                yield layer, owner, [qualified(owner, _parameter(given)) for given in node.args[3:]]


def _parameter(given: Any) -> str:
    """Return the name, in its graph, of the parameter that an operand of fused experts is, or a cast of it; or ""."""
    node = given
    while isinstance(node, fx.Node) and _is_handed_on(node):
        node = node.args[0]
    return str(node.target) if isinstance(node, fx.Node) and node.op == "get_attr" else ""


def _is_handed_on(node: fx.Node) -> bool:
    return node.target is split_vectors or canonical_name(node) in _CASTS


def _others(program: Program, name: str, reader: str) -> list[str]:
    """Return what else than experts needs a parameter whole: names that it is tied to, and what graphs read it for."""
    parameter = own_tensor(program.module(name.rpartition(".")[0]), name.rpartition(".")[2])
    if not isinstance(parameter, nn.Parameter):
        return ["what the graph computes of its weights"]
    others = [f"'{each}'" for each in program.analyses[TensorOwners].names(name) if each != name]
    reads, owner = program.analyses[TensorReads], reader or "(root)"
    others += [f"'{each}'" for each in reads.readers_of(parameter) if each != owner]
    pending = list(reads.nodes_of(parameter, owner))
    while pending:
        for user in pending.pop().users:
            if _is_handed_on(user):
                pending.append(user)
            elif user.op != "call_module" and (user.target is not getattr or user.args[1] not in _HARMLESS):
                others.append(f"'{user.name}'")
    return others


def deal_experts(
    program: Program,
    mixtures: Sequence[Mapping[str, Any]],
    layout: Layout,
    meshes: tuple[DeviceMesh | None, DeviceMesh | None],
    around: Sequence[nn.Module] = (),
) -> list[nn.Parameter]:
    """Deal the experts of mixtures, and return their parameters; those of layers on other ranks are left out.
    `meshes`: of processes with rows of their own, and of those with the same. `around`: see `TensorParallel.split`.
    """
    dealt = list[nn.Parameter]()
    for each in mixtures:
        reader = program.module(each["reader"])
        places = [(program.module(holder), last) for holder, _, last in (n.rpartition(".") for n in each["tensors"])]
        whole = own_parameters(places[0][0]).get(places[0][1])
        if whole is None:
            continue
        layer = cast("FusedExperts | MixtureOfExperts", program.module(each["layer"]))
        layer.placement = ExpertPlacement(whole.shape[0], *meshes)
        for holder, name in places:
            deal_parameter(holder, name, layout, (reader, *around))
            dealt.append(cast("nn.Parameter", own_parameters(holder)[name]))
        if reader is not layer:
            own(reader).lost = "it has experts, of which each process holds some"
            recompile(reader)
    return dealt
