"""What a value is while a model is split over processes, and how operators hand on the dimension along which."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import fx

from ...operators import canonical_name, info_of, normalized_arguments
from ...passes.rewriting import shape_of

__all__ = ["SplitBlock", "SplitCall", "SplitSize", "SplitTensor", "Stop", "parts_in", "result_of"]


class Stop(Exception):
    """A value that is split reaches what has to have the whole of it; the message says what."""

    def __init__(self, reason: str, *, is_near: bool = True, is_uneven: bool = False) -> None:
        super().__init__(reason)
        self.is_near, self.is_uneven = is_near, is_uneven  # whether all but a reason, or a number, fits


@dataclass(eq=False)
class SplitBlock:
    """Layers that are split together, because their results meet."""

    columns: list[str]  # names of the layers that are split by outputs, and of those after them, by inputs
    rows: list[str]
    stop: Stop | None = None  # why it cannot be split after all
    joined: SplitBlock | None = None  # the block that has taken this one in

    @property
    def whole(self) -> SplitBlock:
        """Return the block that this one is a part of by now."""
        return self if self.joined is None else self.joined.whole

    def take(self, other: SplitBlock) -> SplitBlock:
        one, two = self.whole, other.whole
        if one is not two:
            one.columns += two.columns
            one.rows += two.rows
            one.stop = one.stop or two.stop
            two.joined = one
        return one


@dataclass(frozen=True)
class SplitTensor:
    """A tensor of which each process has a part."""

    dim: int  # along which it is split, counted from the last: -1
    block: SplitBlock  # which layers did it


@dataclass(frozen=True)
class SplitSize:
    """A number that differs from that of one process: the size of a part."""

    block: SplitBlock


def parts_in(value: Any) -> Iterator[SplitTensor | SplitSize]:
    """Yield what is split in a value."""
    if isinstance(value, (SplitTensor, SplitSize)):
        yield value
    elif isinstance(value, Mapping):
        yield from parts_in(list(cast("Mapping[Any, Any]", value).values()))
    elif isinstance(value, (tuple, list)):
        for item in cast("list[Any]", value):
            yield from parts_in(item)
    elif isinstance(value, slice):
        yield from parts_in((value.start, value.stop, value.step))


def sizes_of(shape: tuple[int, ...], part: SplitTensor) -> tuple[SplitSize | None, ...]:
    """Return the shape of a part, as a value."""
    return tuple(SplitSize(part.block) if dim - len(shape) == part.dim else None for dim in range(len(shape)))


def position_after(before: tuple[int, ...], after: tuple[int, ...], dim: int) -> int | None:
    """Return the dimension of a reshaped tensor that a dimension has become the outer part of, or that is its own."""
    outside = math.prod(before[:dim])
    for position, size in enumerate(after):
        if math.prod(after[:position]) == outside and size > 1:
            fits = size % before[dim] == 0 or before[dim] % size == 0
            return position if fits else None
    return None


_ALONGSIDE = frozenset({"dropout", "masked_fill", "identity", "type", "type_as", "to", "clone", "contiguous", "detach"})
_CASTS = frozenset({"bfloat16", "double", "float", "half"})
_SHAPES = frozenset({"view", "reshape", "flatten", "unflatten", "expand"})


@dataclass(frozen=True)
class SplitCall:
    """One call of an operator."""

    node: fx.Node
    value: Callable[[Any], Any]  # gives the value of an argument
    processes: int  # over how many it is split

    @property
    def parts(self) -> list[SplitTensor | SplitSize]:
        return list(parts_in(self.value((self.node.args, self.node.kwargs))))

    def named(self, operator: str) -> Mapping[str, Any]:
        """Return the arguments, nodes as they are, by parameter."""
        return normalized_arguments(operator, self.node.target, self.node.args, self.node.kwargs).named

    def tensors(self) -> list[tuple[SplitTensor | None, tuple[int, ...]]]:
        """Return the tensors among the operands and their shapes in one process."""
        found: list[tuple[SplitTensor | None, tuple[int, ...]]] = []
        for node in self.node.all_input_nodes:
            value, shape = self.value(node), shape_of(node)
            if shape is not None:
                found.append((value if isinstance(value, SplitTensor) else None, shape))
        return found


def result_of(call: SplitCall) -> Any:
    """Return what a call gives of which each process has a part; Stop says that it needs the whole."""
    name = canonical_name(call.node)
    if call.node.target is getattr:
        return _attribute(call)
    if name == "getitem":
        return _item(call)
    if name in ("shape", "size"):
        return _size(call)
    if name in ("len", "dim"):
        return None
    sizes = [part for part in call.parts if isinstance(part, SplitSize)]
    if name in ("mul", "floor_divide", "floordiv") and len(sizes) == len(call.parts):
        return sizes[0]
    if name in _SHAPES:
        return _reshaped(call)
    if sizes:
        raise Stop(f"'{call.node.name}' reads the size of a part")
    rule = _RULES.get(name or "")
    if rule is not None:
        return rule(call)
    if info_of(call.node).elementwise or name in _ALONGSIDE or name in _CASTS:
        return _aligned(call)
    raise Stop(f"'{call.node.name}' ({name or call.node.target}) needs the whole of it", is_near=name is not None)


def _attribute(call: SplitCall) -> Any:
    value, name = call.value(call.node.args[0]), call.node.args[1]
    if isinstance(value, SplitTensor) and name == "shape":
        return sizes_of(shape_of(call.node.args[0]) or (), value)
    if isinstance(value, SplitTensor) and name not in ("dtype", "device", "ndim", "requires_grad"):
        raise Stop(f"'{call.node.name}' reads .{name} of a part")
    return None


def _size(call: SplitCall) -> Any:
    value, shape = call.value(call.node.args[0]), shape_of(call.node.args[0])
    sizes = sizes_of(shape or (), value)
    return sizes if len(call.node.args) < 2 else sizes[_integer(call, call.node.args[1])]


def _integer(call: SplitCall, value: Any) -> int:
    if isinstance(value, int):
        return value
    raise Stop(f"'{call.node.name}' computes which dimension it means")


def _item(call: SplitCall) -> Any:
    source, index = call.node.args
    value = call.value(source)
    if isinstance(value, SplitTensor):
        return _sliced(call, value, index)
    try:
        return value[index]
    except (TypeError, LookupError) as error:
        raise Stop(f"'{call.node.name}' picks by what is computed") from error


def _sliced(call: SplitCall, part: SplitTensor, index: Any) -> SplitTensor:
    """Let a tensor keep its split dimension where an index takes all of it."""
    picks: list[Any] = list(cast("tuple[Any, ...]", index)) if isinstance(index, tuple) else [index]
    shape = shape_of(call.node.args[0]) or ()
    plain = all(pick is Ellipsis or isinstance(pick, slice) for pick in picks)
    if Ellipsis in picks:
        place = picks.index(Ellipsis)
        picks[place : place + 1] = [slice(None)] * (len(shape) - len(picks) + 1)
    picks += [slice(None)] * (len(shape) - len(picks))
    if not plain or list(parts_in(call.value(tuple(picks)))) or picks[part.dim] != slice(None):
        raise Stop(f"'{call.node.name}' picks from the dimension that is split")
    return part


def _aligned(call: SplitCall) -> SplitTensor:
    """Let operands that broadcast keep the dimension, which all have to be split along or to lack."""
    tensors = call.tensors()
    (first, *others) = [part for part, _ in tensors if part is not None]
    for other in others:
        first.block.take(other.block)
        if other.dim != first.dim:
            raise Stop(f"'{call.node.name}' joins tensors that are split along different dimensions")
    for part, shape in tensors:
        if part is None and len(shape) >= -first.dim and shape[first.dim] > 1:
            raise Stop(f"'{call.node.name}' joins a part with a whole tensor", is_near=False)
    return first


def _transposed(call: SplitCall) -> SplitTensor:
    named, part = call.named("transpose"), _only(call)
    rank = len(shape_of(call.node) or ())
    one, other = (_integer(call, named[key]) % rank - rank for key in ("dim0", "dim1"))
    return SplitTensor({one: other, other: one}.get(part.dim, part.dim), part.block)


def _permuted(call: SplitCall) -> SplitTensor:
    part, order = _only(call), call.node.args[1:]
    order = order[0] if len(order) == 1 and isinstance(order[0], (tuple, list)) else order
    rank = len(order)
    place = [_integer(call, dim) % rank for dim in order].index(part.dim % rank)
    return SplitTensor(place - rank, part.block)


def _unsqueezed(call: SplitCall) -> SplitTensor:
    part, rank = _only(call), len(shape_of(call.node) or ())
    added = _integer(call, call.named("unsqueeze")["dim"]) % rank
    return SplitTensor(part.dim - 1 if added - rank > part.dim - 1 else part.dim, part.block)


def _only(call: SplitCall) -> SplitTensor:
    parts = [part for part in call.parts if isinstance(part, SplitTensor)]
    if len(parts) != 1:
        raise Stop(f"'{call.node.name}' takes several parts")
    return parts[0]


def _beside(operator: str, default: int = 0) -> Callable[[SplitCall], Any]:
    """Return the rule of operators along one dimension, which must not be the split one."""

    def rule(call: SplitCall) -> Any:
        part = _aligned(call)
        rank = len(shape_of(call.node.all_input_nodes[0]) or ())
        dim = call.named(operator).get("dim", default)
        if dim is None or _integer(call, dim) % rank - rank == part.dim:
            raise Stop(f"'{call.node.name}' ({operator}) works along the dimension that is split")
        meta: Any = call.node.meta.get("val")
        return (part,) * len(cast("list[Any]", meta)) if isinstance(meta, (tuple, list)) else part

    return rule


def _product(call: SplitCall) -> SplitTensor:
    """Let products of matrices keep a dimension that is not of the matrices."""
    part = _aligned(call)
    if part.dim > -3:
        raise Stop(f"'{call.node.name}' multiplies along the dimension that is split")
    return part


def _attention(call: SplitCall) -> SplitTensor:
    """Let attention keep heads: each by itself; fewer heads of keys and values have to be split, too."""
    named = call.named("scaled_dot_product_attention")
    parts = [call.value(named[key]) for key in ("query", "key", "value")]
    if not all(isinstance(part, SplitTensor) for part in parts):
        raise Stop(f"'{call.node.name}' joins a part with a whole tensor", is_near=False)
    for part in parts[1:]:
        parts[0].block.take(part.block)
    if {part.dim for part in parts} != {-3}:
        raise Stop(f"'{call.node.name}' is not split by heads")
    mask = shape_of(named.get("attn_mask"))
    if mask is not None and len(mask) > 2 and mask[-3] > 1:
        raise Stop(f"'{call.node.name}' has a mask for each head")
    return parts[0]


def _reshaped(call: SplitCall) -> SplitTensor:
    """Let a tensor keep its dimension where it stays the outermost of what it is split into or joined with."""
    source, part = call.node.args[0], call.value(call.node.args[0])
    before, after = shape_of(source), shape_of(call.node)
    if not isinstance(part, SplitTensor) or before is None or after is None:
        raise Stop(f"'{call.node.name}' reads the size of a part")
    if canonical_name(call.node) == "expand":
        return SplitTensor(part.dim, part.block)
    place = position_after(before, after, len(before) + part.dim)
    if place is None:
        raise Stop(f"'{call.node.name}' takes the dimension that is split apart")
    if after[place] % call.processes and before[part.dim] != after[place]:
        raise Stop(
            f"{after[place]} heads do not divide by {call.processes} processes ('{call.node.name}')", is_uneven=True
        )
    if canonical_name(call.node) != "flatten":
        _check_written_size(call, place, len(after))
    return SplitTensor(place - len(after), part.block)


def _check_written_size(call: SplitCall, place: int, rank: int) -> None:
    """Make sure that a new shape does not say how large the dimension is in one process."""
    sizes: Sequence[Any] = call.node.args[1:]
    if len(sizes) == 1 and not isinstance(sizes[0], int):
        whole = sizes[0]
        sizes = whole if isinstance(whole, (tuple, list)) else call.value(whole)
    if not isinstance(sizes, (tuple, list)) or len(sizes) != rank:
        raise Stop(f"'{call.node.name}' computes its shape")
    size = sizes[place]
    if size != -1 and not isinstance(call.value(size), SplitSize):
        shown = size if isinstance(size, int) else "a size"
        raise Stop(f"'{call.node.name}' writes {shown} for the dimension that is split, where -1 would do")


_RULES: Mapping[str, Callable[[SplitCall], Any]] = {
    "transpose": _transposed,
    "permute": _permuted,
    "unsqueeze": _unsqueezed,
    "matmul": _product,
    "scaled_dot_product_attention": _attention,
    "softmax": _beside("softmax"),
    "cat": _beside("cat"),
    "split": _beside("split"),
    "chunk": _beside("chunk"),
}
