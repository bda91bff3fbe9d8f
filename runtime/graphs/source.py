"""Python source for captured forwards: guards first, then each graph as straight-line code."""

from __future__ import annotations

import cmath
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from ...compat import in_place_format, operator_format
from ..guards import (
    Attribute,
    GuardMiss,
    Source,
    SourceWriter,
    Tally,
    attribute_at,
    attribute_text,
    children_of,
    fits,
    module_at,
    require,
)
from ..values import (
    ANNOUNCES,
    Absent,
    FunctionCall,
    LeafCall,
    Signature,
    announce,
    announce_changes,
    generators_now,
    given,
    is_namedtuple,
    take_back,
)
from .capture import Specialization

__all__ = ["Code", "generate"]

_ATOMS = (bool, int, str, bytes, type(None), type(...))
_PLAIN_NAMES: Mapping[str, Any] = {
    **{
        kind.__name__: kind
        for kind in (Absent, torch.Tensor, bool, int, float, str, bytes, dict, list, tuple, type, slice)
    },
    **{function.__name__: function for function in (getattr, hasattr, isinstance, len)},
}
"""What code calls by its own name, unless an argument has it."""
_REGISTRIES = {"parameter": "_parameters", "buffer": "_buffers"}
"""Where a module keeps what a node is known to read."""


@dataclass(frozen=True)
class Code:
    """Hold the text of a function called `forward`, and the objects that it refers to by name."""

    text: str
    names: dict[str, Any]


def generate(
    signature: Signature, specializations: Sequence[Specialization], *, restarts: bool = True, refuse: bool = False
) -> Code:
    """Write the forward that runs the first of `specializations` that fits the call, and the module's own otherwise.
    Unless it `restarts` with that where a check fails, its caller does; `refuse` raises an error instead.
    """
    names = _Names({p.name for p in signature.parameters}, specializations)
    forwarding = signature.forwarding(names.name(given) if signature.decorated else "")
    refuses, missed = "refuse" if refuse else "", names.fresh("missed")
    miss = [f"return self._fxopt_{refuses or 'miss'}({forwarding})"]
    restart = f"return self._fxopt_{refuses and 'refuse_'}restart({', '.join(filter(None, (missed, forwarding)))})"
    lines: list[str] = []
    if restarts and any(_checks_something(specialization) for specialization in specializations[:-1]):
        lines.append(f"{missed} = None")
        miss.insert(0, f"if {missed} is not None: {restart}")
    for number, specialization in enumerate(specializations, 1):
        is_last = number == len(specializations)
        body_of = _Body(specialization, names)
        asked, condition = fits(specialization.guards, body_of.write)  # what it names, the body may use
        body = body_of.lines()
        if restarts and _checks_something(specialization):
            told = "" if any(map(_checks_data, specializations[number:])) else f"self._fxopt_passed({missed})"
            body = _restarting(specialization, names, body, missed, restart if is_last else told)
        lines += asked
        if not is_last:
            lines += [f"if {condition or True}:", *_indented(body)]
        else:
            lines += [*([f"if not ({condition}):", *_indented(miss)] if condition else []), *body]
    text = "\n".join([f"def forward({signature.header}):", *_indented(lines if specializations else miss)])
    return Code(f"{text}\n", names.objects)


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for line in lines]


@dataclass
class _Names:
    """Hand out names for the objects that code refers to; none hides an argument or a node."""

    arguments: set[str]
    objects: dict[str, Any]
    _used: set[str]
    _of: dict[int, str]

    def __init__(self, arguments: set[str], specializations: Sequence[Specialization]) -> None:
        self.arguments = arguments | {"self"}
        self._used = arguments | {node.name for v in specializations for node in v.graph.nodes} | {"self"}
        self.objects = {name: value for name, value in _PLAIN_NAMES.items() if name not in self._used}
        self._used.update(_PLAIN_NAMES)
        self._of = {id(value): name for name, value in self.objects.items()}

    def __call__(self, source: Source) -> str:
        """Return an expression for what a guard or a placeholder reads."""
        return source.text(self)

    def name(self, value: Any) -> str:
        """Return the global name for `value`, the same each time."""
        known = self._of.get(id(value))
        if known is None:
            known = self._of[id(value)] = self.fresh(_hint(value))
            self.objects[known] = value
        return known

    def fresh(self, hint: str) -> str:
        """Return a name that nothing has."""
        base = candidate = "_" + "".join(c if c.isalnum() else "_" for c in hint)
        count = 1
        while candidate in self._used:
            candidate, count = f"{base}_{count}", count + 1
        self._used.add(candidate)
        return candidate


def _hint(value: Any) -> str:
    named = getattr(value, "__name__", None)
    if isinstance(named, str):
        return named
    return repr(value).rpartition(".")[2] if isinstance(value, (torch.dtype, torch.layout)) else type(value).__name__


