"""What each node of a model's graphs costs: time, operations and bytes, measured by running them one by one."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import repeat
from typing import Any

import torch
from torch import fx, nn

from ...compat import DispatchMode
from ...operators import flops_of, mutates
from ...passes.timing import in_threads_that_gain, seconds_of
from ...runtime.graphs import capture_of, graph_name, select
from ...runtime.values import Arguments, copied, objects_in, qualified, tensors_in
from ...tracing.examples import Inputs
from ...tracing.isolation import preserved
from ...tracing.program import GraphRunner

__all__ = ["Machine", "NodeCost", "Profile", "measured_machine", "profile_of", "profiles_of"]

_REPEATS = 3
"""Of so many runs of a node the fastest counts: anything else that runs only makes it slower."""

_SIDE = 1024
"""Of the square matrices whose product shows what the machine computes at most."""

_COPIED = 1 << 26
"""So many bytes are copied to see how fast memory is: more than caches hold."""


@dataclass(frozen=True)
class NodeCost:
    """What a node costs in one call.

    Attributes:
        seconds: of its fastest run: of processor time where this thread does the work alone, else by the clock.
        flops: multiplications and additions that torch counts; 0 where it counts none.
        moved: bytes of the tensors that it reads and gives, parameters included.
    """

    seconds: float
    flops: float
    moved: int


@dataclass(frozen=True)
class Profile:
    """The costs of a model's nodes.

    Attributes:
        nodes: name of a graph (as in `fxopt.graphs`) -> name of a node -> cost.
        modules: qualified name of a module that a graph calls -> what the first call of it costs; "" is the model.
    """

    nodes: dict[str, dict[str, NodeCost]] = field(default_factory=dict[str, dict[str, NodeCost]])
    modules: dict[str, NodeCost] = field(default_factory=dict[str, NodeCost])


@dataclass(frozen=True)
class Machine:
    """What this machine reaches with torch's threads: operations a second in float32, and bytes a second."""

    flops: float
    bandwidth: float


def profile_of(model: nn.Module, call: Inputs) -> Profile:
    """Run a call of a captured or optimized model node by node, modules inside as well; the model stays as it is.

    A module without a graph that fits counts as a whole. What runs for gradients is not part of it. Where the call
    takes longer in several threads than in one, since other programs have the cores, torch computes in one.
    """
    with _in_threads_for(model, call):
        return _profile(model, call)


def profiles_of(before: nn.Module, after: nn.Module, call: Inputs) -> tuple[Profile, Profile]:
    """Return `profile_of` two models, both in the threads in which the first one is faster."""
    with _in_threads_for(before, call):
        return _profile(before, call), _profile(after, call)


@contextmanager
def _in_threads_for(model: nn.Module, call: Inputs) -> Generator[None]:
    with torch.no_grad(), preserved(model), in_threads_that_gain(_calling(model, call)):
        yield


def _profile(model: nn.Module, call: Inputs) -> Profile:
    profile = Profile()
    given = next(_turns((call.args, call.kwargs)))
    with preserved(model):
        profile.modules[""] = _cost(_calling(model, call), (given, list(model.parameters())))
        _inside("", model, given, profile)
    return profile


def _calling(model: nn.Module, call: Inputs) -> Callable[[], Any]:
    """Return a function that makes the call, with new arguments each time where a call may write into them."""
    turns = _turns((call.args, call.kwargs))

    def run() -> Any:
        args, kwargs = next(turns)
        return model(*args, **kwargs)

    return run


def _inside(path: str, module: nn.Module, call: Arguments, profile: Profile) -> None:
    """Note what the nodes cost of the graph that a call runs, and of those of the modules that it calls."""
    capture = capture_of(module)
    selected = None if capture is None else select(module, *call)
    if capture is None or selected is None:
        return
    specialization, given = selected
    name = graph_name(path, capture.specializations.index(specialization))
    if name in profile.nodes:  # the first call of a module that is called again stands for all
        return
    runner = _Timed(module, specialization.graph)
    profile.nodes[name] = runner.costs
    runner.run(*given)
    for target, (node, called) in runner.called.items():
        below = qualified(path, target)
        if below not in profile.modules:
            profile.modules[below] = runner.costs[node]
            _inside(below, module.get_submodule(target), called, profile)


class _Timed(GraphRunner):
    """Run a graph, each node several times, and note the node and the arguments of the first call of each module."""

    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        super().__init__(module, graph)
        self.costs: dict[str, NodeCost] = {}
        self.called: dict[str, tuple[str, Arguments]] = {}

    def run_node(self, n: fx.Node) -> Any:
        if not n.op.startswith("call_"):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        read: list[Any] = [args, kwargs]
        turns = _turns((args, kwargs))
        if n.op == "call_module":
            module = self.fetch_attr(str(n.target))
            self.called.setdefault(str(n.target), (n.name, next(turns)))
            read.append([*module.parameters(), *module.buffers()])
        results: list[Any] = []
        call = getattr(self, n.op)

        def run() -> None:
            results.append(call(n.target, *(next(turns) if results else (args, kwargs))))

        repeats = 1 if mutates(n) else _REPEATS  # what writes would write again
        self.costs[n.name] = _cost(run, read, results, repeats)
        return results[0]


def _turns(given: Arguments) -> Iterator[Arguments]:
    """Yield what to run again and again; a cache, or another object that a run may write into, is new each time."""
    if not objects_in(given):
        return repeat(given)
    return iter([copied(given) for _ in range(_REPEATS + 2)])


def _cost(run: Callable[[], Any], read: Any, results: Sequence[Any] = (), repeats: int = _REPEATS) -> NodeCost:
    """Run something several times, and then once with its operations counted; what runs once is not counted."""
    seconds = _fastest(run, repeats)
    flops = 0.0
    if repeats > 1:
        with _Operations() as counted:
            run()
        flops = counted.total
    moved = {id(tensor): tensor.nbytes for tensor in tensors_in((read, list(results[:1])))}
    return NodeCost(seconds, flops, sum(moved.values()))


class _Operations(DispatchMode):
    """Count the operations of what runs inside; torch's own counter hooks modules, which then leave their graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.total += flops_of(func, args, kwargs or {}, result)
        return result


def _fastest(run: Callable[[], Any], repeats: int = _REPEATS) -> float:
    """Return the seconds of the fastest of several runs."""
    return min(seconds_of(run) for _ in range(repeats))


@cache
def measured_machine() -> Machine:
    """Measure what torch computes and copies a second on the CPU; once in a process."""
    a, b = torch.randn(_SIDE, _SIDE), torch.randn(_SIDE, _SIDE)
    source = torch.ones(_COPIED // 4)
    target = torch.empty_like(source)
    product = _fastest(lambda: torch.mm(a, b))
    copied = _fastest(lambda: target.copy_(source))
    return Machine(2 * _SIDE**3 / product, 2 * _COPIED / copied)
