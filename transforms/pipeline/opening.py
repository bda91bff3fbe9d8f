"""One graph of a whole model, in which some modules are looked into and all others stay one call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from torch import fx, nn

from ...compat import submodule
from ...errors import GuardError, MatchFailure
from ...passes.rewriting import Opener, reason_against_opening, unmet_guards
from ...runtime.graphs import Capture, capture_of, specializations_of
from ...runtime.guards import NOT_HELD, SELF, Argument, Attribute, Constant, Guard, Item, Source, reader, require
from ...runtime.values import keep, qualified

__all__ = ["Holds", "OpenedModel", "depends_on_mode", "opened_graph", "why_closed"]


class Holds:
    """Check, in the middle of a graph, the guards of an opened module that are not met for certain."""

    __name__ = "holds"

    def __init__(self, module: nn.Module, capture: Capture, guards: Sequence[Guard], name: str) -> None:
        self.module, self.capture, self.guards, self.name = module, capture, tuple(guards), name

    def forget_unreadable(self) -> None:
        """Drop the guards that read a part of the module which is on another rank: they are checked there."""
        read, kept = reader({"self": self.module}), list[Guard]()
        for guard in self.guards:
            with suppress(*NOT_HELD):
                for source in guard.sources():
                    if not _reads_call(source):
                        read(source)
                kept.append(guard)
        self.guards = tuple(kept)

    def __call__(self, *call: Any) -> None:
        """Check the guards for a call: its positional and its keyword arguments, or nothing where they read neither."""
        given = self.capture.parameters.bind(call[0], call[1]) if call else {}
        names = {"self": self.module, **given}
        failed = next((guard for guard in self.guards if not guard.holds(names)), None)
        if failed is not None:
            raise GuardError(
                f"the graph of {self.name or '(root)'!r}, which the pipeline cuts, holds only where {failed} "
                f"({failed.reason}); optimize with example_inputs of this kind, in this mode"
            )


@dataclass(frozen=True)
class OpenedModel:
    """A model as one graph."""

    graph: fx.Graph  # calls modules by their qualified names; modules that are looked into are not called
    chosen: Mapping[str, int]  # path of calls ("" is the root) -> which graph of the module is looked into
    unpacked: Mapping[str, int]  # name of a node that gives a tuple -> its length; its items are values by themselves
    sources: Mapping[str, Source]  # name of a placeholder -> where its value is in the arguments of the model's forward
    holds: Holds  # checks the guards of the root
    paths: Mapping[str, str]  # name of a call of a captured module -> the path by which it may be opened
    names: Mapping[str, str]  # path of a module that is looked into -> its qualified name

    def given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[fx.Node, Any]:
        """Return the values of the placeholders in one call of the model, or raise GuardError."""
        self.holds(args, kwargs)
        read = reader({"self": self.holds.module, **self.holds.capture.parameters.bind(args, dict(kwargs))})
        return {node: read(self.sources[node.name]) for node in self.graph.find_nodes(op="placeholder")}


def opened_graph(model: nn.Module, chosen: Mapping[str, int], unpacked: Mapping[str, int]) -> OpenedModel:
    """Return a captured model as one graph; MatchFailure: a `chosen` module cannot be looked into."""
    reason = why_closed(model)
    capture = capture_of(model)
    if reason is not None or capture is None:
        raise MatchFailure(f"the model's own forward cannot be cut: {reason}")
    return _Opener(model, chosen, unpacked).result(capture)


def why_closed(module: nn.Module) -> str | None:
    """Return why a module must stay one call, or None."""
    return reason_against_opening(module) if specializations_of(module) else "it has no graph"


def depends_on_mode(module: nn.Module) -> bool:
    """Say whether a captured module has other graphs in training than in evaluation."""
    return any(guard.asks_for_training for each in specializations_of(module) for guard in each.guards)


class _Opener(Opener):
    """Write the graph. A place is a path of calls, and the qualified name of the module there."""

    def __init__(self, model: nn.Module, chosen: Mapping[str, int], unpacked: Mapping[str, int]) -> None:
        self.model = model
        self.chosen, self.unpacked = dict(chosen), dict(unpacked)
        self.graph = fx.Graph()
        self.paths: dict[str, str] = {}
        self.names = {"": ""}

    def result(self, capture: Capture) -> OpenedModel:
        specialization = capture.specializations[self.chosen.get("", 0)]
        placeholders = specialization.graph.find_nodes(op="placeholder")
        inputs = [self.graph.placeholder(node.name) for node in placeholders]
        sources = {new.name: specialization.argument(old) for new, old in zip(inputs, placeholders, strict=True)}
        # Nothing is known of the arguments: any node stands for a value that may be anything.
        anything = fx.Graph().placeholder("anything")
        unknown = {parameter.name: anything for parameter in capture.parameters.parameters}
        guards = unmet_guards(self.model, specialization, unknown)
        self.graph.output(self.run(specialization.graph, ("", ""), inputs))
        holds = Holds(self.model, capture, guards, "")
        return OpenedModel(self.graph, self.chosen, self.unpacked, sources, holds, self.paths, self.names)

    def made(self, node: fx.Node, place: tuple[str, str], args: Any, kwargs: Any) -> Any:
        """Add what a node does; return its value, which is a node or known already."""
        path, owner = place
        if node.target is keep:  # notes what to take back before the original forward runs, which is no more
            return None
        if node.target is require:
            args, kwargs = (*args[:3], False), dict[str, Any]()
            if not isinstance(args[0], fx.Node):  # it is known, and checked while the graph is written
                try:
                    return cast("Any", require)(*args)
                except GuardError as error:
                    raise MatchFailure(str(error)) from error
        if node.target is getattr and args[1:] == ("device",):  # all of a stage is where its inputs are
            args = (next(iter(self.graph.find_nodes(op="placeholder")), args[0]), "device")
        target = qualified(owner, str(node.target)) if node.op in ("get_attr", "call_module") else node.target
        name = "_".join((*path.split("/"), node.name)) if path else node.name
        new = self.graph.create_node(node.op, target, args, kwargs, name=name)
        if node.op == "call_module":
            new.meta.update({"region": True} if node.meta.get("region") else {})
            self.paths[new.name] = _inside(path, node)
        count = self.unpacked.get(new.name)
        if count is None:
            return new
        return tuple(self.graph.call_function(operator.getitem, (new, number)) for number in range(count))

    def opened(self, node: fx.Node, place: tuple[str, str], args: Any, kwargs: Any) -> tuple[Any] | None:
        """Add what a chosen module does, and checks of its guards."""
        path, name = _inside(place[0], node), qualified(place[1], str(node.target))
        if path not in self.chosen:
            return None
        module = submodule(self.model, name)
        capture = None if module is None else capture_of(module)
        if module is None or capture is None:
            raise MatchFailure(f"'{name}' has no graph")
        self.names[path] = name
        specialization = capture.specializations[self.chosen[path]]
        given = capture.parameters.bind(args, kwargs)
        guards = unmet_guards(module, specialization, given)
        of_call = [guard for guard in guards if any(map(_reads_call, guard.sources()))]
        for some, call in (([g for g in guards if g not in of_call], ()), (of_call, (tuple(args), dict(kwargs)))):
            if some:
                self.graph.call_function(Holds(module, capture, some, name), call)
        placeholders = specialization.graph.find_nodes(op="placeholder")
        inputs = [self._at(specialization.argument(each), given, name) for each in placeholders]
        return (self.run(specialization.graph, (path, name), inputs),)

    def _at(self, source: Source, given: Mapping[str, Any], name: str) -> Any:
        """Return what is passed at a source: a node, or a value that is known."""
        match source:
            case Argument(argument):
                return given[argument]
            case Item(owner, Constant(value=key)):
                return self._picked(operator.getitem, self._at(owner, given, name), key)
            case Attribute(owner, key):
                return self._picked(getattr, self._at(owner, given, name), key)
            case _:
                raise MatchFailure(f"'{name}' is given '{source}' in a form that cannot be opened")

    def _picked(self, pick: Callable[[Any, Any], Any], around: Any, key: Any) -> Any:
        return self.graph.call_function(pick, (around, key)) if isinstance(around, fx.Node) else pick(around, key)


def _reads_call(source: Source) -> bool:
    """Say whether a source is, or is made of, an argument of the call."""
    return any(isinstance(part, Argument) and part != SELF for part in source.all())


def _inside(path: str, call: fx.Node) -> str:
    return f"{path}/{call.name}" if path else call.name
