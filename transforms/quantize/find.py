"""Which layers are replaced, whatever the scheme: each is compared, and one of each kind timed, by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...compat import own_parameters
from ...compat.packed import why_no_packing
from ...errors import MatchFailure
from ...layers.packed import PackedLinear
from ...passes.contract import word_for
from ...passes.kinds import Judgement, error_of, figures_of, over_budget
from ...passes.rewriting import layer_of
from ...passes.sites import Cause, Reason, Refusal, Site
from ...runtime.record import Measured
from ...runtime.values import user_class
from ...settings import Measure
from ...tracing.program import Program, is_on_meta
from ...tracing.recording import Call
from .judging import Measurement, with_metric
from .layers import Candidate, already_quantized, reason_against_layer
from .options import Options
from .within import left_in_floats
from .write import Instead

__all__ = ["Found", "Make", "found"]

_NEVER_CALLED = "the example inputs never call it"
_BYPASSED = "torch's encoder layer computes with its weights, and does not call it in evaluation"
_BYTES = 2**25
"""So much of a kind is called in turn, where there is as much: in use, weights do not wait in the caches either."""

Make = Callable[[nn.Module], Instead]


@dataclass(frozen=True)
class Found:
    """What this run knows of a layer: how it compares, and a weight that data have given it, which no plan holds."""

    judgement: Judgement
    weight: Tensor | None = None


def found(
    program: Program, layers: Sequence[Candidate], levels: Mapping[Options, Callable[[Sequence[Candidate]], Make]]
) -> Iterator[Site | Refusal]:
    """Yield the layers to replace, the most saved for an error first, and why others stay.

    `levels`: options -> what returns, for layers, the function that makes what stands in their places; the last one
    that is within the budget is taken.
    """
    options = list(levels)[-1]
    yield from already_quantized(options.keep, program)
    called = _called(program, [layer.module for layer in layers])
    able: list[Candidate] = []
    for layer in sorted(layers, key=lambda layer: -layer.size):
        if word_for(options.keep, layer.name, program) is not None:
            continue
        reason = (reason_against_layer(layer, program) if layer.weights else "") or layer.reason
        if not reason and called is not None and layer.module not in called:
            around = program.module(layer.name.rpartition(".")[0])
            reason = _BYPASSED if isinstance(around, nn.TransformerEncoderLayer) else _NEVER_CALLED
        if reason:
            yield Refusal(reason, layer.name or "(root)")
        else:
            able.append(layer)
    if called is None or is_on_meta(program.model):
        yield from _unjudged(program, able, options, levels[options])
        return
    chosen: dict[nn.Module, _Choice] = {}
    metric: Measurement | None = None
    for level, prepare in levels.items():
        measuring = program.measuring if level.aim == "speed" else Measure.NO
        judged = _judged(program, able, prepare(able), level, measuring=measuring)
        fine = {each.layer.module: each for each in judged if each.is_fine}
        base = {module: each.new for module, each in chosen.items() if each.is_fine}
        costly, metric = left_in_floats(program, {module: each.new for module, each in fine.items()}, level, base)
        for each in judged:
            known = dataclasses.replace(each, cost=costly.get(each.layer.module, ""))
            if known.is_fine or each.layer.module not in base:
                chosen[each.layer.module] = known
    best = sorted(chosen.values(), key=lambda each: -Measured.of(each.judgement.all_figures).saved_per_error)
    yield from with_metric((each.item(program, options) for each in best), metric)


def _unjudged(
    program: Program, layers: Sequence[Candidate], options: Options, prepare: Callable[[Sequence[Candidate]], Make]
) -> Iterator[Site | Refusal]:
    """Yield the layers where nothing is compared: a plan is replayed, or there are no example inputs."""
    make = prepare(layers) if options.calibrates and not program.replaying and layers else None
    for layer in layers:
        try:
            instead = None if make is None else make(layer.module)
        except MatchFailure as failure:
            yield Refusal(str(failure), layer.name)
            continue
        if instead is None:
            yield Site(program, layer.name, {}, detail=layer.detail)
        else:
            known = Found(Judgement(), instead.weight)
            yield Site(program, layer.name, {}, detail=layer.detail, data=instead.data, found=known)


@dataclass(frozen=True)
class _Choice:
    """A layer, what may stand in its place, how they compare, and what that would cost the whole model."""

    layer: Candidate
    instead: Instead | None
    judgement: Judgement
    options: Options
    cost: str = ""

    @property
    def is_fine(self) -> bool:
        return self.instead is not None and not self.cost and self.judgement.reason_against() is None

    @property
    def new(self) -> nn.Module:
        return cast("Instead", self.instead).layer

    def item(self, program: Program, asked: Options) -> Site | Refusal:
        """Return the place to rewrite, or why it is left."""
        refusal = self.judgement.refusal(self.layer.name)
        if refusal is not None or self.cost or self.instead is None:
            return refusal or Refusal(self.cost, self.layer.name)
        other = {} if self.options.scheme == asked.scheme else {"scheme": self.options.scheme}
        return Site(
            program, self.layer.name, {}, detail=self.layer.detail, data={**self.instead.data, **other},
            found=Found(self.judgement, self.instead.weight),
        )  # fmt: skip


def _called(program: Program, modules: list[nn.Module]) -> set[nn.Module] | None:
    """Return those of the modules that the example inputs call, or None where there are none."""
    if not program.inputs or program.replaying:
        return None
    return {module for module in modules if program.recording(modules).calls.get(module)}


# -- judging -------------------------------------------------------------------------------------------------------


def _judged(
    program: Program, layers: Sequence[Candidate], make: Make, options: Options, *, measuring: Measure
) -> list[_Choice]:
    """Return each layer, the same in small numbers and how they compare, on what the model gives them."""
    calls = program.recording([layer.module for layer in layers]).calls
    kinds: dict[Hashable, list[nn.Module]] = {}
    for layer in layers:
        kinds.setdefault(_kind(layer.module, calls[layer.module]), []).append(layer.module)
    found: dict[nn.Module, tuple[Instead | None, Judgement]] = {}
    with torch.no_grad():
        for alike in kinds.values():
            found |= _Alike(alike, calls, make, options).judgements(measuring)
    return [_Choice(layer, *found[layer.module], options) for layer in layers]


@dataclass
class _Alike:
    """Layers of one kind, beside the same in small numbers."""

    modules: Sequence[nn.Module]
    calls: Mapping[nn.Module, Sequence[Call]]
    make: Make
    options: Options

    def judgements(self, measuring: Measure) -> dict[nn.Module, tuple[Instead | None, Judgement]]:
        """Return what stands in the place of each, and what is known of that."""
        some, size = list[tuple[nn.Module, nn.Module]](), 0
        found: dict[nn.Module, tuple[Instead | None, Judgement]] = {}
        for module in self.modules:
            try:
                instead = self.make(module)
            except MatchFailure as failure:
                found[module] = None, Judgement(reason=Reason.of(Cause.JUDGED_WRONG, str(failure)))
                continue
            judgement = self._compared(module, instead.layer)
            found[module] = instead, judgement
            if measuring and judgement.reason is None and size < _BYTES:
                some.append((module, instead.layer))
                size += sum(each.numel() * each.element_size() for each in module.parameters())
        if not some:
            return found
        given = [self.calls[module][0] for module, _ in some]
        before, after = (
            [partial(layer, *call.args, **call.kwargs) for call, layer in zip(given, layers, strict=True)]
            for layers in zip(*some, strict=True)
        )
        figures, reason = figures_of(before, after, cold=measuring.is_cold), None
        if self.options.baseline is torch.bfloat16 and Judgement(figures=figures).reason_against() is None:
            packed = [_in_bfloat16(module, call) for (module, _), call in zip(some, given, strict=True)]
            reason = _why_not_faster(packed, after, cold=measuring.is_cold)
        for module, (new, known) in found.items():
            found[module] = new, dataclasses.replace(known, figures=figures, reason=known.reason or reason)
        return found

    def _compared(self, module: nn.Module, instead: nn.Module) -> Judgement:
        calls = self.calls[module]
        chosen = [calls[number] for number in {0, (len(calls) - 1) // 2, len(calls) - 1}]  # first, middle, last
        error = max(error_of(call.output, instead(*call.args, **call.kwargs)) for call in chosen)
        return Judgement(error, reason=over_budget(error, self.options.error_budget))


def _why_not_faster(
    packed: Sequence[Callable[[], Tensor] | None], after: Sequence[Callable[[], object]], *, cold: bool
) -> Reason | None:
    """Return why small numbers do not gain over calls in bfloat16, or None; where one is missing, nothing is timed."""
    before = [call for call in packed if call is not None]
    if len(before) < len(packed):
        return None
    return Judgement(figures=figures_of(before, after, cold=cold)).reason_against(baseline="bfloat16")


def _in_bfloat16(module: nn.Module, call: Call) -> Callable[[], Tensor] | None:
    """Return a call of a layer that is packed in bfloat16; None where it is not linear, or the CPU lacks the type."""
    layer = layer_of(module)
    if layer is None or not layer.is_linear or why_no_packing(torch.bfloat16):
        return None
    weight, bias = (own_parameters(module).get(name) for name in ("weight", "bias"))
    if weight is None:
        return None
    packed = PackedLinear(dtype=torch.bfloat16, inputs_first=layer.inputs_first)
    return partial(packed, next(iter((*call.args, *call.kwargs.values()))), weight, bias)


def _kind(module: nn.Module, calls: Sequence[Call]) -> Hashable:
    """Return what layers that take as long have in common."""
    given: list[object] = pytree.tree_leaves((calls[0].args, calls[0].kwargs))
    shapes = tuple((each.shape, each.dtype) if isinstance(each, Tensor) else type(each).__name__ for each in given)
    tensors = tuple((name, tuple(each.shape), each.dtype) for name, each in module.named_parameters())
    return user_class(type(module)), shapes, tensors, repr(module)
