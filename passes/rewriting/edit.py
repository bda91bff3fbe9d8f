"""The only thing that changes a program: one site's rewrite, landed whole or undone."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager

from torch import Tensor, fx, nn

from ...errors import CaptureError, MatchFailure, UsageError
from ...runtime.graphs import Capture, Specialization, capture_of, install, uninstall
from ...runtime.values import Absent
from .changes import UnnotedChange, watching
from .regions import RegionContext, Wrapper, inline, outline
from .state_map_check import added_tensors, check_mapped, lasting_shapes
from .tree_edit import TreeEdit

__all__ = ["Edit"]


class Edit(TreeEdit):
    """Change the modules around one site: their graphs, children, attributes and tensors.

    Every change is journalled, so `undo` puts back what was there. Names of modules and tensors are qualified from the
    site's owner; of a site with parts from the module around them or, within `at(part)`, from the part's owner.
    """

    @contextmanager
    def watched(self) -> Generator[None]:
        """Find what is changed otherwise than through this edit; then, and after any error, all is put back. Raise
        UnnotedChange for such a change, MatchFailure for a tensor that no step of the state map accounts for.
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
        self,
        nodes: Iterable[fx.Node],
        *,
        name: str,
        context: RegionContext | None = None,
        wrapper: Wrapper | None = None,
    ) -> fx.Node:
        """Move nodes of the site's graph into a new child; return the call that stands for them.

        Args:
            nodes: neither inputs nor outputs; reads of attributes stay at owner and are handed in.
            name: of the child; numbered if it is taken.
            context: what the child runs under: `Context("checkpoint")`, say, a function that returns a context manager,
                or an object whose `run` calls the region; a saved model loads where these can be pickled.
            wrapper: is given the child and returns the module to call in its place.

        Raises:
            MatchFailure: if a path leaves the nodes and comes back, or a write in place would change its order: then
                they cannot run as one. Or if the owner's forward would come across a wrapper among its children.
            UsageError: the context cannot be opened, or the wrapper returned no module.
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
        """Put the graph of a captured child in the place of a call of it; return the new nodes.

        The child stays where it is in the module tree, save a `Region`, which goes.

        Raises:
            MatchFailure: if the child has no graph, more than one, or is called in a way that its graph does not cover.
        """
        return inline(self, call)

    def run_function(self, function: Callable[[fx.GraphModule], fx.GraphModule]) -> None:
        """Give the site's graph to a function as a `GraphModule`, and take the graph that it returns.

        The function may change the graph and add modules and tensors under new names. It cannot say what it does to
        checkpoints, so it may neither touch the tensors that are there nor put others in their places.

        Raises:
            UsageError: if the function returns no `GraphModule`, or changes anything else than the graph.
            CaptureError: if the graph it returns refers to something that is not there.
            MatchFailure: if it puts a module with tensors, or a tensor, in the place of another.
        """
        owner, watch = self.owner, self._journal.watch
        returned = function(fx.GraphModule(owner, self.graph, type(owner).__name__))
        try:
            if watch is not None:
                watch.check()
        except UnnotedChange as change:
            raise UsageError(f"it {change.what}; a pass function may change only the graph it is given") from change
        if not isinstance(returned, fx.GraphModule):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"returned {type(returned).__name__}; a pass function returns a torch.fx.GraphModule")
        for target in dict.fromkeys(str(n.target) for n in returned.graph.nodes if n.op in ("call_module", "get_attr")):
            self._take_over(target, _attribute(returned, target))
        self.set_graph(returned.graph)

    def _take_over(self, target: str, value: object) -> None:
        """Let the owner have what a returned graph calls `target`."""
        present = _attribute(self.owner, target)
        if value is Absent:
            raise CaptureError(f"its graph refers to '{target}', which does not exist")
        if present is value:
            return
        if present is not Absent and (_has_tensors(value) or _has_tensors(present)):
            raise MatchFailure(f"it replaces '{target}', so checkpoints would not fit; use a new name")
        self.adopt(target, value)


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
