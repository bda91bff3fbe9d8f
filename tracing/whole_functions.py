"""Functions of libraries that are one node each: what they decide inside (a number of groups, say) is their own."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from .proxy import proxies_in

if TYPE_CHECKING:
    from .session import Session
    from .tracer import ModuleTracer

__all__ = ["is_whole_function", "patch_whole_functions"]

_GROUPS = "torch_geometric"
_WHOLE: Mapping[str, str] = {
    f"{_GROUPS}.utils": (
        "scatter segment softmax cumsum degree maybe_num_nodes to_dense_batch to_dense_adj coalesce index_sort lexsort "
        "remove_self_loops add_self_loops add_remaining_self_loops to_undirected sort_edge_index index_to_mask "
        "mask_to_index to_torch_coo_tensor to_torch_csr_tensor to_torch_csc_tensor to_edge_index spmm"
    ),
    f"{_GROUPS}.utils.num_nodes": "maybe_num_nodes",
    f"{_GROUPS}.nn.pool.glob": "global_add_pool global_mean_pool global_max_pool",
    f"{_GROUPS}.nn.pool.select.topk": "topk",
    f"{_GROUPS}.nn.pool.connect.filter_edges": "filter_adj",
}
"""Module -> functions in it that only compute: they draw nothing, and change none of their arguments."""


def is_whole_function(function: Any) -> bool:
    """Tell whether a function is one node; what it gives may be shaped by data."""
    return isinstance(function, FunctionType) and function.__module__.startswith(_GROUPS)


def patch_whole_functions(session: Session) -> None:
    """Send calls that traced code makes of these functions to its tracer, also those from inside their library."""
    for module, name, function in _places(len(sys.modules)):
        session.patch(module, name, session.wrapper(function, _record))
    aggregations = sys.modules.get(f"{_GROUPS}.nn.aggr.base")
    if aggregations is not None:
        session.wrap(aggregations.Aggregation, "__call__", _call)


def _call(tracer: ModuleTracer, original: Any, args: Any, kwargs: Any) -> Any:
    """Record the call of a leaf that works on its arguments before `nn.Module.__call__` sees them."""
    return tracer.children.call(original, args[0], args[1:], kwargs)


@lru_cache(maxsize=1)
def _places(_count: int) -> list[tuple[ModuleType, str, FunctionType]]:
    """Return where these functions are to be found; `_count` modules are loaded: the cache holds as long as that."""
    loaded = {name: module for name, module in list(sys.modules.items()) if name.startswith(_GROUPS)}
    found = {(name, getattr(loaded.get(home), name, None)) for home, names in _WHOLE.items() for name in names.split()}
    whole = [(name, function) for name, function in found if isinstance(function, FunctionType)]
    spaces = [(module, vars(module)) for module in loaded.values()]
    return [(module, name, f) for module, space in spaces for name, f in whole if space.get(name) is f]


def _record(tracer: ModuleTracer, original: Any, args: Any, kwargs: Any) -> Any:
    if next(proxies_in((args, kwargs)), None) is None:
        return original(*args, **kwargs)
    return tracer.create_proxy("call_function", original, args, kwargs)
