"""A module's dataflow with its children inlined, as plain records that know the nodes they came from."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self, TypeVar, cast

from torch import fx, nn

from ....compat import modules_by_name
from ....runtime.guards import Guard
from ....tracing.program import Program

__all__ = [
    "InlinedGraph", "Known", "Operation", "is_chain", "module_operator", "module_signature", "operations_in",
    "state_names",
]  # fmt: skip


@dataclass(eq=False, slots=True)
class Operation:
    """One operator, module call, attribute read, input or output of an expanded dataflow."""

    name: str  # unique and stable: the owner node's name, then those inside the children, joined by "/"
    kind: str
    target: Any  # the fx target; of a call_module or get_attr, qualified from the owner module
    args: tuple[Any, ...]  # like the node's, with operations in the place of nodes
    kwargs: dict[str, Any]
    operator: str | None  # canonical operator name, or None
    node: fx.Node  # the node it stands for; of an expanded child, the child's own node
    call: str  # name of the owner graph's node that it is part of
    index: int
    inputs: Sequence[Operation] = ()  # the operations in these, each as often as it is read
    level: int = 0  # length of the longest path from an input
    users: list[Operation] = field(default_factory=lambda: [])  # noqa: PIE807  `list[...]()` is slow
    example: Any = None  # what is known of its value: shape, dtype, device of a tensor; None where nothing is
    mutates: bool = False  # whether it writes into one of its operands
    pattern: Operation | None = None  # what stands for it in all modules of its kind
    canonical: Any = None  # of a pattern, its canonical form once that was asked for

    def __repr__(self) -> str:
        return f"<{self.name}: {self.operator or self.target}>"


@dataclass(frozen=True)
class InlinedGraph:
    """The operations of one owner graph in execution order."""

    operations: tuple[Operation, ...]  # all of them, inputs and the output included
    results: Mapping[str, Any]  # name of each owner node -> its value: an operation, or a structure of them
    closed: Mapping[str, str]  # name of each module call that must stay one -> why
    conditional: Mapping[str, str]  # module call -> under what alone its graph holds
    modules: Mapping[str, Sequence[str]]  # owner node -> the modules inlined there, qualified from the owner
    assumed: Mapping[str, Sequence[Guard]]  # owner node -> modes taken for granted, as guards of the owner
    may_restart: bool  # whether the owner may run the original forward after its graph has begun: it writes nothing

    @cached_property
    def writes(self) -> Sequence[Operation]:
        return [operation for operation in self.operations if operation.mutates]

    @cached_property
    def operands(self) -> Sequence[Sequence[int] | None]:
        """Return the indices of what each operation reads, if its arguments are that and nothing else; else None."""
        return [
            [operand.index for operand in o.inputs]
            if len(o.args) == len(o.inputs) and all(map(operator.is_, o.args, o.inputs))
            else None
            for o in self.operations
        ]


_K = TypeVar("_K")
_V = TypeVar("_V")


class Known(dict[_K, _V]):
    """What was worked out for a program, until it changes."""

    @classmethod
    def compute(cls, program: Program) -> Self:
        return cls()


def is_chain(graph: fx.Graph) -> bool:
    """Say whether each operation reads the one before it: then no two are independent, however they are opened."""
    previous: fx.Node | None = None
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if previous is not None and previous not in node.all_input_nodes:
            return False
        previous = node
    return True


def operations_in(*arguments: Any) -> tuple[Operation, ...]:
    """Return the operations in arguments, each as often as it is there."""
    found: list[Operation] = []
    for argument in arguments:
        if isinstance(argument, Operation):
            found.append(argument)
        elif isinstance(argument, (tuple, list)):
            found += operations_in(*cast("list[Any]", argument))
        elif isinstance(argument, dict):
            found += operations_in(*cast("dict[Any, Any]", argument).values())
        elif isinstance(argument, slice):
            found += operations_in(argument.start, argument.stop, argument.step)
    return tuple(found)


_OPERATORS: dict[type[nn.Module], str] = {
    nn.BatchNorm1d: "batch_norm",
    nn.BatchNorm2d: "batch_norm",
    nn.BatchNorm3d: "batch_norm",
    nn.InstanceNorm1d: "module",
    nn.InstanceNorm2d: "module",
    nn.InstanceNorm3d: "module",
    nn.LSTM: "recurrent",
    nn.GRU: "recurrent",
    nn.RNN: "recurrent",
    nn.MultiheadAttention: "module",
    nn.TransformerEncoderLayer: "module",
    nn.TransformerDecoderLayer: "module",
}


def module_operator(module: nn.Module) -> str | None:
    """Return what a `torch.nn` leaf computes: `batch_norm`, `recurrent`, any `module` under vmap; None if unknown."""
    operator = _OPERATORS.get(type(module))
    if operator == "batch_norm" and getattr(module, "momentum", None) is None:
        return None  # the cumulative average divides by a tensor's value
    if operator == "recurrent" and getattr(module, "proj_size", 0):
        return None
    return operator


def state_names(module: nn.Module) -> Iterator[str]:
    """Yield what the module's forward reads of itself: parameters, buffers and training flags, in a fixed order."""
    for path, child in modules_by_name(module).items():
        dotted = f"{path}." if path else ""
        for register in ("_parameters", "_buffers"):
            yield from (dotted + name for name, tensor in vars(child)[register].items() if tensor is not None)
        yield f"{dotted}training"


def module_signature(module: nn.Module) -> tuple[Any, ...]:
    """Return what has to be equal for two modules to compute the same function of inputs and state."""
    return tuple(
        (path, type(child), *((n, repr(v)) for n, v in sorted(vars(child).items()) if _decides(n, v)))
        for path, child in modules_by_name(module).items()
    )


def _decides(name: str, value: object) -> bool:
    if name.startswith("_") or name == "training":
        return False
    return callable(value) or isinstance(value, (bool, int, float, str, tuple, list, type(None)))
