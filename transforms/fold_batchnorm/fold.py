"""The pass: batch norms folded into the convolutions and linears before them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch.nn.functional as F
from torch import fx, nn

from ...compat import own_buffers, own_parameters, padding_around
from ...errors import MatchFailure
from ...layers.masked import gone_attribute, gone_of
from ...layers.members import seal, written_out
from ...operators import info_of, operator_info, operator_of_module
from ...passes.contract import Pass
from ...passes.rewriting import Edit
from ...passes.sites import Goal, Numerics, Phase, Refusal, Site
from ...tracing.program import Program
from ...tracing.values import qualified, user_class
from .arithmetic import Fold
from .checking import fault
from .dimensions import expect_dimensions
from .find import TRANSPOSED, Call, Pair, dimensions_wanted, has_own_forward, obstacles, pairs_in
from .own_forward import tail_of
from .unfolded import unfolded

__all__ = ["FoldBatchnorm"]

_KEEPS_DIMENSIONS = (
    nn.Linear, nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d, nn.LayerNorm, nn.Dropout, nn.Dropout1d, nn.AlphaDropout,
    nn.Identity,
)  # fmt: skip


@dataclass(frozen=True)
class FoldBatchnorm(Pass):
    """Fold evaluation-mode batch norms into the convolutions or linears that feed them.

    Before: self.bn(self.conv(x))        After: conv2d(x, *fold(conv.weight, ..., bn.running_var))
    What a batch norm of a subclass computes behind the norm, dropout and an activation, is computed behind the layer.
    A layer that `prune` has masked is folded with its zeros, and follows its masks.
    Refuses: a convolution or batch norm that is called, tied or read elsewhere too, or has hooks or parametrizations;
        a batch norm in training mode or without running statistics; a linear whose output has more than two dimensions;
        calls of `F.batch_norm` in the forward of a module that is no batch norm, and norms before a layer.
    """

    numerics: ClassVar[Numerics] = Numerics.REASSOCIATED
    goal: ClassVar[Goal] = Goal.SPEED
    phase: ClassVar[Phase] = Phase.EVAL
    judges_itself: ClassVar[bool] = True  # one of many norms gains less than can be measured: the whole model tells
    # In a fused ensemble the members' convolutions are one function call, with nothing left to fold into.
    before: ClassVar[tuple[str, ...]] = ("fuse_ensembles",)

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        pairs = pairs_in(program)
        reasons = obstacles(pairs, program, tails=True)
        reasons |= _faults([pair for pair in pairs if pair not in reasons], program)
        yield from unfolded(program, {pair.norm for pair in pairs})
        sound: dict[str, list[Pair]] = {}
        for pair in pairs:
            if pair in reasons:
                yield Refusal(reasons[pair], qualified(pair.owner, pair.norm_name))
            else:
                sound.setdefault(pair.owner, []).append(pair)
        # One site for all of a module: by itself, one of many norms gains less than can be measured.
        for owner, group in sound.items():
            nodes = {
                f"{what}.{number}.{call.specialization}": node.name
                for number, pair in enumerate(group)
                for call in pair.calls
                for what, node in (("layer", call.layer), ("norm", call.norm))
            }
            first = group[0]
            detail = f"{first.norm_name} into {first.layer_name}" if len(group) == 1 else f"{len(group)} batch norms"
            yield Site(
                program, owner, nodes, min(call.specialization for pair in group for call in pair.calls), detail=detail
            )

    def rewrite(self, site: Site, edit: Edit) -> None:
        norms: dict[int, set[str]] = {}
        for label in site.nodes:
            what, number, specialization = label.split(".")
            if what == "layer":
                with edit.in_specialization(int(specialization)):
                    call = Call(
                        int(specialization), edit.graph_node(label), edit.graph_node(f"norm.{number}.{specialization}")
                    )
                    norms.setdefault(int(specialization), set()).add(str(call.norm.target))
                    _seal(call, edit)
                    _fold(call, edit)
        for specialization, names in norms.items():
            with edit.in_specialization(specialization):
                edit.hold_in_evaluation(sorted(names))


def _faults(pairs: Sequence[Pair], program: Program) -> dict[Pair, str]:
    """Return how far off folds are that are wrong in float64."""
    if program.replaying:
        return {}
    found = ((pair, _fault(pair)) for pair in pairs)
    return {pair: reason for pair, reason in found if reason}


def _fault(pair: Pair) -> str:
    fold = _fold_of(pair.layer, pair.norm)
    norm = {**own_parameters(pair.norm), **own_buffers(pair.norm)}
    layer = {**own_parameters(pair.layer), **own_buffers(pair.layer)}
    tensors = [layer[name] for name in fold.layer_tensors] + [norm[name] for name in fold.norm_tensors]
    gone = [gone_of(pair.layer)[name] for name in fold.masked]
    return fault(pair.layer, pair.norm, fold, [each for each in (*tensors, *gone) if each is not None])


def _fold(call: Call, edit: Edit) -> None:
    program, owner = edit.program, edit.site.owner
    layer, norm = program.callee(owner, call.layer), program.callee(owner, call.norm)
    wanted = dimensions_wanted(layer)
    if wanted is not None:
        _expect_dimensions(_source_of_dimensions(call.layer.all_input_nodes[0], program, owner), wanted, edit)
    fold = _fold_of(layer, cast("nn.BatchNorm1d", norm))
    tensors = [f"{call.layer.target}.{name}" for name in fold.layer_tensors]
    tensors += [f"{call.norm.target}.{name}" for name in fold.norm_tensors]
    tensors += [f"{call.layer.target}.{gone_attribute(name)}" for name in fold.masked]
    weight, bias = edit.derive(fold, tensors)
    folded = _call(layer, call.layer, weight, bias, edit)
    folded.meta["source"] = call.layer.meta.get("source")
    edit.replace(call.layer, folded)
    edit.replace(call.norm, _behind(cast("nn.BatchNorm1d", norm), call, folded, edit))


def _behind(norm: nn.BatchNorm1d, call: Call, folded: fx.Node, edit: Edit) -> fx.Node:
    """Write what a norm's own forward computes behind the norm, and return the last of it."""
    tail = tail_of(norm) if has_own_forward(norm) else None
    if tail is None:
        return folded
    if isinstance(tail, str):
        raise MatchFailure(tail)
    # Unlike that of torch, a forward of the user's may take an input without a batch, and norm another dimension.
    wanted = tail.dimensions or _batched_dimensions(edit.program.callee(edit.site.owner, call.layer))
    _expect_dimensions(_source_of_dimensions(folded, edit.program, edit.site.owner), wanted, edit)
    written: dict[fx.Node, Any] = {tail.start: folded, **dict.fromkeys(tail.flags, False)}
    for node in tail.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), written.__getitem__)
        target: Any = {"call_module": f"{call.norm.target}.", "call_method": "."}.get(node.op)
        target = node.target if target is None else f"{target}{node.target}"
        written[node] = edit.call(target, *args, before=call.norm, **kwargs)
        written[node].meta.update({key: node.meta[key] for key in ("val", "source") if key in node.meta})
    return written[tail.nodes[-1] if tail.nodes else tail.start]


