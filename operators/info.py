"""What is known of one operator, and what the schema of a custom one says by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import nn

from ..compat import operator_name, overloads_of
from ..compat.operators import written_arguments

__all__ = ["UNKNOWN", "Chance", "OpInfo", "info_of_schema"]

T = TypeVar("T")


class Chance(NamedTuple):
    """How a call is told with which probability it draws, or whether it does: at 0 (False) it draws nothing."""

    name: str
    position: int
    default: float | bool


@dataclass(frozen=True)
class OpInfo:
    """What passes and tracing know of one operator.

    `pure`, `random` and `fresh` may be left out for an operator of `torch.ops`: its schema and tags say them. For any
    other function None counts as the worst case.

    Attributes:
        name: canonical; of an operator of `torch.ops` outside of aten its qualified name (`"acme::swish"`).
        aliases: further names in torch's namespaces and of methods.
        functions: further functions that compute it.
        modules: classes of modules whose forward computes it, with the module's settings and parameters.
        pure: it only computes its value; its in-place spelling also writes that into the first operand.
        random: it may draw random numbers.
        chances: the arguments that say with which probability it draws, and whether it does.
        counts: it writes running statistics in training.
        fresh: its result never lies in the memory of an operand.
        commutative: its first two operands may change places.
        elementwise: each element of its (broadcast) result is computed from one element of each operand.
        vectorizable: `torch.func.vmap` computes it for several members at once.
        keeps_rank: its result has as many dimensions as its first operand.
        keeps_type: with operands of one dtype, its in-place spelling gives what the other one gives.
        has_dimensions: its result has one dimension at the least, whatever it reads.
        differentiable: gradients may flow through it.
        shape: what the shape of its result depends on: all operands' shapes, the first operand's, or data.
        alone: the operator that it is where it is given one operand alone; "": the same.
        reference: takes the same arguments and computes it in float64, where the operator has no kernel for that.
        order: how its result lies in memory, whatever order operands lie in: `kept`, perhaps as they do, or `anew`;
            None: it may need them in the order of their dimensions, unless it is elementwise.
        notes: what single passes know of it, each a value of the pass's own type.
    """

    name: str
    aliases: tuple[str, ...] = ()
    functions: tuple[Callable[..., Any], ...] = ()
    modules: tuple[type[nn.Module], ...] = ()
    pure: bool | None = None
    random: bool | None = None
    chances: tuple[Chance, ...] = ()
    counts: bool = False
    fresh: bool | None = None
    commutative: bool = False
    elementwise: bool = False
    vectorizable: bool = False
    keeps_rank: bool = False
    keeps_type: bool = False
    has_dimensions: bool = False
    differentiable: bool = True
    shape: Literal["operands", "first", "data"] = "operands"
    alone: str = ""
    reference: Callable[..., Any] | None = None
    order: Literal["kept", "anew"] | None = None
    notes: tuple[object, ...] = ()

    @property
    def memory_order(self) -> Literal["kept", "anew"] | None:
        """Return `order`, which is `kept` of what works element by element."""
        return self.order or ("kept" if self.elementwise else None)

    def note(self, kind: type[T]) -> T | None:
        """Return what a pass knows of the operator, by the type that the pass keeps it in."""
        return next((note for note in self.notes if isinstance(note, kind)), None)

    def completed(self) -> OpInfo:
        """Return the same with nothing left out: filled in from the schema of an operator of `torch.ops`."""
        operator = registered_operator(self.name)
        said = WORST if operator is None else info_of_schema(operator)
        missing = {key: getattr(said, key) for key in ("pure", "random", "fresh") if getattr(self, key) is None}
        return dataclasses.replace(self, **missing)


UNKNOWN = OpInfo("")
"""Nothing is known."""
WORST = OpInfo("", pure=False, random=True, fresh=False)


def registered_operator(name: str) -> Any:
    """Return what `torch.ops` has under a qualified name ("acme::swish"); None where there is nothing."""
    namespace, separator, rest = name.partition("::")
    if not separator:
        return None
    found: Any = getattr(torch.ops, namespace)
    for part in rest.split("."):
        found = getattr(found, part, None)
    return found


@cache
def info_of_schema(operator: Any) -> OpInfo:
    """Return what the schema and the tags of an operator of `torch.ops`, with all its overloads, say of it.
    Pure is what writes into no argument and returns something, fresh what returns no alias of an argument.
    """
    every = overloads_of(operator)
    # Calls of an overload that writes into `out` are known by that argument.
    overloads = [each for each in every if not any(argument.is_out for argument in each[1].arguments)] or every
    returns = [[value.alias_info for value in schema.returns] for _, schema in overloads]
    return OpInfo(
        operator_name(operator) or "",
        pure=all(returns) and not any(written_arguments(overload) for overload, _ in overloads),
        random=any(torch.Tag.nondeterministic_seeded in overload.tags for overload, _ in overloads),
        fresh=not any(alias is not None for aliases in returns for alias in aliases),
    )
