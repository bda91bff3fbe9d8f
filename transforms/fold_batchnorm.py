"""Fold batch norms into the convolutions and linears before them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple, cast

import torch
from torch import fx, nn

from ..compat import own_buffers, own_parameters, transient_buffers
from ..layers.folded import expect_dimensions, fold_modules, is_folded
from ..layers.members import seal
from ..operators import info_of, operator_info, operator_of_module
from ..passes.analyses import CallSites, TensorOwners, TensorReads
from ..passes.base import Goal, Numerics, Pass, Phase, Refusal, Site
from ..passes.opening import obstacle_to_opening
from ..passes.state_map import Fold
from ..tracing.capture import Variant, required_capture
from ..tracing.dynamic import user_class
from ..tracing.meta import TensorMeta
from ..tracing.regions import Region

if TYPE_CHECKING:
    from ..passes.edit import Edit
    from ..tracing.program import Program

__all__ = ["FoldBatchnorm"]

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LAYERS: Mapping[type[nn.Module], tuple[type[nn.Module], ...]] = {
    nn.BatchNorm1d: (nn.Linear, nn.Conv1d, nn.ConvTranspose1d),
    nn.BatchNorm2d: (nn.Conv2d, nn.ConvTranspose2d),
    nn.BatchNorm3d: (nn.Conv3d, nn.ConvTranspose3d),
}
_KNOWN = frozenset((*_LAYERS, *(layer for layers in _LAYERS.values() for layer in layers)))
_DIMENSIONS: Mapping[type[nn.Module], int] = {nn.Linear: 2, nn.Conv1d: 3, nn.ConvTranspose1d: 3}
"""What the output must have where the norm takes several; with fewer or more it would norm another dimension."""

_KEEPS_DIMENSIONS = (
    nn.Linear, nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d, nn.LayerNorm, nn.Dropout, nn.Dropout1d, nn.AlphaDropout,
    nn.Identity,
)  # fmt: skip
_COMPUTING = ("forward", "_conv_forward", "_output_padding", "_check_input_dim", "__call__", "__getattr__")


@dataclass(frozen=True)
class FoldBatchnorm(Pass):
    """Fold evaluation-mode batch norms into the convolutions or linears that feed them.

    Before: self.bn(self.conv(x))        After: self.conv.folded(x)
    Refuses: a convolution or batch norm that is called, tied or read elsewhere too, or has hooks or parametrizations;
        a batch norm in training mode or without running statistics; a linear whose output has more than two dimensions.
    """

    numerics: ClassVar[Numerics] = Numerics.REASSOCIATED
    goal: ClassVar[Goal] = Goal.SPEED
    phase: ClassVar[Phase] = Phase.EVAL
    # In a fused ensemble the members' convolutions are one function call, with nothing left to fold into.
    before: ClassVar[tuple[str, ...]] = ("fuse_ensembles",)

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        if not any(isinstance(module, tuple(_LAYERS)) for module in program.names.distinct):
            return  # most ensembles: their many graphs need not be gone through
        pairs = [pair for home in program.captures for pair in _pairs(program, home)]
        outside = _called_from_outside(pairs, program)
        sound: dict[str, list[_Pair]] = {}
        for pair in pairs:
            reason = _obstacle(pair, program) or outside.get(pair)
            if reason is None:
                sound.setdefault(pair.home, []).append(pair)
            else:
                yield Refusal(reason, _qualified(pair.home, pair.norm_name))
        # One site for all of a module: by itself, one of many norms gains less than can be measured.
        for home, group in sound.items():
            nodes = {
                f"{what}.{number}.{call.variant}": node.name
                for number, pair in enumerate(group)
                for call in pair.calls
                for what, node in (("layer", call.layer), ("norm", call.norm))
            }
            first = group[0]
            detail = f"{first.norm_name} into {first.layer_name}" if len(group) == 1 else f"{len(group)} batch norms"
            yield Site(program, home, nodes, min(call.variant for pair in group for call in pair.calls), detail=detail)

    def rewrite(self, site: Site, edit: Edit) -> None:
        sealed: dict[str, set[str]] = {}
        for label in site.nodes:
            what, number, variant = label.split(".")
            if what == "layer":
                with edit.in_variant(int(variant)):
                    call = _Call(int(variant), edit.graph_node(label), edit.graph_node(f"norm.{number}.{variant}"))
                    _fold(call, edit)
                for node in (call.layer, call.norm):
                    _note_parents(str(node.target), sealed)
        for path, names in sealed.items():
            edit.on_undo(seal(edit.home.get_submodule(path), names))


class _Call(NamedTuple):
    """Where one graph calls a norm on a layer's output."""

    variant: int
    layer: fx.Node
    norm: fx.Node


