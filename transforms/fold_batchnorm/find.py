"""Where a batch norm follows a layer that it can be folded into, and why it must stay where it cannot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from torch import fx, nn

from ...compat import own_buffers, own_parameters
from ...layers.masked import has_only_masks
from ...layers.sync_batch_norm import SYNCHRONIZED
from ...passes.rewriting import obstacle_to_inlining
from ...passes.verification import CallSites, TensorOwners, TensorReads
from ...tracing.graphs import Region, Specialization, required_capture
from ...tracing.program import Program
from ...tracing.values import TensorMeta, qualified, user_class
from .own_forward import tail_of

__all__ = [
    "LAYERS",
    "TRANSPOSED",
    "Call",
    "Pair",
    "dimensions_wanted",
    "evaluated",
    "has_own_forward",
    "obstacles",
    "pairs_in",
]

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS: Mapping[type[nn.Module], tuple[type[nn.Module], ...]] = {
    nn.BatchNorm1d: (nn.Linear, nn.Conv1d, nn.ConvTranspose1d),
    nn.BatchNorm2d: (nn.Conv2d, nn.ConvTranspose2d),
    nn.BatchNorm3d: (nn.Conv3d, nn.ConvTranspose3d),
}
"""Kind of norm -> the layers that it can be folded into."""

_KNOWN = frozenset((*SYNCHRONIZED.values(), *LAYERS, *(layer for layers in LAYERS.values() for layer in layers)))
_DIMENSIONS: Mapping[type[nn.Module], int] = {nn.Linear: 2, nn.Conv1d: 3, nn.ConvTranspose1d: 3}
"""What the output must have where the norm takes several; with fewer or more it would norm another dimension."""

_COMPUTING = ("forward", "_conv_forward", "_output_padding", "_check_input_dim", "__call__", "__getattr__")


class Call(NamedTuple):
    """Where one graph calls a norm on a layer's output."""

    specialization: int
    layer: fx.Node
    norm: fx.Node


@dataclass(frozen=True, eq=False)
class Pair:
    """A norm and the layer before it, with every place where a module's graphs call one on the other's output."""

    owner: str
    layer_name: str
    norm_name: str
    layer: nn.Module
    norm: nn.BatchNorm1d
    calls: list[Call] = field(default_factory=list["Call"])

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
                    found[qualified(qualified(self.owner, path), name)] = tensor
        return found


# -- where there is something to fold --------------------------------------------------------------------------------


def pairs_in(program: Program) -> list[Pair]:
    """Return every pair in a program."""
    if not any(isinstance(module, tuple(LAYERS)) for module in program.names.distinct):
        return []  # most ensembles: their many graphs need not be gone through
    return [pair for owner in program.captures for pair in _pairs(program, owner)]


def obstacles(
    pairs: Sequence[Pair], program: Program, also: tuple[type[nn.Module], ...] = (), *, tails: bool = False
) -> dict[Pair, str]:
    """Return why pairs must stay as they are, where they must.

    Args:
        pairs: in the program.
        program: of the model.
        also: classes whose own forward is known to whoever asks.
        tails: what a norm's own forward computes behind the norm is computed by whoever asks.
    """
    outside = _called_from_outside(pairs, program)
    reasons = {pair: _obstacle(pair, program, also, tails) or outside.get(pair) for pair in pairs}
    return {pair: reason for pair, reason in reasons.items() if reason is not None}


def _pairs(program: Program, owner: str) -> Sequence[Pair]:
    found: dict[tuple[str, str], Pair] = {}
    for number, specialization in evaluated(program, owner):
        for node in specialization.graph.find_nodes(op="call_module"):
            if len(node.all_input_nodes) != 1 or node.all_input_nodes[0].op != "call_module":
                continue
            call = Call(number, node.all_input_nodes[0], node)
            layer, norm = (program.callee(owner, n) for n in (call.layer, call.norm))
            if any(isinstance(norm, kind) and isinstance(layer, layers) for kind, layers in LAYERS.items()):
                names = str(call.layer.target), str(call.norm.target)
                pair = found.setdefault(names, Pair(owner, *names, layer, cast("nn.BatchNorm1d", norm)))
                pair.calls.append(call)
    return list(found.values())


def evaluated(program: Program, owner: str) -> list[tuple[int, Specialization]]:
    """Return the graphs of a module that can run in evaluation mode, with their numbers."""
    module = program.module(owner)
    return [item for item in enumerate(required_capture(module).specializations) if item[1].runs_in_mode(module)]


def _obstacle(pair: Pair, program: Program, also: tuple[type[nn.Module], ...], tails: bool) -> str | None:
    """Return why a pair must stay as it is, or None."""
    return (
        _obstacle_in_mode(pair, program)
        or _obstacle_in_modules(pair, program, also, tails)
        or _obstacle_in_calls(pair, program)
        or _obstacle_in_tensors(pair, program)
        or _obstacle_in_shapes(pair, replaying=program.replaying)
    )


def _obstacle_in_mode(pair: Pair, program: Program) -> str | None:
    if program.training:
        return "the model is in training, where weights change at every step; call model.eval() first"
    if pair.norm.training:
        return "the batch norm is in training mode"
    buffers = own_buffers(pair.norm)
    if any(buffers.get(name) is None for name in ("running_mean", "running_var", "num_batches_tracked")):
        return "the batch norm has no running statistics"
    return None


