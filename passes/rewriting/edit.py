"""The only thing that changes a program: one site's rewrite, landed whole or undone."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager

from torch import fx

from ...runtime.graphs import Capture, Specialization, capture_of, install, uninstall
from .changes import watching
from .function_pass import run_function
from .regions import Opener, Wrapper, inline, outline
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
        """Find what is changed otherwise than through this edit; then, and after any error, all is put back.

        Raises:
            UnnotedChange: naming the change, and the verb to use instead.
            MatchFailure: if no step of the state map accounts for a tensor that was added, or is missing.
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
