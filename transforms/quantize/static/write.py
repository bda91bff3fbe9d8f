"""Put layers of 8 bits in the place of others, and let graphs pass on numbers between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from ....compat import has_global_hooks, has_hooks, own_buffers, own_parameters
from ....compat.quantized import static_format
from ....errors import MatchFailure
from ....layers.folded import Fold
from ....layers.members import settings_of
from ....layers.quantized import (
    FakeQuantized,
    Range,
    StaticConv,
    StaticLayer,
    StaticLinear,
    TiedStaticLinear,
    max_pool_numbers,
    to_numbers,
)
from ....passes.rewriting import Edit, call_of_layer, holds_inputs_first
from ....passes.sites import Site
from ....runtime.guards import Applied, Attribute, Guard, Lacks, Source, Truth, exactly, key_of, module_at, of_class
from ....runtime.state import QuantizeByData, QuantizeSmoothed, QuantizeTrained, QuantizeWeight, StateStep
from ....runtime.values import TensorMeta, meta_of, qualified, user_class
from ...fold_batchnorm import source_of, write_check
from ..layers import CONVOLUTIONS, even_geometry, is_candidate, outputs_first, reason_against_module, weight_of
from ..methods import Treatment, shift_of
from ..write import Instead, instead_of, put
from .find import pooling_of
from .scaling import InputForm

__all__ = ["rewrite"]

_READ = {"layer": (), "norm": ("eps",), "relu": ()}
"""Which settings count, by what a module is in a chain; of operations between layers all do."""


def rewrite(site: Site, edit: Edit, group: int) -> None:
    """Rewrite a layer, or a chain of them in a graph, by the site's data; `group` as in `QuantizeWeight`."""
    layers: list[Mapping[str, Any]] = site.data["layers"]
    if not site.nodes:
        _replace_layer("", layers[0], edit, group)
        return
    called = _members(site, edit)
    nodes = [edit.graph_node(f"layer.{number}") for number in range(len(layers))]
    paths = [str(node.target) for node in nodes]
    for number, node in enumerate(nodes):
        normed = call_of_layer(edit.program, site.owner, node) if f"norm.{number}" in site.nodes else None
        x = source_of(node)
        if normed is not None and x is not None:
            write_check(x, normed.rank + 2, edit, before=node)
    for node, layer in zip(nodes, layers, strict=True):
        _replace_layer(str(node.target), layer, edit, group)
    for number, layer in enumerate(layers):
        scaled_for = cast("int | None", layer.get("scaled_for"))
        _rewrite_call(site, number, layer, None if scaled_for is None else paths[scaled_for], edit)
    for label in site.nodes:
        if label.startswith("between."):
            _pass_numbers(edit.graph_node(label), edit)
        if label.startswith("view."):
            _loosened(edit.graph_node(label), edit)
    edit.hold_where(_unchanged_guards(edit.owner, called))


# -- layers ------------------------------------------------------------------------------------------------------------


def _replace_layer(path: str, layer: Mapping[str, Any], edit: Edit, group: int) -> None:
    old, name = edit.owner.get_submodule(path), qualified(edit.site.owner, path)
    if not is_candidate(old):
        raise MatchFailure(f"'{name}' is a {type(old).__name__} by now")
    stays = bool(layer.get("stays"))
    replays = edit.program.replaying  # else `find` has asked
    reason = reason_against_module(name, old, edit.program, stays=stays) if replays else ""
    if reason:
        raise MatchFailure(f"'{name}': {reason}")
    weight = weight_of(old)
    observed = old.observed() if isinstance(old, FakeQuantized) else {}
    dim = int(holds_inputs_first(old))
    found = Treatment.from_plan(layer, static_format(), group, outputs_first(old, weight), _made(layer, edit))
    form = InputForm(Range(layer["scale"], layer["zero_point"]), found.exponents, shift=found.shift)
    if stays:
        put(edit, path, Instead(TiedStaticLinear(weight, own_parameters(old).get("bias"), group, form.range), ()))
        return
    plain = QuantizeWeight.of(qualified(path, "weight"), weight, static_format(), dim, group)
    step: StateStep = plain
    if observed:
        olds = tuple(qualified(path, name) for name in ("weight", *observed))
        kinds = tuple(str(tensor.dtype).removeprefix("torch.") for tensor in observed.values())
        noted = tuple(float(tensor) for tensor in observed.values())
        step = QuantizeTrained(olds, plain.new, group, plain.dtype, kinds, noted, plain.format)
    elif form.exponents:
        step = QuantizeSmoothed(**vars(plain), exponents=form.exponents)
    if found.weight is not None:
        step, made = QuantizeByData(**vars(plain)), found.weight.to(weight.device)
        weight = made.movedim(0, dim).reshape(weight.shape)
    put(edit, path, instead_of({step: weight}, lambda held: _layer_of(old, *held[0], form)))


