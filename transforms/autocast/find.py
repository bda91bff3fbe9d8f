"""Where in a model regions can be made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, fx, nn

from ...compat import all_modules, has_hooks, own_parameters
from ...layers.autocast import AutocastLeaf, ReturningAutocast
from ...operators import canonical_name, mutates, operator_info, operator_of_module
from ...passes.contract import names_module
from ...passes.sites import Refusal, Site
from ...runtime.graphs import Context, WrappedRegion, capture_of, required_capture, specializations_of
from ...runtime.guards import require
from ...runtime.values import TensorMeta, is_leaf, qualified, user_class
from ...tracing.program import CallSites, Program
from .lists import Kind, kind_of_layer
from .parts import in_float32, kind_of_operation, narrow_nodes, parts_of

__all__ = ["Part", "Repeated", "Search", "repeated_around"]


class Part(NamedTuple):
    """Nodes of a graph that can run in 16 bits as one; `size` counts what gains, in modules that are called, too."""

    owner: str
    specialization: int
    nodes: Sequence[fx.Node]
    gaining: Sequence[fx.Node]
    size: int


Found: TypeAlias = "Part | Site | Refusal"


class Repeated(NamedTuple):
    """Nodes of a graph from the first to the last of several calls of one module."""

    owner: str
    specialization: int
    nodes: tuple[str, ...]


def repeated_around(program: Program, owner: str) -> Repeated | None:
    """Return the calls of the outermost module around `owner` that one graph calls more than once, if they can be one
    region: of its weights, one cast serves all calls.
    """
    names = owner.split(".")
    for count in range(1, len(names) + 1):
        calls: dict[tuple[str, int], list[fx.Node]] = {}
        for site in program.analyses[CallSites].of(program.module(".".join(names[:count]))):
            calls.setdefault(site[:2], []).append(site.node)
        for (caller, number), nodes in calls.items():
            if len(nodes) > 1:
                every = list(nodes[0].graph.nodes)
                among = every[every.index(nodes[0]) : every.index(nodes[-1]) + 1]
                among = [node for node in among if node.op not in _ENDS]
                can_be_one = all(node.target is not require and not mutates(node) for node in among)
                return Repeated(caller, number, tuple(node.name for node in among)) if can_be_one else None
    return None


class Search:
    """Go through the graphs of a model, from the root down; `keep` stays as it is, `device` is a type or "auto"."""

    def __init__(self, program: Program, keep: Sequence[str], device: str, dtype: torch.dtype) -> None:
        self.program, self.keep, self.device = program, keep, device
        self._has_range = dtype is torch.bfloat16  # what may overflow in float16 stays in float32
        self._seen: set[nn.Module] = set()
        self._kinds: dict[nn.Module, Kind] = {}

    def found(self) -> Iterator[Found]:
        """Yield every part, single layers that no region can be around as sites, and why others are left out."""
        if not self.program.inputs:
            yield Refusal("which types it computes in is not known; give example_inputs", "(root)")
            return
        if "" in self.program.captures:
            yield from self._in_module("")
        yield from self._called_by_code()

    def _called_by_code(self) -> Iterator[Found]:
        """Yield what is in modules that only code calls which could not be captured."""
        calls, names = self.program.analyses[CallSites], self.program.names
        left = [module for module in names.distinct if module not in self._seen and not calls.count(module)]
        left = [module for module in left if capture_of(module) is not None or self._gains(module)]
        recorded = self.program.recording(left).calls if left else {}
        for module in left:
            name, called = names.name(module), recorded.get(module, ())
            parts = name.split(".")
            around = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
            if not called or any(self._is_kept(path, self.program.module(path)) for path in around):
                continue
            given = [value for call in called for value in call.args if isinstance(value, Tensor)]
            if capture_of(module) is not None:
                yield from self._in_module(name)
            elif given and all(self._is_for(value.dtype, value.device) for value in given):
                yield Site(self.program, name, {}, detail="a single layer", data={"regions": 0})

    def _gains(self, module: nn.Module) -> bool:
        """Say whether a module is a single layer that gains."""
        cls = type(module)
        is_plain = not has_hooks(module) and not issubclass(cls, AutocastLeaf) and is_leaf(module)
        return is_plain and self._kind_of_layer(user_class(cls)) is Kind.LOWER

    def _in_module(self, owner: str) -> Iterator[Found]:
        module = self.program.module(owner)
        if module in self._seen or self._is_kept(owner, module):
            self._pass_over(module)
            return
        self._seen.add(module)
        parts: list[Part] = []
        called: dict[str, None] = {}
        for number, specialization in enumerate(specializations_of(module)):
            found = self._in_graph(owner, number, specialization.graph)
            parts += found
            inside = {node for part in found for node in part.nodes}
            calls = (node for node in specialization.graph.nodes if node not in inside)
            called.update(dict.fromkeys(filter(None, (self._captured(owner, node) for node in calls))))
        yield from parts
        for node in (node for each in required_capture(module).specializations for node in each.graph.nodes):
            reason = None if node.op in _ENDS else self._obstacle(owner, node)
            if reason is not None:
                yield Refusal(reason, qualified(owner, str(node.target) if node.op == "call_module" else node.name))
        for name in called:
            yield from self._in_module(name)

    def _in_graph(self, owner: str, number: int, graph: fx.Graph) -> list[Part]:
        parts: list[Part] = []
        for nodes in parts_of(graph, lambda node: self._kind(owner, node)):
            gaining = [node for node in nodes if self._kind(owner, node) is Kind.LOWER]
            names = [name for name in (self._captured(owner, node) for node in nodes) if name is not None]
            if len(gaining) == 1 and self._captured(owner, gaining[0]) is not None:
                continue  # its own graph holds all that gains
            for name in names:
                self._pass_over(self.program.module(name))
            for node in gaining:  # layers inside a layer, as shared experts, run in the region
                if node.op == "call_module":
                    self._pass_over(self.program.callee(owner, node))
            inside = (each for name in names for each in all_modules(self.program.module(name)))
            size = len(gaining) + sum(map(self._gains, inside))
            parts.append(Part(owner, number, nodes, gaining, size))
        return parts

    def _captured(self, owner: str, node: fx.Node) -> str | None:
        """Return the name of the captured module that a node calls."""
        if node.op != "call_module":
            return None
        callee = self.program.callee(owner, node)
        capture = capture_of(callee)
        return self.program.name_of(callee) if capture is not None and capture.specializations else None

    def _pass_over(self, module: nn.Module) -> None:
        """Leave out a module and what it calls: it runs in a region already, or is kept."""
        self._seen.update(all_modules(module))

    # -- what is left out ------------------------------------------------------------------------------------------

    def _obstacle(self, owner: str, node: fx.Node) -> str | None:
        if node.op != "call_module":
            return _other_type(node) if kind_of_operation(node) is Kind.LOWER else None
        module = self.program.callee(owner, node)
        opened = _autocast_of(module)
        if opened is not None:
            return None if isinstance(opened, ReturningAutocast) else f"the model itself opens {opened}"
        if self._is_kept(qualified(owner, str(node.target)), module) or not is_leaf(module):
            return None
        kind = kind_of_layer(user_class(type(module)))
        if kind is Kind.LOWER:
            return "its hooks would see results in 16 bits" if has_hooks(module) else _other_type(node)
        has_matrix = any(tensor is not None and tensor.dim() > 1 for tensor in own_parameters(module).values())
        is_known = operator_info(operator_of_module(user_class(type(module)))).pure is not None
        if has_matrix and (not is_known or isinstance(module, nn.RNNBase)):
            return f"{type(module).__name__} is one operation, of which no list says that 16 bits are enough"
        return None

    # -- single nodes ----------------------------------------------------------------------------------------------

    def _kind(self, owner: str, node: fx.Node) -> Kind:
        if node.op in ("placeholder", "get_attr", "output") or not in_float32(node):
            return Kind.FLOAT32
        if node.op == "call_module":
            kind = self._kind_of_module(owner, node)
        else:
            kind = Kind.FLOAT32 if canonical_name(node) in self.keep else kind_of_operation(node)
        first = next((each for each in _tensors(node.meta.get("val")) if each.dtype is torch.float32), None)
        is_meant = first is not None and self._is_for(first.dtype, first.device)
        is_left = (kind is Kind.LOWER and not is_meant) or (kind is Kind.ROUNDS and not self._has_range)
        return Kind.FLOAT32 if is_left else kind

    def _is_for(self, dtype: torch.dtype, device: torch.device) -> bool:
        return dtype is torch.float32 and self.device in ("auto", device.type)

    def _kind_of_module(self, owner: str, node: fx.Node) -> Kind:
        module, name = self.program.callee(owner, node), qualified(owner, str(node.target))
        if isinstance(module, (WrappedRegion, AutocastLeaf)) or has_hooks(module) or self._is_kept(name, module):
            return Kind.FLOAT32
        capture = capture_of(module)
        if capture is None or not capture.specializations:
            return self._kind_of_layer(user_class(type(module)))
        if module not in self._kinds:  # a region takes it in if it takes in all that it computes
            graphs = [each.graph for each in capture.specializations]
            kinds = {kind for graph in graphs for kind in self._kinds_in(name, graph)}
            worst_first = (Kind.FLOAT32, Kind.LOWER, Kind.ROUNDS, Kind.FOLLOWS)
            self._kinds[module] = next((kind for kind in worst_first if kind in kinds), Kind.FOLLOWS)
        return self._kinds[module]

    def _kinds_in(self, owner: str, graph: fx.Graph) -> set[Kind]:
        """Return the kinds of what a graph computes; what rounds and does not read from what gains there is no part."""

        def judge(node: fx.Node) -> Kind:
            return self._kind(owner, node)

        kinds = {judge(node) for node in graph.nodes if node.op not in _ENDS}
        if kinds >= {Kind.LOWER, Kind.ROUNDS}:
            narrow = narrow_nodes(graph, judge)
            if any(judge(node) is Kind.ROUNDS and node not in narrow for node in graph.nodes if node.op not in _ENDS):
                kinds.add(Kind.FLOAT32)
        return kinds

    def _is_kept(self, name: str, module: nn.Module) -> bool:
        return _autocast_of(module) is not None or any(names_module(word, name, module) for word in self.keep)

    def _kind_of_layer(self, cls: type[nn.Module]) -> Kind:
        return Kind.FLOAT32 if operator_of_module(cls) in self.keep else kind_of_layer(cls)


def _autocast_of(module: nn.Module) -> Context | None:
    """Return the autocast that a region runs under."""
    context = module.context if isinstance(module, WrappedRegion) else None
    return context if isinstance(context, Context) and context.kind == "autocast" else None


def _other_type(node: fx.Node) -> str | None:
    """Return why a product stays as it is whose type is not float32."""
    found = next((each.dtype for each in _tensors(node.meta.get("val")) if each.dtype is not torch.float32), None)
    return f"it computes in {str(found).removeprefix('torch.')}; autocast is for float32" if found else None


_ENDS = ("placeholder", "get_attr", "output")


def _tensors(meta: object) -> Iterator[TensorMeta]:
    """Yield the descriptions of the tensors in a value."""
    if isinstance(meta, TensorMeta):
        yield meta
    elif isinstance(meta, (tuple, list)):
        for item in cast("Sequence[object]", meta):
            yield from _tensors(item)