@dataclass(frozen=True, eq=False)
class _Pair:
    """A norm and the layer before it, with every place where a module's graphs call one on the other's output."""

    home: str
    layer_name: str
    norm_name: str
    layer: nn.Module
    norm: nn.BatchNorm1d
    calls: list[_Call] = field(default_factory=list["_Call"])

    @property
    def both(self) -> tuple[tuple[str, nn.Module], ...]:
        """Return what the report calls the two, and the modules."""
        return (self.layer_kind, self.layer), ("batch norm", self.norm)

    @property
    def layer_kind(self) -> str:
        return "linear" if isinstance(self.layer, nn.Linear) else "convolution"

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Return what goes into the fold, by qualified name."""
        found: dict[str, torch.Tensor] = {}
        for path, module in ((self.layer_name, self.layer), (self.norm_name, self.norm)):
            registered = {**own_parameters(module), **own_buffers(module)}
            for name in ("weight", "bias", "running_mean", "running_var"):
                tensor = registered.get(name)
                if tensor is not None:
                    found[f"{_qualified(self.home, path)}.{name}"] = tensor
        return found


# -- where there is something to fold --------------------------------------------------------------------------------


def _pairs(program: Program, home: str) -> Sequence[_Pair]:
    found: dict[tuple[str, str], _Pair] = {}
    for number, variant in _evaluated(program, home):
        for node in variant.graph.find_nodes(op="call_module"):
            if len(node.all_input_nodes) != 1 or node.all_input_nodes[0].op != "call_module":
                continue
            call = _Call(number, node.all_input_nodes[0], node)
            layer, norm = (program.callee(home, n) for n in (call.layer, call.norm))
            if any(isinstance(norm, kind) and isinstance(layer, layers) for kind, layers in _LAYERS.items()):
                names = str(call.layer.target), str(call.norm.target)
                pair = found.setdefault(names, _Pair(home, *names, layer, cast("nn.BatchNorm1d", norm)))
                pair.calls.append(call)
    return list(found.values())


def _evaluated(program: Program, home: str) -> list[tuple[int, Variant]]:
    """Return the graphs of a module that can run in evaluation mode, with their numbers."""
    module = program.module(home)
    return [item for item in enumerate(required_capture(module).variants) if item[1].runs_in_mode(module)]


def _obstacle(pair: _Pair, program: Program) -> str | None:
    """Return why a pair must stay as it is, or None."""
    return (
        _obstacle_in_mode(pair, program)
        or _obstacle_in_modules(pair, program)
        or _obstacle_in_calls(pair, program)
        or _obstacle_in_tensors(pair, program)
        or _obstacle_in_shapes(pair)
    )


def _obstacle_in_mode(pair: _Pair, program: Program) -> str | None:
    if program.training or pair.norm.training:
        return "the batch norm is in training mode"
    if is_folded(pair.norm) or is_folded(pair.layer):
        return "it was folded already"
    buffers, transient = own_buffers(pair.norm), transient_buffers(pair.norm)
    for name in ("running_mean", "running_var"):
        if buffers.get(name) is None:
            return "the batch norm has no running statistics"
        if name in transient:
            return "the batch norm's running statistics are not part of the state dict"
    return None


def _obstacle_in_modules(pair: _Pair, program: Program) -> str | None:
    if isinstance(program.module(pair.home), Region):
        return "they are called in a region, which does not own them"
    for what, module in pair.both:
        reason = obstacle_to_opening(module)
        if reason is not None:
            return f"the {what} cannot be folded: {reason}"
        if _kind(module) is None:
            return f"the {what} is a {type(module).__name__}, whose forward is its own"
        if type(module) is not user_class(type(module)):
            return f"the {what} is part of something fused"
    return None


def _kind(module: nn.Module) -> type[nn.Module] | None:
    """Return the class of torch.nn whose forward a module runs; None where a subclass has one of its own."""
    cls = user_class(type(module))
    kind = next((base for base in cls.__mro__ if base in _KNOWN), None)
    keeps = all(getattr(cls, name, None) is getattr(kind, name, None) for name in _COMPUTING)
    return kind if keeps else None


def _obstacle_in_calls(pair: _Pair, program: Program) -> str | None:
    if any(len(call.layer.users) > 1 for call in pair.calls):
        return f"the {pair.layer_kind}'s output is read elsewhere too"
    graphs = _evaluated(program, pair.home)
    nodes = {node for call in pair.calls for node in (call.layer, call.norm)}
    for what, module in pair.both:
        if program.analyses[CallSites].count(module) > 1:
            return f"the {what} is called elsewhere too"
        if len(graphs) > 1 and any(node not in nodes for node in _calls_of(module, program, pair.home, graphs)):
            return f"the {what} is called otherwise in another graph of the same module"
    return None


def _calls_of(
    module: nn.Module, program: Program, home: str, graphs: Sequence[tuple[int, Variant]]
) -> Iterator[fx.Node]:
    for _, variant in graphs:
        for node in variant.graph.find_nodes(op="call_module"):
            if program.callee(home, node) is module:
                yield node


def _called_from_outside(pairs: Sequence[_Pair], program: Program) -> dict[_Pair, str]:
    """Return why pairs inside modules without a graph must stay: those may call the layer or the norm, too."""
    inside = {pair: around for pair in pairs if (around := _opaque_around(pair, program)) is not None}
    if not inside:
        return {}
    if not program.inputs:
        return {pair: f"'{around}' could not be captured and may call it, too" for pair, around in inside.items()}
    modules = {module for pair in inside for module in (program.module(pair.home), pair.layer, pair.norm)}
    calls = {module: len(of_module) for module, of_module in program.recording(modules).calls.items()}
    reasons: dict[_Pair, str] = {}
    for pair, around in inside.items():
        of_home = calls.get(program.module(pair.home), 0)
        if any(calls.get(module, 0) > of_home for module in (pair.layer, pair.norm)):
            reasons[pair] = f"'{around}' could not be captured and calls it, too"
    return reasons


def _opaque_around(pair: _Pair, program: Program) -> str | None:
    """Return a module without a graph that one of the two is inside of."""
    names = [_qualified(pair.home, name) for name in (pair.layer_name, pair.norm_name)]
    around = (name for name in program.opaque if not name or any(own.startswith(f"{name}.") for own in names))
    return next((name or "(root)" for name in around), None)


def _obstacle_in_tensors(pair: _Pair, program: Program) -> str | None:
    owners, reads, tensors = program.analyses[TensorOwners], program.analyses[TensorReads], pair.tensors
    for name, tensor in tensors.items():
        names = owners.names(name)
        if len(names) > 1:
            return f"'{names[0]}' is tied to '{names[1]}'"
        reader = reads.reader(tensor)
        if reader is not None:
            return f"'{name}' is read in the graph of '{reader}'"
    for what in ("dtype", "device"):
        found = list(dict.fromkeys(str(getattr(tensor, what)).removeprefix("torch.") for tensor in tensors.values()))
        if len(found) > 1:
            return f"the {pair.layer_kind} and the batch norm have tensors of {what} {found[0]} and {found[1]}"
    return None


def _obstacle_in_shapes(pair: _Pair) -> str | None:
    layer = pair.layer
    channels = layer.out_features if isinstance(layer, nn.Linear) else cast("nn.Conv2d", layer).out_channels
    if channels != pair.norm.num_features:
        return f"the {pair.layer_kind} has {channels} channels and the batch norm {pair.norm.num_features}"
    wanted = _dimensions(layer)
    for call in pair.calls if wanted is not None else ():
        known = call.layer.meta.get("val")
        if not isinstance(known, TensorMeta):
            return "the number of dimensions is not known; give example_inputs"
        if len(known.shape) != wanted:
            return f"the {pair.layer_kind} gives {len(known.shape)} dimensions, so the batch norm acts on another one"
    return None


def _dimensions(layer: nn.Module) -> int | None:
    kind = _kind(layer)
    return None if kind is None else _DIMENSIONS.get(kind)


# -- rewriting ---------------------------------------------------------------------------------------------------------


def _fold(call: _Call, edit: Edit) -> None:
    program, home = edit.program, edit.site.home
    layer, norm = program.callee(home, call.layer), program.callee(home, call.norm)
    if not is_folded(layer):
        step = _step(str(call.layer.target), str(call.norm.target), layer, cast("nn.BatchNorm1d", norm))
        edit.on_undo(fold_modules(layer, norm, step))
        edit.record_state(step)
    wanted = _dimensions(layer)
    if wanted is not None:
        _expect_dimensions(_source_of_dimensions(call.layer.all_input_nodes[0], program, home), wanted, edit)
    folded = edit.call(f"{call.layer.target}.folded", *call.layer.args, before=call.layer, **call.layer.kwargs)
    folded.meta["source"] = call.layer.meta.get("source")
    edit.replace(call.layer, folded)
    edit.replace(call.norm, folded)


def _step(layer_name: str, norm_name: str, layer: nn.Module, norm: nn.BatchNorm1d) -> Fold:
    return Fold(
        layer=layer_name,
        norm=norm_name,
        eps=float(norm.eps),
        biased=own_parameters(layer).get("bias") is not None,
        scaled=own_parameters(norm).get("weight") is not None,
        shifted=own_parameters(norm).get("bias") is not None,
        transposed=isinstance(layer, _TRANSPOSED),
        groups=layer.groups if isinstance(layer, _TRANSPOSED) else 1,
    )


def _expect_dimensions(node: fx.Node, count: int, edit: Edit) -> None:
    """Let the graph check a tensor's number of dimensions, once."""
    if not any(user.target is expect_dimensions and user.args[1] == count for user in node.users):
        edit.call(expect_dimensions, node, count)


def _source_of_dimensions(node: fx.Node, program: Program, home: str) -> fx.Node:
    """Return the first of the nodes up to `node` that is bound to have as many dimensions.

    Members of an ensemble then check the input that they share, and nothing in between.
    """

    def keeps_dimensions(node: fx.Node) -> bool:
        if node.op != "call_module":
            return info_of(node).elementwise
        kind = user_class(type(program.callee(home, node)))
        return kind in _KEEPS_DIMENSIONS or operator_info(operator_of_module(kind)).elementwise

    while len(node.all_input_nodes) == 1 and keeps_dimensions(node):
        node = node.all_input_nodes[0]
    return node


def _note_parents(path: str, sealed: dict[str, set[str]]) -> None:
    """Note the children on the way to a module, by their parents: were one replaced, the graph would not know."""
    while path:
        parent, _, last = path.rpartition(".")
        sealed.setdefault(parent, set()).add(last)
        path = parent


def _qualified(home: str, name: str) -> str:
    return f"{home}.{name}" if home else name
