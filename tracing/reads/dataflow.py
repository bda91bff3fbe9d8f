"""Tell what hangs on the data in a tensor from what hangs on its shape, type or layout only."""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any, cast

import torch
from torch import Tensor, fx

from ...operators import has_random_effects, info_of
from ...runtime.guards import DESCRIPTIONS
from ...runtime.values import is_object, tensors_in

__all__ = ["LEAF_LIBRARY", "DataFlow", "is_leaf_function", "leaf_function_places"]


_DESCRIPTIONS: Any = (
    getattr, hasattr, len, type, list, operator.getitem, operator.contains,
    torch.is_floating_point, torch.is_complex, torch.numel, torch.result_type,
    torch.broadcast_tensors, torch.broadcast_shapes,
)  # fmt: skip
"""Functions that tell the shape, type or structure of values."""


class DataFlow:
    """Follow, node by node, what the values of a graph depend on, given their example values. The shapes of `shaped`
    ones hang on data; `later` ones on what was read of objects after objects had been changed.
    """

    def __init__(self, examples: Mapping[fx.Node, Any]) -> None:
        self._examples = examples
        self._tensors: set[fx.Node] = set()
        self.shaped: set[fx.Node] = set()
        self._fixed: set[fx.Node] = set()
        self._made: set[fx.Node] = set()
        self._decides: dict[fx.Node, bool] = {}
        self._objects: set[fx.Node] = set()
        self._changed = False
        self.later: set[fx.Node] = set()

    def note(self, node: fx.Node, *, fixed: bool = False, changes: bool = False) -> None:
        """Follow a new node: the structure of a `fixed` value never changes; `changes` says that it changes objects."""
        inputs = node.all_input_nodes
        value: Any = self._examples.get(node)
        kind = cast("type[object]", type(value))
        if (self._changed and not self._objects.isdisjoint(inputs)) or not self.later.isdisjoint(inputs):
            self.later.add(node)
        self._changed = self._changed or changes
        is_tensor = isinstance(value, Tensor)
        if not is_tensor and self._is_object(value, inputs):
            self._objects.add(node)
        if is_tensor or next(tensors_in(value), None) is not None:
            self._tensors.add(node)
            if self._is_made(node):
                self._made.add(node)
        picks = node.op == "call_function" and node.target in (operator.getitem, getattr)
        structured = fixed or kind.__module__ == "torch.return_types" or (picks and inputs[0] in self._fixed)
        if structured and not is_tensor:  # how long a tensor is hangs on its shape
            self._fixed.add(node)
        shaping = inputs[:1] if info_of(node).shape == "first" else inputs
        if self._shapes_by_data(node) or any(used in self.shaped for used in shaping):
            self.shaped.add(node)
        self._decides[node] = self._hangs_on_data(node)  # now, while what it uses is known: a chain may be long

    def _is_object(self, value: Any, inputs: list[fx.Node]) -> bool:
        return is_object(value) or (isinstance(value, (list, set, Mapping)) and not self._objects.isdisjoint(inputs))

    def is_fixed(self, node: fx.Node) -> bool:
        """Tell whether the number of items in a node's value can never change."""
        return node in self._fixed

    def is_read(self, node: fx.Node) -> bool:
        """Tell whether a value was got from an object, by its name, key or a method."""
        if node.op == "call_function" and node.target not in (getattr, operator.getitem):
            return False
        return node.op in ("call_function", "call_method") and node.args[0] in self._objects

    def is_object(self, node: fx.Node) -> bool:
        """Tell whether a value is an object, or a container that one holds."""
        return node in self._objects

    def is_made(self, node: fx.Node) -> bool:
        """Tell whether a tensor was made from shapes and constants alone (`arange`, a causal mask)."""
        return node in self._made

    def _is_made(self, node: fx.Node) -> bool:
        if node.op not in ("call_function", "call_method") or has_random_effects(node) or "empty" in _name(node):
            return False
        return all(
            used in self._made or (used not in self._tensors and used not in self._objects and not self.decides(used))
            for used in node.all_input_nodes
        )

    def decides(self, node: fx.Node) -> bool:
        """Tell whether a value that is no tensor was computed from the data in one (`.item()`, say)."""
        known = self._decides.get(node)
        return self._hangs_on_data(node) if known is None else known

    def _hangs_on_data(self, node: fx.Node) -> bool:
        if isinstance(self._examples.get(node), Tensor) or node.op in ("placeholder", "get_attr", "call_module"):
            return False
        if self._counts_dimensions(node):
            return False
        describes = _describes(node)
        for used in node.all_input_nodes:
            if used not in self._tensors:
                if self.decides(used):
                    return True
            elif used in self._made:
                continue
            elif not describes or (used in self.shaped and _reads_shape(node) and not self._counts_results(node)):
                return True
        return False

    def _counts_dimensions(self, node: fx.Node) -> bool:
        """Tell whether a node asks how many dimensions there are (`n, c = x.shape`): only sizes hang on data."""
        return node.target is len and type(self._examples.get(node.all_input_nodes[0])) is torch.Size

    def _counts_results(self, node: fx.Node) -> bool:
        """Tell whether a node asks how many results a module or function returned: that is up to its code."""
        source = node.all_input_nodes[0]
        has_own_code = source.op == "call_module" or is_leaf_function(source.target)
        return node.target is len and has_own_code and type(self._examples.get(source)) is tuple

    def _shapes_by_data(self, node: fx.Node) -> bool:
        if info_of(node).shape == "data" or is_leaf_function(node.target):
            return True
        name = _name(node)
        if name == "repeat_interleave":
            return any(used in self._tensors for used in node.all_input_nodes[1:])
        return node.target is operator.getitem and self._picks_by_mask(node.args[1])

    def _picks_by_mask(self, index: Any) -> bool:
        parts = cast("tuple[Any, ...]", index if isinstance(index, tuple) else (index,))
        values = [self._examples.get(part) for part in parts if isinstance(part, fx.Node)]
        return any(isinstance(value, Tensor) and value.dtype in (torch.bool, torch.uint8) for value in values)


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _describes(node: fx.Node) -> bool:
    """Tell whether a node reads only the shape, type or layout of tensors."""
    if node.op == "call_method":
        return node.target in DESCRIPTIONS
    return node.target in _DESCRIPTIONS