def _restarting(specialization: Specialization, names: _Names, body: list[str], missed: str, restart: str) -> list[str]:
    """Write one graph that checks something on the way; after a miss `restart` runs, and the next graph is tried."""
    drawn = _drawn_before_checks(specialization.graph)
    state = names.fresh("generators")
    return [
        *([f"{state} = {names.name(generators_now)}(host={'host' in drawn})"] if drawn else []),
        "try:",
        *_indented(body),
        f"except {names.name(GuardMiss)} as miss:",
        *([f"    {names.name(take_back)}({state})"] if drawn else []),
        f"    {missed} = miss.with_traceback(None)",  # that holds this frame, which holds the exception
        *([f"    {restart}"] if restart else []),
    ]


def _checks_something(specialization: Specialization) -> bool:
    return any(map(_checks, specialization.graph.nodes))


def _checks_data(specialization: Specialization) -> bool:
    """Say whether a graph is for some data only, so that another one may be for the other data."""
    checks = specialization.graph.find_nodes(op="call_function", target=require)
    return any(isinstance(each, Tally) for check in checks for each in check.args)


def _checks(node: fx.Node) -> bool:
    return node.target is require or bool(node.meta.get("checks"))


def _drawn_before_checks(graph: fx.Graph) -> set[str]:
    """Return from which generators a graph may draw before a check that takes nothing back itself."""
    drawn: set[str] = set()
    needed: set[str] = set()
    for node in graph.nodes:
        if node.target is not require and node.meta.get("draws"):
            drawn.add(node.meta["draws"])
        if _checks(node) and not _takes_back(node):
            needed |= drawn
    return needed


def _takes_back(check: fx.Node) -> bool:
    kept = check.args[3] if check.target is require and len(check.args) > 3 else None
    return isinstance(kept, fx.Node) and bool(kept.kwargs.get("random"))


