"""Write layers with batch norms folded in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import fx, nn

from ...compat import padding_around
from ...errors import MatchFailure
from ...layers.folded import Fold, Folds, expect_dimensions
from ...layers.masked import gone_attribute
from ...operators import info_of, operator_info, operator_of_module
from ...passes.rewriting import Edit, LayerCall, hold_written_out
from ...passes.sites import Site
from ...runtime.values import user_class
from .find import FoldedCall, source_of
from .own_forward import tail_of
from .parts import Norm, fold_of, layer_at, norm_at
from .reasons import has_own_forward

__all__ = ["paths_in", "write", "write_check"]

_KEEPS_DIMENSIONS = (nn.Identity, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
"""Beside what the table of operators knows."""


def write(site: Site, edit: Edit) -> None:
    """Write the layers of a site with the norms beside them folded in."""
    norms: dict[int, set[str]] = {}
    for layer, calls in _by_layer(site, edit).items():
        number = calls[0].specialization
        with edit.in_specialization(number):
            found = [_norm(call, edit) for call in calls]
            norms.setdefault(number, set()).update("" if norm.module is None else norm.name for norm in found)
            for call in calls:  # let the way to the two modules, and their settings, be what they are
                nodes = (call.layer, call.norm)
                hold_written_out(edit, [str(node.target) for node in nodes if node.op == "call_module"])
            _fold(layer, calls, edit)
    for number, names in norms.items():
        with edit.in_specialization(number):
            edit.hold_in_evaluation(sorted(names))


def _by_layer(site: Site, edit: Edit) -> dict[fx.Node, list[FoldedCall]]:
    """Return the calls of norms by the layer that takes them: one, or one on each side, that before the layer first."""
    found: dict[fx.Node, list[FoldedCall]] = {}
    for label in site.nodes:
        what, number, specialization = label.split(".")
        if what == "layer":
            with edit.in_specialization(int(specialization)):
                norm = edit.graph_node(f"norm.{number}.{specialization}")
                call = FoldedCall(int(specialization), edit.graph_node(label), norm)
            found.setdefault(call.layer, []).append(call)
    return {layer: sorted(calls, key=_is_behind) for layer, calls in found.items()}


def _is_behind(call: FoldedCall) -> bool:
    return source_of(call.layer) is not call.norm


def _norm(call: FoldedCall, edit: Edit) -> Norm:
    norm = norm_at(edit.program, edit.site.owner, call.norm)
    if norm is None:
        raise MatchFailure(f"'{call.norm.name}' is no batch norm any more")
    return norm


def _fold(node: fx.Node, calls: Sequence[FoldedCall], edit: Edit) -> None:
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
        edit.replace(calls[-1].norm, _rest_of_norm(norms[-1].module, calls[-1], folded, layer.rank, edit))


def _derived(layer: LayerCall, norms: Sequence[Norm], behind: Sequence[bool], edit: Edit) -> Sequence[fx.Node]:
    """Add the weight and the bias that are made of a layer's and of those of one norm or two."""
    fold = fold_of(layer, norms[0], before=not behind[0])
    tensors = paths_in(layer, norms[0], fold)
    tensors += [f"{layer.name}.{gone_attribute(name)}" for name in fold.masked]
    if len(norms) == 1:
        return edit.derive(fold, tensors)
    second = replace(fold_of(layer, norms[1], before=False), biased=True, masked=())
    return edit.derive(Folds(fold, second), [*tensors, *_of_norm(norms[1], second)])


def paths_in(layer: LayerCall, norm: Norm, fold: Fold) -> list[str]:
    """Return the paths of a layer's tensors and a norm's, in the order in which the fold takes them."""
    return [*(layer.paths[name] for name in fold.layer_tensors), *_of_norm(norm, fold)]


def _of_norm(norm: Norm, fold: Fold) -> list[str]:
    return [norm.tensors[name] for name in fold.norm_tensors]


def _rest_of_norm(norm: nn.BatchNorm1d | None, call: FoldedCall, folded: fx.Node, rank: int, edit: Edit) -> fx.Node:
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


def _call(layer: LayerCall, x: fx.Node, weight: fx.Node, bias: fx.Node, before: fx.Node, edit: Edit) -> fx.Node:
    """Write what a layer does with an input, with another weight and bias."""
    options = {name: value for name, value in layer.settings.items() if name != "padding_mode"}
    if layer.module is not None and layer.mode != "zeros":
        x = edit.call(F.pad, x, padding_around(layer.module), mode=layer.mode, before=before)
        options["padding"] = 0
    return edit.call(getattr(F, layer.operator), x, weight, bias, before=before, **options)


def write_check(node: fx.Node, count: int, edit: Edit, *, before: fx.Node | None = None) -> None:
    """Let the graph check a tensor's number of dimensions, once, on what it comes from."""
    while (source := _with_as_many(node, edit)) is not None:
        node = source
    checks = (user for asked in node.users for user in asked.users if user.target is expect_dimensions)
    if not any(check.args[1] == count for check in checks):
        # Asked for by an operator of torch, which other passes know not to read the data.
        edit.call(expect_dimensions, edit.call(".dim", node, before=before), count, before=before)


def _with_as_many(node: fx.Node, edit: Edit) -> fx.Node | None:
    """Return what a tensor is computed of, if that is bound to have as many dimensions."""
    if node.op == "call_module":
        kind = user_class(type(edit.program.callee(edit.site.owner, node)))
        info, known = operator_info(operator_of_module(kind)), kind in _KEEPS_DIMENSIONS
    else:
        info, known = info_of(node), False
    alone = len(node.all_input_nodes) == 1 and (info.elementwise or known)
    return source_of(node) if alone or info.keeps_rank else None
