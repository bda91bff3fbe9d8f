"""Which layers are replaced, one by one, whatever the scheme, and why others stay."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from torch import nn

from ...passes.contract import word_for
from ...passes.sites import Refusal, Site
from ...settings import Measure
from ...tracing.program import Program, is_on_meta
from .eligible import Layer, already_quantized, obstacle
from .judging import Judgement, Make, judged
from .settings import Settings
from .within import left_in_floats

__all__ = ["found"]

_COSTLY = (
    "the whole model would err by more than the budget; this layer alone moves its results by about {:.2g} of "
    "their scale; raise budget= to quantize it too"
)
_NEVER_CALLED = "the example inputs never call it"
_BYPASSED = "torch's encoder layer computes with its weights, and does not call it in evaluation"


def found(settings: Settings, program: Program, layers: Sequence[Layer], make: Make) -> Iterator[Site | Refusal]:
    """Yield a site for each layer, and why others stay as they are.

    First come those that save most for their error, which are the last to go where the whole model errs by too much;
    where nothing runs, the largest.

    Args:
        settings: what the user asks for.
        program: the model.
        layers: which the scheme knows.
        make: returns what stands in the place of one.
    """
    yield from already_quantized(settings.keep, program)
    called = _called(program, [layer.module for layer in layers])
    able: list[Layer] = []
    for layer in sorted(layers, key=lambda layer: -layer.size):
        if word_for(settings.keep, layer.name, program) is not None:
            continue
        reason = (obstacle(layer, program) if layer.weights else "") or layer.objection
        if not reason and called is not None and layer.module not in called:
            reason = _BYPASSED if _in_encoder(layer.name, program) else _NEVER_CALLED
        if reason:
            yield Refusal(reason, layer.name or "(root)")
        else:
            able.append(layer)
    if called is None or is_on_meta(program.model):
        yield from (Site(program, layer.name, {}, detail=layer.detail) for layer in able)
        return
    measuring = program.measuring if settings.aim == "speed" else Measure.NO
    judgements = judged(program, able, make, settings.error_budget, measuring=measuring)
    pairs = list(zip(able, judgements, strict=True))
    fine = {layer.module: each.layer for layer, each in pairs if each.layer is not None and not each.objection}
    costly = left_in_floats(program, fine, settings.error_budget)
    for layer, judgement in sorted(pairs, key=lambda pair: -pair[1].gain):
        yield _site(program, layer, judgement, costly.get(layer.module))


def _site(program: Program, layer: Layer, judgement: Judgement, cost: float | None) -> Site | Refusal:
    if judgement.objection:
        return Refusal(judgement.objection, layer.name, judgement.cause)
    if cost is not None:
        return Refusal(_COSTLY.format(cost), layer.name)
    return Site(program, layer.name, {}, detail=layer.detail, found=dataclasses.replace(judgement, layer=None))


def _called(program: Program, modules: list[nn.Module]) -> set[nn.Module] | None:
    """Return those of the modules that the example inputs call, or None where there are none."""
    if not program.inputs or program.replaying:
        return None
    return {module for module in modules if program.recording(modules).calls.get(module)}


def _in_encoder(name: str, program: Program) -> bool:
    return isinstance(program.module(name.rpartition(".")[0]), nn.TransformerEncoderLayer)
