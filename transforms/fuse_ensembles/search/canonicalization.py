"""Operations in one spelling: operands apart from everything else, in-place forms as the functions they act like."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ....layers.vectorized import Slot
from ....operators import function_path, in_place_signature, operator_info, reached
from ....runtime.values import map_leaves
from ..inlining import Operation

__all__ = [
    "canonical_form", "gives_new_value", "may_share_memory", "packable", "same_shape", "same_type",
    "writes_to_fresh_value",
]  # fmt: skip

_LINEAR = ("input", "weight", "bias")


def packable(operation: Operation) -> bool:
    """Say whether a rule exists that computes N of these at once, and no write makes their order matter."""
    if operation.kind == "call_module":
        # Without an example it is not known whether a module gives one tensor or several.
        return operation.operator is not None and (operation.operator != "module" or operation.example is not None)
    info = operator_info(operation.operator)
    if not (info.elementwise or info.vectorizable or operation.operator == "linear") or not _plain(operation):
        return False
    if operation.operator == "where" and len(operation.args) + len(operation.kwargs) != 3:
        return False  # `torch.where(condition)` gives places, not values
    return not operation.mutates or (writes_to_fresh_value(operation) and _keeps_type(operation))


def _plain(operation: Operation) -> bool:
    """Say whether a call keeps to values: it writes into nothing, and its gradients are dense."""
    if operator_info(operation.operator).elementwise or operation.operator in ("linear", "derived"):
        return True
    if operation.operator == "getitem" and isinstance(operation.args[1], Operation):
        return False
    if operation.kwargs.get("out") is not None or any(_passed(operation, *named) for named in _UNPLAIN):
        return False
    return function_path(operation.node) is not None


_UNPLAIN = (("embedding", "max_norm", 3), ("embedding", "sparse", 6), ("max_pool", "return_indices", 6))


def _passed(operation: Operation, operator: str, name: str, position: int) -> bool:
    """Say whether a call of an operator sets one of its options."""
    if operator not in (operation.operator or ""):
        return False
    value = operation.args[position] if len(operation.args) > position else operation.kwargs.get(name)
    return value is not None and value is not False


def writes_to_fresh_value(operation: Operation) -> bool:
    """Say whether an in-place operator overwrites a new value that nothing else reads, as its functional form would."""
    while True:
        target = operation.inputs[0] if operation.inputs else None
        if "out" in operation.kwargs or target is None or len(target.users) != 1:
            return False
        if not target.mutates:
            return bool(operator_info(target.operator).fresh)
        operation = target


def _keeps_type(operation: Operation) -> bool:
    """Say whether the functional form of an in-place operator gives the type that the in-place one is bound to."""
    if operation.operator == "dropout":
        return in_place_signature(operation.target) is not None
    _, *others = operation.inputs
    return operator_info(operation.operator).keeps_type and all(same_type(other, operation) for other in others)


def same_type(one: Operation, other: Operation) -> bool:
    """Say whether two tensors are known to have one dtype."""
    dtypes = [getattr(operation.example, "dtype", None) for operation in (one, other)]
    return dtypes[0] is not None and dtypes[0] == dtypes[1]


@dataclass(frozen=True)
class CanonicalForm:
    """The canonical form of operations of one pattern."""

    arguments: tuple[tuple[Any, ...], dict[str, Any]]  # with slots for operands, without in-place flags
    text: str  # all that `arguments` say
    order: tuple[int, ...]  # for each slot the operand's place among the inputs


def canonical_form(operation: Operation) -> CanonicalForm:
    """Return the canonical form of an operation, worked out once for its pattern."""
    pattern = operation.pattern or operation
    if pattern.canonical is None:
        pattern.canonical = _canonical_form(pattern)
    return pattern.canonical


def _canonical_form(operation: Operation) -> CanonicalForm:
    places: dict[Operation, int] = {}
    for place, read in enumerate(operation.inputs):
        places.setdefault(read, place)
    order: list[int] = []

    def slot(leaf: Any) -> Any:
        if not isinstance(leaf, Operation):
            return leaf
        order.append(places[leaf])
        return Slot(len(order) - 1)

    arguments = map_leaves(slot, _bound(operation), Operation)
    return CanonicalForm(arguments, repr(arguments), tuple(order))


def _bound(operation: Operation) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments in one spelling: operands of a linear layer positional, `inplace` left out."""
    if operation.operator == "linear":
        named = dict(zip(_LINEAR, operation.args, strict=False)) | operation.kwargs
        return tuple(named.get(name) for name in _LINEAR), {}
    signature = in_place_signature(operation.target)
    if signature is None:
        return operation.args, {name: value for name, value in operation.kwargs.items() if name != "inplace"}
    bound = signature.bind(*operation.args, **operation.kwargs)
    bound.apply_defaults()
    del bound.arguments["inplace"]
    first, *rest = bound.arguments.items()
    return (first[1],), dict(rest)


def may_share_memory(operation: Operation, sources: Collection[Operation]) -> bool:
    """Say whether a value may be, or be a view of, one of `sources`."""

    def shared(one: Operation) -> Sequence[Operation]:
        if not operator_info(one.operator).fresh:
            return one.inputs
        return one.inputs[:1] if one.mutates else ()

    return any(one in sources for one in reached([operation], shared))


def gives_new_value(operation: Operation) -> bool:
    """Say whether the result of an operation shares no memory with what it reads."""
    return bool(operator_info(operation.operator).fresh) and not operation.mutates


def same_shape(one: Operation, other: Operation, depth: int = 64) -> bool:
    """Say whether two values of one shape at capture have one at every call: computed alike from the same things."""
    if one is other:
        return True
    alike = one.kind == "get_attr" or (one.kind != "placeholder" and one.target == other.target)
    if one.kind != other.kind or not alike or depth == 0 or one.kind == "call_module":
        return False
    sources = list(zip(one.inputs, other.inputs, strict=False))
    if canonical_form(one).text != canonical_form(other).text and not _pick_alike(one, other):
        return False
    return all(same_shape(*pair, depth - 1) for pair in sources)


def _pick_alike(one: Operation, other: Operation) -> bool:
    """Say whether both take single places of tensors, whichever: then what is left has one shape."""
    if one.operator != "getitem" or other.operator != "getitem":
        return False
    indices: list[Any] = [item.args[1] if isinstance(item.args[1], tuple) else (item.args[1],) for item in (one, other)]
    places: list[Any] = [[type(part) if type(part) is int else part for part in index] for index in indices]
    source = one.args[0]
    return repr(places[0]) == repr(places[1]) and (hasattr(source.example, "dtype") or source.operator == "unbind")
