"""Run a program's forward node by node on fake tensors, and note what each node allocates, saves and costs."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...compat import DispatchMode, all_modules, draws_randomly, fake_tensors, is_view_operator, own_buffers, storage_id
from ...compat.operators import written_arguments
from ...operators import flops_of
from ...runtime.graphs import Specialization, required_capture, select
from ...runtime.guards import require
from ...runtime.values import map_tensors, qualified, tensors_in
from ...tracing.examples import Inputs
from ...tracing.isolation import in_phase, preserved
from ...tracing.program import GraphRunner, Program
from .problem import Problem, Region, Step
from .recomputation import PRODUCTS, counts

__all__ = ["Forward", "Unit", "traced_forward"]

_PER_BYTE = 8.0
"""Operations that take as long as moving one byte: processors and GPUs compute 5 to 20 in the time."""

_PER_CALL, _PER_WATCHED_CALL = 1e6, 2.5e6
"""Operations that take as long as calling an operator again, of however little work; in a selective region each call is
looked at in Python."""

_LOSS = 3
"""A loss outside of the model takes so many times the bytes of the results: what cross-entropy does.

These are the logarithms of the probabilities, their gradient, and the results' gradient."""

_STATISTICS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
"""Operators that write into running statistics though their schema does not say so."""


@dataclass
class Unit:
    """One node of a graph as it ran, in one call of the module that the graph is of."""

    owner: str  # qualified name of that module
    specialization: int  # which of its graphs
    node: fx.Node
    start: int  # the steps that it stands for: the first, and the one behind the last
    stop: int = 0
    inside: list[Unit] = field(default_factory=list["Unit"])  # the nodes of the graph that it calls


@dataclass
class Forward:
    """What one forward allocates, saves and costs."""

    units: list[Unit] = field(default_factory=list["Unit"])  # the nodes of the root's graph
    steps: list[Step] = field(default_factory=list["Step"])  # all operations, in order
    touched: list[frozenset[int]] = field(default_factory=list["frozenset[int]"])  # by step: what it reads and writes
    sizes: dict[int, int] = field(default_factory=dict[int, int])
    written: dict[int, list[int]] = field(default_factory=lambda: defaultdict[int, list[int]](list))  # memory -> steps
    random: set[int] = field(default_factory=set[int])  # the steps that draw random numbers
    gradients: dict[int, int] = field(default_factory=dict[int, int])  # activation -> bytes
    results: frozenset[int] = frozenset()  # those of them whose gradient is there when the backward begins

    def problem(self, spans: Sequence[Region] = (), overhead: float = 0.0) -> Problem:
        """Return what a solver must know, with the regions among which to choose."""
        loss = _LOSS * sum(self.gradients[result] for result in self.results)
        return Problem(self.steps, self.sizes, spans, overhead, self.gradients, self.results, loss)


def traced_forward(program: Program) -> Forward:
    """Return what the first example call does in training, on fake tensors or, where these fail, on real ones."""
    call = program.whole_calls[0]
    with in_phase(program.model, True), preserved(program.model), torch.enable_grad():
        with contextlib.suppress(RuntimeError), fake_tensors() as mode:
            return _traced(program, call, mode.from_tensor)
        return _traced(program, call, torch.clone)


def _traced(program: Program, call: Inputs, stand_in: Callable[[Tensor], Tensor]) -> Forward:
    """Make a call on copies of its tensors and of the model's buffers, which it may write into."""
    registers = [own_buffers(module) for module in all_modules(program.model)]
    originals = [dict(register) for register in registers]
    copies = {id(tensor): stand_in(tensor) for held in originals for tensor in held.values() if tensor is not None}
    try:
        for register in registers:
            register.update({name: copies[id(tensor)] for name, tensor in register.items() if tensor is not None})
        return _WatchedForward(program).of(map_tensors(stand_in, call))
    finally:
        for register, held in zip(registers, originals, strict=True):
            register.update(held)


