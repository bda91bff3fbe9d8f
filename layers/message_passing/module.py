"""A convolution of PyTorch Geometric that goes over compressed rows where it can."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, cast

from torch import Tensor, nn
from torch.compiler import is_compiling

from ...compat import has_global_hooks, has_hooks
from ...runtime.graphs import uninstall
from ...runtime.values import Remade, in_class, remade_by, subclass, user_class
from .kept import KeptGraphs, Sights, is_small, most_edges
from .supported import CONVOLUTIONS, takes

__all__ = ["CompressedMessages", "compressed", "is_compressed"]

_KEPT = "_fxopt_graphs"
"""In the `__dict__` of a module: what was computed from graphs, which it shares with the others of its model."""

_TRAINS = "_fxopt_trains_over_rows"
"""Likewise: whether calls in training go over rows, too; where that was not checked, the layer's own forward runs."""


_UNOBSERVED = "_fxopt_calls_unobserved"
"""Likewise, of one layer: how many more calls on small graphs run the layer's own forward without a look at these."""


class CompressedMessages(Remade):
    """A convolution of its own class, with its own parameters, whose calls go over compressed rows of the graph.
    The layer's own forward runs other calls (devices, sparse tensors, pairs, attention weights, dropout in training),
    and what is compiled, exported or traced.
    """

    _fxopt_is_operation: ClassVar[bool] = True

    def forward(self, x: Any, edge_index: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():  # asked before anything is counted: a count that a compiled call reads compiles it anew
            return super().forward(x, edge_index, *args, **kwargs)  # type: ignore[misc]
        its, sources = vars(self), _sources(x)
        if (
            its[_UNOBSERVED]
            and type(sources) is Tensor
            and type(edge_index) is Tensor
            and is_small(sources, edge_index)
        ):
            its[_UNOBSERVED] -= 1
        elif self._goes_over_rows(sources, edge_index):
            found = self._over_rows(x, edge_index, *args, **kwargs)
            if found is not None:
                return found
        return super().forward(x, edge_index, *args, **kwargs)  # type: ignore[misc]

    def _goes_over_rows(self, x: Any, edge_index: Any) -> bool:
        """Say whether this graph has come often enough; this comes first, for it runs where nothing can be gained."""
        its = vars(self)
        if not (its[_TRAINS] or not its["training"]) or type(x) is not Tensor or type(edge_index) is not Tensor:
            return False
        sights, key = its[_KEPT].sights, (id(self), its["training"])
        seen = sights.get(key)
        seen = sights.setdefault(key, Sights()) if seen is None else seen
        if seen.wants(edge_index) or its.get("cached", False) or not is_small(x, edge_index):
            return True
        its[_UNOBSERVED] = seen.calls_unobserved
        return False

    def _over_rows(self, x: Any, edge_index: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what the layer's own forward would; None where that has to run."""
        given, layer = (*args, *kwargs.values()), cast("nn.Module", self)
        edges = given[0] if given else None
        if has_hooks(cast("Any", layer).aggr_module) or has_global_hooks():  # the layer's own forward runs them
            return None
        is_usual = not given or (
            len(given) == 1 and (args or next(iter(kwargs)) in ("edge_weight", "edge_attr", "edge_type"))
        )
        if not is_usual or not takes(layer, x, edge_index, edges):
            return None
        base = user_class(type(layer))
        compute = CONVOLUTIONS[f"{base.__module__}.{base.__qualname__}"]
        return compute(layer, vars(layer)[_KEPT], x, edge_index, edges)

    def train(self, mode: bool = True) -> Any:
        """Set the mode; what follows from weights of edges is computed anew."""
        its = vars(self)
        cast("KeptGraphs", its[_KEPT]).forget_trained()
        its[_UNOBSERVED] = 0
        return cast("Any", super()).train(mode)


class CompressedKinds(CompressedMessages):
    """The same with features and edges by kind, as `HGTConv` takes them."""

    def forward(self, x_dict: Any, edge_index_dict: Any) -> Any:
        own: Any = cast("Any", super(CompressedMessages, self)).forward
        if is_compiling():
            return own(x_dict, edge_index_dict)
        its, (sources, edges) = vars(self), most_edges(x_dict, edge_index_dict)
        if its[_UNOBSERVED] and type(sources) is Tensor and is_small(sources, edges):
            its[_UNOBSERVED] -= 1
        elif self._goes_over_rows(sources, edges):
            found = self._over_rows(x_dict, edge_index_dict)
            if found is not None:
                return found
        return own(x_dict, edge_index_dict)


def _sources(x: object) -> Any:
    """Return the features of sources, of a pair of those and of targets as well."""
    pair = cast("tuple[Any, ...]", x if type(x) is tuple else ())
    return pair[0] if len(pair) == 2 else cast("Any", x)


def compressed(module: nn.Module, beside: nn.Module, *, trains: bool) -> nn.Module:
    """Return a module that goes over compressed rows, sharing what is kept with those `beside` it."""
    new = in_class(module, type(module))
    uninstall(new)
    object.__setattr__(new, "__class__", _compressed_class(user_class(type(module))))
    shared = next((vars(each)[_KEPT] for each in beside.modules() if _KEPT in vars(each)), None)
    vars(new)[_KEPT], vars(new)[_TRAINS] = KeptGraphs() if shared is None else shared, trains
    vars(new)[_UNOBSERVED] = 0
    return new


def is_compressed(module: nn.Module) -> bool:
    """Say whether a module goes over compressed rows already."""
    return isinstance(module, CompressedMessages)


def _compressed_class(base: type[nn.Module]) -> type[nn.Module]:
    body = partial(remade_by, _compressed_class, base)
    mixin = CompressedKinds if base.__name__ == "HGTConv" else CompressedMessages
    return subclass(base, (mixin,), body, key="compressed messages")
