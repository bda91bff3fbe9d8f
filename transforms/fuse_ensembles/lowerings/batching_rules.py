"""How each operator is written for N members at once: the rules, and `vmap` for operators that have none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from torch import fx
from torch.utils import _pytree as pytree

from ....errors import MatchFailure
from ....layers import batched_layers as batched
from ....layers.batched_recurrent import recurrent_members
from ....layers.vectorized import Slot, vectorize_members
from ....operators import Derived, operator_info, resolve
from ....runtime.values import map_leaves
from ..search import Pack, is_stacked

__all__ = ["BatchingRule", "call", "write_layer"]

Values = Sequence[fx.Node]
"""The operands as written: stacked ones with the members along dimension 0, others as they are."""


@dataclass(frozen=True)
class BatchingRule:
    """How a vectorizable operator is written for N members at once: a note of its `OpInfo`."""

    write: Callable[[Pack, Values, fx.Graph], fx.Node | None]  # None: use torch.func.vmap


def write_layer(pack: Pack, values: Values, graph: fx.Graph) -> fx.Node:
    """Write what `pack` computes, given its operands."""
    added = operator_info(pack.operator).note(BatchingRule)
    rule = _RULES.get(pack.operator) if added is None else added.write
    written = rule(pack, values, graph) if rule is not None else None
    return written if written is not None else _vectorized(pack, values, graph)


def call(path: str, args: tuple[Any, ...], kwargs: dict[str, Any], graph: fx.Graph) -> fx.Node:
    """Write a call of the function or method that `operators.function_path` named."""
    if path.startswith("."):
        return graph.call_method(path[1:], args, kwargs)
    return graph.call_function(resolve(path), args, kwargs)


def filled(pack: Pack, values: Values) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the pack's arguments with its operands in their places."""
    return _written(pack.arguments, values)


def _vectorized(pack: Pack, values: Values, graph: fx.Graph) -> fx.Node:
    if not pack.function and not operator_info(pack.operator).elementwise:
        raise MatchFailure(f"'{pack.operator}' cannot be computed for several members at once")
    if not any(map(is_stacked, pack.operands)):
        return call(pack.function, *filled(pack, values), graph)

    stacked = pytree.tree_map(partial(_is_own, pack), pack.arguments)
    return graph.call_function(vectorize_members, (pack.function, stacked, *filled(pack, values)))


# -- arguments by name ---------------------------------------------------------------------------------------------


def _named(pack: Pack, names: Sequence[str]) -> dict[str, Any] | None:
    """Return the arguments by name, or None where there are others."""
    args, kwargs = pack.arguments
    if len(args) > len(names) or not set(kwargs) <= set(names):
        return None
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _is_own(pack: Pack, argument: object) -> bool:
    return isinstance(argument, Slot) and is_stacked(pack.operands[argument.index])


def _own_or_absent(pack: Pack, *arguments: object) -> bool:
    return all(argument is None or _is_own(pack, argument) for argument in arguments)


def _written(argument: Any, values: Values) -> Any:
    return map_leaves(lambda leaf: values[leaf.index] if isinstance(leaf, Slot) else leaf, argument, Slot)


# -- layers --------------------------------------------------------------------------------------------------------


def _convolution(pack: Pack, values: Values, graph: fx.Graph) -> fx.Node | None:
    options = ("output_padding", "groups", "dilation") if "transpose" in pack.operator else ("dilation", "groups")
    named = _named(pack, ("input", "weight", "bias", "stride", "padding", *options))
    if named is None:
        return None
    x, weight, bias = named.pop("input"), named.pop("weight"), named.pop("bias", None)
    if not _is_own(pack, weight) or not _own_or_absent(pack, bias):
        return None
    groups, shared = named.pop("groups", 1), not _is_own(pack, x)
    arguments = (pack.function, x, weight, bias, shared, groups, named)
    return graph.call_function(batched.convolve_members, _written(arguments, values))


def _norm(function: Callable[..., Any], names: Sequence[str], defaults: Mapping[str, Any]) -> Callable[..., Any]:
    def rule(pack: Pack, values: Values, graph: fx.Graph) -> fx.Node | None:
        given = _named(pack, names)
        if given is None:
            return None
        named = {**defaults, **given}
        if not _own_or_absent(pack, named["weight"], named.get("bias")):
            return None
        arguments = (*(named[name] for name in names), not _is_own(pack, named["input"]))
        return graph.call_function(function, _written(arguments, values))

    return rule


