"""Look into modules from outside: which may be, where a graph of theirs holds, and their graphs written in as one."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx, nn
from torch.nn.utils import parametrize

from ...compat import all_modules, has_hooks, only_collects
from ...runtime.graphs import Capture, Specialization, WrappedRegion, capture_of
from ...runtime.guards import (
    SELF,
    Applied,
    Argument,
    Attribute,
    Condition,
    Constant,
    Equals,
    Guard,
    Item,
    Known,
    Method,
    Source,
    Truth,
    is_outside,
    is_switch,
    require,
)
from ...runtime.values import map_leaves, user_class
from ..sites import VOLATILE, is_volatile

__all__ = [
    "Checks", "Opener", "bound", "lasting_guards", "only_builds", "only_graph", "reason_against_inlining",
    "reason_against_opening", "received", "substituted", "unmet_guards",
]  # fmt: skip


def reason_against_inlining(module: nn.Module) -> str | None:
    """Return why a module, or one inside it, must stay one call (hooks, parametrizations, contexts), or None."""
    return next((reason for reason in map(reason_against_opening, all_modules(module)) if reason is not None), None)


def reason_against_opening(module: nn.Module, *, asks_for_hooks: bool = False) -> str | None:
    """Return why a module must stay one call, whatever is inside it, or None; all that look into modules ask this.
    Whoever `asks_for_hooks` at each call, as `UnchangedGuard` does, opens those with hooks that do nothing now, too.
    """
    if isinstance(module, WrappedRegion):
        return f"it opens {module.context}"
    if user_class(type(module)).__call__ is not nn.Module.__call__ and not isinstance(module, fx.GraphModule):
        return "it has a __call__ of its own"
    if has_hooks(module) and not (asks_for_hooks and only_collects(module)):
        return "it has hooks"
    if parametrize.is_parametrized(module):
        return "it has parametrizations"
    if "forward" in vars(module):
        return "its forward was replaced"
    return VOLATILE if is_volatile(module) else None


def unmet_guards(module: nn.Module, specialization: Specialization, given: Mapping[str, Any]) -> list[Guard]:
    """Return the conditions of a captured module's graph that one call of it does not always meet. What is `given` and
    no constant stands for a value that may be any tensor.
    """
    names = {"self": module, **given}
    return [g for g in specialization.guards if _may_change(g, module) or not g.holds(names)]


def lasting_guards(module: nn.Module, specialization: Specialization, given: Mapping[str, Any]) -> list[Guard]:
    """Return the conditions that whoever writes a module's graph out has to go on asking there. All but those that
    constants among the arguments meet for ever.
    """
    unmet = unmet_guards(module, specialization, given)
    return [guard for guard in specialization.guards if guard in unmet or not _is_on_arguments_alone(guard)]


def _is_on_arguments_alone(guard: Guard) -> bool:
    sources = list(guard.sources())
    return any(isinstance(each, Argument) for each in sources) and not any(
        each == SELF or is_outside(each) for each in sources
    )


def _may_change(guard: Guard, module: nn.Module) -> bool:
    """Say whether a condition may change from call to call although arguments and module stay the same."""
    is_global = guard.asks_for_training or any(is_switch(each) or is_outside(each) for each in guard.sources())
    return is_global or any(_looks_inside(source, module) for source in guard.sources())


def _looks_inside(source: Source, module: nn.Module) -> bool:
    """Say whether a source is what a plain attribute of the module holds: that may change unnoticed."""
    if not isinstance(source, Attribute) or source.owner != SELF or source.name == "_modules":
        return False
    value = vars(module).get(source.name)
    return value is not None and not isinstance(value, torch.Tensor)


# -- graphs of what is called, in the place of the calls -----------------------------------------------------------


class Opener:
    """Go through a graph and those of what it calls; a subclass says which are opened, and what becomes of other nodes.
    What it makes of nodes are their values: nodes of a new graph, say. Items of structures of values are known.
    """

    def run(self, graph: fx.Graph, place: Any, inputs: Sequence[Any]) -> Any:
        """Return what a graph gives of `inputs`; `place` says to the subclass where it is called."""
        values: dict[fx.Node, Any] = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
        for node in graph.nodes:
            if node.op == "output":
                return substituted(node.args[0], values)
            if node.op != "placeholder":
                values[node] = self.value(node, place, values)
        return None

    def value(self, node: fx.Node, place: Any, values: Mapping[fx.Node, Any]) -> Any:
        """Return the value of a node, neither input nor output, given those of the nodes before."""
        args, kwargs = substituted(node.args, values), substituted(node.kwargs, values)
        is_of_structure = bool(args) and isinstance(args[0], (tuple, list, dict))
        if node.target is operator.getitem and is_of_structure and isinstance(args[1], (int, str, slice)):
            return args[0][args[1]]
        if node.target in (operator.getitem, getattr) and node.op == "call_function" and (held := _field(*args[:2])):
            return held[0]
        if node.target is len and is_of_structure:
            return len(args[0])
        opened = self.opened(node, place, args, kwargs) if node.op == "call_module" else None
        return self.made(node, place, args, kwargs) if opened is None else opened[0]

    def opened(self, node: fx.Node, place: Any, args: Any, kwargs: Any) -> tuple[Any] | None:
        """Return what a call gives of a module that is looked into, or None."""
        raise NotImplementedError

    def made(self, node: fx.Node, place: Any, args: Any, kwargs: Any) -> Any:
        """Return the value of any other node."""
        raise NotImplementedError


def _field(built: object, key: object) -> tuple[Any] | None:
    """Return what a field of an output of transformers holds that a node builds, by name or number; None: unknown."""
    given = _fields(built)
    if given is None:
        return None
    if type(key) is int:  # those that are not None are counted
        present = [value for value in given.values() if value is not None]
        return (present[key],) if -len(present) <= key < len(present) else None
    return (given[key],) if isinstance(key, str) and key in given else None


def _fields(built: object) -> dict[str, Any] | None:
    """Return what all fields hold of an output of transformers that a node builds, or None."""
    kind = built.target if isinstance(built, fx.Node) and built.op == "call_function" else None
    if not isinstance(built, fx.Node) or not isinstance(kind, type) or built.args or not _is_model_output(kind):
        return None
    given = {each.name: built.kwargs.get(each.name, each.default) for each in dataclasses.fields(kind)}
    is_known = all(value is not dataclasses.MISSING for value in given.values()) and set(built.kwargs) <= set(given)
    return given if is_known else None


def only_builds(node: fx.Node) -> bool:
    """Say whether a node builds an output of a class of transformers itself: where nobody reads it, it may go."""
    return _fields(node) is not None and str(getattr(node.target, "__module__", "")).startswith("transformers.")


def _is_model_output(kind: type) -> bool:
    """Say whether a class is an output of transformers that reads its fields as the library does."""
    base = next((each for each in kind.__mro__ if each.__name__ == "ModelOutput"), None)
    plain = {name for each in kind.__mro__ if not (base and issubclass(base, each)) for name in vars(each)}
    return (
        base is not None and base.__module__ == "transformers.utils.generic" and dataclasses.is_dataclass(kind)
        and not plain & {"__getitem__", "__getattribute__", "__getattr__", "__post_init__", "to_tuple"}
    )  # fmt: skip


def substituted(argument: Any, values: Mapping[fx.Node, Any]) -> Any:
    """Return arguments with the values of nodes in their places."""
    return map_leaves(lambda leaf: values[leaf] if isinstance(leaf, fx.Node) else leaf, argument)


def bound(capture: Capture, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what a call passes by argument, or None where it does not fit."""
    try:
        return capture.parameters.bind(args, kwargs)
    except TypeError:
        return None


