"""The pass: weights that are packed, or that an engine holds, take memory once."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx, nn

from ..compat import children_of, modules_by_name
from ..layers.delegated import fit_for_disk, move_to_disk
from ..layers.packed import Packed, PackedConvolution, PackedLinear, refuse_checkpoints, release_weight
from ..passes.contract import Pass
from ..passes.sites import Goal, Numerics, Phase, Refusal, Site
from ..runtime.graphs import capture_of
from ..runtime.values import qualified
from ..storage import byte_text
from ..tracing.program import Program, TensorOwners

__all__ = ["Release"]


@dataclass(frozen=True)
class Release(Pass):
    """Free the weights that `pack` has packed or an engine holds, in models that only serve from then on.

    Before: a weight, and the packed form beside it        After: the packed form; for engines also a file on disk
    Refuses: weights that anything but packed layers reads: tied ones, those of folded norms, of layers for one row.
    """

    numerics: ClassVar[Numerics] = Numerics.EXACT
    goal: ClassVar[Goal] = Goal.MEMORY
    phase: ClassVar[Phase] = Phase.EVAL

    @classmethod
    def searched(cls, phase: Phase, goals: Collection[Goal]) -> Mapping[str, Sequence[Any]] | None:
        return {} if phase is Phase.EVAL and not set(goals) <= {Goal.SPEED} else None

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        called = sorted({"", *(call.module for call in program.inputs)})
        graphs = _graphs(program.model, called)
        owners, names, readers = program.analyses[TensorOwners], list[str](), _readers(program.model, graphs)
        parameters = dict(program.model.named_parameters(remove_duplicate=False))
        for name, nodes in readers.items():
            tied = [each for each in owners.names(name) if each != name]
            reason = _why_kept(tied, nodes) if name in parameters else "it is a buffer, and stays"
            if reason:
                yield Refusal(reason, name)
            else:
                names.append(name)
        moved = [name for name in fit_for_disk(program.model) if name not in names]
        if names or moved:
            data = {"weights": names, "called": called, "moved": moved}
            yield Site(program, "", {}, data=data, detail=_said(program.model, names, moved))
        nodes = (node for each in graphs.values() for graph in each for node in graph.nodes)
        packed = {node.args[1] for node in nodes if _layer_of(node) is not None}
        made = len([each for each in packed if isinstance(each, fx.Node) and each.op != "get_attr"])
        if made:
            yield Refusal(
                f"{made} packed {_plural(made)} made of several tensors (a norm is folded in): all of these stay",
                "(root)",
            )
        elif not readers and not moved:
            yield Refusal("nothing is packed: 'pack' is not listed before it, or found no layer that gains", "(root)")

    def finalize(self, model: nn.Module, sites: Sequence[Site]) -> nn.Module:
        for site in sites:
            move_to_disk(model, site.data["moved"])
            readers = _readers(model, _graphs(model, site.data["called"]))
            for name in site.data["weights"]:
                self._release(model, name, readers[name])
        refuse_checkpoints(model)
        return model.requires_grad_(False)  # packed weights give no gradients: who wants some wants the numbers

    @staticmethod
    def _release(model: nn.Module, name: str, nodes: Sequence[fx.Node]) -> None:
        layers = [_layer_of(user) for node in nodes for user in node.users]
        path, _, own_name = name.rpartition(".")
        used = list({id(layer): layer for layer in layers if layer is not None}.values())
        with torch.inference_mode(False), torch.no_grad():
            release_weight(model.get_submodule(path), own_name, name, used)


def _said(model: nn.Module, names: Sequence[str], moved: Sequence[str]) -> str:
    """Return what is done, in words."""

    def sized(those: Sequence[str]) -> str:
        size = sum(each.nbytes for each in (operator.attrgetter(name)(model) for name in those))
        return f"{len(those)} {_plural(len(those))}, {byte_text(size)}"

    said = [f"{sized(names)} freed; state_dict() and copies raise from now on"] if names else []
    return "; ".join([*said, f"{sized(moved)}, that engines hold, moved to files"] if moved else said)


def _plural(count: int) -> str:
    return "weight" if count == 1 else "weights"


def _graphs(model: nn.Module, called: Sequence[str]) -> dict[nn.Module, list[fx.Graph]]:
    """Return the modules that run where these are called in evaluation, with their graphs; without any, its forward."""
    modules = modules_by_name(model)
    waiting, found = [modules[name] for name in called if name in modules], dict[nn.Module, list[fx.Graph]]()
    while waiting:
        module = waiting.pop()
        if module not in found:
            capture = capture_of(module)
            every = () if capture is None else capture.specializations
            found[module] = graphs = [each.graph for each in every if each.runs_in_mode(module)]
            targets = [str(node.target) for graph in graphs for node in graph.find_nodes(op="call_module")]
            waiting += map(module.get_submodule, targets) if graphs else filter(None, children_of(module).values())
    return found


def _readers(model: nn.Module, graphs: Mapping[nn.Module, Sequence[fx.Graph]]) -> dict[str, list[fx.Node]]:
    """Return name of a parameter -> what reads it in these graphs, if a packed layer is among that."""
    found: defaultdict[str, list[fx.Node]] = defaultdict(list)
    for owner, module in modules_by_name(model).items():
        for graph in graphs.get(module, ()):
            for node in graph.find_nodes(op="get_attr"):
                found[qualified(owner, str(node.target))].append(node)
    packed = {
        name: nodes for name, nodes in found.items() if any(_is_weight(n, user) for n in nodes for user in n.users)
    }
    return {n: nodes for n, nodes in packed.items() if graphs.get(model.get_submodule(n.rpartition(".")[0])) != []}


def _why_kept(tied: Sequence[str], nodes: Sequence[fx.Node]) -> str:
    if tied:
        return f"it is tied to '{tied[0]}', and stays"
    for node in nodes:
        for user in node.users:
            layer = _layer_of(user)
            if layer is None or not _is_weight(node, user):
                return f"'{user.name}' reads it, too, and it stays"
            if isinstance(user.args[0], fx.Node) and user.args[0].op == "get_attr":
                return f"'{user.name}' computes it of a parameter, as torch does, and it stays"
            if type(layer) not in (PackedLinear, PackedConvolution):
                return f"a {type(layer).__name__} holds it in another form, and it stays"
    return ""


def _is_weight(node: fx.Node, user: fx.Node) -> bool:
    """Say whether a node is what another one packs, and nothing else of it."""
    return _layer_of(user) is not None and user.args[1] is node and user.args.count(node) == 1


def _layer_of(node: fx.Node) -> Packed | None:
    return node.target if isinstance(node.target, Packed) and len(node.args) > 1 else None
