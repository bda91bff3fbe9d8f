"""The pass: weights that are packed are held in that form alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx, nn

from ..compat import modules_by_name
from ..layers.packed import Packed, PackedConvolution, PackedLinear, release_weight
from ..passes.contract import Pass
from ..passes.sites import Goal, Numerics, Phase, Refusal, Site
from ..passes.verification import TensorOwners
from ..tracing.graphs import capture_of
from ..tracing.program import Program
from ..tracing.values import qualified

__all__ = ["Release"]


@dataclass(frozen=True)
class Release(Pass):
    """Free the float32 weights that `pack` has packed, in models that only serve from then on.

    Before: a weight, and the packed form beside it        After: the packed form
    Refuses: weights that anything but packed layers reads: tied ones, those of folded norms, of layers for one row.
    """

    numerics: ClassVar[Numerics] = Numerics.EXACT
    goal: ClassVar[Goal] = Goal.MEMORY
    phase: ClassVar[Phase] = Phase.EVAL

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        owners, names, readers = program.analyses[TensorOwners], list[str](), _readers(program.model)
        for name, nodes in readers.items():
            reason = _why_kept([each for each in owners.names(name) if each != name], nodes)
            if reason:
                yield Refusal(reason, name)
            else:
                names.append(name)
        if names:
            yield Site(program, "", {}, data={"weights": names}, detail=f"{len(names)} weights")
        elif not readers:
            yield Refusal("nothing is packed; list pack before it", "(root)")

    def finalize(self, model: nn.Module, sites: Sequence[Site]) -> nn.Module:
        readers = _readers(model)
        for name in (name for site in sites for name in site.data["weights"]):
            layers = [_layer_of(user) for node in readers[name] for user in node.users]
            path, _, own_name = name.rpartition(".")
            used = list({id(layer): layer for layer in layers if layer is not None}.values())
            with torch.inference_mode(False), torch.no_grad():
                release_weight(model.get_submodule(path), own_name, name, used)
        return model.requires_grad_(False)  # packed weights give no gradients: who wants some wants the numbers


def _readers(model: nn.Module) -> dict[str, list[fx.Node]]:
    """Return name of a parameter -> what reads it in graphs for evaluation, if a packed layer is among that."""
    found: defaultdict[str, list[fx.Node]] = defaultdict(list)
    called: set[str] = set()
    for owner, module in modules_by_name(model).items():
        capture = capture_of(module)
        for specialization in () if capture is None else capture.specializations:
            if specialization.runs_in_mode(module):
                for node in specialization.graph.nodes:
                    if node.op == "get_attr":
                        found[qualified(owner, str(node.target))].append(node)
                    elif node.op == "call_module":
                        called.add(qualified(owner, str(node.target)))
    own = {name: nodes for name, nodes in found.items() if name.rpartition(".")[0] not in called}
    return {name: nodes for name, nodes in own.items() if any(_is_weight(n, user) for n in nodes for user in n.users)}


def _why_kept(tied: Sequence[str], nodes: Sequence[fx.Node]) -> str:
    if tied:
        return f"it is tied to '{tied[0]}', and stays"
    for node in nodes:
        for user in node.users:
            layer = _layer_of(user)
            if layer is None or not _is_weight(node, user):
                return f"'{user.name}' reads it, too, and it stays"
            if type(layer) not in (PackedLinear, PackedConvolution):
                return f"a {type(layer).__name__} holds it in another form, and it stays"
    return ""


def _is_weight(node: fx.Node, user: fx.Node) -> bool:
    """Say whether a node is what another one packs, and nothing else of it."""
    return _layer_of(user) is not None and user.args[1] is node and user.args.count(node) == 1


def _layer_of(node: fx.Node) -> Packed | None:
    return node.target if isinstance(node.target, Packed) and len(node.args) > 1 else None
