"""Count the bytes that a model holds between calls."""

from __future__ import annotations

from torch import Tensor, nn

from ...compat import all_modules, storage_id
from ...layers.delegated import held_bytes
from ...operators import Keeping
from ...runtime.graphs import specializations_of
from ...runtime.values import all_tensors, plain_tensors, tensors_in

__all__ = ["held_memory"]


def held_memory(model: nn.Module) -> int:
    """Return the bytes of the tensors of a model, of what its graphs derived from them, and of engines; shared ones
    once.
    """
    modules = all_modules(model)
    kept = [
        node.target for module in modules for each in specializations_of(module) for node in each.graph.nodes
        if isinstance(node.target, Keeping)
    ]  # fmt: skip
    tensors = [
        *all_tensors(modules), *(tensor for module in modules for tensor in plain_tensors(module)),
        *(tensor for each in kept for made in each.kept() for tensor in tensors_in(made)),
    ]  # fmt: skip
    return sum({_memory(each): _bytes(each) for each in tensors}.values()) + sum(
        size for size, _ in held_bytes(model).values()
    )


def _memory(tensor: Tensor) -> int:
    """Tell memory from others'; a packed weight has none that torch tells of."""
    try:
        return storage_id(tensor)
    except NotImplementedError:
        return -id(tensor)


def _bytes(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().nbytes()
    except NotImplementedError:
        return tensor.numel() * tensor.element_size()
