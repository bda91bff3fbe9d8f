"""The pass: batch norms folded into the convolutions and linears before them, or else behind them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import fx, nn

from ...compat import padding_around
from ...errors import MatchFailure
from ...layers.masked import gone_attribute, gone_of
from ...passes.contract import Pass
from ...passes.rewriting import Edit, hold_written_out
from ...passes.sites import Cause, Goal, Numerics, Phase, Refusal, Site
from ...tracing.program import Program
from .arithmetic import Fold, Folds
from .checking import fault
from .dimensions import write_check
from .find import Call, Pair, pairs_in, source_of
from .obstacles import has_own_forward, obstacles
from .own_forward import tail_of
from .parts import Layer, Norm, layer_at, norm_at, tensor_at
from .unfolded import unfolded

__all__ = ["FoldBatchnorm"]


@dataclass(frozen=True)
class FoldBatchnorm(Pass):
    """Fold evaluation-mode batch norms into the convolutions or linears before them, or else behind them.

    Before: self.bn(self.conv(x))        After: conv2d(x, *fold(conv.weight, ..., bn.running_var))
    Calls of `F.batch_norm` and of the layers' functions on tensors of the model are the same.
    What a batch norm of a subclass computes behind the norm, dropout and an activation, is computed behind the layer.
    A layer that `prune` has masked is folded with its zeros, and follows its masks.
    Refuses: a convolution or batch norm that is called, tied or read elsewhere too, or has hooks or parametrizations;
        a batch norm in training mode or without running statistics; a linear on more than two dimensions;
        norms before a convolution that pads with zeros or is transposed.
    """

    numerics: ClassVar[Numerics] = Numerics.REASSOCIATED
    goal: ClassVar[Goal] = Goal.SPEED
    phase: ClassVar[Phase] = Phase.EVAL
    profiles_itself: ClassVar[bool] = True  # one of many norms gains less than can be measured: the whole model tells
    # In a fused ensemble the members' convolutions are one function call, with nothing left to fold into.

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        pairs = pairs_in(program)
        reasons = obstacles(pairs, program, tails=True)
        reasons |= _faults([pair for pair in pairs if pair not in reasons], program)
        yield from unfolded(program)
        sound = _taken(pairs, reasons)
        for pair in _named(pairs, sound):
            yield Refusal(reasons[pair], pair.place, Cause.IN_TRAINING if program.training else Cause.NOT_APPLICABLE)
        # One site for all of a module: by itself, one of many norms gains less than can be measured.
        owners: dict[str, list[Pair]] = {}
        for pair in sound:
            owners.setdefault(pair.owner, []).append(pair)
        yield from (_site(program, owner, group) for owner, group in owners.items())

    def rewrite(self, site: Site, edit: Edit) -> None:
        norms: dict[int, set[str]] = {}
        for layer, calls in _by_layer(site, edit).items():
            number = calls[0].specialization
            with edit.in_specialization(number):
                found = [_norm(call, edit) for call in calls]
                norms.setdefault(number, set()).update("" if norm.module is None else norm.name for norm in found)
                for call in calls:
                    _seal(call, edit)
                _fold(layer, calls, edit)
        for number, names in norms.items():
            with edit.in_specialization(number):
                edit.hold_in_evaluation(sorted(names))


def _taken(pairs: Sequence[Pair], reasons: Mapping[Pair, str]) -> list[Pair]:
    """Return the pairs to fold: each norm goes into the layer before it or, where that will not do, the one behind."""
    sound = [pair for pair in pairs if pair not in reasons]
    gone = {call.norm for pair in sound if not pair.before for call in pair.calls}
    return [pair for pair in sound if not (pair.before and any(call.norm in gone for call in pair.calls))]


def _named(pairs: Sequence[Pair], sound: Sequence[Pair]) -> Iterator[Pair]:
    """Yield one refused pair for each norm that is in no pair to fold."""
    seen = {call.norm for pair in sound for call in pair.calls}
    for pair in pairs:
        nodes = {call.norm for call in pair.calls}
        if not nodes & seen:
            yield pair
        seen |= nodes


def _site(program: Program, owner: str, group: Sequence[Pair]) -> Site:
    nodes = {
        f"{what}.{number}.{call.specialization}": node.name
        for number, pair in enumerate(group)
        for call in pair.calls
        for what, node in (("layer", call.layer), ("norm", call.norm))
    }
    first = group[0]
    detail = f"{first.norm.name} into {first.layer.name}" if len(group) == 1 else f"{len(group)} batch norms"
    return Site(program, owner, nodes, min(call.specialization for pair in group for call in pair.calls), detail=detail)


def _faults(pairs: Sequence[Pair], program: Program) -> dict[Pair, str]:
    """Return how far off folds are that are wrong in float64."""
    if program.replaying:
        return {}
    found = ((pair, _fault(pair, program.module(pair.owner))) for pair in pairs)
    return {pair: reason for pair, reason in found if reason}


def _fault(pair: Pair, owner: nn.Module) -> str:
    fold = _fold_of(pair.layer, pair.norm, before=pair.before)
    gone = [] if pair.layer.module is None else [gone_of(pair.layer.module)[name] for name in fold.masked]
    tensors = [tensor_at(owner, path) for path in (*_of_layer(pair.layer, fold), *_of_norm(pair.norm, fold))]
    return fault(pair.layer, pair.norm, fold, [*(each for each in tensors if each is not None), *gone])


def _by_layer(site: Site, edit: Edit) -> dict[fx.Node, list[Call]]:
    """Return the calls of norms by the layer that takes them: one, or one on each side, that before the layer first."""
    found: dict[fx.Node, list[Call]] = {}
    for label in site.nodes:
        what, number, specialization = label.split(".")
        if what == "layer":
            with edit.in_specialization(int(specialization)):
                norm = edit.graph_node(f"norm.{number}.{specialization}")
                call = Call(int(specialization), edit.graph_node(label), norm)
            found.setdefault(call.layer, []).append(call)
    return {layer: sorted(calls, key=_is_behind) for layer, calls in found.items()}


def _is_behind(call: Call) -> bool:
    return source_of(call.layer) is not call.norm


def _norm(call: Call, edit: Edit) -> Norm:
    norm = norm_at(edit.program, edit.site.owner, call.norm)
    if norm is None:
        raise MatchFailure(f"'{call.norm.name}' is no batch norm any more")
    return norm


def _fold(node: fx.Node, calls: Sequence[Call], edit: Edit) -> None:
    """Write a layer with the norms on its sides folded in, in the place of the first of them."""
    layer = layer_at(edit.program, edit.site.owner, node)
    behind = [_is_behind(call) for call in calls]
    place = node if behind[0] else calls[0].norm
    x = source_of(place)
    if layer is None or x is None:
        raise MatchFailure(f"'{node.name}' is no call of a layer any more")
    norms = [_norm(call, edit) for call in calls]
    # With fewer dimensions (an image without a batch) or more, the norm refuses, or norms another dimension.
    write_check(x, layer.rank + 2, edit)
    weight, bias = _derived(layer, norms, behind, edit)
    # What the norm reads may be written to between the norm and the layer behind it.
    folded = _call(layer, x, weight, bias, place, edit)
    folded.meta.update({key: node.meta.get(key) for key in ("source", "val")})
    edit.replace(node, folded)
    if not behind[0]:
        edit.replace(calls[0].norm, x)
    if behind[-1]:
        edit.replace(calls[-1].norm, _behind(norms[-1].module, calls[-1], folded, layer.rank, edit))


def _derived(layer: Layer, norms: Sequence[Norm], behind: Sequence[bool], edit: Edit) -> Sequence[fx.Node]:
    """Add the weight and the bias that are made of a layer's and of those of one norm or two."""
    fold = _fold_of(layer, norms[0], before=not behind[0])
    tensors = [*_of_layer(layer, fold), *_of_norm(norms[0], fold)]
    tensors += [f"{layer.name}.{gone_attribute(name)}" for name in fold.masked]
    if len(norms) == 1:
        return edit.derive(fold, tensors)
    second = replace(_fold_of(layer, norms[1], before=False), biased=True, masked=())
    return edit.derive(Folds(fold, second), [*tensors, *_of_norm(norms[1], second)])


