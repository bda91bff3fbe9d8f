"""Write a call on a packed weight in the place of a layer and what stands behind it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx, nn

from ...layers.members import settings_of
from ...layers.packed import keep_narrow
from ...passes.rewriting import Edit, hold_written_out, lay_out_readers
from ...passes.sites import Site
from ...runtime.guards import Guard, Truth, attribute_at
from .decompositions import spelled_at
from .epilogue import find_epilogue
from .layers import Packable, packable_at

__all__ = ["ACTIVATION", "seal_modules", "write"]

ACTIVATION = "activation."
"""What sites call activations that are written out, with a number behind."""

_DROPS = "pack leaves dropout out"


def write(site: Site, edit: Edit, dtype: torch.dtype) -> bool:
    """Write a site; say whether its layers were still there."""
    edit.trainable = True  # where gradients are wanted, it computes as the layers do
    lay_out_readers(edit, site.nodes)
    layers = [label for label in site.nodes if label.startswith("layer.")]
    if not all(_write(site, edit, label, dtype) for label in layers):
        return False
    for label in site.nodes:
        if label.startswith(ACTIVATION) and not _write_activation(site, edit, label):
            return False
    if dtype is not torch.float32:
        keep_narrow(edit.graph)
    return True


def _write(site: Site, edit: Edit, label: str, dtype: torch.dtype) -> bool:
    layer = packable_at(edit.program, site.owner, edit.graph_node(label))
    if layer is None or layer.reason:
        return False
    transposed = label in (site.data or {}).get("transposed", ())
    found = find_epilogue(layer.call)
    if found.modes:
        edit.hold_where([Guard(attribute_at(mode), Truth(False), _DROPS) for mode in found.modes])
    around = [each for each in (layer.pad, *found.inside[1:]) if each is not None]
    modules = [str(each.target) for each in (layer.call.node, *around) if each.op == "call_module"]
    tensors = [_read(name, edit, layer) for name in (layer.call.weight, layer.call.bias)]
    more = () if found.other is None else (found.other,)
    function = layer.packed(found.activation, dtype, found.joins, transposed=transposed)
    packed = edit.call(function, layer.x, *tensors, *more, before=found.last)
    packed.meta["source"] = layer.call.node.meta.get("source")
    between = [each for each in found.inside if each is not found.last]
    edit.replace(found.last, packed)
    for each in reversed(between):
        if each in edit.graph.nodes and not each.users:  # a sum that is written into the layer's result
            edit.erase(each)
    seal_modules(modules, edit)
    return True


def _write_activation(site: Site, edit: Edit, label: str) -> bool:
    """Write torch's own function in the place of an activation that is written out."""
    node = edit.graph_node(label)
    found = spelled_at(edit.program, site.owner, node)
    if found is None:
        return False
    function, settings = found.activation.as_function
    new = edit.call(function, found.x, **settings, before=node)
    new.meta["source"] = node.meta.get("source")
    edit.replace(node, new)
    seal_modules([str(each.target) for each in found.computed if each.op == "call_module"], edit)
    return True


def _read(tensor: str | fx.Node | None, edit: Edit, layer: Packable) -> fx.Node | None:
    if not isinstance(tensor, str):
        return tensor
    node = edit.get_attr(tensor, before=layer.call.node)
    node.meta["parameter"] = True
    return node


def seal_modules(modules: Sequence[str], edit: Edit) -> None:
    """Let the settings that the graph holds, and the way to the modules, be what they are; not those of dropouts."""
    hold_written_out(edit, modules, lambda module: settings_of(module) if isinstance(module, nn.Dropout) else ())