def _derived(pack: Pack, values: Values, graph: fx.Graph) -> fx.Node:
    """Write what is kept for each member as what is kept for all of them."""
    target = cast("Derived", pack.members[0].node.target)
    return graph.call_function(target.for_members(tuple(map(is_stacked, pack.operands))), tuple(values))


def _batch_norm(pack: Pack, values: Values, graph: fx.Graph) -> fx.Node:
    names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked", "training")
    inputs = len(pack.operands) - len(pack.state)
    state = dict(zip(pack.state, values[inputs:], strict=True))
    shared = not is_stacked(pack.operands[0])
    return graph.call_function(
        batched.batch_norm_members,
        (values[0], *(state.get(name) for name in names), pack.options["momentum"], pack.options["eps"], shared),
    )


def _recurrent(pack: Pack, values: Values, graph: fx.Graph) -> fx.Node:
    inputs = len(pack.operands) - len(pack.state)
    if inputs != 1:
        raise MatchFailure("the members' recurrent layers are called with initial states")
    state = dict(zip(pack.state, values[inputs:], strict=True))
    training = state.pop("training")
    options = {name: pack.options[name] for name in _RECURRENT}
    shared = not is_stacked(pack.operands[0])
    return graph.call_function(recurrent_members, (values[0], state, options, training, shared))


_RECURRENT = ("mode", "num_layers", "bidirectional", "batch_first", "dropout", "hidden_size")


def _embedding(pack: Pack, values: Values, graph: fx.Graph) -> fx.Node | None:
    named = _named(pack, ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"))
    if named is None or named.get("scale_grad_by_freq") or not _is_own(pack, named["weight"]):
        return None
    shared = not _is_own(pack, named["input"])
    arguments = (named["input"], named["weight"], named.get("padding_idx"), shared)
    return graph.call_function(batched.embed_members, _written(arguments, values))


def _pool(pack: Pack, values: Values, graph: fx.Graph) -> fx.Node | None:
    args, kwargs = pack.arguments
    if not args or not _is_own(pack, args[0]) or len(pack.operands) > 1:
        return None
    arguments = (pack.function, values[0], int(pack.operator[-2]), args[1:], kwargs)
    return graph.call_function(batched.pool_members, arguments)


# -- operators that see the members' dimension as one more batch dimension -----------------------------------------


def _same(pack: Pack, values: Values, graph: fx.Graph) -> fx.Node | None:
    args, _ = pack.arguments
    if not args or not _is_own(pack, args[0]) or sum(map(is_stacked, pack.operands)) > 1:
        return None
    return call(pack.function, *filled(pack, values), graph)


def _along(*dims: tuple[str, int, int | None]) -> Callable[..., Any]:
    """Return the rule of an operator whose (name, position, default) are dimensions of its input."""

    def rule(pack: Pack, values: Values, graph: fx.Graph) -> fx.Node | None:
        args, kwargs = list(pack.arguments[0]), dict(pack.arguments[1])
        first = pytree.tree_leaves(args[0]) if args else []
        if not args or not all(_is_own(pack, leaf) for leaf in first) or len(pack.operands) > len(first):
            return None
        for name, position, default in dims:
            place: Any = (args, position) if len(args) > position else (kwargs, name)
            dim = args[position] if len(args) > position else kwargs.get(name, default)
            moved = _behind_members(dim)
            dims_moved = cast("tuple[int, ...]", moved if isinstance(moved, tuple) else (moved,))
            # A negative dimension is the members' own if a member has none.
            if moved is None or (min(dims_moved) < 0 and not pack.has_dimensions(0)):
                return None
            place[0][place[1]] = moved
        positional, named = tuple(_written(args, values)), dict(_written(kwargs, values))
        return call(pack.function, positional, named, graph)

    return rule


def _behind_members(dim: object) -> Any:
    """Return a member's dimension, or several, in the stacked tensor; None where it is not known."""
    if isinstance(dim, (tuple, list)):
        moved = [_behind_members(d) for d in cast("list[object]", dim)]
        return None if None in moved or not moved else tuple(moved)
    if not isinstance(dim, int) or isinstance(dim, bool):
        return None
    return dim + 1 if dim >= 0 else dim


def _permute(pack: Pack, values: Values, graph: fx.Graph) -> fx.Node | None:
    args, kwargs = pack.arguments
    dims = args[1:]
    if len(dims) == 1 and isinstance(dims[0], (tuple, list)):
        dims = tuple(cast("Sequence[Any]", dims[0]))
    moved = None if kwargs or not dims or not _is_own(pack, args[0]) else _behind_members(dims)
    return None if moved is None else graph.call_method("permute", (values[0], (0, *moved)))


def _reshape(pack: Pack, values: Values, graph: fx.Graph) -> fx.Node | None:
    args, kwargs = pack.arguments
    shape = args[1:]
    if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
        shape = tuple(cast("list[Any]", shape[0]))
    sizes = all(isinstance(size, (int, Slot)) and not _is_own(pack, size) for size in shape)
    if kwargs or not shape or not sizes or not _is_own(pack, args[0]):
        return None
    return graph.call_function(batched.reshape_members, (values[0], *_written(shape, values)))


def _shape(function: Callable[..., Any]) -> Callable[..., Any]:
    def rule(pack: Pack, values: Values, graph: fx.Graph) -> fx.Node:
        args, kwargs = filled(pack, values)
        extra = () if pack.operator == "shape" else args[1:]
        return graph.call_function(function, (args[0], *extra), kwargs)

    return rule


def _length(pack: Pack, values: Values, graph: fx.Graph) -> fx.Node:
    operand = pack.operands[0]
    if isinstance(operand, Pack) and operand.result != "stacked":
        return graph.call_function(len, (values[0],))
    return graph.call_function(batched.member_size, (values[0], 0))


def _getitem(pack: Pack, values: Values, graph: fx.Graph) -> fx.Node | None:
    (source, index), _ = pack.arguments
    if not isinstance(source, Slot) or len(pack.operands) > 1:
        return None
    operand = pack.operands[source.index]
    if not (isinstance(operand, Pack) and operand.result in ("several", "common")):
        parts = cast("tuple[Any, ...]", index if isinstance(index, tuple) else (index,))
        if not all(part is None or isinstance(part, (int, slice)) or part is Ellipsis for part in parts):
            return None
        index = (slice(None), *parts)
    return graph.call_function(resolve("operator.getitem"), (values[0], index))


def _attention(pack: Pack, values: Values, graph: fx.Graph) -> fx.Node | None:
    args, kwargs = pack.arguments
    if len(args) != 3 or not all(_is_own(pack, a) for a in args) or "attn_mask" in kwargs:
        return None
    args, kwargs = filled(pack, values)
    return graph.call_function(batched.attend_members, args, kwargs)


_CONVOLUTIONS = [f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)]
_POOLS = [f"{kind}_pool{n}d" for kind in ("max", "avg", "adaptive_avg", "adaptive_max") for n in (1, 2, 3)]
_DIM = _along(("dim", 1, None))
_AFFINE = {"weight": None, "bias": None, "eps": 1e-5}

