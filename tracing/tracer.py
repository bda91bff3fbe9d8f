"""Trace the forward of one module into a graph that calls its children."""

from __future__ import annotations

import inspect
import operator
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn

from .arguments import Arguments
from .captured import Variant
from .cleanup import drop_unused, late_checks
from .dataflow import DataFlow
from .decisions import Decisions
from .expressions import SWITCHES
from .guards import Guard
from .leaves import container_lengths, is_leaf, is_library
from .locate import source_of
from .lowering import Lowering
from .meta import meta_of
from .names import ModelNames
from .preserve import AttributeState, change_count
from .proxy import UNKNOWN, MethodProxy, ValueProxy, proxies_in
from .record import Call
from .session import Session, Untraceable
from .signature import Signature
from .structure import map_leaves, map_tensors, tensors_in

__all__ = ["ModuleTracer"]

_REFUSED = frozenset("backward register_hook retain_grad requires_grad_ share_memory_ numpy set_ resize_ cuda".split())
_OPTIONAL = (getattr, operator.getitem)
_GETTER = type(Tensor.shape.__get__)


class ModuleTracer:
    """Run a module's forward once on proxies, and keep what it did as a graph.

    Args:
        session: intercepts what the forward does.
        names: of the whole model.
        home: name of the module to trace.
        call: the call to trace, with its children's results; None traces without example values.
        stateful: tells whether calling a module changes something that outlives the call.
        answers: what switches ("self.training") are to answer, where it is not what they say now.
    """

    def __init__(
        self,
        session: Session,
        names: ModelNames,
        home: str,
        call: Call | None,
        stateful: Callable[[nn.Module], bool],
        answers: Mapping[str, bool] | None = None,
    ) -> None:
        self.session = session
        self.names = names
        self.home = home
        self.module = names.modules[home]
        self.graph = fx.Graph()
        self.expressions: dict[str, str] = {}
        self.failure: Untraceable | None = None
        self.examples: dict[fx.Node, Any] = {}
        self.data = DataFlow(self.examples)
        self.decisions = Decisions(self)
        self._lowering = Lowering(self)
        self._answers = dict(answers or {})
        self._stateful = stateful
        self._call = call
        self._results: dict[nn.Module, deque[Call]] = {}
        for child, child_call in [] if call is None else call.children:
            self._results.setdefault(child, deque()).append(child_call)
        self._attributes: dict[str, ValueProxy] = {}
        self._lengths: dict[fx.Node, fx.Node] = {}
        self._lasting: set[fx.Node] = set()
        self._protected: set[int] = set()

    def trace(self, signature: Signature) -> Variant:
        """Return the module's graph for the call at hand.

        Raises:
            Untraceable: if the forward does something that no graph can say.
            Exception: whatever the forward raises when it is run on proxies.
        """
        arguments = Arguments(signature, self._placeholder, self.expressions)
        forward = type(self.module).forward
        self.session.wrap_globals(inspect.unwrap(forward))
        state, draws = AttributeState(self.module), self.session.host_draws(forward)
        try:
            args, kwargs = self._arguments_for(signature, arguments)
            with self.session.observers.observed(self.module) as reads, self.session.tracing(self):
                result = forward(self.module, *args, **kwargs)
                self.graph.output(self._lowering.value(result))
                self._check(state, forward, draws)
        finally:
            state.restore()
        self._finish()
        lengths = container_lengths(self.module, self.graph)
        return Variant((*arguments.guards, *lengths, *self.decisions.guards.values()), self.graph, self.expressions, frozenset(reads))

    def fail(self, reason: str) -> NoReturn:
        """Give the module up.

        Raises:
            Untraceable: always; code that catches it cannot save the graph.
        """
        self.failure = Untraceable(reason, source_of())
        raise self.failure

    def _arguments_for(self, signature: Signature, arguments: Arguments) -> tuple[list[Any], dict[str, Any]]:
        if self._call is None:
            return arguments.without_values()
        args, kwargs = self._call.forward_arguments
        return arguments.of_call(signature.bind(args, dict(kwargs)))

    def _placeholder(self, name: str, value: Tensor | None) -> ValueProxy:
        identifier = "".join(c if c.isalnum() or c == "_" else "_" for c in name)
        node = self.graph.create_node("placeholder", identifier)
        return self._proxy(node, UNKNOWN if value is None else self._protect(_copy(value)))

    def _check(self, state: AttributeState, forward: Callable[..., Any], draws: Any) -> None:
        if self.failure is not None:
            raise self.failure
        changed = state.changed()
        if changed is not None:
            self.fail(f"it changes self.{changed}")
        if self.session.host_draws(forward) != draws:
            self.fail("it draws from random numbers that are not torch's")

    def _finish(self) -> None:
        self.decisions.settle()
        drop_unused(self.graph)
        for check in late_checks(self.graph, self._lasts):
            if check not in self.decisions.structural:
                reason = "it decides by an intermediate value after a change that cannot be taken back"
                raise Untraceable(reason, check.meta["source"])
            check.args = (*check.args[:3], False)

    def _lasts(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return self._stateful(self.module.get_submodule(str(node.target)))
        return node in self._lasting

    # What the session sends here

    def torch_function(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a torch function, method or property access."""
        self.decisions.forget_index((args, kwargs))
        name = getattr(function, "__name__", "")
        if isinstance(function, _GETTER):
            return self._property(name, function, args)
        if name in ("_set_grad_enabled", "set_grad_enabled"):
            self.fail("the grad mode is switched inside the forward")
        if torch.overrides.is_tensor_method_or_property(function):
            return self._method(name, args, kwargs)
        return self.create_proxy("call_function", function, args, kwargs)

    def _property(self, name: str, function: Any, args: tuple[Any, ...]) -> Any:
        if name != "__get__":
            self.fail("it sets an attribute of a tensor")
        return self.create_proxy("call_function", getattr, (args[0], function.__self__.__name__), {})

    def _method(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        owner = args[0] if issubclass(type(args[0]), ValueProxy) else self._lowering.proxy_of(args[0])
        if name.startswith("__"):
            return getattr(ValueProxy, name)(owner, *args[1:], **kwargs)
        return self.attribute_of(owner, name)(*args[1:], **kwargs)

    def call_module(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Record the call of a child; what is no child of this module is traced through."""
        path = self.names.relative(self.home, module)
        if path is None:
            return self._call_stranger(original, module, args, kwargs)
        if not path:
            self.fail("it calls itself")
        with self.session.aside():
            lowered = self._lowering.arguments(args, kwargs)
        value = self._child_value(original, module, args, kwargs)
        with self.session.aside():
            node = self.graph.create_node("call_module", path, *lowered)
            return self._wrap(node, value, optional=True, fixed=is_library(type(module)) and is_leaf(module))

    def _call_stranger(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        if next(module.parameters(), None) is not None or next(module.buffers(), None) is not None:
            self.fail(f"it calls a {type(module).__name__} that is not registered as its child")
        return original(module, *args, **kwargs)

    def _child_value(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        calls = self._results.get(module)
        with self.session.aside():
            if calls:
                return map_tensors(_copy, calls.popleft().output)
            values = self._values((args, kwargs))
        if values is UNKNOWN:
            return UNKNOWN
        with self.session.suspended():
            return original(module, *values[0], **values[1])

    def read(self, module: nn.Module, name: str, value: Any) -> Any:
        """Answer a read of a parameter, buffer or child."""
        path = self.names.relative(self.home, module) if isinstance(value, Tensor) else None
        if path is None:
            return value
        return self.attribute(f"{path}.{name}" if path else name, value)

    def read_training(self, module: nn.Module, value: bool) -> Any:
        """Answer a read of a training flag: the graph looks it up whenever it runs."""
        path = self.names.relative(self.home, module)
        if path is None:
            return value
        target = f"{path}.training" if path else "training"
        return self.attribute(target, self._answers.get(f"self.{target}", value))

    def question(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Answer a question about a mode of torch: the graph asks it whenever it runs."""
        value = function(*args, **kwargs)
        if not args and not kwargs:
            value = self._answers.get(SWITCHES[function], function is torch.is_grad_enabled or value)
        return self._wrap(self.graph.create_node("call_function", function, args, kwargs), value)

    def refuses_write(self, module: nn.Module, name: str, value: Any) -> bool:
        """Tell whether an assignment is to be skipped, having been recorded already (`self.count += 1`)."""
        path = self.names.relative(self.home, module)
        if path is None:
            return False
        target = f"{path}.{name}" if path else name
        if not (issubclass(type(value), ValueProxy) and _changes(value.node, target)):
            self.fail(f"it assigns self.{target}")
        return True

    def attribute(self, target: str, value: Any) -> ValueProxy:
        """Return the proxy for a tensor or flag of this module or one inside it."""
        proxy = self._attributes.get(target)
        if proxy is None:
            with self.session.aside():
                proxy = self._proxy(self.graph.create_node("get_attr", target), self._protect(value))
            self._attributes[target] = proxy
        return proxy

    # What proxies send here

    def create_proxy(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record an operation, and do it on the example values."""
        with self.session.aside():
            lowered = self._lowering.arguments(args, kwargs)
            values = self._values((args, kwargs))
            counts = [(tensor, change_count(tensor)) for tensor in tensors_in(values)]
        value = UNKNOWN if values is UNKNOWN else self._evaluate(kind, target, *values)
        with self.session.aside():
            node = self.graph.create_node(kind, target, *lowered)
            changed = (tensor for tensor, count in counts if change_count(tensor) != count)
            if value is UNKNOWN or any(_storage(tensor) in self._protected for tensor in changed):
                self._lasting.add(node)
            return self._wrap(node, value, optional=target in _OPTIONAL)

    def _evaluate(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.session.suspended():
            if kind == "call_method":
                return getattr(args[0], target)(*args[1:], **kwargs)
            return target(*args, **kwargs)

    def _values(self, arguments: Any) -> Any:
        """Return `arguments` with example values in place of proxies, or UNKNOWN where one has none."""
        if any(proxy.fxopt_value is UNKNOWN for proxy in proxies_in(arguments)):
            return UNKNOWN
        return map_leaves(_value, arguments, ValueProxy)

    def _wrap(self, node: fx.Node, value: Any, *, optional: bool = False, fixed: bool = False) -> Any:
        """Return what the traced code sees of a node's value; None stays None, for `is None` asks no proxy."""
        proxy = self._proxy(node, value)
        self.data.note(node, fixed=fixed)
        if value is not None:
            return proxy
        if optional and not self.data.is_fixed(node):
            self.decisions.absent(node)
        return None

    def _proxy(self, node: fx.Node, value: Any) -> ValueProxy:
        if value is not UNKNOWN:
            node.meta["val"] = meta_of(value)
        node.meta["source"] = source_of()
        self.examples[node] = value
        return ValueProxy(node, self, value)

    def _protect(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self._protected.add(_storage(value))
        return value

    def attribute_of(self, proxy: ValueProxy, name: str) -> Any:
        """Answer a read of an attribute: a method to call later, or the value as a node."""
        if name in _REFUSED:
            self.fail(f"it calls .{name} on a value")
        value = proxy.fxopt_value
        if isinstance(value, Mapping) and name in ("keys", "values", "items"):
            return lambda: self._mapping_part(proxy, name)
        with self.session.suspended():
            member = getattr(Tensor, name, None) if value is UNKNOWN else getattr(value, name)
        if callable(member) and not isinstance(member, type):
            return MethodProxy(proxy, name)
        return self.create_proxy("call_function", getattr, (proxy, name), {})

    def _mapping_part(self, proxy: ValueProxy, name: str) -> list[Any]:
        keys = self.decisions.keys(proxy)
        if name == "keys":
            return keys
        return [proxy[key] if name == "values" else (key, proxy[key]) for key in keys]

    def is_instance(self, proxy: ValueProxy, kinds: Any) -> bool:
        """Answer `isinstance` from the example; without one, whatever was put in or called is a tensor."""
        value = proxy.fxopt_value
        if value is UNKNOWN:
            return proxy.node.op in ("placeholder", "call_module", "get_attr") and issubclass(Tensor, kinds)
        return isinstance(value, kinds)

    def hash_of(self, proxy: ValueProxy) -> int:
        """Answer `hash(proxy)`: tensors by identity, plain values by what they are."""
        value = proxy.fxopt_value
        if value is UNKNOWN or isinstance(value, Tensor):
            return id(proxy)
        return hash(self.decisions.plain(proxy))

    # What decisions ask

    def length_node(self, proxy: ValueProxy) -> fx.Node:
        """Return the node for the number of items in a value."""
        node = self._lengths.get(proxy.node)
        if node is None:
            node = self._lengths[proxy.node] = self.create_proxy("call_function", len, (proxy,), {}).node
        return node

    def constant(self, value: Any) -> Any:
        """Return a plain value as a node argument."""
        return self._lowering.value(value)

    def is_switch(self, expression: str) -> bool:
        """Tell whether an expression asks for a mode that may differ from call to call."""
        return expression in SWITCHES.values() or (expression.startswith("self.") and expression.endswith(".training")) or expression == "self.training"


def _changes(node: fx.Node, target: str) -> bool:
    """Tell whether a node changed the attribute `target` in place and returned it."""
    while node.op != "get_attr":
        in_place = node.op == "call_function" and getattr(node.target, "__name__", "").startswith("i")
        in_place = in_place or (node.op == "call_method" and str(node.target).endswith("_"))
        if not in_place or not node.args or not isinstance(node.args[0], fx.Node):
            return False
        node = node.args[0]
    return node.target == target


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _value(leaf: Any) -> Any:
    return leaf.fxopt_value if issubclass(type(leaf), ValueProxy) else leaf


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:
        return id(tensor)