class _Memory:
    """Numbers for memory that are never used again."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._count = 0

    def number(self, tensor: Tensor, of: int | None = None) -> int | None:
        """Return the number of a tensor's memory; new memory gets a new one, or `of`. A sparse tensor has none."""
        try:
            key = storage_id(tensor)
        except NotImplementedError:
            return None
        if key not in self._numbers:
            self._count += of is None
            self._numbers[key] = self._count if of is None else of
            weakref.finalize(tensor.untyped_storage(), self._numbers.pop, key, None).atexit = False
        return self._numbers[key]

    def numbers(self, value: Any) -> list[int]:
        return [number for tensor in tensors_in(value) if (number := self.number(tensor)) is not None]


@dataclass
class _Open:
    """The step that is running."""

    reads: set[int]
    touched: set[int] = field(default_factory=set[int])
    makes: set[int] = field(default_factory=set[int])
    saves: set[int] = field(default_factory=set[int])
    products: set[int] = field(default_factory=set[int])
    operations: float = 0.0
    until_saved: float = 0.0
    light: float = 0.0
    light_until_saved: float = 0.0

    @property
    def is_idle(self) -> bool:
        return not (self.makes or self.saves or self.operations or self.touched)


class _WatchedForward:
    """One forward, watched."""

    def __init__(self, program: Program) -> None:
        self.forward, self.memory = Forward(), _Memory()
        self._program = program
        self._units, self._open = self.forward.units, _Open(set())
        self._called: nn.Module | None = None
        self._free: set[int] = set()
        self._counters: set[int] = set()
        self._learned: dict[int, int] = {}
        self._saving = False

    def of(self, call: Inputs) -> Forward:
        model = self._program.model
        given = (*model.parameters(), *model.buffers(), (call.args, call.kwargs))
        self._free.update(self.memory.numbers(given))
        learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._learned = {n: p.untyped_storage().nbytes() for p in learned for n in self.memory.numbers(p)}
        norms = [module for module in model.modules() if counts(module)]
        self._counters.update(self.memory.numbers([list(norm.buffers(recurse=False)) for norm in norms]))
        captures = {self._program.module(name): name for name in self._program.captures}
        try:
            for module, name in captures.items():
                module.__dict__["forward"] = partial(self._interpreted, module, name)
            hooks = torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor)
            with hooks, _Operators(self):
                self._called = model
                result = model(*call.args, **call.kwargs)
        finally:
            for module in captures:
                module.__dict__.pop("forward", None)
        self.close()
        self._end(result)
        return self.forward

    def _end(self, result: Any) -> None:
        """Note what the results are; a number among them is the loss, and the backward begins there."""
        self._has_gradients(result)
        learned = [tensor for tensor in tensors_in(result) if tensor.requires_grad]
        begins = [tensor for tensor in learned if not tensor.dim()] or learned
        self.forward.results = frozenset(self.memory.numbers(begins)) & self.forward.gradients.keys()
        for number in self._free.union(self.memory.numbers(result)):
            self.forward.sizes.pop(number, None)

    def _has_gradients(self, value: Any) -> None:
        for tensor in tensors_in(value):
            number = self.memory.number(tensor) if tensor.requires_grad else None
            if number is not None and number not in self._free:
                self.forward.gradients[number] = tensor.untyped_storage().nbytes()

    def _interpreted(self, module: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a module's graph node by node, where a node called it; else nobody could say where its nodes are."""
        selected = select(module, args, kwargs) if self._called is module else None
        if selected is None:
            return type(module).forward(module, *args, **kwargs)
        self._called = None
        specialization, values = selected
        known = required_capture(module).specializations
        number = next(number for number, each in enumerate(known) if each is specialization)
        return _Runner(self, module, name, number, specialization).run(*values)

    def node(self, owner: str, specialization: int, node: fx.Node, given: Any, run: Callable[[], Any]) -> Any:
        self.close()
        unit = Unit(owner, specialization, node, len(self.forward.steps))
        self._open.reads.update(n for n in self.memory.numbers(given) if n not in self._free)
        around, self._units = self._units, unit.inside
        called = node.op == "call_module" and qualified(owner, str(node.target))
        self._called = self._program.module(called) if called else None
        try:
            result = run()
            self._has_gradients(result)
            return result
        finally:
            self.close()
            self._called, self._units, unit.stop = None, around, len(self.forward.steps)
            around.append(unit)

    def close(self) -> None:
        """End the step that is running."""
        step, self._open = self._open, _Open(set())
        if step.is_idle:
            return
        self.forward.steps.append(
            Step(
                reads=frozenset(step.reads), makes=frozenset(step.makes), saves=frozenset(step.saves - self._free),
                operations=step.operations, until_saved=step.until_saved, products=frozenset(step.products),
                light=step.light, light_until_saved=step.light_until_saved,
                learned=sum(self._learned.get(memory, 0) for memory in step.touched),
            )
        )  # fmt: skip
        self.forward.touched.append(frozenset(step.touched))

    def _save(self, tensor: Tensor) -> Tensor:
        """Note what autograd saves, and return it without its history: a node that holds its result is never freed."""
        number = self.memory.number(tensor)
        if number is not None and number not in self._free:
            self._allocated(number, tensor)
            self._open.saves.add(number)
            self._open.until_saved, self._open.light_until_saved = self._open.operations, self._open.light
        self._saving = True
        try:
            return tensor.detach()
        finally:
            self._saving = False

    def _allocated(self, number: int, tensor: Tensor) -> None:
        if number not in self.forward.sizes:
            self.forward.sizes[number] = tensor.untyped_storage().nbytes()
            self._open.makes.add(number)

    def ran(self, operator: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        if self._saving:
            return
        given = self.memory.numbers((args, dict(kwargs)))
        self._open.touched.update(given)
        view_of = given[0] if given and is_view_operator(operator) else None
        for tensor in tensors_in(result):
            number = self.memory.number(tensor, view_of)
            if number is not None and number not in self._free:
                self._allocated(number, tensor)
        places = written_arguments(operator)
        written = [value for place, value in (*enumerate(args), *kwargs.items()) if place in places]
        if operator.overloadpacket.__name__ in _STATISTICS:
            written += args[3:5]
        for number in self.memory.numbers(written):
            if number not in self._counters:  # running statistics of norms
                self.forward.written[number].append(len(self.forward.steps))
        if draws_randomly(operator, args, kwargs):
            self.forward.random.add(len(self.forward.steps))
        cost = 0.0
        if view_of is None:  # its multiplications and additions, and the bytes that it moves
            counted = flops_of(operator, args, kwargs, result)
            moved = sum(t.numel() * t.element_size() for t in tensors_in((args, dict(kwargs), result)))
            cost = (counted if math.isfinite(counted) else 0.0) + moved * _PER_BYTE
        self._open.operations += cost + _PER_CALL
        self._open.light += _PER_WATCHED_CALL
        if operator in PRODUCTS:
            self._open.products.update(self.memory.numbers(result))
        else:
            self._open.light += cost


class _Operators(DispatchMode):
    """Tell a run which operators it dispatches."""

    def __init__(self, run: _WatchedForward) -> None:
        super().__init__()
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace != "prim":
            self._run.ran(func, args, kwargs or {}, result)
        return result


class _Runner(GraphRunner):
    """Run the graph of one call, each node as a unit."""

    def __init__(
        self, run: _WatchedForward, module: nn.Module, name: str, number: int, specialization: Specialization
    ) -> None:
        super().__init__(module, specialization.graph)
        self._run, self._name, self._number = run, name, number

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "output", "get_attr"):
            return super().run_node(n)
        if n.target is require:
            return None  # a fake value cannot be looked at
        given = self.fetch_args_kwargs_from_env(n)
        return self._run.node(self._name, self._number, n, given, lambda: super(_Runner, self).run_node(n))
