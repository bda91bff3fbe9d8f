"""Shrink a model on which passes fail, as long as they fail in the same way."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from .. import api
from ..compat import all_modules, modules_by_name
from ..errors import FxoptError, InputError, one_line
from ..interrupts import stop_if_interrupted
from ..passes.sites import Numerics
from ..passes.verification import with_rows
from ..runtime.graphs import Capture, Specialization
from ..runtime.guards import Argument
from ..runtime.values import map_tensors, user_class
from ..testing import assert_equivalent
from ..tracing.examples import Inputs
from ..tracing.recording import record

__all__ = ["Case", "Failing", "reduced"]

_FEW_ROWS = (1, 2, 3)
_CUTS = (0.5, 0.75, 0.9)
"""How much of a graph is kept where its end is cut off, tried in order."""
_ATTEMPTS = 300
"""So many models are tried at most."""

_Smaller = tuple[nn.Module, Inputs]


@dataclass(frozen=True)
class Case:
    """What is asked of a model, and how it is judged."""

    passes: str
    training: bool
    verify: bool | None = None
    measure: bool = False
    tolerance: float | None = None
    seed: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """Return the arguments of `optimize` that are not left out."""
        given = {"verify": self.verify, "measure": self.measure, "seed": self.seed}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def judgement(self) -> dict[str, Any]:
        """Return the arguments of `assert_equivalent`."""
        allowed = {} if self.tolerance is None else {"numerics": Numerics.APPROXIMATE, "budget": self.tolerance}
        return {"gradients": self.training, **allowed}

    def failure(self, model: nn.Module, call: Inputs) -> tuple[str, str]:
        """Return what kind of failure passes make of a model, and its message; both empty if it is right."""
        fast = model
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what is tried out, nobody needs them
                fast = api.optimize(model, self.passes, example_inputs=[call], **self.options)
            assert_equivalent(model, fast, [call], **self.judgement)
        except Exception as error:  # passes of others raise whatever they like
            stop_if_interrupted()
            named = re.search(r"pass '[^']*'", str(error)) if isinstance(error, FxoptError) else None
            kind = f"{type(error).__name__}{f' of {named[0]}' if named and fast is model else ''}"
            return kind, one_line(error)
        return "", ""


@dataclass(frozen=True)
class Failing:
    """A model with a call on which passes fail; `path` is its name in the user's model, None once it is another, made
    from `origin`, which has one.
    """

    model: nn.Module
    call: Inputs
    kind: str
    message: str
    path: str | None = ""
    origin: Failing | None = None

    @property
    def nodes(self) -> int:
        """Return how many operations its graphs have."""
        return sum(len(_operations(each)) for each in all_modules(self.model) if isinstance(each, fx.GraphModule))


def reduced(case: Case, model: nn.Module, call: Inputs, tell: Callable[[str], None]) -> Failing:
    """Return the smallest model found on which passes fail as on this one; raise `InputError` if they do not."""
    kind, message = case.failure(model, call)
    if not kind:
        raise InputError(
            "the passes do not fail on this model; for rewrites that checks take back, give --no-verify (verify=False)"
        )
    tell(f"{kind}: {message}")
    return _Reduction(case, tell).run(Failing(model, call, kind, message))


class _Reduction:
    """Try smaller models one after another."""

    def __init__(self, case: Case, tell: Callable[[str], None]) -> None:
        self._case, self._tell, self._left = case, tell, _ATTEMPTS

    def run(self, found: Failing) -> Failing:
        found = origin = self._inner(self._with_few_rows(found))
        for move in (_as_graphs, _flat):
            found = self._moved(found, move) or found
        if isinstance(found.model, fx.GraphModule):
            found = self._without_nodes(self._cut_off(self._moved(found, _one_output) or found))
        return replace(self._with_few_rows(found), origin=origin)

    def _tried(self, found: Failing, model: nn.Module, call: Inputs, path: str | None = None) -> Failing | None:
        """Return a smaller model where it runs and fails in the same way."""
        if self._left == 0:
            return None
        self._left -= 1
        with contextlib.redirect_stderr(io.StringIO()):  # torch.fx prints each error of a graph's code there
            kind, message = self._case.failure(model, call) if _runs(model, call) else ("", "")
        return Failing(model, call, kind, message, path) if kind == found.kind else None

    def _moved(self, found: Failing, move: Callable[[Failing], _Smaller | None]) -> Failing | None:
        """Return what a move makes of a model, where that fails still."""
        try:
            made = move(found)
        except Exception:  # what cannot be traced, or is no graph any more, stays
            return None
        smaller = made and self._tried(found, *made)
        if smaller:
            self._tell(f"{smaller.nodes} operations left")
        return smaller or None

    def _cut_off(self, found: Failing) -> Failing:
        """Cut off as much as can be from the end of the graph."""
        smaller: Failing | None = found
        while smaller is not None:
            found = smaller
            smaller = next(filter(None, (self._moved(found, _cut(share)) for share in _CUTS)), None)
        return found

    def _with_few_rows(self, found: Failing) -> Failing:
        for rows in _FEW_ROWS:
            made = with_rows((found.call.args, found.call.kwargs), rows)
            smaller = made and self._tried(found, found.model, Inputs(*made[0], **made[1]), found.path)
            if smaller:
                return smaller
        return found

    def _inner(self, found: Failing) -> Failing:
        """Go into the module that fails by itself, as deep as there is one."""
        for name, module, call in _called(found):
            path = ".".join(filter(None, (found.path, name)))
            smaller = self._tried(found, module, call, path)
            if smaller is not None:
                self._tell(f"{path} fails by itself, a {user_class(type(module)).__name__}")
                return self._inner(smaller)
        return found

    def _without_nodes(self, found: Failing) -> Failing:
        """Leave out as many nodes in a row as can be: all of them, half of them, a quarter, ..., one."""
        graphs = [name for name, each in modules_by_name(found.model).items() if isinstance(each, fx.GraphModule)]
        for name in graphs:
            size = len(_operations(_part(found.model, name)))
            while size:
                start = 0
                while start < len(_operations(_part(found.model, name))):
                    smaller = self._moved(found, partial(_without, name=name, start=start, count=size))
                    found, start = (found, start + size) if smaller is None else (smaller, start)
                size //= 2
        return found


def _runs(model: nn.Module, call: Inputs) -> bool:
    try:
        with torch.no_grad():
            copy.deepcopy(model)(*map_tensors(torch.clone, call.args), **map_tensors(torch.clone, call.kwargs))
    except Exception:  # it is no model any more
        return False
    return True


def _called(found: Failing) -> Iterator[tuple[str, nn.Module, Inputs]]:
    """Yield the outermost modules inside a model whose calls a script can hold, each with its first one."""
    recording, outer = record(found.model, [found.call]), list[str]()
    for name, module in modules_by_name(found.model).items():
        calls = recording.calls.get(module)
        if name and calls and not any(name.startswith(f"{each}.") for each in outer):
            args, kwargs = map_tensors(torch.clone, calls[0].plain_arguments)
            if _is_written(args) and _is_written(kwargs):
                outer.append(name)
                yield name, module, Inputs(*args, **kwargs)


def _is_written(value: Any) -> bool:
    """Say whether a script can hold what a call is given: not a cache, say."""
    if isinstance(value, dict):
        return all(map(_is_written, cast("dict[Any, Any]", value).values()))
    if type(value) in (tuple, list):
        return all(map(_is_written, value))
    return isinstance(value, (Tensor, bool, int, float, str, type(None)))


# -- as graphs ---------------------------------------------------------------------------------------------------------


def _as_graphs(found: Failing) -> _Smaller | None:
    """Write the user's modules as graph modules, the innermost first; those of torch stay."""
    program, model = api.capture(found.model, [found.call]), copy.deepcopy(found.model)
    made = dict[str, list[str]]()
    for name in sorted(program.captures, key=lambda each: -each.count(".") - bool(each)):
        module, capture = model.get_submodule(name), program.captures[name]
        if name and type(module).__module__.startswith("torch.nn."):
            continue
        only = next(each for each in capture.specializations if each.runs_in_mode(program.module(name)))
        graph = fx.Graph()
        graph.output(graph.graph_copy(only.graph, {}))
        for node in graph.find_nodes(op="call_module"):
            inner = ".".join(filter(None, (name, str(node.target))))
            if inner in made:
                node.args, node.kwargs = (), _bound(program.captures[inner], made[inner], node.args, node.kwargs)
        made[name] = [_argument(only, node) for node in only.graph.find_nodes(op="placeholder")]
        parent, _, last = name.rpartition(".")
        if not name:
            given = _bound(capture, made[name], found.call.args, found.call.kwargs)
            return fx.GraphModule(module, graph), Inputs(*(given[each] for each in made[name]))
        setattr(model.get_submodule(parent), last, fx.GraphModule(module, graph))
    return None


