"""What nodes of a graph are to an engine: operations that it may compute, sizes, checks, or calls that stay."""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from torch import fx, nn

from ...layers.folded import CHECKS
from ...layers.quantized import ON_NUMBERS, QuantizedLayer, StaticComputation
from ...operators import (
    Keeping,
    canonical_name,
    has_random_effects,
    info_of,
    is_known_function,
    mutates,
    operator_of_module,
)
from ...runtime.values import PLAIN_TYPES, Meta, TensorMeta, user_class

__all__ = ["Kind", "heavy_count", "is_in_8_bits", "is_of_torch", "is_plain", "is_worth_a_call", "kinds_of", "name_of"]

_HEAVY = frozenset(
    "linear matmul mm bmm addmm baddbmm einsum conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
    "scaled_dot_product_attention packed packed_lstm static_int8 lstm gru".split()
)
"""What makes a region worth a call of an engine."""
_LEAST_HEAVY = 2
_STORING = (operator.setitem, operator.delitem, setattr, delattr)
"""What changes an object that a call is given, such as a cache."""
_STAYS = frozenset("det diff nonzero unique unique_consecutive masked_select bincount histc searchsorted".split())
"""What no converter knows, raises for some matrices, or gives shapes that the numbers decide."""
_DECOMPOSED = ("linalg", "cholesky", "inverse", "pinverse", "lu", "qr", "svd", "eig", "logdet", "slogdet")
"""How names of decompositions begin, which raise for some matrices."""
_DESCRIBES = frozenset("shape size dim len numel ndim dtype device is_floating_point condition type".split())
"""What tells of a tensor without reading its numbers."""
_VIEWS = frozenset(
    "view view_as unsqueeze squeeze transpose permute expand expand_as getitem narrow chunk split tensor_split unbind "
    "unflatten diagonal detach t T mT swapaxes swapdims movedim select".split()
)
"""What takes no time, and gives the memory of its first operand."""
_RANGED = frozenset(
    "embedding embedding_bag gather index_select take take_along_dim index_add index_copy index_fill index_put scatter "
    "scatter_add scatter_reduce one_hot cross_entropy nll_loss repeat_interleave remainder fmod".split()
)
"""What raises for integers out of range, where engines may give anything."""
_INDEXED = frozenset(("getitem", "setitem"))
"""The same, for integers in the second operand; a mask there makes shapes of numbers."""


class Kind(enum.Enum):
    """What a node is to an engine."""

    SOURCE = enum.auto()  # an input, a tensor of the model
    TENSOR = enum.auto()  # an operation that an engine may compute
    SIZE = enum.auto()  # a number, a shape or a type, known from what tensors are like
    CHECK = enum.auto()
    OTHER = enum.auto()


def kinds_of(graph: fx.Graph, metas: Mapping[fx.Node, Meta]) -> dict[fx.Node, Kind]:
    """Return what each node is, given what it gives in a call."""
    kinds, given = dict[fx.Node, Kind](), set[fx.Node]()  # whose numbers depend on those that a call is given
    for node in graph.nodes:
        kind = _kind_of(node, metas)
        if kind is Kind.TENSOR and (_is_of_object(node, metas, kinds) or _may_refuse(node, metas, given)):
            kind = Kind.OTHER
        elif kind is Kind.TENSOR and _is_view(node, metas) and kinds[node.args[0]] is not Kind.TENSOR:
            kind = Kind.SIZE  # in the memory that it is read from, wherever it is read
        kinds[node] = kind
        is_read = any(each in given for each in node.all_input_nodes) and not is_plain(metas.get(node))
        if kind is Kind.OTHER or node.op == "placeholder" or is_read:
            given.add(node)
    return kinds


def is_worth_a_call(nodes: Iterable[fx.Node]) -> bool:
    """Say whether nodes compute enough for a call of an engine."""
    return heavy_count(nodes) >= _LEAST_HEAVY


def heavy_count(nodes: Iterable[fx.Node], callee: Callable[[fx.Node], nn.Module] | None = None) -> int:
    """Return how many of some nodes are products, convolutions or attention, or call layers that are, by `callee`."""

    def is_heavy(node: fx.Node) -> bool:
        if callee is None or node.op != "call_module":
            return canonical_name(node) in _HEAVY
        module = callee(node)
        return isinstance(module, QuantizedLayer) or operator_of_module(user_class(type(module))) in _HEAVY

    return sum(map(is_heavy, nodes))


