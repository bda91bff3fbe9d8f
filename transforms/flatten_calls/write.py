"""The graph of a module with what it calls written out in the place of the calls, layers of torch.nn included."""

from __future__ import annotations

import copy
import operator
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import fx, nn

from ...compat import has_hooks, is_registered_operator, own_buffers, own_children, own_parameters
from ...compat.calls import DIRECT
from ...layers.folded import expect_one_of
from ...layers.packed import keep_narrow
from ...layers.quantized import ON_NUMBERS, Int8DynamicLinear, QuantizedLayer, StaticLayer, TiedInt8Linear
from ...layers.written_out import Opened, UnchangedGuard, WithoutGradient
from ...operators import info_of, mutates, reached
from ...passes.rewriting import (
    Checks,
    Opener,
    asks_unchanged,
    bound,
    lasting_guards,
    only_builds,
    opened_by,
    paths_to,
    reason_against_opening,
    received,
    writes,
)
from ...runtime.graphs import (
    Capture,
    ContextRegion,
    Region,
    Specialization,
    capture_of,
    copy_graph,
    required_capture,
)
from ...runtime.guards import (
    SELF,
    Applied,
    Argument,
    Attribute,
    Guard,
    Is,
    Source,
    key_of,
    length_of,
    module_at,
    require,
)
from ...runtime.values import INTERNAL, PLAIN_TYPES, is_plain_structure, keep, map_leaves, qualified, user_class
from ...tracing.analyses import may_draw
from ...tracing.program import Program
from ...tracing.rules import leaf_graph

__all__ = ["Flat", "flattened", "is_written_out"]

_FRESH = (F.linear, torch.conv1d, torch.conv2d, torch.conv3d, torch.batch_norm)
"""Their results are new, and their gradients do without them: what follows may write there."""

_NORMS = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,)}
"""Kind -> the numbers of dimensions that it takes."""


def leaf_body(module: nn.Module) -> fx.Graph | None:
    """Return the graph of what a layer calls in its mode, with its tensors as attributes; None where it has none."""
    graph = _norm_in_evaluation(module) if type(module) in _NORMS else leaf_graph(module)
    return None if graph is None else copy_graph(graph)


def settings_of(module: nn.Module) -> tuple[tuple[str, Any], ...] | None:
    """Return the attributes that a layer's forward reads, with their values; None where one is no plain value."""
    read = _names_read(type(module))
    found = tuple((name, value) for name, value in vars(module).items() if name in read and name not in _REGISTRIES)
    return found if all(is_plain_structure(value) for _, value in found) else None


_REGISTRIES = frozenset(INTERNAL) - {"training"}


def _names_read(kind: type) -> set[str]:
    """Return the names in the code of a class's forward, and in that of its methods which are among these."""

    def names_in(name: str) -> tuple[str, ...]:
        function = getattr(kind, name, None)
        return function.__code__.co_names if isinstance(function, types.FunctionType) else ()

    return set(reached(["forward"], names_in))


def _norm_in_evaluation(module: nn.Module) -> fx.Graph | None:
    """Return the graph of a batch norm that has statistics and does not update them."""
    norm = cast("nn.BatchNorm2d", module)
    if norm.training or norm.running_mean is None or norm.running_var is None:
        return None
    graph = fx.Graph()
    x = graph.placeholder("input")
    graph.call_function(expect_one_of, (graph.call_method("dim", (x,)), *_NORMS[type(norm)]))
    tensors = [graph.get_attr(name) for name in ("running_mean", "running_var")]
    tensors += [graph.get_attr(name) for name in ("weight", "bias") if norm.affine]
    padding = [None] * (4 - len(tensors))
    graph.output(graph.call_function(F.batch_norm, (x, *tensors, *padding, False, 0.0, norm.eps)))
    return graph


