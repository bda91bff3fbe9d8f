"""Functions of libraries that are one node each: what they decide inside (a number of groups, say) is their own."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any

__all__ = ["LEAF_LIBRARY", "is_leaf_function", "leaf_function_places"]

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