class _Body:
    """Write the statements of one graph."""

    def __init__(self, specialization: Specialization, names: _Names) -> None:
        self._specialization = specialization
        self._nodes = list(specialization.graph.nodes)
        self._names = names
        self._places = {node: place for node in self._nodes if (place := _place(node)) is not None}
        self.write = SourceWriter(specialization.guards, names.fresh, names.name, [*self._looked_up()])
        self._last_uses = _last_uses(self._nodes)
        # A child may be called `self`, and a tensor as an argument that the graph does not take: after a check that
        # fails, the forward passes all its arguments on.
        self._renamed = {node: names.fresh(node.name) for node in self._nodes if self._hides_argument(node)}

    def lines(self) -> list[str]:
        counts = Counter(self._places.values())
        lines = [line for place, count in counts.items() if count > 1 for line in self.write.assigned(place)]
        for node in self._nodes:
            said, line = self._announcement(node), self._statement(node)  # in this order: the first names what is read
            if line is None:
                continue
            lines += said
            dead = self._last_uses.get(node)
            freed = f"{' = '.join(map(self._local, dead))} = None" if dead else ""
            # What follows a condition on its line would belong to it.
            lines += [line, freed] if freed and _is_check(node) else [f"{line};  {freed}" if freed else line]
        return lines

    def _looked_up(self) -> Iterator[Source]:
        """Yield what nodes find children and tensors by; of a tensor the module, too, which may keep it elsewhere."""
        for node, place in self._places.items():
            yield place
            if node.op == "get_attr":
                yield from place.parts

    def _statement(self, node: fx.Node) -> str | None:
        if node.op == "placeholder":
            expression = self._names(self._specialization.argument(node))
            return None if expression == self._local(node) else f"{self._local(node)} = {expression}"
        if node.op == "output":
            return f"return {self._format(node.args[0])}"
        if _is_check(node):
            return f"if {self._fails(*node.args[:2])}: {self._expression(node)}"
        change = in_place_format(node.target) if node.op == "call_function" and not node.kwargs else None
        if change is not None and isinstance(node.args[0], fx.Node):
            statement = change.format(*(self._format(argument) for argument in node.args))
            return f"{statement};  {self._local(node)} = {self._local(node.args[0])}" if node.users else statement
        expression = self._expression(node)
        return f"{self._local(node)} = {expression}" if node.users else expression

    def _fails(self, value: Any, expected: Any) -> str:
        """Write the condition under which `require` raises, to spare the call where it does not."""
        operand = self._operand(value)
        if isinstance(expected, bool):
            return f"not {operand}" if expected else f"{operand} or {operand} is None"
        return f"{operand} is not None" if expected is None else f"not {operand} == {self._operand(expected)}"

    def _announcement(self, node: fx.Node) -> list[str]:
        """Write what says that a node may draw outside torch's generators, or change objects unnoted."""
        draws, changes = node.meta.get("draws") == "host", node.meta.get("changes", False)
        said = "; ".join(
            f"{self._names.name(f)}()" for f, is_said in ((announce, draws), (announce_changes, changes)) if is_said
        )
        if said and node.op == "call_module":
            kind = f"{self._names.name(type)}({self._callee(node)})"
            said = f"if not {self._names.name(hasattr)}({kind}, {ANNOUNCES!r}): {said}"
        return [said] if said else []

    def _callee(self, node: fx.Node) -> str:
        if node.meta.get("region"):  # a plain attribute
            return self._names(attribute_at(str(node.target)))
        return f"{self.write(self._places[node])}[{str(node.target).rpartition('.')[2]!r}]"

    def _hides_argument(self, node: fx.Node) -> bool:
        """Say whether a node has the name of an argument, and does not stand for this one."""
        stands = node.op == "placeholder" and self._names(self._specialization.argument(node)) == node.name
        return node.op != "output" and node.name in self._names.arguments and not stands

    def _local(self, node: fx.Node) -> str:
        return self._renamed.get(node, node.name)

    def _expression(self, node: fx.Node) -> str:
        if node.op == "get_attr":
            return self._read(node)
        if node.op == "call_module":
            return f"{self._callee(node)}({self._arguments(node.args, node.kwargs)})"
        if node.op == "call_method":
            owner, *rest = node.args
            return f"{self._operand(owner)}.{node.target}({self._arguments(rest, node.kwargs)})"
        return self._call(cast("Callable[..., Any]", node.target), node)

    def _read(self, node: fx.Node) -> str:
        """Write the read of an attribute; a child's tensor is had in a tenth of the time without `__getattr__`."""
        target, local, place = str(node.target), self._local(node), self._places.get(node)
        if place is None:
            return self._names(attribute_at(target))
        name = target.rpartition(".")[2]
        held = f"{self.write(place)}.get({name!r})"
        # It may be kept elsewhere: as a parametrization, or on the replicas of nn.DataParallel.
        return f"{local} if ({local} := {held}) is not None else {attribute_text(self.write(*place.parts), name)}"

    def _call(self, function: Callable[..., Any], node: fx.Node) -> str:
        form = operator_format(function)
        if form is not None and not node.kwargs:
            return form.format(*(self._operand(argument) for argument in node.args))
        if function is operator.is_not:
            return " is not ".join(self._operand(argument) for argument in node.args)
        if function is getattr and len(node.args) == 2 and isinstance(node.args[1], str):
            return attribute_text(self._operand(node.args[0]), node.args[1])
        if isinstance(function, FunctionCall):
            return f"{self._names.name(function.function)}.apply({self._arguments(node.args, node.kwargs)})"
        called = function.function if isinstance(function, LeafCall) else function
        return f"{self._names.name(called)}({self._arguments(node.args, node.kwargs)})"

    def _arguments(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> str:
        written = [self._format(argument) for argument in args]
        written += [f"{key}={self._format(value)}" for key, value in kwargs.items()]
        return ", ".join(written)

    def _operand(self, value: Any) -> str:
        """Format a value for the side of an operator or of a dot: `-1 ** x` is not `(-1) ** x`."""
        text = self._format(value)
        return text if isinstance(value, fx.Node) or text.isidentifier() else f"({text})"

    def _format(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self._local(value)
        if type(value) in _ATOMS:
            return repr(value)
        if isinstance(value, (float, complex)) and type(value) in (float, complex) and cmath.isfinite(value):
            return repr(value)
        return self._format_container(value)

    def _format_container(self, value: Any) -> str:
        if is_namedtuple(value):
            return f"{self._names.name(type(value))}({self._arguments(value, {})})"
        if isinstance(value, tuple):
            items = [self._format(item) for item in cast("tuple[Any, ...]", value)]
            return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
        if isinstance(value, list):
            return f"[{self._arguments(cast('list[Any]', value), {})}]"
        if isinstance(value, dict):
            pairs = cast("dict[Any, Any]", value).items()
            return "{" + ", ".join(f"{self._format(key)}: {self._format(item)}" for key, item in pairs) + "}"
        if isinstance(value, slice):
            limits = cast("tuple[Any, ...]", (value.start, value.stop, value.step))
            return f"{self._names.name(slice)}({self._arguments(limits, {})})"
        if isinstance(value, torch.device):
            return f"{self._names.name(torch.device)}('{value}')"
        return self._names.name(value)


def _is_check(node: fx.Node) -> bool:
    return node.target is require and len(node.args) == 4 and not node.users and not isinstance(node.args[1], fx.Node)


def _last_uses(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Return, for each node, the values that nothing needs after it; arguments are kept, for a miss may need them."""
    last: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(nodes):
        for used in node.all_input_nodes:
            if used not in seen and used.op != "placeholder" and node.op != "output":
                last.setdefault(node, []).append(used)
            seen.add(used)
    return last


def _place(node: fx.Node) -> Source | None:
    """Return where a module keeps the child that a node calls, or the tensor of a module inside that it reads."""
    path, dot, _ = str(node.target).rpartition(".")
    if node.op == "call_module" and not node.meta.get("region"):
        return children_of(module_at(path.split(".") if path else ()))
    kept = next((name for kind, name in _REGISTRIES.items() if node.meta.get(kind)), "")
    if node.op == "get_attr" and node.users and kept and dot:
        return Attribute(module_at(path.split(".")), kept)
    return None
