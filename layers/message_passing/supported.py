"""Which convolutions, and which calls of them, are computed over compressed rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...compat import is_plainly_eager
from ...runtime.values import user_class
from . import convolutions, kinds
from .kept import KeptGraphs, most_edges

__all__ = ["CONVOLUTIONS", "not_supported", "takes"]

Compute = Callable[[Any, KeptGraphs, Any, Any, Any], Any]

_CONV = "torch_geometric.nn.conv."
CONVOLUTIONS: Mapping[str, Compute] = {
    f"{_CONV}gcn_conv.GCNConv": convolutions.gcn,
    f"{_CONV}sage_conv.SAGEConv": convolutions.sage,
    f"{_CONV}gin_conv.GINConv": convolutions.gin,
    f"{_CONV}rgcn_conv.RGCNConv": convolutions.rgcn,
    f"{_CONV}gat_conv.GATConv": convolutions.gat,
    f"{_CONV}gatv2_conv.GATv2Conv": convolutions.gatv2,
    f"{_CONV}hgt_conv.HGTConv": kinds.hgt,
}
"""Class, by name -> what computes a call: of the layer, what is kept, x, edge_index and weights or features of edges;
of `HGTConv` x and edges by kind.

It returns None where the layer's own forward has to."""

_AGGREGATIONS = {"SumAggregation": "sum", "MeanAggregation": "mean"}
_AVERAGING = ("SAGEConv", "GINConv", "RGCNConv")
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_FLOW = "source_to_target"
_HOOKS = tuple(
    f"_{what}_forward_{kind}hooks"
    for what in ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
    for kind in ("", "pre_")
)


def not_supported(conv: nn.Module) -> str | None:
    """Return why a layer cannot be computed over compressed rows as it is set up; None where it can."""
    layer: Any = conv
    name = user_class(type(conv)).__name__
    aggregation = _AGGREGATIONS.get(type(layer.aggr_module).__name__)
    if aggregation is None or (aggregation == "mean" and name not in _AVERAGING):
        return (
            f"it aggregates by {layer.aggr}, and only sums, and means of SAGEConv, GINConv and RGCNConv, go over rows"
        )
    if any(getattr(layer, hooks, None) for hooks in _HOOKS):
        return "it has hooks on its messages, which there are none of over rows"
    if getattr(layer, "_explain", None):
        return "its messages are being explained"
    if getattr(layer, "num_blocks", None) is not None:
        return "its weights are blocks, and the products are by block"
    if getattr(layer, "lin", layer) is None:
        return "its sources and targets are transformed by layers of their own"
    return None


def takes(conv: nn.Module, x: object, edge_index: object, edges: object) -> bool:
    """Say whether a call, in eager mode on a CPU, goes over compressed rows."""
    if isinstance(x, dict):
        return _takes_kinds(conv, cast("dict[str, Any]", x), cast("dict[Any, Any]", edge_index))
    if type(x) is tuple:
        sources, targets = cast("tuple[object, object]", x)
        return _takes_targets(conv, sources, targets) and takes(conv, sources, edge_index, edges)
    if torch.compiler.is_compiling() or type(x) is not Tensor or type(edge_index) is not Tensor:
        return False
    if x.dim() != 2 or x.dtype not in _DTYPES or x.device.type != "cpu" or not x.numel():
        return False
    if not _are_edges(edge_index) or not edge_index.numel() or edge_index.device != x.device:
        return False
    if torch.is_autocast_enabled("cpu") or not is_plainly_eager(watched=True):
        return False
    fits = _names_relations(edges, x, edge_index) if hasattr(conv, "num_relations") else _fits(edges, x, edge_index)
    return fits and not _drops(conv) and not_supported(conv) is None


def _are_edges(edge_index: Tensor) -> bool:
    is_plain = edge_index.dtype == torch.int64 and edge_index.layout == torch.strided
    return is_plain and edge_index.dim() == 2 and len(edge_index) == 2


def _takes_kinds(conv: nn.Module, x: dict[str, Any], edges: dict[Any, Any]) -> bool:
    """Say whether a layer goes over rows with these features and edges by kind; some kinds may have no edges."""
    sources, most = most_edges(x, edges)
    if most is None or not all(map(_are_edges, edges.values())) or not takes(conv, sources, most, None):
        return False
    if sources.dtype.itemsize < 4 or cast("Any", conv).flow != _FLOW:
        return False
    alike = (type(each) is Tensor and each.dim() == 2 and each.dtype == sources.dtype for each in x.values())
    return all(alike) and {each.device for each in (*x.values(), *edges.values())} == {sources.device}


def _takes_targets(conv: nn.Module, sources: object, targets: object) -> bool:
    """Say whether a layer goes over rows from nodes of one kind to these of another, as those of `HeteroConv` may."""
    if type(sources) is not Tensor or type(targets) is not Tensor or targets.dim() != 2 or not targets.numel():
        return False
    is_alike = targets.dtype == sources.dtype and targets.device == sources.device
    return is_alike and user_class(type(conv)).__name__ == "SAGEConv" and cast("Any", conv).flow == _FLOW


def _names_relations(edges: object, x: Tensor, edge_index: Tensor) -> bool:
    """Say whether these are a relation for each edge; of narrow features the layer itself makes wide results."""
    if not isinstance(edges, Tensor) or edges.dtype != torch.int64 or edges.shape != edge_index.shape[1:]:
        return False
    return edges.device == x.device and x.dtype.itemsize >= 4 and torch.get_default_dtype() is torch.float32


def _fits(edges: object, x: Tensor, edge_index: Tensor) -> bool:
    if edges is None:
        return True
    if not isinstance(edges, Tensor) or edges.device != x.device or edges.dtype != x.dtype:
        return False
    return edges.dim() in (1, 2) and len(edges) == edge_index.shape[1]


def _drops(conv: Any) -> bool:
    """Say whether attention is dropped at random: the random stream is the layer's own."""
    return bool(conv.training and getattr(conv, "dropout", 0.0))
