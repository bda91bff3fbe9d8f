"""Join the graphs of a captured model, one per module, into one flat graph that needs none of the model's classes."""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch import fx, nn

from ..errors import ArchiveError, CaptureError, GuardError
from ..layers.ensemble import VectorizedMembers
from ..tracing.autograd_functions import FunctionCall
from ..tracing.capture import Capture, Variant, capture_of, required_capture
from ..tracing.guards import Guard, require
from ..tracing.leaf_graphs import trace_leaf
from ..tracing.leaves import is_leaf
from ..tracing.regions import ContextRegion
from ..tracing.rollback import keep
from ..tracing.signature import signature_of
from .conditions import FUNCTIONS, Apply, Argument, Attribute, Condition, Literal, Read, Tree, parts
from .flat_code import FlatVariant
from .flat_contexts import carries_gradients, forbids_autocast, records_nothing
from .flat_values import Fields, Unfolded, call_on_structure, example_of, fields_of, fold, holds, mapped, plain
from .graph_json import FlatGraph
from .guard_trees import conjuncts, path_of, reads_self_only
from .holdings import Holdings
from .targets import ATTRIBUTES, is_method, name_of_function
from .values import encode

__all__ = ["Flattening", "NotNow"]

Scope = Mapping[str, Any]

_BY_DATA = "it decides by the data in a tensor"
"""What has no forward of its own cannot start over where other data decide otherwise."""


class NotNow(Exception):
    """A graph of the model is for another mode than the one it is in."""


class _Located(ArchiveError):
    """A refusal that says where."""