def _argument(specialization: Specialization, placeholder: fx.Node) -> str:
    source = specialization.argument(placeholder)
    if not isinstance(source, Argument) or source.name != str(placeholder.target):
        raise ValueError("an argument holds tensors inside")
    return source.name


def _bound(capture: Capture, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return those arguments of a call, by name, that a graph takes: all others are bound in it."""
    given = inspect.Signature(capture.parameters.parameters).bind(*args, **kwargs).arguments
    return {name: given[name] for name in names}


def _flat(found: Failing) -> _Smaller | None:
    """Put the graphs of inner modules, and Sequential, into that of the model."""
    return (fx.symbolic_trace(found.model), found.call) if isinstance(found.model, fx.GraphModule) else None


# -- smaller graphs ----------------------------------------------------------------------------------------------------


class _Values(fx.Interpreter):
    """Run a graph and keep the value of each node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)

    @staticmethod
    def of(module: fx.GraphModule, call: Inputs) -> dict[fx.Node, Any]:
        running = _Values(module)
        with torch.no_grad():
            running.run(*map_tensors(torch.clone, call.args))
        return running.env


def _operations(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op not in ("placeholder", "output", "get_attr")]


def _part(model: nn.Module, name: str = "") -> fx.GraphModule:
    return cast("fx.GraphModule", model.get_submodule(name))


