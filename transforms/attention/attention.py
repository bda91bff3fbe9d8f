"""The pass: attention that is written out, by `scaled_dot_product_attention`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import fx

from ...cuda_ops import Kernel
from ...errors import MatchFailure
from ...operators import hidden_scores, hides_later, scaled_dot_product_attention
from ...passes.contract import Pass
from ...passes.kinds import Judgement
from ...passes.rewriting import Edit, Held
from ...passes.sites import Goal, Numerics, OwnForward, Phase, Refusal, Site
from ...runtime.graphs import usual
from ...runtime.guards import SELF, Attribute, Guard, Truth, attribute_at
from ...runtime.values import TensorMeta
from ...tracing.program import Program, is_called
from ..swap_kernels import Occurrence
from .decompositions import WRITTEN_OUT, number_of
from .judging import Judge
from .returned import readers_of, weights_left_out

__all__ = ["Attention"]

_HIDES = -1e9
"""A score of at most this is as good as minus infinity in float32."""


@dataclass(frozen=True)
class Attention(Pass):
    """Compute attention that is written out by torch's operator, which never holds all weights.

    Before: y = softmax(q @ k.transpose(-2, -1) * scale + mask, -1) @ v
    After: y = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    Refuses: weights that something else reads, dropout of the weights in training, masks that only lower scores.
    """

    numerics: ClassVar[Numerics] = Numerics.REASSOCIATED
    goal: ClassVar[Goal] = Goal.SPEED
    phase: ClassVar[Phase] = Phase.BOTH
    own_forward: ClassVar[OwnForward | None] = OwnForward.RIGHT

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        judge = Judge(program)
        for owner, capture in program.captures.items():
            if not is_called(program, owner):
                continue
            for number, specialization in usual(capture.specializations):
                for node in specialization.graph.nodes:
                    found = _occurrence(program, owner, node)
                    if isinstance(found, str) and specialization.runs_in_mode(program.module(owner)):
                        yield Refusal(found, node)
                    elif isinstance(found, Occurrence):
                        yield _judged(found, number, judge.of(found))

    def judges(self, site: Site) -> bool:
        return site.found is not None

    def judgement(self, site: Site) -> Mapping[str, Any]:
        return site.found or {}

    def rewrite(self, site: Site, edit: Edit) -> None:
        part = site.part("result")
        with edit.at(part):
            found = _occurrence(edit.program, part.owner, part["result"])
            if not isinstance(found, Occurrence):
                raise MatchFailure(found or "attention is not there any more")
            if found.unread is not None:  # who hooks the module may ask for the weights
                hooks = Attribute(SELF, "_forward_hooks")
                edit.hold_where([Guard(hooks, Truth(False), "attention leaves its weights out")])
                _leave_out(found.unread, edit)
            if found.found.values.get("mode") and _drops(found):
                drops = attribute_at(found.found.values["mode"])
                edit.hold_where([Guard(drops, Truth(False), "attention leaves dropout out")])
                edit.trainable = True  # its own forward runs then
            found.write(edit)


def _leave_out(weights: fx.Node, edit: Edit) -> None:
    output = edit.graph.output_node()
    with edit.graph.inserting_before(output):
        instead = edit.graph.call_function(weights_left_out)
    output.args = fx.map_arg(output.args, lambda node: instead if node is weights else node)
    edit.sign(instead)


def _judged(found: Occurrence, number: int, known: tuple[str, Judgement] | None) -> Site | Refusal:
    if known is None:
        return _site(found, number)
    code, judgement = known
    site = replace(_site(found, number), kind=("attention", code), found=judgement.figures)
    return judgement.refusal(found.result, surely=True) or site


def _site(found: Occurrence, number: int) -> Site:
    phase = Phase.EVAL if _drops(found) else None
    detail = "causal" if found.found.values.get("causal") else ""
    nodes = {"result": found.result.name}
    options: dict[str, Any] = {"phase": phase, "detail": detail, "kind": "attention"}
    here = Site(found.program, found.owner, nodes, number, **options)
    readers = [] if found.unread is None else readers_of(found.program, found.owner, found.unread) or []
    if not readers:
        return here
    label = f"{found.owner}/{found.result.name}"
    named = (replace(reader, nodes={f"reader.{n}": each for each in reader.nodes.values()})
             for n, reader in enumerate(readers))  # fmt: skip
    return Site.over(found.program, here, *named, label=label, **options)


def _occurrence(program: Program, owner: str, node: fx.Node) -> Occurrence | str | None:
    """Return the attention whose result a node is; None if it is something else, or why it stays as it is."""
    first: str | None = None
    for found in WRITTEN_OUT.at(program, owner, node):
        q = found.nodes["q"].meta.get("val")
        settings = {"rank": len(q.shape) if isinstance(q, TensorMeta) else 0}
        seen = _with_unread(Occurrence(_KERNEL, found, settings))
        reason = _unfit(seen) if isinstance(seen, Occurrence) else seen
        if isinstance(seen, Occurrence) and reason is None:
            return seen
        first = first or reason
    return first


def _with_unread(found: Occurrence) -> Occurrence | str:
    """Return the same, with weights that are returned but read by no caller; or who reads them."""
    output = found.result.graph.output_node()
    returned = [node for node in found.covered - {found.result} if output in node.users]
    if not returned:
        return found
    if len(returned) > 1 or readers_of(found.program, found.owner, returned[0]) is None:
        return f"the weights '{returned[0].name}' are returned, and may be read by the caller"
    return replace(found, unread=returned[0])


def _unfit(found: Occurrence) -> str | None:
    """Return why an occurrence cannot be computed by the operator, or None."""
    values, metas = found.found.values, {k: n.meta.get("val") for k, n in found.found.nodes.items()}
    if any(isinstance(value, Held) or value is None for value in values.values()) or not all(
        isinstance(meta, TensorMeta) and len(meta.shape) > 1 for meta in metas.values()
    ):
        return "what it reads is not known to be tensors with rows"
    q, v, keys = (cast("TensorMeta", metas[name]) for name in ("q", "v", "k" if "k" in metas else "keys"))
    if not q.shape[:-2] == v.shape[:-2] == keys.shape[:-2]:
        return "queries, keys and values are not of one batch"
    scores = (*q.shape[:-1], v.shape[-2])
    if values["dim"] not in (-1, len(scores) - 1):
        return "the weights are normalized over another dimension than the keys'"
    if reason := _unfit_mask(values, metas, scores):
        return reason
    graph, every = found.result.graph, found.program.captures[found.owner].specializations
    guards = [guard for each in every if each.graph is graph for guard in each.guards]
    if _drops(found) and any(each.asks_for_training and each.check == Truth(True) for each in guards):
        return "it drops weights in training"
    return found.reason_against()


def _unfit_mask(values: Any, metas: Any, scores: Sequence[int]) -> str | None:
    number, lowest = number_of(values.get("number")), torch.finfo(metas["q"].dtype).min
    if number is not None and number > max(_HIDES, lowest):
        return f"a masked score is {number:g}, which is too large to act as minus infinity"
    if "beta" in values and number_of(values["beta"]) != 1:
        return "the mask is scaled"
    for name, kind in (("mask", "floating-point numbers"), ("hidden", "flags"), ("shown", "flags")):
        meta = metas.get(name)
        if meta is None:
            continue
        if meta.dtype.is_floating_point is not (name == "mask") or (name != "mask" and meta.dtype != torch.bool):
            return f"the mask holds no {kind}"
        pairs = zip(reversed(meta.shape), reversed(scores), strict=False)
        if len(meta.shape) > len(scores) or not all(each in (1, wide) for each, wide in pairs):
            return "the mask has another shape than the scores"
    return None


def _drops(found: Occurrence) -> bool:
    return bool(number_of(found.found.values.get("p"))) and found.found.values["mode"] != ""


def attend(
    q: Any,
    v: Any,
    rank: int,
    keys: Any = None,
    k: Any = None,
    mask: Any = None,
    hidden: Any = None,
    shown: Any = None,
    scale: Any = 1.0,
    divisor: Any = None,
    number: Any = None,
    causal: bool = False,
    **_: Any,
) -> Any:
    """Return attention by torch's operator; all as `WRITTEN_OUT` names it, tensors or proxies of them."""
    k = keys.transpose(-2, -1) if k is None else k
    scale = scale if divisor is None else 1.0 / divisor
    if hidden is None and shown is not None:
        hidden = shown.logical_not()
    if hidden is not None:  # added, so that a row without anything to attend to gives what it gave
        mask = _called(hidden_scores, hidden, number, q)
    if rank == 3:  # the fast kernels take four dimensions
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    is_causal = _called(hides_later, q.size(-2), k.size(-2)) if causal else False
    result = _called(scaled_dot_product_attention, q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale)
    return result.squeeze(0) if rank == 3 else result


def _called(function: Callable[..., Any], q: Any, *others: Any, **named: Any) -> Any:
    """Call a function, or write a call of it where it is given proxies."""
    if isinstance(q, fx.Proxy):
        return q.tracer.create_proxy("call_function", function, (q, *others), named)
    return function(q, *others, **named)


_KERNEL = Kernel("attention", attend, ())
