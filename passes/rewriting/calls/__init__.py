"""What the calls of a graph compute, however they are spelled: operators, patterns of them, layers."""

from __future__ import annotations

from .layers import LAYERS, Layer, LayerCall, call_of_layer, layer_of, objection_to_module, shape_of, tensor_read
from .patterns import Match, Pattern, anything, either, module, operation
from .spelling import Held, call_in, is_undisturbed

__all__ = [
    "LAYERS", "Held", "Layer", "LayerCall", "Match", "Pattern", "anything", "call_in", "call_of_layer", "either",
    "is_undisturbed", "layer_of", "module", "objection_to_module", "operation", "shape_of", "tensor_read",
]  # fmt: skip
