"""Whole experts: rows of a router, slices or modules of its experts, sizes that count them, and what a run chooses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from ....compat import modules_by_name, own_buffers, own_children, own_parameters, transient_buffers
from ....layers.resized import item_names
from ....runtime.values import qualified
from ....tracing.isolation import in_phase, preserved
from ....tracing.program import Program
from ....tracing.recording import calls_intercepted, copy_inputs
from .groups import Attribute, Coupling, Cut, Group, Number, Refused, Router

__all__ = ["Choices", "Routing", "choices_of", "weights_of", "with_experts"]


@dataclasses.dataclass(frozen=True)
class Routing:
    """What a module chooses from: how many are chosen at once, at the most, and how often each was [size]."""

    most: int
    counts: Tensor


@dataclasses.dataclass
class Choices:
    """What was chosen in which modules, those around them included."""

    # Module -> what it chooses from, by size; and how many features the linear layers give that are computed in it.
    routings: dict[str, dict[int, Routing]] = dataclasses.field(default_factory=dict[str, dict[int, Routing]])
    linears: dict[str, set[int]] = dataclasses.field(default_factory=dict[str, set[int]])

    def chosen(self, modules: Iterable[str], size: int, indices: Tensor) -> None:
        """Note that some of `size` were chosen: `indices` [..., k]; one group of experts is no choice."""
        if size == 1:
            return
        counts = indices.detach().flatten().bincount(minlength=size).cpu()
        for module in modules:
            of = self.routings.setdefault(module, {})
            known = of.get(size, Routing(0, torch.zeros_like(counts)))
            of[size] = Routing(max(known.most, indices.shape[-1]), known.counts + counts)


def choices_of(program: Program, run: Callable[[nn.Module], None] | None = None) -> Choices:
    """Return what a program's modules choose while it runs, on its example inputs or as `run` runs the model."""
    watch, model = _Watch(program), program.model
    with preserved(model), in_phase(model, False), torch.no_grad(), calls_intercepted(watch.call), watch:
        if run is not None:
            run(model)
        else:
            for call in program.whole_calls:
                copy_inputs(call).run(model)
    return watch.choices


class _Watch(TorchFunctionMode):
    """Note what is chosen, and where the run is."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.choices = Choices()
        self._names = program.names
        self._inside: list[str] = []

    def call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._inside.append(self._names.name(module) if module in self._names else "")
        try:
            return original(module, *args, **kwargs)
        finally:
            self._inside.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in (torch.topk, Tensor.topk):
            given = args[2] if len(args) > 2 else kwargs.get("dim", -1)
            if given in (-1, result[1].dim() - 1):
                self.choices.chosen(dict.fromkeys(self._inside), args[0].shape[-1], result[1])
        elif func is F.linear:
            for module in self._inside:
                self.choices.linears.setdefault(module, set()).add(result.shape[-1])
        return result


_COUNTING: Mapping[str, tuple[tuple[int, str], ...]] = {
    "histc": ((1, "bins"), (3, "max")), "one_hot": ((1, "num_classes"),), "bincount": ((2, "minlength"),),
}  # fmt: skip
"""Functions of the numbers of experts that are told how many there are: where, and by which name."""

_OTHER_COUNTS = ("per_tok", "top_k", "topk", "shared", "group")
"""Words in the names of attributes that count something else of experts."""


@dataclasses.dataclass(frozen=True)
class _Stack:
    """What may be experts: a module with a slice of each tensor for each of them, or a list of modules."""

    module: str
    around: str  # the module around it that holds their router, too
    size: int
    members: tuple[str, ...] = ()  # of a list

    def cuts(self, program: Program) -> Iterator[Cut]:
        """Yield what goes with each expert: its slice of each tensor, or all tensors of its module."""
        if not self.members:
            yield from _rows(program, self.module, self.size)
        for unit, member in enumerate(self.members):
            for name, module in modules_by_name(program.module(member)).items():
                for last, tensor in weights_of(module).items():
                    if tensor.dim():
                        path = qualified(qualified(member, name) if name else member, last)
                        yield Cut(path, 0, (unit,) * len(tensor))


def with_experts(program: Program, found: Coupling) -> Coupling:
    """Return what was found, and the groups of whole experts; what else was said of their routers is gone."""
    stacks = list(_stacks(program))
    choices = choices_of(program) if stacks else Choices()
    routed = [(stack, choices.routings.get(stack.around, {}).get(stack.size)) for stack in stacks]
    made = [_group(program, stack, routing, choices) for stack, routing in routed if routing is not None]
    groups = [each for each in made if isinstance(each, Group)]
    refused = [each for each in made if isinstance(each, Refused)]
    known = {each.layer for each in refused} | {group.name for group in groups}
    others = [each for each in found.refused if each.layer not in known]
    return Coupling((*found.groups, *groups), (*others, *refused))


def _stacks(program: Program) -> Iterator[_Stack]:
    """Yield what may be experts, by the forms of tensors alone."""
    for name, module in program.names.modules.items():
        if isinstance(module, nn.ModuleList) and len(module) > 1:
            around, members = name.rpartition(".")[0], tuple(qualified(name, last) for last in item_names(module))
            if any(_routers(program, around, name, len(members))):
                yield _Stack(name, around, len(members), members)
        tensors = weights_of(module)
        sizes = {len(tensor) if tensor.dim() else 0 for tensor in tensors.values()}
        if len(sizes) == 1 and max(sizes) > 1 and any(tensor.dim() > 2 for tensor in tensors.values()):
            arounds = (name, name.rpartition(".")[0])
            size = max(sizes)
            around = next((each for each in arounds if any(_routers(program, each, name, size))), None)
            if around is not None:
                yield _Stack(name, around, max(sizes))


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's own tensors that hold weights."""
    transient = transient_buffers(module)
    buffers = {name: each for name, each in own_buffers(module).items() if name not in transient}
    own: dict[str, Tensor | None] = {**own_parameters(module), **buffers}
    return {name: each for name, each in own.items() if each is not None and each.is_floating_point()}