def _obstacle_in_modules(pair: Pair, program: Program, also: tuple[type[nn.Module], ...], tails: bool) -> str | None:
    if isinstance(program.module(pair.owner), Region):
        return "they are called in a region that does not own them"
    for what, module in pair.both:
        reason = obstacle_to_inlining(module)
        if reason is not None:
            return f"the {what} cannot be folded: {reason}"
        if tails and module is pair.norm and has_own_forward(module):
            tail = tail_of(module)
            if isinstance(tail, str):
                return tail
            continue
        if _kind(module) is None and not isinstance(module, also):
            return f"the {what} is a {type(module).__name__}, which has its original forward"
        if type(module) is not user_class(type(module)) and not (module is pair.layer and has_only_masks(module)):
            return f"the {what} is part of something fused"
    return None


def has_own_forward(module: nn.Module) -> bool:
    """Say whether a layer or norm is of a subclass that computes something else than the class of torch.nn."""
    return _kind(module) is None


def _kind(module: nn.Module) -> type[nn.Module] | None:
    """Return the class of torch.nn whose forward a module runs; None where a subclass has one of its own."""
    cls = user_class(type(module))
    kind = next((base for base in cls.__mro__ if base in _KNOWN), None)
    keeps = all(getattr(cls, name, None) is getattr(kind, name, None) for name in _COMPUTING)
    return kind if keeps else None


def _obstacle_in_calls(pair: Pair, program: Program) -> str | None:
    if any(len(call.layer.args) + len(call.layer.kwargs) > 1 for call in pair.calls):
        return f"the {pair.layer_kind} is called with more than one argument"
    if any(len(call.layer.users) > 1 for call in pair.calls):
        return f"the {pair.layer_kind}'s output is read elsewhere too"
    graphs = evaluated(program, pair.owner)
    nodes = {node for call in pair.calls for node in (call.layer, call.norm)}
    for what, module in pair.both:
        if program.analyses[CallSites].count(module) > 1:
            return f"the {what} is called elsewhere too"
        if len(graphs) > 1 and any(node not in nodes for node in _calls_of(module, program, pair.owner, graphs)):
            return f"the {what} is called in another way by another graph of the same module"
    return None


def _calls_of(
    module: nn.Module, program: Program, owner: str, graphs: Sequence[tuple[int, Specialization]]
) -> Iterator[fx.Node]:
    for _, specialization in graphs:
        for node in specialization.graph.find_nodes(op="call_module"):
            if program.callee(owner, node) is module:
                yield node


def _called_from_outside(pairs: Sequence[Pair], program: Program) -> dict[Pair, str]:
    """Return why pairs inside modules without a graph must stay: those may call the layer or the norm, too."""
    inside = {pair: around for pair in pairs if (around := _opaque_around(pair, program)) is not None}
    if not inside:
        return {}
    if program.replaying:
        return {}  # the recording that was asked is not here
    if not program.inputs:
        return {pair: f"'{around}' could not be captured and may call it, too" for pair, around in inside.items()}
    modules = {module for pair in inside for module in (program.module(pair.owner), pair.layer, pair.norm)}
    calls = {module: len(of_module) for module, of_module in program.recording(modules).calls.items()}
    reasons: dict[Pair, str] = {}
    for pair, around in inside.items():
        of_owner = calls.get(program.module(pair.owner), 0)
        if any(calls.get(module, 0) > of_owner for module in (pair.layer, pair.norm)):
            reasons[pair] = f"'{around}' could not be captured and calls it, too"
    return reasons


def _opaque_around(pair: Pair, program: Program) -> str | None:
    """Return a module without a graph that one of the two is inside of."""
    names = [qualified(pair.owner, name) for name in (pair.layer_name, pair.norm_name)]
    around = (name for name in program.opaque if not name or any(own.startswith(f"{name}.") for own in names))
    return next((name or "(root)" for name in around), None)


def _obstacle_in_tensors(pair: Pair, program: Program) -> str | None:
    owners, reads, tensors = program.analyses[TensorOwners], program.analyses[TensorReads], pair.tensors
    for name, tensor in tensors.items():
        names = owners.names(name)
        if len(names) > 1:
            return f"'{names[0]}' is tied to '{names[1]}'"
        reader = reads.reader(tensor)
        if reader not in (None, qualified(pair.owner, pair.norm_name)):  # its own forward is not called any more
            return f"'{name}' is read in the graph of '{reader}'"
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            return f"'{name}' is of type {type(tensor).__name__}, which is not folded"
    for what in ("dtype", "device"):
        found = list(dict.fromkeys(str(getattr(tensor, what)).removeprefix("torch.") for tensor in tensors.values()))
        if len(found) > 1:
            return f"the {pair.layer_kind} and the batch norm have tensors of {what} {found[0]} and {found[1]}"
    return None


def _obstacle_in_shapes(pair: Pair, *, replaying: bool) -> str | None:
    layer = pair.layer
    channels = layer.out_features if isinstance(layer, nn.Linear) else cast("nn.Conv2d", layer).out_channels
    if channels != pair.norm.num_features:
        return f"the {pair.layer_kind} has {channels} channels and the batch norm {pair.norm.num_features}"
    wanted = dimensions_wanted(layer)
    for call in pair.calls if wanted is not None else ():
        known = call.layer.meta.get("val")
        if not isinstance(known, TensorMeta):
            if replaying:
                continue
            return "the number of dimensions is not known; give example_inputs"
        if len(known.shape) != wanted:
            return f"the {pair.layer_kind} gives {len(known.shape)} dimensions, so the batch norm acts on another one"
    return None


def dimensions_wanted(layer: nn.Module) -> int | None:
    """Return how many dimensions a layer's output must have for the norm behind it to norm its channels; None: any."""
    kind = _kind(layer)
    return None if kind is None else _DIMENSIONS.get(kind)