def _copied(found: Failing) -> fx.GraphModule:
    return _part(copy.deepcopy(found.model))


def _one_output(found: Failing) -> _Smaller | None:
    """Give back the first tensor alone of several."""
    model = _copied(found)
    (output,) = model.graph.find_nodes(op="output")
    if isinstance(output.args[0], fx.Node):
        return None
    output.args = (output.all_input_nodes[0],)
    return _cleaned(model, found.call)


def _cut(share: float) -> Callable[[Failing], _Smaller | None]:
    """Return the move that keeps such a part of a graph, from its begin, and gives back the last tensor there."""

    def cut(found: Failing) -> _Smaller | None:
        model = _copied(found)
        values, operations = _Values.of(model, found.call), _operations(model)
        kept = [node for node in operations[: int(share * len(operations))] if isinstance(values[node], Tensor)]
        if not kept:
            return None
        (output,) = model.graph.find_nodes(op="output")
        output.args = (kept[-1],)
        return _cleaned(model, found.call)

    return cut


def _without(found: Failing, name: str, start: int, count: int) -> _Smaller | None:
    """Leave out some operations in a row of one graph: who reads one reads an input of it that is like it or, in the
    graph of the model itself, a new argument.
    """
    model, call = _copied(found), found.call
    part = _part(model, name)
    values = {} if name else _Values.of(part, call)
    gone = _operations(part)[start : start + count]
    for node in gone:
        inputs, value = node.all_input_nodes, values.get(node)
        stand_in = next((each for each in inputs if name or _are_alike(values.get(each), value)), None)
        if stand_in is None and isinstance(value, Tensor):
            with part.graph.inserting_before(next(iter(part.graph.nodes))):
                stand_in = part.graph.placeholder(f"given_{node.name}")
            values[stand_in], call = value, Inputs(value.detach().clone(), *call.args)
        if stand_in is not None:
            node.replace_all_uses_with(stand_in)
    for node in reversed(gone):
        part.graph.erase_node(node)
    part.recompile()
    return _cleaned(model, call)


def _are_alike(one: Any, other: Any) -> bool:
    both = isinstance(one, Tensor) and isinstance(other, Tensor)
    return both and one.shape == other.shape and one.dtype == other.dtype


def _cleaned(model: fx.GraphModule, call: Inputs) -> _Smaller:
    """Drop what nothing reads: nodes, arguments and modules."""
    model.graph.eliminate_dead_code()
    args = list[Any]()
    for node, value in zip(model.graph.find_nodes(op="placeholder"), call.args, strict=True):
        if node.users:
            args.append(value)
        else:
            model.graph.erase_node(node)
    model.recompile()
    model.delete_all_unused_submodules()
    return model, Inputs(*args)
