"""What a forward reads from modules while it is traced, looked up anew whenever the graph runs; arguments of nodes."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from ...compat import in_place_format
from ...runtime.guards import Source, attribute_at, question
from ...runtime.values import INTERNAL, copied, has_attributes, is_namedtuple, qualified
from ..proxies import PLAIN, Tracer, ValueProxy
from ..reads import NestedReads, items_of
from .assignments import Assignments
from .children import ChildReads
from .contexts import OpenContexts

__all__ = ["Attributes", "NodeArguments"]


class Attributes:
    """Hand out one proxy for each tensor and flag of the traced module and those inside it."""

    def __init__(
        self,
        tracer: Tracer,
        answers: Mapping[Source, bool],
        questions: ChildReads,
        contexts: OpenContexts,
        assignments: Assignments,
        nested: NestedReads,
        called: Callable[[nn.Module], bool],
    ) -> None:
        self._tracer = tracer
        self.questions = questions
        self._contexts = contexts
        self._assignments = assignments
        self._nested = nested
        self._called = called
        self._answers = answers
        self._proxies: dict[str, ValueProxy] = {}
        self._names: dict[int, str] | None = None
        self._held: dict[int, ValueProxy] = {}
        self._new: set[int] = set()
        self._handed_on: set[int] = set()

    def proxy(self, target: str, value: Any) -> ValueProxy:
        """Return the proxy for the attribute called `target` as seen from the traced module."""
        proxy = self._proxies.get(target)
        if proxy is None:
            proxy = self._proxies[target] = self._tracer.source_node("get_attr", target, value)
        return proxy

    def of_tensor(self, tensor: Tensor) -> ValueProxy:
        """Return the proxy of a tensor that traced code holds itself (`for p in self.parameters()`); else give up."""
        name = self.tensor_names().get(id(tensor))
        if name is not None:
            return self.proxy(name, tensor)
        held = self._held.get(id(tensor)) or self._in_container(tensor)
        if held is None:
            self._tracer.fail("it uses a tensor that is not a parameter, buffer or attribute of the module")
        self._held[id(tensor)] = held
        return held

    def tensor_names(self) -> Mapping[int, str]:
        """Return id of a tensor -> its name as seen from the traced module."""
        if self._names is None:
            self._names = self._tracer.names.tensors(self._tracer.owner)
        return self._names

    def _in_container(self, tensor: Tensor) -> ValueProxy | None:
        """Return the proxy of a tensor in a list, tuple or dictionary that the traced module holds, or None."""
        for name, value in list(vars(self._tracer.module).items()):
            path = None if name in INTERNAL else _path_to(tensor, value)
            if path is not None:
                with self._tracer.session.aside():
                    example = copied(value)  # the forward may write into it
                proxy: Any = self.proxy(name, example)
                for key in path:
                    proxy = proxy.fxopt_item(key)
                return proxy
        return None

    def of_object(self, value: Any) -> ValueProxy | None:
        """Return the proxy of an object that the module holds as an attribute (its configuration), or a part of one."""
        for holder, path in self._holders():
            for name, held in cast("dict[str, Any]", vars(holder)).items():
                if held is value and name.isidentifier():
                    self._handed_on.add(id(value))
                    return self._part(path, name, value)
        return None

    def _holders(self) -> Iterator[tuple[Any, tuple[str, ...]]]:
        """Yield the traced module and the objects among its attributes, each with the names that lead there."""
        module = self._tracer.module
        yield module, ()
        yield from ((value, (name,)) for name, value in list(vars(module).items()) if has_attributes(value))

    def _part(self, path: tuple[str, ...], name: str, value: Any) -> ValueProxy:
        if not path:
            return self.proxy(name, value)
        owner = self.proxy(path[0], vars(self._tracer.module)[path[0]])
        return self._tracer.create_proxy("call_function", getattr, (owner, name), {})

    def read(self, module: nn.Module, name: str, value: Any, frame: FrameType) -> Any:
        """Answer a read of a parameter, buffer or child by the code in `frame`."""
        if value is None or issubclass(type(value), nn.Module):
            self.questions.note_read(module, name, value, frame)
            return value
        if issubclass(type(value), ValueProxy):  # it was set before
            return value
        target = self._target(module, name) if isinstance(value, Tensor) else None
        return value if target is None else self.proxy(target, value)

    def note_plain(self, module: nn.Module, name: str, value: Any) -> None:
        """Note that an attribute of a module inside is read; the traced module's own are seen elsewhere."""
        if name in self._assignments.by_calls.get(module, frozenset()) and self._called(module):
            self._tracer.fail(f"it reads the attribute {name!r} of a child after a call that sets it")
        if self._assignments.is_written(module, name):
            return
        self._assignments.note_read(module, name)
        if name in INTERNAL or name.startswith(("__", "_fxopt")) or isinstance(value, (Tensor, nn.Module)):
            return
        with self._tracer.session.aside():
            path = self._tracer.names.relative(self._tracer.owner, module)
            if path:
                self._nested.note_inside(path, name, value)

    def read_training(self, module: nn.Module, value: bool) -> Any:
        """Answer a read of a training flag."""
        target = self._target(module, "training")
        if target is not None:
            return self.proxy(target, self._answers.get(attribute_at(target), value))
        if id(module) not in self._new:
            self._tracer.fail("it reads the mode of a module that is not registered as its child")
        return value

    def made(self, module: nn.Module) -> None:
        """Note a module that the forward itself makes."""
        self._new.add(id(module))

    def ask(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Answer a question about a mode of torch; within a context that decides it, the answer never changes."""
        args = tuple(self._contexts.plain(argument) for argument in args)
        known = self._contexts.knows(function.__name__, args)
        if known is not None:
            return known
        value = function(*args, **kwargs)
        asked = None if kwargs else question(function, args)
        if asked is not None:
            value = self._answers.get(asked, function is torch.is_grad_enabled or value)
        return self._tracer.source_node("call_function", function, value, args, kwargs)

    def accepts(self, module: nn.Module, name: str, value: Any) -> bool:
        """Tell whether an assignment is to be made now; to the traced module, or one inside it, nodes make it."""
        path = self._tracer.names.relative(self._tracer.owner, module)
        if path is None:
            return True
        target = qualified(path, name)
        is_set = self._assignments.is_written(module, name)
        if is_set or not (issubclass(type(value), ValueProxy) and _changes(value.node, target)):
            self._assignments.record(module, path, name, value)
        return False

    def check_arrays(self, plain: set[str]) -> None:
        """Give up on numpy's values, read of `plain` attributes or inside, that nodes were not given whole."""
        for root, source, array in self._nested.arrays:
            if id(array) not in self._handed_on and (not root or root in plain):
                self._tracer.fail(f"it reads the numpy value {source}, which may change; make it a buffer", "")

    def _target(self, module: nn.Module, name: str) -> str | None:
        path = self._tracer.names.relative(self._tracer.owner, module)
        return None if path is None else qualified(path, name)


def _path_to(tensor: Tensor, value: Any, depth: int = 2) -> tuple[int | str, ...] | None:
    """Return the keys and places that lead from a container to a tensor in it, or None."""
    for key, item in items_of(value):
        if isinstance(key, enum.Enum):
            continue
        if item is tensor:
            return (key,)
        inner = _path_to(tensor, item, depth - 1) if depth else None
        if inner is not None:
            return (key, *inner)
    return None


def _changes(node: fx.Node, target: str) -> bool:
    """Tell whether a node changed the attribute `target` in place and returned it."""
    while node.op != "get_attr":
        in_place = node.op == "call_function" and in_place_format(node.target) is not None
        in_place = in_place or (node.op == "call_method" and str(node.target).endswith("_"))
        if not in_place or not node.args or not isinstance(node.args[0], fx.Node):
            return False
        node = node.args[0]
    return node.target == target


_CONSTANTS = (enum.Enum, range)


class NodeArguments:
    """Replace proxies by their nodes and tensors by get_attr nodes, containers included."""

    def __init__(self, tracer: Tracer, attributes: Attributes) -> None:
        self._tracer = tracer
        self._attributes = attributes

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for a node."""
        return tuple(self.value(item) for item in args), {key: self.value(item) for key, item in kwargs.items()}

    def value(self, value: Any) -> Any:
        """Return one argument for a node; give up if it is, or holds, something that a graph cannot."""
        kind = cast("type[object]", type(value))
        if issubclass(kind, ValueProxy):
            return self._node(value)
        if isinstance(value, float):  # numpy's, too
            return float(value)
        if kind in PLAIN or isinstance(value, _CONSTANTS):
            return value
        if kind is slice:
            return slice(self.value(value.start), self.value(value.stop), self.value(value.step))
        if isinstance(value, Tensor):
            return self._attributes.of_tensor(value).node
        if issubclass(kind, (tuple, list, dict)) and not dataclasses.is_dataclass(value):
            return self._container(value)
        return self._object(value)

    def _node(self, proxy: ValueProxy) -> Any:
        if proxy.tracer is not self._tracer:
            self._tracer.fail("it uses a value that another forward computed")
        return proxy.node

    def _container(self, value: Any) -> Any:
        if isinstance(value, dict):
            pairs = cast("dict[Any, Any]", value)
            if type(pairs) is not dict:
                return self._tracer.fail(f"it passes on a {type(pairs).__name__}")
            return {key: self.value(item) for key, item in pairs.items()}
        items = [self.value(item) for item in value]
        if is_namedtuple(value):
            return type(value)(*items)
        return items if isinstance(value, list) else tuple(items)

    def _object(self, value: Any) -> Any:
        held = self._attributes.of_object(value)
        if held is not None:
            return held.node
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._dataclass(value)
        return self._tracer.fail(f"it passes on a {type(value).__name__}")

    def _dataclass(self, value: Any) -> Any:
        """Rebuild a dataclass (a model output, say) in the graph, from its fields."""
        fields = dataclasses.fields(value)
        if not all(field.init for field in fields):
            self._tracer.fail(f"it builds a {type(value).__name__}, and not all of its fields can be set")
        kwargs = {field.name: self.value(getattr(value, field.name)) for field in fields}
        present = {name: item for name, item in kwargs.items() if item is not None}
        return self._tracer.graph.call_function(cast("type[Any]", type(value)), (), present)
