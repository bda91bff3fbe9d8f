"""Why a batch norm must stay where it is."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ...layers.distributed import SYNCHRONIZED
from ...layers.masked import has_only_masks
from ...passes.rewriting import LAYERS, reason_against_inlining
from ...runtime.graphs import Region
from ...runtime.values import TensorMeta, qualified, user_class
from ...tracing.program import CallSites, Program, TensorOwners, TensorReads
from .find import Pair, evaluated
from .own_forward import tail_of
from .parts import NORMS, tensor_at

__all__ = ["has_own_forward", "reasons_against"]

_KNOWN = frozenset((*SYNCHRONIZED.values(), *NORMS, *LAYERS))
_COMPUTING = ("forward", "_conv_forward", "_output_padding", "_check_input_dim", "__call__", "__getattr__")


def reasons_against(
    pairs: Sequence[Pair], program: Program, also: tuple[type[nn.Module], ...] = (), *, tails: bool = False
) -> dict[Pair, str]:
    """Return why pairs must stay; `also`: classes whose own forward is known, `tails`: those of norms are read."""
    outside = _called_from_outside(pairs, program)
    reasons = {pair: _reason_against(pair, program, also, tails) or outside.get(pair) for pair in pairs}
    return {pair: reason for pair, reason in reasons.items() if reason is not None}


def has_own_forward(module: nn.Module) -> bool:
    """Say whether a layer or norm is of a subclass that computes something else than the class of torch.nn."""
    return _kind(module) is None


def _reason_against(pair: Pair, program: Program, also: tuple[type[nn.Module], ...], tails: bool) -> str | None:
    """Return why a pair must stay as it is, or None."""
    return (
        _reason_in_mode(pair, program)
        or _reason_in_order(pair)
        or _reason_in_modules(pair, program, also, tails=tails and not pair.before)
        or _reason_in_calls(pair, program)
        or _reason_in_tensors(pair, program)
        or _reason_in_shapes(pair, replaying=program.replaying)
    )


def _reason_in_mode(pair: Pair, program: Program) -> str | None:
    if program.training:
        return "the model is in training, where weights change at every step; call model.eval() first"
    if pair.norm.training:
        return "the batch norm is in training mode"
    if not pair.norm.has_statistics:
        return "the batch norm has no running statistics"
    return None


def _reason_in_order(pair: Pair) -> str | None:
    if not pair.before:
        return None
    if pair.layer.is_transposed:
        return f"it stands before '{pair.layer.name}', a transposed convolution, which adds up fewer terms at the edges"
    if pair.layer.pads:
        return f"it stands before '{pair.layer.name}', which pads with zeros that are not normed"
    return None


def _reason_in_modules(pair: Pair, program: Program, also: tuple[type[nn.Module], ...], *, tails: bool) -> str | None:
    if isinstance(program.module(pair.owner), Region):
        return "they are called in a region that does not own them"
    for what, module in pair.modules:
        reason = reason_against_inlining(module)
        if reason is not None:
            return f"the {what} cannot be folded: {reason}"
        if tails and module is pair.norm.module and has_own_forward(module):
            tail = tail_of(module)
            if isinstance(tail, str):
                return tail
            continue
        if _kind(module) is None and not isinstance(module, also):
            return f"the {what} is a {type(module).__name__}, which has its original forward"
        masked = module is pair.layer.module and has_only_masks(module)
        if type(module) is not user_class(type(module)) and not masked:
            return f"the {what} is part of something fused"
    return None


def _kind(module: nn.Module) -> type[nn.Module] | None:
    """Return the class of torch.nn whose forward a module runs; None where a subclass has one of its own."""
    cls = user_class(type(module))
    kind = next((base for base in cls.__mro__ if base in _KNOWN), None)
    keeps = all(getattr(cls, name, None) is getattr(kind, name, None) for name in _COMPUTING)
    return kind if keeps else None


def _reason_in_calls(pair: Pair, program: Program) -> str | None:
    layers = [call.layer for call in pair.calls]
    if pair.layer.module is not None and any(len(node.args) + len(node.kwargs) > 1 for node in layers):
        return f"the {pair.layer.kind} is called with more than one argument"
    if not pair.before and any(len(node.users) > 1 for node in layers):
        return f"the {pair.layer.kind}'s output is read elsewhere too"
    calls, graphs = program.analyses[CallSites], {number for number, _ in evaluated(program, pair.owner)}
    nodes = {node for call in pair.calls for node in (call.layer, call.norm)}
    for what, module in pair.modules:
        if calls.count(module) > 1:
            return f"the {what} is called elsewhere too"
        here = (call for call in calls.of(module) if call.owner == pair.owner and call.specialization in graphs)
        if len(graphs) > 1 and not all(call.node in nodes for call in here):
            return f"the {what} is called in another way by another graph of the same module"
    return None


def _called_from_outside(pairs: Sequence[Pair], program: Program) -> dict[Pair, str]:
    """Return why pairs inside modules without a graph must stay: those may call the layer or the norm, too."""
    inside = {pair: around for pair in pairs if (around := _opaque_around(pair, program)) is not None}
    if not inside:
        return {}
    if program.replaying:
        return {}  # the recording that was asked is not here
    if not program.inputs:
        return {pair: f"'{around}' could not be captured and may call it, too" for pair, around in inside.items()}
    modules = {each for pair in inside for each in (program.module(pair.owner), *(own for _, own in pair.modules))}
    calls = {module: len(of_module) for module, of_module in program.recording(modules).calls.items()}
    reasons: dict[Pair, str] = {}
    for pair, around in inside.items():
        of_owner = calls.get(program.module(pair.owner), 0)
        if any(calls.get(module, 0) > of_owner for _, module in pair.modules):
            reasons[pair] = f"'{around}' could not be captured and calls it, too"
    return reasons


def _opaque_around(pair: Pair, program: Program) -> str | None:
    """Return a module without a graph that one of the two is inside of."""
    names = [qualified(pair.owner, part.name) for part in (pair.layer, pair.norm)]
    around = (name for name in program.opaque if not name or any(own.startswith(f"{name}.") for own in names))
    return next((name or "(root)" for name in around), None)


def _reason_in_tensors(pair: Pair, program: Program) -> str | None:
    owners, found = program.analyses[TensorOwners], dict[str, Tensor]()
    for name, path in pair.tensors.items():
        tensor = tensor_at(program.module(pair.owner), path)
        if tensor is None:
            return f"'{name}' is no tensor"
        names = owners.names(name)
        if len(names) > 1:
            return f"'{names[0]}' is tied to '{names[1]}'"
        reader = _reader(pair, program, tensor)
        if reader is not None:
            return f"'{name}' is read in the graph of '{reader}'"
        holder = name.rpartition(".")[0]
        module = None if holder == pair.owner else program.names.modules.get(holder)
        is_own = any(module is each for _, each in pair.modules)
        if module is not None and not is_own and program.analyses[CallSites].of(module):
            return f"'{holder}', whose tensors it reads, is called as well"
        if type(tensor) not in (Tensor, nn.Parameter):
            return f"'{name}' is of type {type(tensor).__name__}, which is not folded"
        found[name] = tensor
    for what in ("dtype", "device"):
        kinds = list(dict.fromkeys(str(getattr(tensor, what)).removeprefix("torch.") for tensor in found.values()))
        if len(kinds) > 1:
            return f"the {pair.layer.kind} and the batch norm have tensors of {what} {kinds[0]} and {kinds[1]}"
    return None


def _reader(pair: Pair, program: Program, tensor: Tensor) -> str | None:
    """Return a module whose graph reads a tensor for something else than the two."""
    reads, own = program.analyses[TensorReads], {node for call in pair.calls for node in call[1:]}
    for reader in reads.readers_of(tensor):
        if pair.norm.module is not None and reader == pair.place:
            continue  # the norm's own forward is not called any more
        if any(user not in own for node in reads.nodes_of(tensor, reader) for user in node.users):
            return reader
    return None


def _reason_in_shapes(pair: Pair, *, replaying: bool) -> str | None:
    channels = pair.layer.channels[0 if pair.before else 1]
    if channels != pair.norm.width:
        return f"the {pair.layer.kind} has {channels} channels and the batch norm {pair.norm.width}"
    # Norms of one rank refuse other numbers of dimensions themselves.
    wanted = None if len(pair.norm.ranks) == 1 else pair.layer.rank + 2
    for call in pair.calls if wanted is not None else ():
        known = (call.norm if pair.before else call.layer).meta.get("val")
        if not isinstance(known, TensorMeta):
            if replaying:
                continue
            return "the number of dimensions is not known; give example_inputs"
        if len(known.shape) != wanted:
            gives = f"the {pair.layer.kind} {'reads' if pair.before else 'gives'} {len(known.shape)} dimensions"
            return f"{gives}, so the batch norm acts on another one"
    return None