def _made(layer: Mapping[str, Any], edit: Edit) -> Tensor | None:
    """Return the weight that the data of this run have given a layer."""
    found = edit.site.found
    return cast("Mapping[str, Tensor | None]", found).get(layer["name"]) if isinstance(found, Mapping) else None


def _layer_of(old: nn.Module, values: Tensor, scales: Tensor, form: InputForm) -> StaticLayer:
    weight = weight_of(old)
    settings = values, scales, own_parameters(old).get("bias"), weight.dtype, form.range
    shift = shift_of(form.shift, len(values)).to(values.device) if form.shift else None
    if not isinstance(old, CONVOLUTIONS):
        factors = form.factors(outputs_first(old, weight).float())
        return StaticLinear(*settings, factors, int(holds_inputs_first(old)), shift)
    geometry = even_geometry(old)
    if geometry is None:
        raise MatchFailure("its padding is not the same number of zeros on both sides")
    return StaticConv(*settings, geometry, shift)


# -- graphs ------------------------------------------------------------------------------------------------------------


def _rewrite_call(site: Site, number: int, layer: Mapping[str, Any], scaled_for: str | None, edit: Edit) -> None:
    """Write a call with what comes behind it; `scaled_for`: a layer whose inputs its numbers are."""
    node, options = edit.graph_node(f"layer.{number}"), dict[str, Any]()
    behind = [label for label in (f"norm.{number}", f"relu.{number}") if label in site.nodes]
    replaced = [node, *map(edit.graph_node, behind)]
    if f"norm.{number}" in site.nodes:
        options["scales"], options["bias"] = _folded(node, edit.graph_node(f"norm.{number}"), edit)
    if f"relu.{number}" in site.nodes:
        options["activation"] = "relu"
    if layer["output"] is not None:
        output = Range(*layer["output"])
        options["output"] = output.scale, output.zero_point
        if scaled_for is not None:
            options["output_factors"] = _factors_at(scaled_for, edit)
    else:
        options["contiguous"] = layer["contiguous"]
    x = _numbers_of(node, layer, edit)
    call = edit.call(str(node.target), x, before=replaced[-1], **options)
    for old in replaced:
        edit.replace(old, call)
    if layer["output"] is not None:
        _note_numbers(call)


def _folded(node: fx.Node, norm: fx.Node, edit: Edit) -> list[fx.Node]:
    """Add scales and bias with a batch norm folded into them, made anew when one of its tensors changes."""
    layer, module = str(node.target), cast("nn.BatchNorm2d", edit.owner.get_submodule(str(norm.target)))
    fold = Fold(
        eps=float(module.eps),
        biased=own_parameters(edit.owner.get_submodule(layer)).get("bias") is not None,
        scaled=own_parameters(module).get("weight") is not None,
        shifted=own_parameters(module).get("bias") is not None,
    )
    of_layer = [f"{layer}.weight_scales", *[f"{layer}.bias"] * fold.biased]
    trainable = edit.trainable
    edit.hold_in_evaluation([str(norm.target)])
    edit.trainable = trainable  # the layers themselves cannot be trained
    return edit.derive(fold, [*of_layer, *(f"{norm.target}.{name}" for name in fold.norm_tensors)])


def _numbers_of(node: fx.Node, layer: Mapping[str, Any], edit: Edit) -> Any:
    """Return what a layer reads: numbers that are made once, where several layers read the same floats."""
    x, settings = cast("fx.Node", node.args[0]), (layer["scale"], layer["zero_point"])
    factors = _factors(str(node.target), edit)
    known = next((user for user in x.users if _makes_numbers(user, settings, factors, edit)), None)
    if known is not None:
        return known
    val = x.meta.get("val")
    of_numbers = isinstance(val, TensorMeta) and val.dtype is torch.uint8
    if of_numbers or sum(_calls_layer(user, edit) for user in x.users) < 2:
        return x
    scaled = () if factors is None else (_factors_at(str(node.target), edit),)
    numbers = edit.call(to_numbers, x, *settings, *scaled)
    numbers.meta["val"] = val
    _note_numbers(numbers)
    return numbers


