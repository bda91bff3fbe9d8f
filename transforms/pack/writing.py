"""Write a call on a packed weight in the place of a layer and what stands behind it."""

from __future__ import annotations

import torch
from torch import fx

from ...layers.members import seal, written_out
from ...layers.packed import NO_ACTIVATION, PackedLinear
from ...passes.rewriting import Edit, Place
from ...passes.sites import Site
from .behind import activation_behind
from .layers import Layer, layer_at

__all__ = ["write"]


def write(site: Site, edit: Edit, dtype: torch.dtype) -> bool:
    """Write a site; say whether its layers were still there."""
    return all(_write(site, edit, edit.graph_node(label), dtype) for label in site.nodes)


def _write(site: Site, edit: Edit, node: fx.Node, dtype: torch.dtype) -> bool:
    layer = layer_at(edit.program, site.owner, node)
    if layer is None or layer.objection:
        return False
    found = activation_behind(Place(edit.program, site.owner), layer.node)
    last, activation = (layer.node, NO_ACTIVATION) if found is None else found
    modules = [*layer.modules, *([str(last.target)] if found and last.op == "call_module" else [])]
    tensors = [_read(name, edit, layer) for name in (layer.weight, layer.bias)]
    packed = edit.call(PackedLinear(activation, dtype, layer.transposed), layer.x, *tensors, before=last)
    packed.meta["source"] = layer.node.meta.get("source")
    edit.replace(last, packed)
    _seal(modules, edit)
    edit.trainable = True  # where gradients are wanted, it computes as the layer does
    return True


def _read(tensor: str | fx.Node | None, edit: Edit, layer: Layer) -> fx.Node | None:
    if not isinstance(tensor, str):
        return tensor
    node = edit.get_attr(tensor, before=layer.node)
    node.meta["parameter"] = True
    return node


def _seal(modules: list[str], edit: Edit) -> None:
    """Let the settings that the graph now holds, and the way to the modules, be what they are."""
    for path, names in written_out(edit.owner, modules).items():
        module = edit.owner.get_submodule(path)
        edit.on_undo(seal(module, names), module)