def only_graph(module: nn.Module, call: fx.Node) -> tuple[Specialization, Mapping[str, Any]] | None:
    """Return the one graph of a captured module and what a call passes by argument; None if there is no such graph."""
    capture = capture_of(module)
    if capture is None or len(capture.specializations) != 1:
        return None
    given = bound(capture, call.args, call.kwargs)
    return None if given is None else (capture.specializations[0], given)


def received(specialization: Specialization, given: Mapping[str, Any], kind: type) -> list[Any] | None:
    """Return what each placeholder receives, or None where one receives no value, of this kind, by itself."""
    sources = map(specialization.argument, specialization.graph.find_nodes(op="placeholder"))
    values = [_value_of(source, given) for source in sources]
    return values if all(isinstance(value, kind) for value in values) else None


def _value_of(source: Source, given: Mapping[str, Any]) -> Any:
    """Return what a call passes in an argument, or in a container among the arguments; None where that is not known."""
    match source:
        case Argument(name):
            return given.get(name)
        case Item(owner, Constant(value=key)):
            held = _value_of(owner, given)
            try:
                return cast("Any", held)[key] if isinstance(held, (tuple, list, dict)) else None
            except (IndexError, KeyError, TypeError):
                return None
        case _:
            return None


# -- conditions on what is computed, as checks in the graph around --------------------------------------------------


