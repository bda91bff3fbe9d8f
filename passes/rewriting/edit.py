"""The only thing that changes a program: one site's rewrite, landed whole or undone."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx, nn

from ...errors import CaptureError, MatchFailure, UsageError
from ...runtime.graphs import Capture, Specialization, capture_of, install, uninstall
from ...runtime.values import Absent
from .changes import UnnotedChange, Watch, watching
from .regions import Opener, Wrapper, inline, outline
from .state_map_check import added_tensors, check_mapped, lasting_shapes
from .tree_edit import TreeEdit

__all__ = ["Adopt", "Edit", "run_function"]


class Edit(TreeEdit):
    """Change the modules around one site: their graphs, children, attributes and tensors.

    Every change is journalled, so `undo` puts back what was there. Names of modules and tensors are qualified from the
    site's owner; of a site with parts from the module around them or, within `at(part)`, from the part's owner.
    """

    @contextmanager
    def watched(self) -> Generator[None]:
        """Find what is changed otherwise than through this edit; then, and after any error, all is put back.
        UnnotedChange names the change, and the verb to use; MatchFailure: no step of the state map accounts for a
        tensor.
        """
        journal = self._journal
        with watching(journal.snapshot, self.program, self.site.owner) as watch:
            journal.watch, shapes, added = watch, lasting_shapes(self.holder), added_tensors(self.holder)
            try:
                yield
                journal.keep(watch.check())
                check_mapped(shapes, lasting_shapes(self.holder), self.state_map_of_model(), added)
            except BaseException:
                self.undo()
                watch.restore()
                raise
            finally:
                journal.watch = None

    def outline(
        self, nodes: Iterable[fx.Node], *, name: str, context: Opener | None = None, wrapper: Wrapper | None = None
    ) -> fx.Node:
        """Move nodes of the site's graph into a new child; return the call that stands for them. See `outline`.

        Args:
            nodes: operations that can run as one.
            name: of the child; numbered if it is taken.
            context: what the child runs under: a `Context`, or a function that returns a context manager.
            wrapper: is given the child and returns the module to call in its place.
        """
        return outline(self, nodes, name=name, context=context, wrapper=wrapper)

    def give_graph(self, specialization: Specialization) -> None:
        """Let the owner run from a graph, where it has none, that other graphs will be put in the place of.

        It holds for some calls only (a loop that was written out, say), so it is not run itself.
        """
        owner, name = self.owner, self.site.owner
        if capture_of(owner) is not None:
            return
        opaque = self.program.opaque.pop(name, None)
        if opaque is not None:
            self._journal.note(lambda: self.program.opaque.update({name: opaque}))
        self._journal.note(lambda: uninstall(owner))
        install(owner, Capture(type(owner), [specialization]))
        self._journal.accept(owner)
        self.program.touch()

    def inline(self, call: fx.Node) -> list[fx.Node]:
        """Put the graph of a captured child in the place of a call of it; return the new nodes. See `inline`."""
        return inline(self, call)

    def run_function(self, function: Callable[[fx.GraphModule], fx.GraphModule]) -> None:
        """Give the site's graph to a function as a `GraphModule` and take the graph it returns; see `run_function`."""
        self.set_graph(run_function(function, self.owner, self.graph, self.adopt, self._journal.watch))


Adopt = Callable[[str, Any], None]
"""Puts a value in the place of an attribute of the owner, by its qualified name."""


def run_function(
    function: Callable[[fx.GraphModule], fx.GraphModule],
    owner: nn.Module,
    graph: fx.Graph,
    adopt: Adopt,
    watch: Watch | None,
) -> fx.Graph:
    """Return the graph that a function makes of `graph`, which it may edit in place, having adopted what it calls.

    Raises:
        UsageError: if the function returns no `GraphModule`, or changes what `watch` watches.
        CaptureError: if the graph it returns refers to something that is not there.
        MatchFailure: if it puts a module with tensors, or a tensor, in the place of another.
    """
    returned = function(fx.GraphModule(owner, graph, type(owner).__name__))
    try:
        if watch is not None:
            watch.check()
    except UnnotedChange as change:
        raise UsageError(f"it {change.what}; a pass function may change only the graph it is given") from change
    if not isinstance(returned, fx.GraphModule):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"returned {type(returned).__name__}; a pass function returns a torch.fx.GraphModule")
    for target in dict.fromkeys(str(n.target) for n in returned.graph.nodes if n.op in ("call_module", "get_attr")):
        _take_over(target, returned, owner, adopt)
    return returned.graph


def _take_over(target: str, returned: fx.GraphModule, owner: nn.Module, adopt: Adopt) -> None:
    """Let the owner have what the returned graph calls `target`."""
    value, present = _attribute(returned, target), _attribute(owner, target)
    if value is Absent:
        raise CaptureError(f"its graph refers to '{target}', which does not exist")
    if present is value:
        return
    if present is not Absent and (_has_tensors(value) or _has_tensors(present)):
        raise MatchFailure(f"it replaces '{target}', so checkpoints would not fit; use a new name")
    adopt(target, value)


def _attribute(module: nn.Module, name: str) -> object:
    path, _, last = name.rpartition(".")
    try:
        return getattr(module.get_submodule(path), last)
    except AttributeError:
        return Absent


def _has_tensors(value: object) -> bool:
    if isinstance(value, nn.Module):
        return next(value.parameters(), None) is not None or next(value.buffers(), None) is not None
    return isinstance(value, Tensor)
