"""What an expert computes of its rows, read off one round of a loop: linear layers, and operations row by row."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, fx, nn

from ...compat import all_modules, own_tensor
from ...errors import MatchFailure
from ...layers.moe import apply_linear
from ...operators import canonical_name, info_of, mutates, operator_info, operator_of_module
from ...runtime.values import all_tensors
from .members import Items, Slices, Source, operands
from .rounds import Joined, Round, draws, is_dropout
from .unrolling import Unrolled

__all__ = ["ExpertTemplate", "description", "is_grouped_product", "template_of"]

_ALONG = {"chunk": 2, "split": 2, "softmax": 1, "log_softmax": 1, "glu": 1, "cat": 1}
"""Operations along one dimension, and which argument says it."""
_CASTS = ("to", "float", "half", "bfloat16", "double", "type_as", "contiguous", "identity")


@dataclass
class ExpertLinear:
    """One linear layer of all experts."""

    weight: Source  # of which family its weights are
    bias: Source | None = None  # likewise, or None
    transposed: bool = False  # whether weights are [in, out]


@dataclass(frozen=True)
class ExpertTemplate:
    """What each expert computes."""

    compute: fx.GraphModule  # of rows and linear layers
    layers: Sequence[ExpertLinear]
    idle: Sequence[fx.Node]  # dropouts that were left out


def description(each: Round, call: Unrolled) -> tuple[Any, ...]:
    """Return what is equal for rounds in which the same is computed, each with tensors of its own."""
    places, sources = {node: number for number, node in enumerate(each.nodes)}, call.sources

    def shown(node: fx.Node) -> Any:
        if node in places:
            return f"%{places[node]}"
        if node in sources and not isinstance(sources[node][0], Slices):
            return sources[node][0].kind
        return "%rows" if node is each.rows else f"%{node.name}"

    steps: list[Any] = []
    for node in each.nodes:
        target = sources[node][0].kind if node in sources else str(node.target)
        own = node not in sources or node.op == "call_module"
        args = fx.map_arg((operands(node), dict(node.kwargs)), shown) if own else ()
        module = call.module.get_submodule(str(node.target)) if node.op == "call_module" else None
        settings = "" if module is None else f"{type(module).__qualname__} {module.extra_repr()}"
        steps.append((node.op, target, repr(args), settings))
    return tuple(steps)


def template_of(
    each: Round,
    joined: Mapping[fx.Node, Joined],
    owner: nn.Module,
    sources: Mapping[fx.Node, tuple[Source, int]],
    values: Mapping[fx.Node, Any],
) -> ExpertTemplate:
    """Return what an expert computes: rows through linear layers, with operations row by row, or raise MatchFailure.
    `owner`: whose graph it is; `sources`: which of its nodes belong to an expert; `values`: what nodes gave.
    """
    return _TemplateWriter(each, joined, owner, sources, values).template()


def is_grouped_product(node: fx.Node) -> bool:
    """Say whether a node multiplies rows that are sorted by expert with the weights of all experts."""
    return node.op == "call_function" and "grouped_mm" in getattr(node.target, "__name__", "")


class _TemplateWriter:
    def __init__(
        self,
        each: Round,
        joined: Mapping[fx.Node, Joined],
        owner: nn.Module,
        sources: Mapping[fx.Node, tuple[Source, int]],
        values: Mapping[fx.Node, Any],
    ) -> None:
        self.round, self.joined, self.owner, self.sources, self.values = each, joined, owner, sources, values
        self.graph = fx.Graph()
        self.rows = self.graph.placeholder("rows")
        self.linears = self.graph.placeholder("linears")
        self.new: dict[fx.Node, fx.Node] = {each.rows: self.rows}
        self.tensors: dict[fx.Node, tuple[Source, bool]] = {}
        self.results: dict[fx.Node, ExpertLinear] = {}
        self.layers: list[ExpertLinear] = []
        self.idle = list(each.idle)
        self.root = nn.Module()

    def template(self) -> ExpertTemplate:
        for node in self.round.nodes:
            self._write(node)
        if not self.layers:
            raise MatchFailure("the experts have no linear layers")
        self.graph.output(self.new[self.round.output])
        return ExpertTemplate(fx.GraphModule(self.root, self.graph, "Expert"), self.layers, self.idle)

    def _write(self, node: fx.Node) -> None:
        name = canonical_name(node)
        if node in self.joined:
            self._join(node)
        elif node in self.sources and node.op != "call_module":
            self.tensors[node] = self.sources[node][0], False
        elif operands(node)[:1] and operands(node)[0] in self.tensors and _turns(node, name):
            source, turned = self.tensors[operands(node)[0]]
            self.tensors[node] = source, not turned
        elif name == "to" and self._is_type_of_weights(operands(node)[1:]):
            self.new[node] = self._value(operands(node)[0])
        elif node.op == "call_module":
            self._module(node)
        elif name == "linear":
            given = dict(zip(("input", "weight", "bias"), operands(node), strict=False)) | dict(node.kwargs)
            self._linear(node, given["input"], given["weight"], given.get("bias"))
        elif (name in ("matmul", "mm") or is_grouped_product(node)) and operands(node)[1] in self.tensors:
            source, turned = self.tensors[operands(node)[1]]
            self._layer(node, operands(node)[0], ExpertLinear(source, transposed=not turned))
        elif name == "add" and self._bias(node):
            pass
        elif is_dropout(node, self.owner):
            self._skip(node)
        else:
            self._operation(node, name)

    def _join(self, node: fx.Node) -> None:
        """Write the linear layers of all experts, whose rows are side by side, as the layer of each row's expert."""
        joined = self.joined[node]
        first = joined.first
        for used in first.all_input_nodes:
            if used in self.sources:
                self._write(used)
        self.new[operands(first)[0]] = self._value(joined.rows)
        self._write(first)
        self.new[node] = self.new[first]

    def _skip(self, node: fx.Node) -> None:
        self.idle += [node] if draws(node, self.owner) else []
        self.new[node] = self._value(operands(node)[0])

    def _linear(self, node: fx.Node, rows: Any, weight: Any, bias: Any) -> None:
        if weight not in self.tensors or (bias is not None and bias not in self.tensors):
            raise MatchFailure("the experts share a linear layer")
        source, turned = self.tensors[weight]
        self._layer(node, rows, ExpertLinear(source, self.tensors[bias][0] if bias is not None else None, turned))

    def _layer(self, node: fx.Node, rows: Any, layer: ExpertLinear) -> None:
        number = len(self.layers)
        self.layers.append(layer)
        self.results[node] = layer
        self.new[node] = self.graph.call_function(apply_linear, (self.linears, number, self._value(rows)))

    def _is_type_of_weights(self, given: Sequence[Any]) -> bool:
        """Say whether a cast is to the type that the weights have: linear layers see to that."""
        of = given[0] if len(given) == 1 and isinstance(given[0], fx.Node) else None
        return of is not None and of.target is getattr and of.args[1] == "dtype" and of.args[0] in self.tensors

    def _bias(self, node: fx.Node) -> bool:
        """Let the vector of an expert that is added to the result of a linear layer be its bias."""
        vectors = [a for a in operands(node) if a in self.tensors]
        rest = [a for a in operands(node) if a not in vectors]
        layer = self.results.get(rest[0]) if len(vectors) == len(rest) == 1 else None
        if layer is None or layer.bias is not None:
            return False
        if len(rest[0].users) > 1 and not (mutates(node) and next(iter(rest[0].users)) is node):
            return False
        layer.bias = self.tensors[vectors[0]][0]
        self.new[node] = self.new[rest[0]]
        return True

    def _module(self, node: fx.Node) -> None:
        module = self.owner.get_submodule(str(node.target))
        if type(module) is nn.Linear:
            family = self.sources.get(node, (None, 0))[0]
            if not isinstance(family, Items):
                raise MatchFailure("the experts share a linear layer")
            bias = None if own_tensor(module, "bias") is None else family.within("bias")
            self._layer(node, operands(node)[0], ExpertLinear(family.within("weight"), bias))
        elif is_dropout(node, self.owner):
            self._skip(node)
        elif all_tensors(all_modules(module)) or not self._is_by_row(module):
            raise MatchFailure(f"the experts hold a {type(module).__name__}, which is not computed for all at once")
        else:
            name = f"operation_{len(list(self.root.children()))}"
            self.root.add_module(name, copy.deepcopy(module))
            self.new[node] = self.graph.call_module(name, tuple(self._value(a) for a in operands(node)))

    def _is_by_row(self, module: nn.Module) -> bool:
        name = operator_of_module(type(module))
        if name in ("softmax", "log_softmax", "glu"):
            return bool(module.dim == -1)
        return name in (None, "identity") or operator_info(name).elementwise

    def _operation(self, node: fx.Node, name: str | None) -> None:
        given: tuple[Any, Any]
        named: dict[str, Any] = dict(node.kwargs)
        if name in _ALONG:
            given = self._along(node, _ALONG[name])
        elif name == "getitem":
            given = (operands(node)[0], self._item(node)), {}
        elif node.target is getattr or info_of(node).elementwise or name in _CASTS:
            given = operands(node), named
        else:
            raise MatchFailure(f"the experts compute {name or node.target}, which is not known to go row by row")
        args, kwargs = fx.map_arg(given, self._value)
        self.new[node] = self.graph.create_node(node.op, node.target, args, kwargs)

    def _along(self, node: fx.Node, place: int) -> tuple[Any, Any]:
        """Return the arguments with the last dimension counted from the end: rows may have one dimension more."""
        args, kwargs = list(operands(node)), dict[str, Any](node.kwargs)
        dim = args[place] if len(args) > place else kwargs.get("dim", -1 if node.target in ("glu", F.glu) else 0)
        if dim not in (1, -1):
            raise MatchFailure(f"the experts compute {node.name} along dimension {dim}, across rows")
        if len(args) > place:
            args[place] = -1
        else:
            kwargs["dim"] = -1
        return tuple(args), kwargs

    def _item(self, node: fx.Node) -> Any:
        of, key = self.values[operands(node)[0]], operands(node)[1]
        if not isinstance(of, Tensor):
            return key
        keys: tuple[Any, ...] = cast("tuple[Any, ...]", key) if isinstance(key, tuple) else (key,)
        if len(keys) == 2 and keys[0] in (..., slice(None)) and isinstance(keys[1], slice):
            return (..., keys[1])
        raise MatchFailure(f"the experts pick from {operands(node)[0]} what is no range of features")

    def _value(self, node: Any) -> Any:
        if not isinstance(node, fx.Node):
            return node
        if node in self.new:
            return self.new[node]
        # A tensor that the rows are taken from has their type, whatever that is.
        if (
            node.target is getattr
            and operands(node)[1] in ("dtype", "device")
            and operands(node)[0] in self._ancestors()
        ):
            return self.graph.call_function(getattr, (self.rows, operands(node)[1]))
        raise MatchFailure(f"the experts read '{node.name}', which is made outside of them")

    def _ancestors(self) -> set[fx.Node]:
        found, node = set[fx.Node](), self.round.rows
        while isinstance(node, fx.Node):
            found.add(node)
            keeps_type = canonical_name(node) in ("getitem", "reshape", "view", "index_select", "flatten")
            node = operands(node)[0] if keeps_type else None
        return found


def _turns(node: fx.Node, name: str | None) -> bool:
    return name in ("t", "transpose") or (node.target is getattr and operands(node)[1] in ("T", "mT"))