def _reads_shape(node: fx.Node) -> bool:
    if node.target is getattr:
        return node.args[1] in ("shape", "nbytes")
    return node.target not in ("dim", "ndimension", "element_size", "get_device", "is_floating_point", "is_complex")


LEAF_LIBRARY = "torch_geometric"
_LEAVES: Mapping[str, str] = {
    f"{LEAF_LIBRARY}.utils": (
        "scatter segment softmax cumsum degree maybe_num_nodes to_dense_batch to_dense_adj coalesce index_sort lexsort "
        "remove_self_loops add_self_loops add_remaining_self_loops to_undirected sort_edge_index index_to_mask "
        "mask_to_index to_torch_coo_tensor to_torch_csr_tensor to_torch_csc_tensor to_edge_index spmm"
    ),
    f"{LEAF_LIBRARY}.utils.num_nodes": "maybe_num_nodes",
    f"{LEAF_LIBRARY}.nn.pool.glob": "global_add_pool global_mean_pool global_max_pool",
    f"{LEAF_LIBRARY}.nn.pool.select.topk": "topk",
    f"{LEAF_LIBRARY}.nn.pool.connect.filter_edges": "filter_adj",
}
"""Module -> functions in it that only compute: they draw nothing, and change none of their arguments."""


def is_leaf_function(function: Any) -> bool:
    """Tell whether a function is one node; what it gives may be shaped by data."""
    return isinstance(function, FunctionType) and function.__module__.startswith(LEAF_LIBRARY)


def leaf_function_places() -> list[tuple[ModuleType, str, FunctionType]]:
    """Return the modules and names under which these functions are found, with the functions."""
    return _places(len(sys.modules))


@lru_cache(maxsize=1)
def _places(_count: int) -> list[tuple[ModuleType, str, FunctionType]]:
    """Return where these functions are to be found; `_count` modules are loaded: the cache holds as long as that."""
    loaded = {name: module for name, module in list(sys.modules.items()) if name.startswith(LEAF_LIBRARY)}
    found = {
        (name, getattr(loaded.get(namespace), name, None))
        for namespace, names in _LEAVES.items()
        for name in names.split()
    }
    whole = [(name, function) for name, function in found if isinstance(function, FunctionType)]
    spaces = [(module, vars(module)) for module in loaded.values()]
    return [(module, name, f) for module, space in spaces for name, f in whole if space.get(name) is f]