def _makes_numbers(user: fx.Node, settings: tuple[float, int], factors: Tensor | None, edit: Edit) -> bool:
    """Say whether a node makes the numbers that a layer reads, with these scales of its inputs."""
    if user.target is not to_numbers or user.args[1:3] != settings:
        return False
    read = user.args[3] if len(user.args) > 3 else None
    if read is None or factors is None:
        return read is factors
    own = _factors(str(cast("fx.Node", read).target).rpartition(".")[0], edit)
    return own is not None and torch.equal(own, factors)


def _factors(path: str, edit: Edit) -> Tensor | None:
    """Return what a layer scales its inputs with."""
    return own_buffers(edit.owner.get_submodule(path)).get("factors")


def _factors_at(path: str, edit: Edit) -> fx.Node:
    """Return a node that reads what a layer scales its inputs with."""
    node = edit.get_attr(qualified(path, "factors"))
    node.meta["buffer"], node.meta["val"] = True, meta_of(_factors(path, edit))
    return node


def _calls_layer(user: fx.Node, edit: Edit) -> bool:
    if user.op != "call_module":
        return False
    module = edit.owner.get_submodule(str(user.target))
    return isinstance(module, (nn.Linear, *CONVOLUTIONS, StaticLayer)) or holds_inputs_first(module)


def _pass_numbers(node: fx.Node, edit: Edit) -> None:
    """Let an operation take numbers, whose channels come last in memory."""
    pooling = pooling_of(edit.program, edit.site.owner, node)
    if pooling is not None:
        pooled = edit.call(max_pool_numbers, node.args[0], *pooling, before=node)
        edit.replace(node, pooled)
        _note_numbers(pooled)
    else:
        _note_numbers(_loosened(node, edit))


def _loosened(node: fx.Node, edit: Edit) -> fx.Node:
    """Let an operation take any layout: `view` becomes `reshape`."""
    if node.op != "call_method" or node.target != "view":
        return node
    reshaped = edit.call(".reshape", *node.args, before=node, **node.kwargs)
    edit.replace(node, reshaped)
    return reshaped


def _note_numbers(node: fx.Node) -> None:
    val = node.meta.get("val")
    if isinstance(val, TensorMeta):
        node.meta["val"] = dataclasses.replace(val, dtype=torch.uint8)


# -- what the graph stands on: the modules that it calls with numbers, or no longer calls, are as they were --------


def _members(site: Site, edit: Edit) -> dict[str, str]:
    """Return the modules of a chain, by their paths from its owner: "layer", "norm", "relu", "between" or "view"."""
    nodes = {label: edit.graph_node(label) for label in site.nodes}
    return {str(node.target): label.partition(".")[0] for label, node in nodes.items() if node.op == "call_module"}


def _unchanged_guards(owner: nn.Module, called: Mapping[str, str]) -> list[Guard]:
    """Return guards on hooks, classes and settings of the modules of a chain: path -> what it is there."""
    anywhere = Guard(Applied(has_global_hooks, ()), Truth(False), "hooks on all modules would meet numbers of 8 bits")
    found = [anywhere]
    for path, what in called.items():
        module = owner.get_submodule(path)
        names = _READ.get(what, settings_of(module))
        found += _as_it_is(module_at(path.split(".")), module, [name for name in names if name != "inplace"])
    return found


def _as_it_is(place: Source, module: nn.Module, names: list[str]) -> Iterator[Guard]:
    yield of_class(place, user_class(type(module)), "quantize has written what it computes into the graph")
    yield Guard(Applied(has_hooks, (place,)), Truth(False), "a hook would meet numbers of 8 bits, or never run")
    yield Guard(Attribute(place, "__dict__"), Lacks(key_of("forward")), "quantize has read its own forward")
    for name in names:
        yield from exactly(Attribute(place, name), getattr(module, name))