def _batched_dimensions(layer: nn.Module) -> int:
    """Return how many dimensions a layer gives where the second is its channels."""
    return 2 if isinstance(layer, nn.Linear) else len(cast("nn.Conv2d", layer).kernel_size) + 2


def _fold_of(layer: nn.Module, norm: nn.BatchNorm1d) -> Fold:
    return Fold(
        eps=float(norm.eps),
        biased=own_parameters(layer).get("bias") is not None,
        scaled=own_parameters(norm).get("weight") is not None,
        shifted=own_parameters(norm).get("bias") is not None,
        transposed=isinstance(layer, TRANSPOSED),
        groups=layer.groups if isinstance(layer, TRANSPOSED) else 1,
        masked=tuple(name for name in gone_of(layer) if own_parameters(layer).get(name) is not None),
    )


def _call(layer: nn.Module, node: fx.Node, weight: fx.Node, bias: fx.Node, edit: Edit) -> fx.Node:
    """Write what a layer does with its input, with another weight and bias."""
    x = node.all_input_nodes[0]
    if isinstance(layer, nn.Linear):
        return edit.call(F.linear, x, weight, bias, before=node)
    conv = cast("nn.Conv2d", layer)
    options: dict[str, Any] = {"stride": conv.stride, "dilation": conv.dilation, "groups": conv.groups}
    options["padding"] = conv.padding
    kind = f"{'conv_transpose' if isinstance(layer, TRANSPOSED) else 'conv'}{len(conv.kernel_size)}d"
    if isinstance(layer, TRANSPOSED):
        options["output_padding"] = layer.output_padding
    if conv.padding_mode != "zeros":
        x = edit.call(F.pad, x, padding_around(conv), mode=conv.padding_mode, before=node)
        options["padding"] = 0
    return edit.call(getattr(F, kind), x, weight, bias, before=node, **options)


# -- what the rewrite stands on ------------------------------------------------------------------------------------


def _seal(call: Call, edit: Edit) -> None:
    """Let the settings that the graph now holds, and the way to the two modules, be what they are."""
    for path, names in written_out(edit.owner, [str(call.layer.target), str(call.norm.target)]).items():
        module = edit.owner.get_submodule(path)
        edit.on_undo(seal(module, names), module)


def _expect_dimensions(node: fx.Node, count: int, edit: Edit) -> None:
    """Let the graph check a tensor's number of dimensions, once."""
    if not any(user.target is expect_dimensions and user.args[1] == count for user in node.users):
        edit.call(expect_dimensions, node, count)


def _source_of_dimensions(node: fx.Node, program: Program, owner: str) -> fx.Node:
    """Return the first of the nodes up to `node` that is bound to have as many dimensions.

    Members of an ensemble then check the input that they share, and nothing in between.
    """

    def keeps_dimensions(node: fx.Node) -> bool:
        if node.op != "call_module":
            return info_of(node).elementwise
        kind = user_class(type(program.callee(owner, node)))
        return kind in _KEEPS_DIMENSIONS or operator_info(operator_of_module(kind)).elementwise

    while len(node.all_input_nodes) == 1 and keeps_dimensions(node):
        node = node.all_input_nodes[0]
    return node