def is_in_8_bits(node: fx.Node) -> bool:
    """Say whether a node computes with numbers of 8 bits."""
    return isinstance(node.target, StaticComputation)


def _kind_of(node: fx.Node, metas: Mapping[fx.Node, Meta]) -> Kind:
    if node.op in ("placeholder", "get_attr"):
        return Kind.SOURCE
    if node.op not in ("call_function", "call_method"):
        return Kind.OTHER
    meta = metas[node]
    if node.target in CHECKS:
        asked = metas[node.args[0]] if isinstance(node.args[0], fx.Node) else None
        return Kind.OTHER if isinstance(asked, TensorMeta) else Kind.CHECK
    if is_plain(meta) and (node.target in _STORING or mutates(node) or node.meta.get("changes") is not None):
        return Kind.OTHER
    if is_plain(meta):
        on_tensors = any(_holds_tensors(metas[each]) for each in node.all_input_nodes)
        return Kind.SIZE if not on_tensors or _describes(node) else Kind.OTHER
    if not _holds_tensors(meta) or has_random_effects(node) or not is_of_torch(node):
        return Kind.OTHER
    return Kind.TENSOR


def _may_refuse(node: fx.Node, metas: Mapping[fx.Node, Meta], given: Collection[fx.Node]) -> bool:
    """Say whether engines may differ by the numbers that a call is given: they raise, make shapes or are rounded."""
    name, operands = name_of(node), list[fx.Node]()
    if info_of(node).shape == "data" or name.startswith(_DECOMPOSED) or name in _STAYS:
        return True
    if name == "floor_divide" or "rounding_mode" in node.kwargs:  # engines round quotients below zero otherwise
        return any(each in given for each in node.all_input_nodes)
    if name.rstrip("_") in _RANGED:
        operands = node.all_input_nodes
    elif name in _INDEXED:
        fx.map_arg(node.args[1:2], operands.append)
    return any(each in given and _holds_integers(metas[each]) for each in operands)


def _holds_integers(meta: Meta) -> bool:
    return isinstance(meta, TensorMeta) and not (meta.dtype.is_floating_point or meta.dtype.is_complex)


def _is_of_object(node: fx.Node, metas: Mapping[fx.Node, Meta], kinds: Mapping[fx.Node, Kind]) -> bool:
    """Say whether a node reads a tensor out of what a call that stays gives: an engine is given tensors alone."""
    if node.target not in (getattr, operator.getitem) or not isinstance(node.args[0], fx.Node):
        return False
    return not isinstance(metas[node.args[0]], TensorMeta) and kinds[node.args[0]] in (Kind.SOURCE, Kind.OTHER)


def _is_view(node: fx.Node, metas: Mapping[fx.Node, Meta]) -> bool:
    if name_of(node) not in _VIEWS or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    return not any(_holds_tensors(metas[each]) for each in node.all_input_nodes if each is not node.args[0])


def _describes(node: fx.Node) -> bool:
    return name_of(node) in _DESCRIBES or getattr(node.target, "__name__", "") in _DESCRIBES


def name_of(node: fx.Node) -> str:
    """Return what a call is called, also where the table of operators has no row for it."""
    if node.op == "call_module":
        return str(node.target)
    if node.target is getattr:
        return str(node.args[1])
    return canonical_name(node) or (
        str(node.target) if node.op == "call_method" else str(getattr(node.target, "__name__", ""))
    )


def is_of_torch(node: fx.Node) -> bool:
    """Say whether a node calls what torch or the table of operators has."""
    if node.op == "call_method":
        return hasattr(torch.Tensor, str(node.target))
    if node.target in ON_NUMBERS:
        return True
    return isinstance(node.target, Keeping) or canonical_name(node) is not None or is_known_function(node.target)


def is_plain(meta: Meta) -> bool:
    """Say whether a value holds numbers, words and types alone."""
    if isinstance(meta, (tuple, list)):
        return all(map(is_plain, meta))
    return isinstance(meta, (*PLAIN_TYPES, torch.dtype, torch.device, torch.memory_format)) or meta is None


def _holds_tensors(meta: Meta) -> bool:
    if isinstance(meta, (tuple, list)):
        return bool(meta) and all(map(_holds_tensors, meta))
    return isinstance(meta, TensorMeta)