class Flattening:
    """Build one flat graph, for the modes that the modules are in now.

    Args:
        holdings: the model's modules and tensors by name.
        opaque: name of a module that could not be captured -> line and reason.
    """

    def __init__(self, holdings: Holdings, opaque: Mapping[str, tuple[str, str]]) -> None:
        self.holdings, self.opaque = holdings, opaque
        self.graph = fx.Graph()
        self.paths: dict[str, Sequence[str | int]] = {}
        self.conditions: dict[str, Condition] = {}

    def run(self, variant: Variant) -> FlatVariant:
        """Return the flat graph of a call of the model.

        Args:
            variant: the model's own graph for the call.

        Raises:
            NotNow: if that graph is for another mode.
            ArchiveError: naming the module, the line and the reason, if some of it cannot be said in an archive.
        """
        root = self.holdings.names.modules[""]
        with self._located("", ""):
            for guard in variant.guards:
                self._assume(guard, root)
        result = self._inline("", root, variant, None)
        with self._located("", ""):
            self._create("output", "output", (plain(result),), {})
        return FlatVariant(tuple(self.conditions.values()), FlatGraph(self.graph, self.paths))

    def _assume(self, guard: Guard, root: nn.Module) -> None:
        """Keep a guard of the model itself as a condition."""
        if reads_self_only(guard.expression):
            return
        for tree in conjuncts(guard.expression):
            self._hoist(tree, guard, "", root)

    def _hoist(self, tree: Tree, guard: Guard, home: str, module: nn.Module) -> None:
        if not _asks_for_arguments(tree) and not guard.holds({"self": module}):
            raise NotNow
        condition = Condition(self._from_root(tree, home), guard.reason)
        self.conditions.setdefault(json.dumps(condition.to_json()), condition)

    def _from_root(self, tree: Tree, home: str) -> Tree:
        """Return a condition from the root's point of view; archives keep the shapes of what they hold."""
        match tree:
            case Read(target=target):
                found = self.holdings.look_up(f"{home}.{target}" if home else target)
                if found.tensor is not None and found.rest in (("shape",), ("ndim",)):
                    return Literal(tuple(found.tensor.shape) if found.rest == ("shape",) else found.tensor.ndim)
                tree = Read(self.holdings.read(found.name))
                return reduce(Attribute, found.rest, tree)
            case Attribute(owner=owner, name=name):
                return Attribute(self._from_root(owner, home), name)
            case Apply(operation=operation, operands=operands):
                return Apply(operation, tuple(self._from_root(operand, home) for operand in operands))
            case _:
                return tree

    # -- modules ---------------------------------------------------------------------------------------------------

    def _inline(self, home: str, module: nn.Module, variant: Variant, scope: Scope | None) -> Any:
        """Add what a graph does; return its result, made of nodes of the flat graph."""
        values: dict[fx.Node, Any] = {}
        if variant.volatile:
            raise _Located(f"module {home or '(root)'!r}: its attributes are set while the model runs")
        for node in variant.graph.nodes:
            with self._located(home, node.meta.get("source", "")):
                if node.op == "placeholder":
                    expression = variant.arguments.get(node.name, str(node.target))
                    values[node] = self._placeholder(node, expression, scope, home)
                    continue
                args, kwargs = mapped(values.__getitem__, (tuple(node.args), dict(node.kwargs)))
                if node.op == "output":
                    return args[0]
                values[node] = self._value(home, node, args, kwargs)
        raise _Located(f"the graph of {home!r} has no output")

    def _value(self, home: str, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if node.op == "call_function":
            return self._call(node.target, args, kwargs, node)
        if node.op == "call_method":
            return self._method(str(node.target), args, kwargs, node)
        name = f"{home}.{node.target}" if home else str(node.target)
        return self._read(name) if node.op == "get_attr" else self._call_module(name, args, kwargs, node)

    def _placeholder(self, node: fx.Node, expression: str, scope: Scope | None, home: str) -> Any:
        if scope is not None:
            return self._evaluate(conjuncts(expression)[0], scope, home)
        path = path_of(expression)
        new = self._create("placeholder", node.name, (), {}, node)
        self.paths[new.name] = path
        return new

    def _call_module(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], node: fx.Node) -> Any:
        module = self.holdings.names.modules[name]
        name = self.holdings.names.name(module)
        with self._located(name, self.opaque.get(name, ("", ""))[0]):
            if isinstance(module, ContextRegion):
                return self._under_context(name, module, args, kwargs)
            self.holdings.check_callable(module)
            capture = capture_of(module)
            if capture is not None and capture.variants:
                return self._call_captured(name, module, capture, args, kwargs)
            if self.holdings.kind_of(name) is not None:
                return self._create("call_module", self.holdings.called(name), args, kwargs, node)
            if is_leaf(module):
                return self._call_leaf(name, module, args, kwargs)
            if isinstance(module, VectorizedMembers):
                raise ArchiveError("its members call a module that archives do not hold")
            raise ArchiveError(self.opaque.get(name, ("", f"this {type(module).__name__} has no graph"))[1])

    def _under_context(self, name: str, region: ContextRegion, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Put what runs under a context into the graph, where it is the same without."""
        context, device, before = region.context, forbids_autocast(region.context), set(self.graph.nodes)
        if device is not None:
            asked = self._create("call_function", torch.is_autocast_enabled, (device,), {})
            asked.meta["val"] = False
            reason = f"a part of the model runs without autocast, which is switched on for {device} now"
            self._create("call_function", require, (asked, False, reason, False), {})
        elif not records_nothing(context):
            raise ArchiveError(f"its forward opens {context}, which archives do not")
        result = self._call_captured(name, region, required_capture(region), args, kwargs)
        inside = [node for node in self.graph.nodes if node not in before]
        if device is None and carries_gradients(inside, self.holdings.takes_gradients):
            raise ArchiveError(f"its forward opens {context} where gradients might flow, which archives do not")
        return result

    def _call_captured(
        self, name: str, module: nn.Module, capture: Capture, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            scope = capture.parameters.bind(args, kwargs)
        except TypeError as error:
            raise ArchiveError(f"it is called with other arguments than it takes: {error}") from error
        variant = _chosen(module, capture, scope)
        for guard in variant.guards:
            if not reads_self_only(guard.expression):
                for tree in conjuncts(guard.expression):
                    self._check(tree, guard, scope, name, module)
        return self._inline(name, module, variant, scope)

    def _check(self, tree: Tree, guard: Guard, scope: Scope, home: str, module: nn.Module) -> None:
        """Check a guard of an inner module now, or in the middle of the graph, or when the model is called."""
        if not _asks_for_arguments(tree):
            self._hoist(tree, guard, home, module)
            return
        value = self._evaluate(tree, scope, home)
        if isinstance(value, fx.Node):
            self._create("call_function", require, (value, True, f"{guard.expression} ({guard.reason})", False), {})
        elif not value:
            raise ArchiveError(f"it is called although {guard.expression} ({guard.reason}) does not hold")

    def _call_leaf(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Put a leaf's own calls into the graph, where archives do not hold its class."""
        try:
            graph = trace_leaf(module)
        except CaptureError as error:
            raise ArchiveError(f"archives hold no {type(module).__name__}, and {error}") from error
        signature = signature_of(type(module).forward)
        scope = signature.bind(args, kwargs)
        for parameter in signature.parameters:
            default = parameter.default
            if default is not parameter.empty and scope[parameter.name] is not default:
                raise ArchiveError(f"archives hold no {type(module).__name__} called with {parameter.name}=")
        return self._inline(name, module, Variant((), graph), scope)

    # -- values ----------------------------------------------------------------------------------------------------

    def _call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], node: fx.Node | None = None) -> Any:
        if function is require:
            return self._require(args)
        if function is keep and kwargs.get("random"):
            raise ArchiveError(_BY_DATA)
        if isinstance(function, type) and dataclasses.is_dataclass(function):
            return fields_of(function, args, kwargs)
        try:
            return fold(function, args, kwargs)
        except Unfolded:
            pass
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise ArchiveError(f"{_described(function)} raises {type(error).__name__}: {error}") from error
        if name_of_function(function) is None or (function is getattr and args[1] not in ATTRIBUTES):
            what = f".{args[1]}" if function is getattr else _described(function)
            raise ArchiveError(f"it uses {what}, which archives do not")
        return self._create("call_function", function, args, kwargs, node)

    def _require(self, args: tuple[Any, ...]) -> None:
        value, expected, reason, *_, tally = (*args, None) if len(args) < 5 else args
        if tally is not None:
            raise ArchiveError(_BY_DATA)
        if isinstance(value, fx.Node):
            self._create("call_function", require, (value, expected, reason, False), {})
            return
        try:
            require(value, expected, reason, restart=False)
        except GuardError as error:
            raise ArchiveError(f"it is called in a way that it has no graph for: {error}") from error

    def _method(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], node: fx.Node | None = None) -> Any:
        if isinstance(args[0], (Fields, dict, tuple, list)):
            return call_on_structure(name, args[0], args[1:])
        if not is_method(name):
            raise ArchiveError(f"it calls .{name}, which archives do not")
        return self._create("call_method", name, args, kwargs, node)

    def _read(self, name: str) -> Any:
        """Return what the model holds under a qualified name: a tensor or a mode, and perhaps an attribute of it."""
        found = self.holdings.look_up(name)
        value: Any = found.tensor
        if found.tensor is not None and found.rest[:1] in (("shape",), ("ndim",)):
            value = getattr(found.tensor, found.rest[0])  # archives keep the shapes of what they hold
            return self._attributes(value, found.rest[1:])
        return self._attributes(self._create("get_attr", self.holdings.read(found.name), (), {}), found.rest)

    def _attributes(self, value: Any, names: Sequence[str]) -> Any:
        for name in names:
            value = self._call(getattr, (value, name), {})
        return value

    def _evaluate(self, tree: Tree, scope: Scope, home: str) -> Any:
        """Return the value of a guard, or of an argument."""
        match tree:
            case Argument(name=name):
                return scope[name]
            case Literal(value=value):
                return value
            case Read(target=target):
                return self._read(f"{home}.{target}" if home else target)
            case Attribute(owner=owner, name=name):
                return self._call(getattr, (self._evaluate(owner, scope, home), name), {})
            case Apply(operation=operation, operands=operands):
                return self._apply(operation, tuple(self._evaluate(operand, scope, home) for operand in operands))

    def _apply(self, operation: str, values: tuple[Any, ...]) -> Any:
        if operation in ("type", "type_name"):
            kind: type = type(example_of(values[0]))  # pyright: ignore[reportUnknownVariableType]
            return kind if operation == "type" else kind.__name__
        if operation == "in":
            return self._call(operator.contains, (values[1], values[0]), {})
        if operation.startswith("."):
            return self._method(operation[1:], values, {})
        return self._call(FUNCTIONS[operation], values, {})

    def _create(
        self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: fx.Node | None = None
    ) -> fx.Node:
        held = next((value for value in (*args, *kwargs.values()) if holds(Fields, value)), None)
        if held is not None:
            raise ArchiveError("it hands a dataclass on to a function")
        encode([args, kwargs], lambda node: 0)
        new = self.graph.create_node(op, target, args, kwargs, None if like is None else like.name)
        if like is not None:
            new.meta.update({key: like.meta[key] for key in ("val", "source") if key in like.meta})
        return new

    @contextmanager
    def _located(self, home: str, place: str) -> Generator[None]:
        """Say which module a refusal is about, and its line."""
        try:
            yield
        except _Located:
            raise
        except ArchiveError as error:
            raise _Located(f"module {home or '(root)'!r}{f' ({place})' if place else ''}: {error}") from error


def _chosen(module: nn.Module, capture: Capture, scope: Scope) -> Variant:
    """Return the graph that a module runs for a call like the example."""
    names = {"self": module, **{name: example_of(value) for name, value in scope.items()}}
    missed: list[str] = []
    for variant in capture.variants:
        failed = next((guard for guard in variant.guards if not guard.holds(names)), None)
        if failed is None:
            return variant
        missed.append(f"{failed.expression} ({failed.reason})")
    raise ArchiveError(f"it has no graph for this call; its graphs are for {' or '.join(missed)}")


def _asks_for_arguments(tree: Tree) -> bool:
    return any(isinstance(part, Argument) for part in parts(tree))


def _described(function: Any) -> str:
    if isinstance(function, FunctionCall):
        return f"the custom autograd function {function.function.__name__}"
    home = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None) or str(function)
    return f"{home}.{name}" if home else name