_RULES: Mapping[str, Callable[[Pack, Values, fx.Graph], fx.Node | None]] = {
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
    **dict.fromkeys(_POOLS, _pool),
    **dict.fromkeys("contiguous float half double bfloat16 to type clone detach dropout".split(), _same),
    **dict.fromkeys(
        "softmax log_softmax softmin logsumexp cumsum cumprod mean sum amax amin unsqueeze squeeze unflatten "
        "narrow".split(),
        _DIM,
    ),
    "batch_norm": _batch_norm,
    "derived": _derived,
    "embedding": _embedding,
    "recurrent": _recurrent,
    "cat": _along(("dim", 1, 0)),
    "stack": _along(("dim", 1, 0)),
    "chunk": _along(("dim", 2, 0)),
    "split": _along(("dim", 2, 0)),
    "dim": _shape(batched.member_dim),
    "flatten": _along(("start_dim", 1, 0), ("end_dim", 2, -1)),
    "getitem": _getitem,
    "glu": _along(("dim", 1, -1)),
    "group_norm": _norm(batched.group_norm_members, ("input", "num_groups", "weight", "bias", "eps"), _AFFINE),
    "layer_norm": _norm(batched.layer_norm_members, ("input", "normalized_shape", "weight", "bias", "eps"), _AFFINE),
    "len": _length,
    "normalize": _along(("dim", 2, 1)),
    "numel": _shape(batched.member_numel),
    "permute": _permute,
    "reshape": _reshape,
    "rms_norm": _norm(
        batched.rms_norm_members, ("input", "normalized_shape", "weight", "eps"), {"weight": None, "eps": None}
    ),
    "scaled_dot_product_attention": _attention,
    "shape": _shape(batched.member_size),
    "size": _shape(batched.member_size),
    "transpose": _along(("dim0", 1, None), ("dim1", 2, None)),
    "view": _reshape,
}
