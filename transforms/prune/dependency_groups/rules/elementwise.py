"""Operators that work element by element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor

from ..dimension_tracker import DimensionTracker
from ..labels import Block, Labels

__all__ = ["ELEMENTWISE", "merged", "results_of"]

_Zero = Callable[[Sequence[bool | None]], bool]

_KEEPING = (
    "relu relu6 gelu silu tanh sin tan asin atan sinh asinh atanh sqrt abs neg negative positive leaky_relu elu "
    "hardswish mish celu selu sign sgn erf expm1 log1p clone detach alias _to_copy lift_fresh lift contiguous square "
    "round floor ceil trunc frac nan_to_num softshrink hardshrink rrelu_with_noise prelu _prelu_kernel erfinv deg2rad "
    "native_dropout dropout feature_dropout alpha_dropout zeros_like empty_like real imag isnan isinf _conj to zero "
    "rad2deg"
)  # fmt: skip
_CHANGING = (
    "sigmoid exp cos log log2 log10 reciprocal rsqrt softplus hardsigmoid logical_not bitwise_not log_sigmoid "
    "log_sigmoid_forward erfc cosh acos ones_like full_like fill rand_like randn_like bernoulli threshold exp2 digamma "
    "lgamma uniform normal exponential geometric random isfinite logit i0 randint_like"
)  # fmt: skip
_ALL = "add sub rsub maximum minimum copy hypot ne fmax fmin bitwise_or bitwise_xor logical_or logical_xor gt lt"
_ANY = "mul bitwise_and logical_and"
_FIRST = "div true_divide floor_divide fmod remainder pow"
_NEVER = "eq ge le atan2 xlogy logaddexp nextafter float_power polar complex isclose"


def results_of(out: Any) -> Sequence[Any]:
    """Return what an operator gives as a sequence."""
    return cast("Sequence[Any]", out) if isinstance(out, (tuple, list)) else (out,)


def merged(tracker: DimensionTracker, operands: Sequence[Labels], shape: Sequence[int], zero: _Zero) -> Labels:
    """Return the labels of what operands give element by element; what meets must go together."""
    blocks: list[Block] = []
    shifted = [_shifted(labels, len(shape)) for labels in operands]
    for dims in _overlapping(shifted):
        found = _merged(tracker, shifted, dims, zero)
        if found is not None:
            blocks.append(found)
    return Labels(tuple(shape), tuple(blocks))


def _shifted(labels: Labels, rank: int) -> Labels:
    shift = rank - len(labels.shape)
    if not shift:
        return labels
    blocks = tuple(block.at([dim + shift for dim in block.dims]) for block in labels.blocks)
    return Labels((1,) * shift + labels.shape, blocks)


def _overlapping(operands: Sequence[Labels]) -> list[tuple[int, ...]]:
    """Return the sets of dimensions that blocks connect."""
    found: list[set[int]] = []
    for block in (block for labels in operands for block in labels.blocks):
        touching = [dims for dims in found if dims & set(block.dims)]
        found = [dims for dims in found if dims not in touching] + [set(block.dims).union(*touching)]
    return [tuple(sorted(dims)) for dims in found]


def _merged(tracker: DimensionTracker, operands: Sequence[Labels], dims: tuple[int, ...], zero: _Zero) -> Block | None:
    """Return the block of a result over dimensions that blocks of the operands connect."""
    present = [labels for labels in operands if any(labels.shape[dim] > 1 for dim in dims)]
    blocks = [labels.of(dims[0]) for labels in operands]
    if all(_covers(labels.of(dims[0]), dims) for labels in present):
        given = [block for block in blocks if block is not None]
        for other in given[1:]:
            tracker.atoms.join(given[0].atoms, other.atoms, tracker.why)
        return Block(dims, given[0].atoms, zero([None if block is None else block.zero for block in blocks]))
    cut = _cut(present, dims)
    for labels in present:
        tracker.keep_whole(labels, [dim for dim in dims if dim != cut])
    if cut is None:
        return None
    lines = [labels.line(cut, tracker.atoms, tracker.why) for labels in operands]
    if any(len(block.dims) > 1 for block in blocks if block is not None):
        tracker.heads += [line.atoms for line in lines if line is not None]
    given = [line for line in lines if line is not None]
    for other in given[1:]:
        tracker.atoms.join(given[0].atoms, other.atoms, tracker.why)
    return Block((cut,), given[0].atoms, zero([None if line is None else line.zero for line in lines]))


def _covers(block: Block | None, dims: tuple[int, ...]) -> bool:
    return block is not None and block.dims == dims


def _cut(operands: Sequence[Labels], dims: tuple[int, ...]) -> int | None:
    """Return the one of the dimensions that may be cut: none of the operands has it whole."""
    able = [
        dim for dim in dims if all(labels.shape[dim] == 1 or labels.of(dim) is not None for labels in operands)
    ]  # fmt: skip
    everywhere = [dim for dim in able if all(labels.of(dim) is not None for labels in operands)]
    return next(iter(everywhere or able), None)


def _all(flags: Sequence[bool | None]) -> bool:
    return all(flag is True for flag in flags)


def _any(flags: Sequence[bool | None]) -> bool:
    return any(flag is True for flag in flags)


def _first(flags: Sequence[bool | None]) -> bool:
    return flags[0] is True


def _never(flags: Sequence[bool | None]) -> bool:  # noqa: ARG001  one of several
    return False


def _sum_and_product(flags: Sequence[bool | None]) -> bool:
    return flags[0] is True and (flags[1] is True or flags[2] is True)


def _rule(zero: _Zero, *, scalars: bool = False) -> Callable[..., Any]:
    def elementwise(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:  # noqa: ARG001
        results = results_of(out)
        operands = [value for value in args if isinstance(value, Tensor)]
        plain = [value for value in args[:2] if not isinstance(value, Tensor)] if scalars else []
        empty = [Labels(()) for value in plain if value != 0]
        labels = merged(tracker, [*map(tracker.get, operands), *empty], results[0].shape, zero)
        return [labels] * len(results)

    return elementwise


def _clamp(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Labels:
    """Clamping keeps a zero that is within the limits."""
    low, high = (*args, None, None)[1:3]
    low, high = kwargs.get("min", low), kwargs.get("max", high)
    tensors = [value for value in (args[0], low, high) if isinstance(value, Tensor)]
    keeps = len(tensors) == 1 and (low is None or low <= 0) and (high is None or high >= 0)
    return merged(tracker, [tracker.get(value) for value in tensors], out.shape, _first if keeps else _never)


def _where(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Labels:  # noqa: ARG001
    """What is chosen is zero where both alternatives are."""
    operands = [tracker.get(value) if isinstance(value, Tensor) else Labels(()) for value in args]
    given = [operand for operand, value in zip(operands, args, strict=True) if isinstance(value, Tensor) or value != 0]
    return merged(tracker, given, out.shape, lambda flags: all(flag is True for flag in flags[1:]))


def _masked_fill(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Labels:  # noqa: ARG001
    filled = args[2]
    keeps = not isinstance(filled, Tensor) and filled == 0
    return merged(tracker, [tracker.get(value) for value in args[:2]], out.shape, _first if keeps else _never)


def _fused(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Labels:  # noqa: ARG001
    """Add a product or quotient to a value."""
    return merged(tracker, [tracker.get(value) for value in args[:3]], out.shape, _sum_and_product)


ELEMENTWISE: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_KEEPING.split(), _rule(_first)),
    **dict.fromkeys(_CHANGING.split(), _rule(_never)),
    **dict.fromkeys(_ALL.split(), _rule(_all, scalars=True)),
    **dict.fromkeys(_ANY.split(), _rule(_any)),
    **dict.fromkeys(_FIRST.split(), _rule(_first)),
    **dict.fromkeys(_NEVER.split(), _rule(_never)),
    **dict.fromkeys(("clamp", "clip", "clamp_min", "clamp_max", "hardtanh"), _clamp),
    "where": _where,
    "masked_fill": _masked_fill,
    "addcmul": _fused,
    "addcdiv": _fused,
    "lerp": _rule(lambda flags: flags[0] is True and flags[1] is True),
}