def _in_floats(layer: QuantizedLayer) -> fx.Graph:
    """Return the graph of a linear layer with the weight that its numbers stand for."""
    graph = fx.Graph()
    x = graph.placeholder("input")
    tensors = {**own_parameters(layer), **own_buffers(layer)}
    held = {name: graph.get_attr(name) for name, each in tensors.items() if each is not None}
    weight = held.get("weight")
    if weight is None:
        scales = graph.call_method("reshape", (held["weight_scales"], -1, 1))
        weight = graph.call_method("type_as", (graph.call_method("mul", (held["weight_values"], scales)), x))
    if "factors" in held:
        weight = graph.call_method("mul", (weight, graph.call_method("type_as", (held["factors"], x))))
    bias = held.get("bias")
    if "shift" in held:
        shift = graph.call_method("type_as", (held["shift"], x))
        bias = shift if bias is None else graph.call_method("add", (bias, shift))
    graph.output(graph.call_function(F.linear, (x, weight, bias)))
    return graph


def shorten(graph: fx.Graph) -> None:
    """Let a graph call what functions call in the end, and write ReLUs into results that nothing else reads."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is F.dropout:
            _drop(node)
        elif node.op == "call_function" and node.target in DIRECT:
            _call_directly(node)
    for node in graph.find_nodes(op="call_function", target=torch.relu):
        x = node.args[0]
        if isinstance(x, fx.Node) and x.op == "call_function" and x.target in _FRESH and len(x.users) == 1:
            node.target = torch.relu_


def _drop(node: fx.Node) -> None:
    """Take a dropout out that drops nothing."""
    training = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", True)
    x = node.args[0] if node.args else node.kwargs.get("input")
    if training is False and isinstance(x, fx.Node):
        node.replace_all_uses_with(x)
        node.graph.erase_node(node)


def _call_directly(node: fx.Node) -> None:
    function, passed_on = DIRECT[node.target]
    try:
        args = passed_on(*node.args, **node.kwargs)
    except TypeError:
        return  # spelled otherwise
    if args is not None and isinstance(args[0], fx.Node):
        node.target, node.args, node.kwargs = function, args, {}


_CHANGED = "flatten_calls wrote out what it calls"


@dataclass
class Flat:
    """A graph with calls written out."""

    specialization: Specialization  # the graph, and when it holds
    calls: int  # how many calls were written out
    opened: frozenset[str]  # the names of the modules whose calls were written out
    closed: dict[str, str]  # name of each module that is called as before -> why; "" where that is as it mostly is


def flattened(program: Program, name: str, specialization: Specialization, *, quantized: bool = False) -> Flat:
    """Return one of a module's graphs with all calls written out that can be, by the modules' present modes; those of
    layers of 8 bits, where `quantized`: by ranges that are known before, or in floats where a call would find them.
    """
    owner = program.module(name)
    writer, arguments = _written(program, name, specialization, quantized, draws=owner.training)
    if writer.has_left_out and any(map(_may_draw, writer.graph.nodes)):
        writer, arguments = _written(program, name, specialization, quantized, draws=True)
    keep_narrow(writer.graph, exactly=True)
    writer.graph.eliminate_dead_code(is_impure_node=lambda node: node.op != "get_attr" and not only_builds(node))
    writer.note_computed(specialization.guards, "")
    found = Applied(UnchangedGuard(writer.opened_modules(), len(own_children(owner))), (SELF,))
    mode = Guard(Attribute(SELF, "training"), Is(key_of(owner.training)), _CHANGED)
    own = [guard for guard in specialization.guards if not (_counts_children(guard, owner) or asks_unchanged(guard))]
    guards = (*own, mode, *writer.guards, Guard(found, Is(key_of(True)), _CHANGED))
    reads = dict.fromkeys(guards)
    flat = replace(specialization, graph=writer.graph, guards=tuple(reads), arguments=arguments)
    return Flat(flat, writer.calls, frozenset(writer.found), writer.closed)


def _may_draw(node: fx.Node) -> bool:
    return node.op == "call_module" or (may_draw(node) and not only_builds(node))


def _written(
    program: Program, name: str, specialization: Specialization, quantized: bool, *, draws: bool
) -> tuple[_Writer, dict[str, Source]]:
    """Return what wrote a graph with the calls of a module, and what each of its inputs is, by name."""
    writer = _Writer(program, name, program.module(name), quantized, draws)
    placeholders = specialization.graph.find_nodes(op="placeholder")
    sources = [specialization.argument(node) for node in placeholders]
    inputs = [writer.input(node, source) for node, source in zip(placeholders, sources, strict=True)]
    writer.graph.output(writer.run(specialization.graph, ("", ""), inputs))
    shorten(writer.graph)
    return writer, {node.name: source for node, source in zip(inputs, sources, strict=True)}


def is_written_out(guard: Guard) -> bool:
    """Say whether a condition is that of a graph in which calls were written out."""
    return asks_unchanged(guard, compiled=False)


class _Writer(Opener):
    """Write what a module calls into one graph. A place is the path of a module, and what stood there before."""

    def __init__(self, program: Program, name: str, owner: nn.Module, quantized: bool, draws: bool) -> None:
        self.program, self.name, self.owner, self.graph = program, name, owner, fx.Graph()
        self._opens_quantized, self._draws = quantized, draws
        self.guards: list[Guard] = []  # conditions of the graphs that were opened, as those of the owner
        self.calls, self.closed = 0, dict[str, str]()
        self.found: dict[str, Opened] = {}  # the modules that were opened
        self._computed: dict[str, Opened] = {}
        self._sources: dict[fx.Node, Source] = {}
        self._has_written = False  # to what was there before the start
        self._fresh = set[fx.Node]()  # results in memory of their own
        self._checks = Checks(self.graph)
        self.has_left_out = False  # what only keeps the state of random generators

    def input(self, node: fx.Node, source: Source) -> fx.Node:
        """Add an argument of the owner's."""
        new = self.graph.node_copy(node)
        self._sources[new] = source
        return new

    def opened_modules(self) -> list[Opened]:
        """Return the modules that were opened, and those on the way there, each behind the one that holds it."""
        known = {**self._computed, **self.found}
        paths = dict.fromkeys(part for path in known for part in paths_to(path))
        return [
            known.get(path) or Opened.leaf(path, self.owner.get_submodule(path), ())
            for path in sorted(paths, key=lambda p: p.count("."))
        ]

    def note_computed(self, guards: Iterable[Guard], path: str) -> None:
        """Ask, with all others, for the modules that a graph of the module at `path` computes itself."""
        opened = (each.inside(path) for guard in guards if asks_unchanged(guard) for each in opened_by(guard))
        self._computed |= {each.path: each for each in opened}

    def made(self, node: fx.Node, place: tuple[str, str], args: Any, kwargs: Any) -> Any:
        """Write any other node, or return what is known of it."""
        if node.target is require and _is_met(*args[:2]):
            return None
        if self._only_keeps_generators(node):
            return True  # a check that fails has nothing to take back
        target = qualified(place[0], str(node.target)) if node.op in ("call_module", "get_attr") else node.target
        parent, _, last = str(target).rpartition(".")
        if node.op == "get_attr" and self._is_mode(parent, last):
            return self.owner.get_submodule(parent).training
        if node.op == "get_attr" and parent in self.found and last in self.found[parent].without:
            return None
        new = self.graph.create_node(node.op, target, args, kwargs, node.name)
        new.meta = dict(node.meta)
        is_pure = node.target in ON_NUMBERS or node.target is bool or only_builds(node)
        if not is_pure and writes(node, self.program, qualified(self.name, place[0])):
            overwritten = _overwritten(new) if mutates(node) else ()
            if overwritten and all(each in self._fresh for each in overwritten):
                self._fresh.add(new)  # what was computed since the start
            else:
                self._has_written = True
        elif info_of(node).fresh:
            self._fresh.add(new)
        if place[1]:
            new.meta["origin"] = place[1]
        if node.op == "get_attr":
            module = self.owner.get_submodule(parent)
            new.meta["parameter"], new.meta["buffer"] = last in own_parameters(module), last in own_buffers(module)
        return new

    def _is_mode(self, path: str, name: str) -> bool:
        """Say whether an attribute is the mode of the owner, or of a module that was opened; note that it is read."""
        if name != "training" or (path and path not in self.found):
            return False
        if path:
            self.found[path] = self.found[path].with_setting(name, self.owner.get_submodule(path).training)
        return True

    def opened(self, node: fx.Node, place: tuple[str, str], args: Any, kwargs: Any) -> tuple[Any] | None:
        """Write what a called module computes; None where it stays a call."""
        path = qualified(place[0], str(node.target))
        module = self.owner.get_submodule(path)
        if isinstance(module, ContextRegion) and module.context.gradients is False:
            return self._without_gradient(node, module, place, args, kwargs)
        reason = reason_against_opening(module, asks_for_hooks=True)
        if reason is not None or isinstance(module, Region) or not _is_held(self.owner, path):
            self.closed[path] = reason or ""
            return None
        if self._opens_quantized and isinstance(module, StaticLayer) and len(args) == 1:
            return (self._static(module, path, node, args[0], kwargs),)
        capture = capture_of(module)
        if capture is not None:
            found = self._captured(module, capture, path, node, args, kwargs)
        else:
            found = self._dynamic(module, path, args) or self._leaf(module, path, args, kwargs)
        if found is None:
            self.closed.setdefault(path, "")
            return None
        graph, inputs = found
        result = self.run(graph, (path, place[1] or str(node.meta.get("origin", node.name))), inputs)
        self.calls += 1
        if isinstance(result, fx.Node) and "val" in node.meta:
            result.meta.setdefault("val", node.meta["val"])  # graphs of layers are traced without example values
        return (result,)

    def _without_gradient(
        self, node: fx.Node, region: ContextRegion, place: tuple[str, str], args: Any, kwargs: Any
    ) -> tuple[Any] | None:
        """Write a part of a forward that runs under `no_grad`, whose results pass no gradient on; None where it stays a
        call.
        """
        capture, owner = required_capture(region), qualified(self.name, place[0])
        given, fitting = bound(capture, args, kwargs), capture.specializations
        inputs = None
        if given is not None and len(fitting) == 1 and not lasting_guards(region, fitting[0], given):
            inputs = received(fitting[0], given, fx.Node)
        may_not_open = region.context.kind == "inference_mode" or has_hooks(region)
        if (
            inputs is None
            or may_not_open
            or any(_is_of(region, node) or writes(node, self.program, owner) for node in fitting[0].graph.nodes)
        ):
            self.closed[qualified(place[0], str(node.target))] = f"it opens {region.context}"
            return None

        def stopped(leaf: Any) -> Any:
            if not isinstance(leaf, fx.Node) or leaf in inputs:
                return leaf
            new = self.graph.call_function(WithoutGradient(), (leaf,))
            new.meta = dict(leaf.meta)
            return new

        return (map_leaves(stopped, self.run(fitting[0].graph, place, inputs)),)

    def _leaf(self, module: nn.Module, path: str, args: Any, kwargs: Any) -> tuple[fx.Graph, Sequence[Any]] | None:
        graph, settings = leaf_body(module), settings_of(module)
        if graph is None or settings is None or kwargs or len(args) != len(graph.find_nodes(op="placeholder")):
            return None
        self.found[path] = Opened.leaf(path, module, settings)
        return graph, args

    def _dynamic(self, module: nn.Module, path: str, args: Any) -> tuple[fx.Graph, Sequence[Any]] | None:
        """Return the graph of a layer that rounds its input at each call, without that."""
        if not self._opens_quantized or not isinstance(module, (Int8DynamicLinear, TiedInt8Linear)) or len(args) != 1:
            return None
        self.found[path] = Opened.computed(path, module, ())
        return _in_floats(module), args

    def _static(self, module: StaticLayer, path: str, node: fx.Node, x: Any, kwargs: Mapping[str, Any]) -> fx.Node:
        """Write the call of a layer that computes in 8 bits as one of what it computes."""
        self.calls += 1
        self.found[path] = Opened.computed(path, module, ("range", "dtype"))
        given, own = dict(kwargs), own_parameters(module)
        values = self._tensor_of(path, "weight_values", is_parameter=False)
        scales = given.pop("scales", None) or self._tensor_of(path, "weight_scales", is_parameter=False)
        bias = given.pop("bias", None)
        if bias is None and own.get("bias") is not None:
            bias = self._tensor_of(path, "bias", is_parameter=True)
        for name in ("factors", "shift"):
            if own_buffers(module).get(name) is not None:
                given[name] = self._tensor_of(path, name, is_parameter=False)
        new = self.graph.call_function(copy.deepcopy(module.computation), (x, values, scales, bias), given)
        new.meta = {"origin": node.name, **node.meta}
        self._fresh.add(new)
        return new

    def _tensor_of(self, path: str, name: str, *, is_parameter: bool) -> fx.Node:
        node = self.graph.get_attr(qualified(path, name))
        node.meta["parameter"], node.meta["buffer"] = is_parameter, not is_parameter
        return node

    def _captured(
        self, module: nn.Module, capture: Capture, path: str, node: fx.Node, args: Any, kwargs: Any
    ) -> tuple[fx.Graph, Sequence[Any]] | None:
        given = bound(capture, args, kwargs)
        fitting = [each for each in capture.specializations if each.runs_in_mode(module)]
        if given is None or len(fitting) != 1 or not self._may_restart(fitting[0].graph):
            return None
        inputs = received(fitting[0], given, fx.Node)
        gives = fitting[0].graph.output_node().args[0]
        if inputs is None or not (isinstance(gives, (fx.Node, tuple)) or (isinstance(gives, list) and _are_read(node))):
            return None
        lasting = [guard for guard in lasting_guards(module, fitting[0], given) if not asks_unchanged(guard)]
        asked = {guard: self._of_owner(guard, path, given) for guard in lasting}
        computed = [guard for guard, over in asked.items() if over is None]
        if computed and (self._has_written or not self._checks.write(computed, given)):
            return None  # the owner could not start over
        self.guards += [guard for guard in asked.values() if guard is not None]
        self.note_computed(fitting[0].guards, path)
        self.found[path] = Opened.captured(path, module, sorted(fitting[0].reads))
        return fitting[0].graph, inputs

    def _may_restart(self, graph: fx.Graph) -> bool:
        """Say whether the owner may start over where a check in a graph fails: nothing was written before."""
        targets = {
            node.target for node in graph.nodes if node.op == "call_function" and not self._only_keeps_generators(node)
        }
        return require not in targets or (keep not in targets and not self._has_written)

    def _only_keeps_generators(self, node: fx.Node) -> bool:
        """Say whether a node keeps nothing but the state of random generators, and nothing draws."""
        is_needless = (
            node.target is keep and not self._draws and not node.args and dict(node.kwargs) == {"random": True}
        )
        self.has_left_out = self.has_left_out or is_needless
        return is_needless

    def _of_owner(self, guard: Guard, path: str, given: Mapping[str, Any]) -> Guard | None:
        """Return the condition of a module's graph as one of the owner's; None where it is on what is computed."""
        replaced: dict[Source, Source] = {SELF: module_at(path.split("."))}
        arguments = {each for source in guard.sources() for each in source.all() if isinstance(each, Argument)}
        for argument in arguments - {SELF}:
            value = given.get(argument.name)
            source = self._sources.get(value) if isinstance(value, fx.Node) else None
            if source is None:
                return None
            replaced[argument] = source
        return guard.over(replaced)