@dataclass(frozen=True)
class _Calculation:
    """What a condition looks at: a function, or a method by its name, of a value and constants."""

    function: Callable[..., Any] | str
    args: tuple[Any, ...]


def _comparison(guard: Guard, given: Mapping[str, Any]) -> tuple[fx.Node | _Calculation, int] | None:
    """Return what a condition on types, ranks and sizes of arguments compares with what; None for other conditions."""
    match guard.check:
        case Equals(Constant(value=int() as expected)) if not isinstance(expected, bool):
            pass
        case Truth(expected):
            pass
        case _:
            return None
    asked = _asked(guard.source, given)
    return None if asked is None else (asked, expected)


def _asked(source: Source, given: Mapping[str, Any]) -> fx.Node | _Calculation | None:
    match source:
        case Argument(name):
            return value if isinstance(value := given.get(name), fx.Node) else None
        case Attribute(owner, "shape"):
            function, rest = getattr, ("shape",)
        case Item(owner, Constant(value=int() as place)):
            function, rest = operator.getitem, (place,)
        case Applied(function, (owner,)) if function is len:
            rest = ()
        case Method(owner, "dim" | "is_floating_point" as function, ()):
            rest = ()
        case Applied(function, (owner, Constant(value=int() as other))) if function in (operator.eq, operator.ne):
            rest = (other,)
        case Applied(function, (owner, Known(value=type() as kind))) if function is isinstance:
            rest = (kind,)
        case _:
            return None
    read = _asked(owner, given)
    return None if read is None else _Calculation(function, (read, *rest))


def _condition(guard: Guard, given: Mapping[str, Any]) -> tuple[_Calculation, bool] | None:
    """Return any other condition on arguments alone; None where it is on the module, or what is outside of it."""
    read = [each for each in guard.sources() if isinstance(each, Argument)]
    names = tuple(dict.fromkeys(each.name for each in read))
    if not names or SELF in read or any(name not in given for name in names) or any(map(is_outside, guard.sources())):
        return None
    values = tuple(given[name] for name in names)
    return (_Calculation(Condition(guard, names), values), True) if _are_hashable(values) else None


def _are_hashable(values: tuple[Any, ...]) -> bool:
    try:
        hash(values)
    except TypeError:
        return False
    return True


class Checks:
    """Checks in a graph, each written once; where one fails, the module that runs the graph starts over."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._nodes: dict[Any, fx.Node] = {}

    def write(self, guards: Sequence[Guard], given: Mapping[str, Any]) -> bool:
        """Write conditions on what is `given`, by argument; False, and none, where one is also on anything else."""
        compared = [_comparison(guard, given) or _condition(guard, given) for guard in guards]
        if None in compared:
            return False
        for guard, (asked, expected) in zip(guards, cast("list[tuple[Any, int]]", compared), strict=True):
            key = asked, type(expected), expected  # True is 1
            if key not in self._nodes:
                args = (self._node(asked), expected, guard.reason, True)
                self._nodes[key] = self._graph.call_function(require, args)
        return True

    def _node(self, asked: fx.Node | _Calculation) -> fx.Node:
        if isinstance(asked, fx.Node):
            return asked
        if asked not in self._nodes:
            first, *others = asked.args
            args = (self._node(first) if isinstance(first, _Calculation) else first, *others)
            create = self._graph.call_method if isinstance(asked.function, str) else self._graph.call_function
            self._nodes[asked] = cast("Any", create)(asked.function, args)
        return self._nodes[asked]
