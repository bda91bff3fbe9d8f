"""How attention is written out, as one pattern."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from ...operators import canonical_name
from ...passes.rewriting import Held, Match, Pattern, either, operation
from ..swap_kernels import tensor, through

__all__ = ["WRITTEN_OUT", "number_of"]


def number_of(value: Any) -> float | None:
    """Return a number, or the one that a node had at capture; None for anything else."""
    value = value.meta.get("val") if isinstance(value, fx.Node) else value
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


@dataclass(frozen=True)
class _Number(Pattern):
    """A number, or a node that computes one."""

    def fits(self, value: Any, found: Match) -> Iterator[Match]:
        if number_of(value) is not None:
            yield from found.holding(str(self.name), value)


@dataclass(frozen=True)
class _Mode(Pattern):
    """Whether weights are dropped: what is found is the attribute that says so, "" for never."""

    def fits(self, value: Any, found: Match) -> Iterator[Match]:
        if value is False:
            yield from found.holding(str(self.name), "")
        elif isinstance(value, Held) or (isinstance(value, fx.Node) and value.op == "get_attr"):
            yield from found.holding(str(self.name), str(value.name if isinstance(value, Held) else value.target))


@dataclass(frozen=True)
class _Square(Pattern):
    """As many rows as columns, all of one number; what it is a part of is the causal mask."""

    number: float = 1.0

    def fits(self, value: Any, found: Match) -> Iterator[Match]:
        if not isinstance(value, fx.Node) or value.target not in (torch.ones, torch.full) or not value.args:
            return
        first = value.args[0]
        size = cast("tuple[Any, ...]", first) if isinstance(first, (tuple, list)) else value.args[:2]
        number = 1.0 if value.target is torch.ones else value.kwargs.get("fill_value", value.args[-1])
        if len(size) == 2 and _are_one(*size) and number == self.number:
            for inner in found.computed_by(None, value):
                yield from inner.holding("causal", True)


@dataclass(frozen=True)
class _Flags(Pattern):
    """Numbers turned into flags by `.bool()`."""

    computed: Pattern | None = None

    def fits(self, value: Any, found: Match) -> Iterator[Match]:
        if isinstance(value, fx.Node) and value.target == "bool" and self.computed is not None:
            for inner in self.computed.fits(value.args[0], found):
                yield from inner.computed_by(self.name, value)


def _are_one(first: Any, second: Any) -> bool:
    """Say whether two sizes are one number, read twice perhaps."""
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node) or first is second:
        return type(first) is type(second) and first == second
    reads = first.target in ("size", getattr, operator.getitem) and first.target == second.target
    return reads and len(first.args) == len(second.args) and all(map(_are_one, first.args, second.args))


@dataclass(frozen=True)
class _Einsum(Pattern):
    """A product of matrices by `torch.einsum`, whose last letters are these, and equal ones before them."""

    letters: tuple[str, str, str] = ("", "", "")
    operands: tuple[Any, Any] = (None, None)

    def fits(self, value: Any, found: Match) -> Iterator[Match]:
        if not isinstance(value, fx.Node) or canonical_name(value) != "einsum" or len(value.args) != 3:
            return
        equation, *given = value.args
        if isinstance(equation, str) and self._is_meant(equation.replace(" ", "")):
            for first in self.operands[0].fits(given[0], found):
                for both in self.operands[1].fits(given[1], first):
                    yield from both.computed_by(None, value)

    def _is_meant(self, equation: str) -> bool:
        terms = equation.replace("->", ",").split(",")
        if len(terms) != 3 or len({term[:-2] for term in terms}) > 1 or len(set(terms[0])) < len(terms[0]):
            return False
        last = [term[-2:] for term in terms]
        meant = dict(zip("".join(self.letters), "".join(last), strict=False))
        return len(set(meant.values())) == 3 and last == [
            "".join(map(meant.__getitem__, each)) for each in self.letters
        ]


def _computed(operator: str, *operands: Any, **arguments: Any) -> Pattern:
    return through(operation(operator, *operands, **arguments))


def _product(first: Any, second: Any) -> Pattern:
    return either(_computed("matmul", first, second), _computed("bmm", first, second))


def _written_out() -> Pattern:
    q, keys, number = tensor("q"), tensor("keys"), _Number("number")
    by_einsum = through(_Einsum(None, ("id", "jd", "ij"), (q, tensor("k"))))
    product = either(_product(q, keys), by_einsum)
    scaled = either(_computed("mul", product, _Number("scale")), _computed("div", product, _Number("divisor")), product)
    above = operation("triu", _Square(), diagonal=1)
    hidden = either(
        above,
        _Flags(computed=above),
        operation("eq", operation("tril", _Square(), diagonal=0), 0),
        operation("logical_not", operation("tril", _Square(), diagonal=0)),
        operation("bitwise_not", operation("tril", _Square(), diagonal=0)),
    )
    masked = either(
        _computed("masked_fill", scaled, hidden, number),
        _computed("add", scaled, operation("triu", _Square(number=float("-inf")), diagonal=1)),
        _computed("masked_fill", scaled, tensor("hidden"), number),
        _computed("where", tensor("shown"), scaled, number),
        _computed("add", scaled, tensor("mask")),
        _computed("baddbmm", tensor("mask"), q, keys, beta=_Number("beta"), alpha=_Number("scale")),
        scaled,
    )
    weights = _computed("softmax", masked, dim=_Number("dim"))
    used = either(_computed("dropout", weights, p=_Number("p"), training=_Mode("mode")), weights)
    by_einsum = through(_Einsum(None, ("ij", "jd", "id"), (used, tensor("v"))))
    return either(_product(used, tensor("v")), by_einsum)


WRITTEN_OUT = _written_out()
"""Its operands are `q`, `keys` (transposed) or `k`, `v`, and `mask` (added) or the flags `hidden` or `shown`."""
