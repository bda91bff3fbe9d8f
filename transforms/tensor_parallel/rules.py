"""What a value is while a model is split over processes, and how operators hand on the dimension along which."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, cast

from torch import fx

from ...operators import canonical_name, info_of, normalized_arguments
from ...passes.rewriting import shape_of
from .axes import SplitAxis, SplitSize, SplitTensor, Stop, joined, parts_in, settled, sizes_of

__all__ = ["SplitCall", "result_of", "stop_at_one_head"]


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
    numbers: list[list[Any]] = field(default_factory=list[list[Any]])  # that are others there: paths, each with its own

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
            if isinstance(value, tuple) and list(parts_in(value)):
                raise Stop(f"'{self.node.name}' takes several parts as one argument")
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
    if sizes and name not in ("split", "chunk"):
        raise Stop(f"'{call.node.name}' reads the size of a part")
    rule = _RULES.get(name or "")
    if rule is not None:
        return rule(call)
    if info_of(call.node).elementwise or name in _ALONGSIDE or name in _CASTS:
        return _aligned(call)
    raise Stop(f"'{call.node.name}' ({name or call.node.target}) needs the whole of it", is_near=name is not None)


def stop_at_one_head(call: SplitCall, heads: Sequence[str]) -> Stop | None:
    """Return the stop that names one head, where a product is not computed by parts for that.

    `heads`: for each operand the node where it became one head, or ''.
    """
    named = next(filter(None, heads), None)
    if named is None:
        return None
    is_product = len(heads) > 1 and canonical_name(call.node) in ("matmul", "scaled_dot_product_attention")
    is_all = all(heads)  # else there are more queries than keys
    what = "1 head does" if is_all else "1 head of keys and values does"
    return Stop(f"{what} not divide by {call.processes} processes ('{named}')", is_uneven=is_all and is_product)


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
    """Let a tensor keep its split dimension where an index takes all of it, or a part of the outputs of layers."""
    picks: list[Any] = list(cast("tuple[Any, ...]", index)) if isinstance(index, tuple) else [index]
    rank = len(shape_of(call.node.args[0]) or ())
    known = (int, slice, type(None), type(Ellipsis), *(() if any(isinstance(p, int) for p in picks) else (list,)))
    if sum(isinstance(pick, list) for pick in picks) > 1 or not all(
        isinstance(pick, known) and not isinstance(pick, bool) for pick in picks
    ):
        raise Stop(f"'{call.node.name}' picks by what is computed")
    places: list[int | None] = list(range(len(picks)))  # of each pick in the index
    taken = sum(pick is not None and pick is not Ellipsis for pick in picks)
    at = picks.index(Ellipsis) if Ellipsis in picks else len(picks)
    picks[at : at + 1], places[at : at + 1] = [slice(None)] * (rank - taken), [None] * (rank - taken)
    dim, kept, behind = 0, part, 0
    for place, pick in reversed(list(zip(places, picks, strict=True))):
        dim -= pick is not None
        if dim == part.dim and pick is not None:
            if not isinstance(pick, slice):
                raise Stop(f"'{call.node.name}' picks from the dimension that is split")
            kept = _section(call, part, cast("Any", pick), place, is_only=not isinstance(index, tuple))
            continue
        if dim > part.dim:
            behind += (pick is None) - isinstance(pick, int)
        if list(parts_in(call.value(pick))):
            raise Stop(f"'{call.node.name}' reads the size of a part")
    return replace(kept, dim=part.dim - behind)


def _section(call: SplitCall, part: SplitTensor, pick: slice, place: int | None, *, is_only: bool) -> SplitTensor:
    """Return the part of a section of a layer's outputs, which each process has a share of."""
    if pick == slice(None):
        return part
    bounds = [_number(call, bound) for bound in (pick.start, pick.stop)]
    if part.axis is None or pick.step not in (None, 1) or place is None or "?" in bounds:
        raise Stop(f"'{call.node.name}' picks from the dimension that is split")
    size = part.axis.whole.size
    start, end, _ = slice(*bounds).indices(size)
    part.axis.read(start, end)
    path = ["args", 1] if is_only else ["args", 1, place]
    for name, bound in (("start", pick.start), ("stop", pick.stop)):
        if isinstance(bound, int) and bound:
            call.numbers.append([*path, name, _share(call, bound)])
    return replace(part, axis=None)


