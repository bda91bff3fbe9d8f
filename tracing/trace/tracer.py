"""Trace the forward of one module into a graph that calls its children."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any, NoReturn, cast

from torch import Tensor, fx, nn

from ...compat import all_modules, property_access
from ...runtime.graphs import Specialization
from ...runtime.guards import Source
from ...runtime.values import Absent, ModelNames, Signature, copied, meta_of
from ..examples import Untraceable
from ..isolation import AttributeState, AutocastState, Change, Changes, Watch, is_repeatable
from ..proxies import UNKNOWN, MethodProxy, Session, ValueProxy, asks_memo, examples_of, is_tensor_method
from ..reads import DataFlow, NestedReads, OutsideReads, container_lengths, source_of
from ..recording import Call
from .arguments import Arguments
from .assignments import Assignments, State
from .attributes import Attributes, NodeArguments
from .checks import NoneGuards, drop_unused, is_statement, order_checks
from .children import ChildReads, Children
from .contexts import OpenContexts
from .decisions import Decisions

__all__ = ["ModuleTracer", "TracingSession"]

_REFUSED = frozenset("backward register_hook retain_grad requires_grad_ share_memory_ numpy set_ resize_ cuda".split())
"""Methods that no graph may hold: they reach outside the forward, or make a tensor another one."""
_RESHAPING = frozenset("unsqueeze_ squeeze_ t_ transpose_ swapaxes_ swapdims_".split())
_OPTIONAL = (getattr, operator.getitem)
_ACCESSOR = property_access()


class ModuleTracer:
    """Run a module's forward once on proxies, for a `call` or without values, and keep what it did as a graph. Calling
    a module may be `stateful`, and has `assigned` own attributes. `answers` of switches and `state` of attributes stand
    for what they are now.
    """

    def __init__(
        self,
        session: Session[ModuleTracer],
        names: ModelNames,
        owner: str,
        call: Call | None,
        stateful: Callable[[nn.Module], bool],
        assigned: Mapping[nn.Module, frozenset[str]],
        answers: Mapping[Source, bool] | None = None,
        state: State | None = None,
    ) -> None:
        self.session = session
        self.names = names
        self.owner = owner
        self.module = names.modules[owner]
        self.graph = fx.Graph()
        self.places: dict[str, Source] = {}
        self.liftable = True
        self.failure: Untraceable | None = None
        self.examples: dict[fx.Node, Any] = {}
        self.data = DataFlow(self.examples)
        self.decisions = self._decisions()
        self.changes = Changes()
        self.contexts = OpenContexts(self)
        self.nested = NestedReads(self.module, self._tensor_names)
        self.assignments = Assignments(self, assigned, state or {}, self._tensor, recorded=call is not None)
        questions = ChildReads(self, self.nested)
        self.children = Children(self, call, questions, self.changes)
        self.attributes = Attributes(
            self, dict(answers or {}), questions, self.contexts, self.assignments, self.nested, self.children.has_called
        )
        self.none_guards = NoneGuards(self, self.decisions)
        self._arguments = NodeArguments(self, self.attributes)
        self._stateful = stateful
        self._call = call
        self._lasting: dict[fx.Node, Change] = {}

    def trace(self, signature: Signature) -> Specialization:
        """Return the graph of the call; raise Untraceable if none can say it, or whatever the forward raises."""
        arguments = Arguments(signature, self._placeholder, self.places)
        forward, outside = self.forward, OutsideReads(self.module)
        self.session.wrap_globals(inspect.unwrap(forward))
        self.session.wrap_memos(type(self.module))
        self.assignments.begin()
        state, draws = AttributeState(self.module), self.session.host_draws(forward)
        try:
            args, kwargs = self._example_arguments(signature, arguments)
            observed = self.session.observers.observed(self.module)
            with self._autocast_state(), observed as seen, self.nested.noted(), self.session.tracing(self):
                result = forward(self.module, *args, **kwargs)
                self.graph.output(self._arguments.value(result))
                self._check(state, forward, draws)
        finally:
            self.contexts.close()
            self.assignments.undo()
            state.restore()
            self.assignments.end()
        if seen.set_on_class:
            raise Untraceable(f"it sets a value outside the module: {min(seen.set_on_class)} of its class")
        self._finish()
        self.attributes.questions.settle(forward)
        lengths = container_lengths(self.module, self.graph, seen.names)
        plain = seen.plain - self.assignments.names
        guards = (*arguments.guards, *lengths, *self.assignments.guards, *self.nested.guards(plain))
        guards += (*self.decisions.guards, *outside.guards(plain), *self.children.guards())
        self.attributes.check_arrays(plain)
        reads = plain - self.nested.compared | self.attributes.questions.read
        volatile = bool(self.assignments.state or self.assignments.nodes)
        return Specialization(guards, self.graph, self.places, frozenset(reads), volatile)

    @property
    def forward(self) -> Callable[..., Any]:
        """Return the forward that is traced."""
        return type(self.module).forward

    def opens(self, child: nn.Module) -> bool:
        """Say whether a call of a child is traced through, instead of becoming a node."""
        return False

    def _decisions(self) -> Decisions:
        return Decisions(self)

    def fail(self, reason: str, location: str | None = None) -> NoReturn:
        """Give the module up: raise Untraceable; code that catches it cannot save the graph."""
        raise self.give_up(reason, location)

    def give_up(self, reason: str, location: str | None = None) -> Untraceable:
        """Note that the module cannot be captured, and let the forward run on."""
        self.failure = Untraceable(reason, source_of() if location is None else location)
        return self.failure

    def _autocast_state(self) -> AbstractContextManager[None]:
        """Return the autocast that the call was recorded under."""
        autocast_state: AutocastState | None = None if self._call is None else self._call.autocast_state
        return nullcontext() if autocast_state is None else autocast_state.entered()

    def _example_arguments(self, signature: Signature, arguments: Arguments) -> tuple[list[Any], dict[str, Any]]:
        if self._call is None:
            return arguments.without_values()
        args, kwargs = self._call.forward_arguments
        return arguments.of_call(signature.bind(args, dict(kwargs)))

    # What is read before there are attributes to be asked.

    def _tensor_names(self) -> Mapping[int, str]:
        return self.attributes.tensor_names()

    def _tensor(self, tensor: Tensor) -> ValueProxy:
        return self.attributes.of_tensor(tensor)

    def _placeholder(self, name: str, value: Any) -> ValueProxy:
        identifier = "".join(c if c.isalnum() or c == "_" else "_" for c in name)
        return self.source_node("placeholder", identifier, self._example(value))

    def _example(self, value: Any) -> Any:
        if value is None:
            return UNKNOWN
        return copied(value) if self._call is None else self._call.example(value)

    def _check(self, state: AttributeState, forward: Callable[..., Any], draws: Any) -> None:
        if self.failure is not None:
            raise self.failure
        self.contexts.check()
        self.assignments.settle(self.seen_names())
        self.assignments.undo()
        changed = state.changed()
        if changed is not None:
            self.fail(f"it changes self.{changed}")
        if self.session.host_draws(forward) != draws:
            self.fail("it uses random numbers that are not torch's")

    def _finish(self) -> None:
        self.decisions.settle()
        self.none_guards.settle()
        drop_unused(self.graph)
        marks = bool(self._lasting or self.assignments.by_calls)
        order_checks(self.graph, self.module, self.decisions, self._lasting_change, marks=marks)
        self.examples.clear()

    def note_class(self, module: nn.Module) -> None:
        """Note that traced code asks for the class of a module."""
        self.attributes.questions.note_class(module)

    def seen_names(self) -> set[str]:
        """Return the names of the module's own attributes that were read so far."""
        return self.session.observers.seen

    def note_lasting(self, node: fx.Node, change: Change) -> None:
        """Note what a node changes that outlives the call."""
        self._lasting[node] = change

    def _lasting_change(self, node: fx.Node) -> Change | None:
        change = self._lasting.get(node)
        if node.op != "call_module":
            return change
        callee = self.module.get_submodule(str(node.target))
        if self._stateful(callee):
            return Change(revocable=False)
        places = [(m, name) for m in all_modules(callee) for name in sorted(self.assignments.by_calls.get(m, ()))]
        return change if not places else self.assignments.change(places, change)

    # Nodes

    def create_proxy(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record an operation, and do it on the example values."""
        with self.session.aside():
            values = examples_of((args, kwargs))
            watch = Watch(self.changes, [] if values is UNKNOWN else [*values[0], *values[1].values()])
        value = UNKNOWN if values is UNKNOWN else self._evaluate(kind, target, *values)
        with self.session.aside():
            lasting = Change(revocable=False) if value is UNKNOWN else watch.lasting()
            if target is setattr and is_repeatable(args[0].node, args[1]):
                lasting = None
            asks = kind == "call_method" and value is None and not isinstance(values[0][0], Tensor)
            asks = asks and not is_statement()
        if kind == "call_method" and target in _RESHAPING:
            self.liftable = False
        return self.add(kind, target, args, kwargs, value, optional=asks or target in _OPTIONAL, lasting=lasting)

    def add(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        value: Any,
        *,
        optional: bool = False,
        fixed: bool = False,
        lasting: Change | None = None,
    ) -> Any:
        """Add a node with an example value, and return what traced code sees of it. An `optional` value may be None in
        another call; the structure of a `fixed` one never changes; `lasting`: what the node changes that outlives the
        call.
        """
        with self.session.aside():
            node = self.graph.create_node(kind, target, *self._arguments.arguments(args, kwargs))
            if lasting is not None:
                self._lasting[node] = lasting
            proxy = self._proxy(node, value)
            self.data.note(node, fixed=fixed, changes=lasting is not None and lasting.objects)
            if value is not None and value is not UNKNOWN:
                self.none_guards.note(node, changes=lasting is not None)
            if kind == "call_module":
                self.changes.protect(value)
            else:
                self.changes.derive(value, map(self.examples.get, node.all_input_nodes))
        if value is not None:
            return proxy
        if optional and not self.data.is_fixed(node):
            self.decisions.absent(node)
        return None  # itself: `is None` asks no proxy

    def source_node(self, kind: str, target: Any, value: Any, args: Any = (), kwargs: Any = None) -> ValueProxy:
        """Add a node whose value comes from outside: an argument, an attribute, a mode; a tensor is not to change."""
        with self.session.aside():
            proxy = self._proxy(self.graph.create_node(kind, target, args, kwargs), value)
            self.data.note(proxy.node)
            self.changes.protect(value, proxy.node if kind == "placeholder" else None)
            return proxy

    def _proxy(self, node: fx.Node, value: Any) -> ValueProxy:
        if value is not UNKNOWN:
            node.meta["val"] = meta_of(value)
        node.meta["source"] = source_of()
        self.examples[node] = value
        return ValueProxy(node, self, value)

    def _evaluate(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.session.suspended():
            if kind == "call_method":
                return getattr(args[0], target)(*args[1:], **kwargs)
            return target(*args, **kwargs)

    def values(self, arguments: Any) -> Any:
        """Return `arguments` with example values in place of proxies, or UNKNOWN where one has none."""
        with self.session.aside():
            return examples_of(arguments)

    def constant(self, value: Any) -> Any:
        """Return a plain value as a node argument."""
        return self._arguments.value(value)

    # Questions

    def torch_function(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a torch function, method or property access."""
        self.decisions.forget_index((args, kwargs))
        name = getattr(function, "__name__", "")
        if isinstance(function, _ACCESSOR):
            return self._property(name, function, args)
        if name in ("_set_grad_enabled", "set_grad_enabled"):
            self.fail("it switches the grad mode")
        if name == "__get__" or is_tensor_method(function, name):
            return self._method(name, args, kwargs)
        return self.create_proxy("call_function", function, args, kwargs)

    def _property(self, name: str, function: Any, args: tuple[Any, ...]) -> Any:
        if name != "__get__":
            self.fail("it sets an attribute of a tensor")
        return self.create_proxy("call_function", getattr, (args[0], function.__self__.__name__), {})

    def _method(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        owner = args[0] if issubclass(type(args[0]), ValueProxy) else self.attributes.of_tensor(args[0])
        if name.startswith("__"):
            return getattr(ValueProxy, name)(owner, *args[1:], **kwargs)
        return self.attribute_of(owner, name)(*args[1:], **kwargs)

    def attribute_of(self, proxy: ValueProxy, name: str) -> Any:
        """Answer a read of an attribute: a method to call later, or the value as a node."""
        value = proxy.fxopt_value
        if name in _REFUSED and (value is UNKNOWN or isinstance(value, Tensor)):
            self.fail("it turns a tensor into a numpy array" if name == "numpy" else f"it calls .{name} on a value")
        if value is UNKNOWN and proxy.node.op == "placeholder" and not hasattr(Tensor, name):
            self.fail(f"only example inputs can give what .{name} of an argument is")
        if isinstance(value, Mapping) and name in ("keys", "values", "items"):
            return lambda: self._mapping_part(proxy, name)
        owner: Any = Tensor if value is UNKNOWN else proxy.fxopt_value
        with self.session.suspended():
            member: Any = getattr(owner, name, None if value is UNKNOWN else Absent)
        if member is Absent:
            self.decisions.missing(proxy, name)
        if callable(member) and not isinstance(member, type):
            return MethodProxy(proxy, name)
        return self.create_proxy("call_function", getattr, (proxy, name), {})

    def set_attribute(self, proxy: ValueProxy, name: str, value: Any) -> None:
        """Record the assignment of an attribute to an object."""
        if proxy.fxopt_value is UNKNOWN or isinstance(proxy.fxopt_value, Tensor):
            self.fail(f"sets the attribute {name!r} of a tensor")
        self.create_proxy("call_function", setattr, (proxy, name, value), {})

    def _mapping_part(self, proxy: ValueProxy, name: str) -> list[Any]:
        keys = self.decisions.keys(proxy)
        if name == "keys":
            return keys
        return [proxy.fxopt_item(key) if name == "values" else (key, proxy.fxopt_item(key)) for key in keys]

    def is_instance(self, proxy: ValueProxy, kinds: Any) -> bool:
        """Answer `isinstance` from the example; without one, what was put in is a tensor, or else what was called."""
        if (value := proxy.fxopt_value) is UNKNOWN:
            if _asks_for_containers(kinds) and not issubclass(Tensor, kinds):
                self.decisions.assume_tensor(proxy)
            return proxy.node.op in ("placeholder", "call_module", "get_attr") and issubclass(Tensor, kinds)
        answer = isinstance(value, kinds)
        if proxy.node.op == "placeholder":
            self.decisions.kind(proxy.node, value, kinds)
        elif self.data.is_read(proxy.node):
            self.decisions.kind_read(proxy)
        return answer

    def hash_of(self, proxy: ValueProxy, frame: FrameType) -> int:
        """Answer `hash(proxy)`, asked by what runs in `frame`: tensors by identity, plain values by what they are."""
        value = proxy.fxopt_value
        if value is UNKNOWN or isinstance(value, Tensor):
            return id(proxy)
        if asks_memo(frame):
            self.fail("it calls a memoised function that is found neither in its file nor in its class")
        return hash(self.decisions.plain(proxy))


def _asks_for_containers(kinds: Any) -> bool:
    each = cast("tuple[Any, ...]", kinds if isinstance(kinds, tuple) else (kinds,))
    return any(isinstance(kind, type) and issubclass(kind, (tuple, list, dict)) for kind in each)


TracingSession = Session[ModuleTracer]
"""What intercepts the traced forwards of a model."""