def _of_layer(layer: Layer, fold: Fold) -> list[str]:
    return [layer.tensors[name] for name in fold.layer_tensors]


def _of_norm(norm: Norm, fold: Fold) -> list[str]:
    return [norm.tensors[name] for name in fold.norm_tensors]


def _behind(norm: nn.BatchNorm1d | None, call: Call, folded: fx.Node, rank: int, edit: Edit) -> fx.Node:
    """Write what a norm's own forward computes behind the norm, and return the last of it."""
    tail = tail_of(norm) if norm is not None and has_own_forward(norm) else None
    if tail is None:
        return folded
    if isinstance(tail, str):
        raise MatchFailure(tail)
    # Unlike that of torch, a forward of the user's may take an input without a batch, and norm another dimension.
    write_check(folded, tail.dimensions or rank + 2, edit)
    written: dict[fx.Node, Any] = {tail.start: folded, **dict.fromkeys(tail.flags, False)}
    for node in tail.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), written.__getitem__)
        target: Any = {"call_module": f"{call.norm.target}.", "call_method": "."}.get(node.op)
        target = node.target if target is None else f"{target}{node.target}"
        written[node] = edit.call(target, *args, before=call.norm, **kwargs)
        written[node].meta.update({key: node.meta[key] for key in ("val", "source") if key in node.meta})
    return written[tail.nodes[-1] if tail.nodes else tail.start]


def _fold_of(layer: Layer, norm: Norm, *, before: bool) -> Fold:
    masks = [] if layer.module is None else list(gone_of(layer.module))
    return Fold(
        eps=norm.eps,
        biased="bias" in layer.tensors,
        scaled="weight" in norm.tensors,
        shifted="bias" in norm.tensors,
        counted="num_batches_tracked" in norm.tensors,
        transposed=layer.is_transposed,
        groups=layer.groups,
        masked=tuple(name for name in masks if name in layer.tensors),
        before=before,
    )


def _call(layer: Layer, x: fx.Node, weight: fx.Node, bias: fx.Node, before: fx.Node, edit: Edit) -> fx.Node:
    """Write what a layer does with an input, with another weight and bias."""
    options = {name: value for name, value in layer.settings.items() if name != "padding_mode"}
    if layer.module is not None and layer.mode != "zeros":
        x = edit.call(F.pad, x, padding_around(layer.module), mode=layer.mode, before=before)
        options["padding"] = 0
    return edit.call(getattr(F, layer.function), x, weight, bias, before=before, **options)


# -- what the rewrite stands on ------------------------------------------------------------------------------------


def _seal(call: Call, edit: Edit) -> None:
    """Let the settings that the graph now holds, and the way to the two modules, be what they are."""
    modules = [str(node.target) for node in (call.layer, call.norm) if node.op == "call_module"]
    hold_written_out(edit, modules)