def _number(call: SplitCall, bound: Any) -> Any:
    """Return a number that is written, or that is a share where it is computed; "?" for any other."""
    if isinstance(bound, fx.Node):
        return bound.meta.get("val", "?") if isinstance(call.value(bound), SplitSize) else "?"
    return bound


def _share(call: SplitCall, number: int) -> int:
    if number % call.processes:
        raise Stop(f"'{call.node.name}' divides at {number}, no multiple of {call.processes} processes", is_uneven=True)
    return number // call.processes


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
    return joined(first, others)


def _transposed(call: SplitCall) -> SplitTensor:
    named, part = call.named("transpose"), _only(call)
    rank = len(shape_of(call.node) or ())
    one, other = (_integer(call, named[key]) % rank - rank for key in ("dim0", "dim1"))
    return replace(part, dim={one: other, other: one}.get(part.dim, part.dim))


def _permuted(call: SplitCall) -> SplitTensor:
    part, order = _only(call), call.node.args[1:]
    order = order[0] if len(order) == 1 and isinstance(order[0], (tuple, list)) else order
    rank = len(order)
    place = [_integer(call, dim) % rank for dim in order].index(part.dim % rank)
    return replace(part, dim=place - rank)


def _unsqueezed(call: SplitCall) -> SplitTensor:
    part, rank = _only(call), len(shape_of(call.node) or ())
    added = _integer(call, call.named("unsqueeze")["dim"]) % rank
    return replace(part, dim=part.dim - 1 if added - rank > part.dim - 1 else part.dim)


def _unbound(call: SplitCall) -> Any:
    """Let the slices along another dimension keep the one that is split."""
    part, source = _only(call), shape_of(call.node.args[0]) or ()
    dim = _integer(call, call.named("unbind").get("dim", 0)) % len(source) - len(source)
    if dim == part.dim:
        raise Stop(f"'{call.node.name}' (unbind) works along the dimension that is split")
    return (replace(part, dim=part.dim + (dim > part.dim)),) * source[dim]


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
        meta: Any = call.node.meta.get("val")
        if dim is None or _integer(call, dim) % rank - rank == part.dim:
            if operator not in ("split", "chunk") or part.axis is None:
                raise Stop(f"'{call.node.name}' ({operator}) works along the dimension that is split")
            return _divided(call, part, [each.shape[part.dim] for each in meta])
        return (part,) * len(cast("list[Any]", meta)) if isinstance(meta, (tuple, list)) else part

    return rule


def _divided(call: SplitCall, part: SplitTensor, sizes: Sequence[int]) -> Any:
    """Return the parts of sections that a layer's outputs are divided into."""
    axis = cast("SplitAxis", part.axis)
    for size, end in zip(sizes, accumulate(sizes), strict=True):
        axis.read(end - size, end)
    if canonical_name(call.node) == "chunk":
        if len(set(sizes)) > 1:
            raise Stop(f"'{call.node.name}' divides into unequal chunks")
    else:
        name = next((n for n in ("split_size_or_sections", "split_size", "split_sizes") if n in call.node.kwargs), None)
        path = ["args", 1] if name is None else ["kwargs", name]
        given: Any = call.node.args[1] if name is None else call.node.kwargs[name]
        _write_shares(call, path, given)
    return (replace(part, axis=None),) * len(sizes)


def _write_shares(call: SplitCall, path: list[Any], given: Any) -> None:
    """Let a number, or each in a list, be its share; those that are computed from sizes of parts are that already."""
    if isinstance(given, (tuple, list)):
        for place, each in enumerate(cast("list[Any]", given)):
            _write_shares(call, [*path, place], each)
    elif isinstance(given, int):
        call.numbers.append([*path, _share(call, given)])
    elif not isinstance(call.value(given), SplitSize):
        raise Stop(f"'{call.node.name}' computes where it divides")


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
    part = joined(parts[0], parts[1:])
    if {each.dim for each in parts} != {-3}:
        raise Stop(f"'{call.node.name}' is not split by heads")
    mask = shape_of(named.get("attn_mask"))
    if mask is not None and len(mask) > 2 and mask[-3] > 1:
        raise Stop(f"'{call.node.name}' has a mask for each head")
    return part