def _routers(program: Program, around: str, experts: str, size: int) -> Iterator[str]:
    """Yield the modules in a module, but for its experts, that have a row for each of `size` experts."""
    pending = [around]
    while pending:
        name = pending.pop()
        module = program.module(name)
        weight = own_parameters(module).get("weight")
        if name != around and weight is not None and weight.dim() == 2 and len(weight) == size:
            yield name
        children = (qualified(name, last) for last, child in own_children(module).items() if child is not None)
        pending += [child for child in children if child != experts]


def _group(program: Program, stack: _Stack, routing: Routing, choices: Choices) -> Group | Refused:
    size = stack.size
    routers = [
        name for name in _routers(program, stack.around, stack.module, size) if choices.linears.get(name) == {size}
    ]
    choosing = [name for name in routers if name in choices.routings]
    name, *others = choosing or routers or [stack.around]
    place = name if choosing else stack.around
    reason = _obstacle(program, name, others, place, stack, choices) if routers else "no linear layer is its router"
    if reason is not None:
        return Refused(name, f"its experts cannot be removed: {reason}")
    modules = list(dict.fromkeys((stack.around, name, stack.module)))
    return Group(
        name, "experts", size, (*_rows(program, name, size), *stack.cuts(program)),
        tuple(_numbers(program, modules, size)), tuple(_attributes(program, modules, size)),
        router=Router(name, place, routing.most), listed=stack.module if stack.members else None,
    )  # fmt: skip


def _rows(program: Program, owner: str, size: int) -> Iterator[Cut]:
    """Yield the tensors of a module that have a row for each expert."""
    for last, tensor in weights_of(program.module(owner)).items():
        if tensor.dim() and len(tensor) == size:
            yield Cut(qualified(owner, last), 0, tuple(range(size)))


def _obstacle(
    program: Program, router: str, others: list[str], place: str, stack: _Stack, choices: Choices
) -> str | None:
    """Return why the experts of a router cannot be followed."""
    if others:
        return f"'{others[0]}' may be their router, too"
    if len(choices.routings[place]) > 1:
        return "the router also chooses among groups of them"
    if getattr(program.module(router), "capacity_factor", None) is not None:
        return "their number decides how many tokens each serves (capacity_factor)"
    if _returns_logits(program):
        advice = "set config.output_router_logits = False"
        return f"the model returns the logits of all, and balances their load by them; {advice}"
    if stack.members:
        return _obstacle_in_list(program, stack)
    return None


def _returns_logits(program: Program) -> bool:
    """Say whether a model of transformers collects the routers' logits, by hooks which no graph shows."""
    configs = (getattr(module, "config", None) for module in program.names.modules.values())
    asked = (call.kwargs.get("output_router_logits", False) for call in program.whole_calls)
    return any(asked) or any(getattr(config, "output_router_logits", False) is True for config in configs)


def _obstacle_in_list(program: Program, stack: _Stack) -> str | None:
    """Return why modules cannot be taken out of a list."""
    if stack.around in program.captures:
        return f"the graph of '{stack.around or 'the model'}' calls them one by one"
    tensors = [tensor for name in stack.members for tensor in program.module(name).parameters()]
    return "they share tensors" if len(tensors) > len({id(tensor) for tensor in tensors}) else None


def _attributes(program: Program, modules: list[str], size: int) -> Iterator[Attribute]:
    for name in modules:
        module = program.module(name)
        for attribute, value in vars(module).items():
            counts = "expert" in attribute and not any(word in attribute for word in _OTHER_COUNTS)
            is_width = isinstance(module, nn.Linear) and attribute == "out_features"
            if type(value) is int and value == size and (counts or is_width):
                yield Attribute(name, attribute, None, tuple(range(size)))


def _numbers(program: Program, modules: list[str], size: int) -> Iterator[Number]:
    """Yield the numbers in graphs that count experts, or are the number of the last one."""
    for owner in modules:
        capture = program.captures.get(owner)
        for which, specialization in enumerate(() if capture is None else capture.specializations):
            for node in specialization.graph.nodes:
                for path, value in _counted(node):
                    if abs(value - size) <= 1:
                        yield Number(owner, which, node.name, path, tuple(range(size)))


def _counted(node: fx.Node) -> Iterator[tuple[tuple[str | int, ...], int]]:
    """Yield the numbers that a node is told of how many there are, and the ways to them."""
    target: Any = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    for position, keyword in _COUNTING.get(name, ()) if node.op != "call_module" else ():
        in_order = position < len(node.args)
        value = node.args[position] if in_order else node.kwargs.get(keyword)
        if type(value) is int:
            yield ((0, position) if in_order else (1, keyword)), value