def _is_of(region: Region, node: fx.Node) -> bool:
    """Say whether a node reads what the region itself holds, not the module around it: a constant, another region."""
    return node.op == "get_attr" or (
        node.op == "call_module" and isinstance(region.get_submodule(str(node.target)), Region)
    )


def _are_read(call: fx.Node) -> bool:
    """Say whether of a list that a call returns only items are read."""
    return all(user.target in (operator.getitem, len) for user in call.users)


def _is_met(value: object, expected: object) -> bool:
    """Say whether a check asks for what is known by now."""
    return type(value) in PLAIN_TYPES and type(value) is type(expected) and value == expected


def _counts_children(guard: Guard, owner: nn.Module) -> bool:
    """Say whether a condition is on the number of a Sequential's children, which is asked for with all others."""
    counts = getattr(user_class(type(owner)), "__len__", None)
    return counts is nn.Sequential.__len__ and guard.source == length_of(SELF)


def _is_held(owner: nn.Module, path: str) -> bool:
    """Say whether modules, and no regions, lead to a module."""
    ways = [owner.get_submodule(part) for part in paths_to(path)]
    return not any(isinstance(module, Region) for module in (owner, *ways)) and bool(own_children(owner))


def _overwritten(node: fx.Node) -> Sequence[Any]:
    """Return the operands that an operation in place may write into."""
    if node.kwargs.get("out") is not None:
        return [node.kwargs["out"]]
    target = node.target
    if is_registered_operator(target) or "writes" in node.meta or getattr(target, "may_write", False):
        return node.all_input_nodes
    return node.args[:1]