def _reshaped(call: SplitCall) -> SplitTensor:
    """Let a tensor keep its dimension where it stays the outermost of what it is split into or joined with.
    The outer dimension may count sections of a layer's outputs instead, as queries, keys and values are.
    """
    source, part = call.node.args[0], call.value(call.node.args[0])
    before, after = shape_of(source), shape_of(call.node)
    if not isinstance(part, SplitTensor) or before is None or after is None:
        raise Stop(f"'{call.node.name}' reads the size of a part")
    if canonical_name(call.node) == "expand":
        _write_size(call, len(after) + part.dim, len(after))
        return part
    place = position_after(before, after, len(before) + part.dim)
    if place is None:
        raise Stop(f"'{call.node.name}' takes the dimension that is split apart")
    size = before[part.dim]
    _note_one_head(call, part, len(before), after, place)
    if after[place] != size:
        counts_sections = part.axis is not None and _counts_sections(after[place:], size, call.processes)
        is_share = after[place] % call.processes == 0
        if part.axis is not None and counts_sections and is_share:
            part.axis.whole.has_choice = True
        if part.axis is not None and counts_sections and (not is_share or part.axis.whole.prefers_sections):
            count = after[place]
            for number in range(count):
                part.axis.read(number * size // count, (number + 1) * size // count)
            part, place = replace(part, axis=None), place + 1
        elif not is_share:
            heads = f"{after[place]} heads do not divide by {call.processes} processes"
            raise Stop(f"{heads} ('{call.node.name}')", is_uneven=True)
        else:
            part = settled(part)
    if canonical_name(call.node) != "flatten":
        _write_size(call, place, len(after))
    return replace(part, dim=place - len(after))


def _note_one_head(call: SplitCall, part: SplitTensor, rank: int, after: tuple[int, ...], place: int) -> None:
    """Note where outputs of a layer get a dimension that counts one head."""
    if rank < len(after) == 4 and place == 3 and after[2] == 1:
        part.block.whole.one_head = part.block.whole.one_head or call.node.name


def _counts_sections(sizes: Sequence[int], size: int, processes: int) -> bool:
    """Say whether a dimension may have become the number of sections, that of heads, and the size of each."""
    return len(sizes) > 2 and math.prod(sizes[:3]) <= size and sizes[1] % processes == 0 and min(sizes[1:3]) > 1


def _write_size(call: SplitCall, place: int, rank: int) -> None:
    """Make sure that a new shape says of a part how large it is, where it says how large the dimension is."""
    path, sizes, offset = _written_sizes(call)
    if isinstance(sizes, fx.Node):
        path, sizes = [], call.value(sizes)
    if not isinstance(sizes, (tuple, list)):
        raise Stop(f"'{call.node.name}' computes its shape")
    sizes = cast("Sequence[Any]", sizes)
    if len(sizes) + offset > rank:
        raise Stop(f"'{call.node.name}' computes its shape")
    if not offset <= place < offset + len(sizes):
        return
    size = sizes[place - offset]
    if size == -1 or isinstance(call.value(size), SplitSize):
        return
    number = size.meta.get("val") if isinstance(size, fx.Node) else size  # it is as constant as the weights are
    if isinstance(number, int) and path:
        call.numbers.append([*path[:-1], path[-1] + place - offset, _share(call, number)])
    else:
        shown = size if isinstance(size, int) else "a size"
        raise Stop(f"'{call.node.name}' computes a shape with {shown} for the dimension that is split")


def _written_sizes(call: SplitCall) -> tuple[list[Any], Any, int]:
    """Return the path of the first size that a call writes, all of them, and of which dimension the first is."""
    args, kwargs = call.node.args, call.node.kwargs
    first, offset = 1, 0
    if canonical_name(call.node) == "unflatten":
        rank = len(shape_of(args[0]) or ())
        first, offset = 2, _integer(call, kwargs["dim"] if "dim" in kwargs else args[1]) % rank
    name = next((each for each in ("shape", "size", "sizes") if each in kwargs), None)
    if name is not None:
        return ["kwargs", name, 0], kwargs[name], offset
    sizes: Any = args[first:]
    if len(sizes) == 1 and not isinstance(sizes[0], int):
        is_one = isinstance(sizes[0], fx.Node) and isinstance(sizes[0].meta.get("val"), int)
        return ["args", first, 0], sizes if is_one else sizes[0], offset
    return ["args", first], sizes, offset


_RULES: Mapping[str, Callable[[SplitCall], Any]] = {
    "transpose": _transposed,
    "permute": _permuted,
    "unsqueeze": _unsqueezed,
    "unbind": _unbound,
    "matmul": _product,
    "scaled_dot_product_attention": _attention,
    "softmax": _beside("softmax"),
    "cat": _beside("cat"),
    "split": _beside("split"),
    "chunk": _beside("chunk"),
}
