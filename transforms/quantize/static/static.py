"""Calibrate, leave out what costs too much, and find layers one by one or in chains."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from ....layers.quantized import FakeQuantized
from ....passes.sites import Cause, Refusal, Site
from ....runtime.state import powers_of
from ....tracing.examples import Inputs
from ....tracing.program import Program
from ...calibration import calls, ranges_of
from ..judging import with_metric
from ..layers import CONVOLUTIONS, candidates, is_tied, outputs_first, weight_of
from ..methods import Treatment
from ..options import Options
from .correction import corrected
from .find import Chain, Link, chains
from .scaling import InputForm, treatments_of
from .sensitivity import Sensitivity, sensitivity

__all__ = ["find"]

_LEAST_TO_HOLD_OUT = 4
"""Of so many batches of calibration one is left to judge on."""


def find(options: Options, program: Program) -> Iterator[Site | Refusal]:
    """Yield the chains of linear layers and convolutions to quantize, and why others stay."""
    if program.training:
        reason = "it is for evaluation, and the model is in training; call model.eval() first"
        yield Refusal(reason, "(root)", Cause.IN_TRAINING)
        return
    layers, refused = candidates(options.keep, program, stays=options.aim == "speed")
    yield from refused
    if layers:
        yield from _calibrated(options, program, layers)


def _calibrated(options: Options, program: Program, layers: Mapping[str, nn.Module]) -> Iterator[Site | Refusal]:
    trained = {name: layer.input_range for name, layer in layers.items() if isinstance(layer, FakeQuantized)}
    others = {name: layer for name, layer in layers.items() if name not in trained}
    if others or options.calibration is not None or program.whole_calls:
        data = calls(options.calibration, options.batches, program, options.scheme)
    else:
        data = ()
    seen, judged = _divided(data)
    forms = {name: InputForm(range_) for name, range_ in trained.items()}
    if others:
        forms |= _forms(options, program, others, seen)
    unreached = "the calibration data never reaches it, or is empty there"
    yield from (Refusal(unreached, name) for name in layers if name not in forms)
    if not forms:
        return
    found = Sensitivity(dict.fromkeys(forms, 0.0))
    is_held_out = len(judged) > 1
    if is_held_out:
        forms = corrected(program, forms, options, seen, judged)
    if data:
        found = sensitivity(program, forms, options, judged)
    for name in found.left:
        cost = f"quantized alone, it moves the model's results by about {found.alone[name]:.2g} of their scale"
        yield Refusal(f"{cost}; with all layers {found.together}", name)
    kept = {name: form for name, form in forms.items() if name not in found.left}
    if found.left and kept and is_held_out and options.metric is None:  # others are before them than when all erred
        kept = corrected(program, kept, options, seen, judged)
    yield from with_metric(_sites(program, kept, found), found.metric)


def _forms(
    options: Options, program: Program, layers: Mapping[str, nn.Module], calls: Sequence[Inputs]
) -> dict[str, InputForm]:
    """Return how the input of each layer that the calls reach becomes numbers."""
    own = {name: layer for name, layer in layers.items() if not is_tied(layer, program)}
    found = treatments_of(options, program, own, calls) if options.calibrates else {}
    scaled = {name: each.exponents for name, each in found.items() if each.exponents}
    counts = {name: outputs_first(layers[name], weight_of(layers[name])).shape[1] for name in scaled}
    factors = {name: powers_of(text, counts[name], -1) for name, text in scaled.items()}
    ranges = ranges_of(program, layers, calls, options.observer, factors)
    weights = {name: each.weight for name, each in found.items()}
    return {name: InputForm(range_, scaled.get(name, ""), weights.get(name)) for name, range_ in ranges.items()}


def _divided(data: Sequence[Inputs]) -> tuple[Sequence[Inputs], Sequence[Inputs]]:
    """Return the calls to find ranges on, and those to judge on: the first, and one that no range has seen."""
    if len(data) < _LEAST_TO_HOLD_OUT:
        return data, data[:1]
    return data[:-1], [data[0], data[-1]]


def _sites(program: Program, forms: Mapping[str, InputForm], found: Sensitivity) -> Iterator[Site]:
    chained: set[str] = set()
    own = {name: form for name, form in forms.items() if not is_tied(program.module(name), program)}
    for chain in chains(program, own):
        chained.update(link.name for link in chain.links)
        yield _site_of(program, chain, forms, found)
    for name in forms:
        if name not in chained:
            data = _data(name, forms[name], None, found) | ({} if name in own else {"stays": True})
            yield Site(
                program, name, {}, data={"layers": [data]}, detail=_detail([data]), kind=_kind(program, [data]),
                found={name: forms[name].weight},
            )  # fmt: skip


def _site_of(program: Program, chain: Chain, forms: Mapping[str, InputForm], found: Sensitivity) -> Site:
    data = [_data(link.name, forms[link.name], link, found) for link in chain.links]
    for link, layer in zip(chain.links, data, strict=True):
        if link.output is not None and link.behind is not None and link.output.exponents:
            layer["scaled_for"] = chain.links.index(link.behind)
    nodes = {label: name for number, link in enumerate(chain.links) for label, name in _nodes(number, link)}
    return Site(
        program, chain.owner, nodes, chain.specialization,
        data={"layers": data}, detail=_detail(data), kind=_kind(program, data),
        label=data[0]["name"] if len(data) == 1 else "",
        found={link.name: forms[link.name].weight for link in chain.links},
    )  # fmt: skip


def _kind(program: Program, layers: list[dict[str, Any]]) -> Hashable:
    """Return what the time of layers hangs on: not on calibration, and on the order in memory for convolutions only."""
    moved = (isinstance(program.module(layer["name"]), CONVOLUTIONS) and layer["contiguous"] for layer in layers)
    return tuple(zip((layer["output"] is None for layer in layers), moved, strict=True))


def _nodes(number: int, link: Link) -> Iterator[tuple[str, str]]:
    named = {"layer": link.node, "norm": link.norm, "relu": link.relu}
    yield from ((f"{what}.{number}", node.name) for what, node in named.items() if node is not None)
    yield from ((f"between.{number}.{place}", node.name) for place, node in enumerate(link.between))
    yield from ((f"view.{number}.{place}", node.name) for place, node in enumerate(link.followers.views))


def _data(name: str, form: InputForm, link: Link | None, found: Sensitivity) -> dict[str, Any]:
    output = None if link is None or link.output is None else link.output.range
    return {
        "name": name, "scale": form.range.scale, "zero_point": form.range.zero_point,
        **Treatment(form.exponents, form.shift, form.weight).data,
        "output": None if output is None else [output.scale, output.zero_point],
        "contiguous": link is None or link.followers.is_open,
        "error": found.own[name], **({"moves_results": found.alone[name]} if found.alone else {}),
    }  # fmt: skip


def _detail(layers: list[dict[str, Any]]) -> str:
    worst = max(layers, key=lambda layer: layer["error"])
    count = f"{len(layers)} layers, at most" if len(layers) > 1 else "off by"
    return f"{count} {worst['error']:.1%} of the scale" + (f" ({worst['name']})" if len(layers) > 1 else "")
