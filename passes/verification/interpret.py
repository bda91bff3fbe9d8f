"""Run a captured module node by node: past guards that only hold in its own types, and with the tape on each node."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx, nn

from ...runtime.graphs import Capture, Specialization, capture_of, fitting, required_capture, select
from ...runtime.guards import GuardMiss
from ...runtime.values import Arguments
from ...tracing.program import GraphRunner
from .tape import Tape

__all__ = ["graph_forward", "own_forward"]


def graph_forward(module: nn.Module, arguments: Arguments, tape: Tape | None) -> Callable[..., Any] | None:
    """Return a forward that interprets the graph which a call with `arguments` runs, None where it runs none. Guards
    are asked in the module's own types; what the forward is given may be wider. Give it to `module` only for a while:
    its capture is replaced too.
    """
    capture = capture_of(module)
    if capture is None:
        return None
    specializations = fitting(module, *arguments)
    return _Forward(module, specializations, capture, tape) if specializations else None


def own_forward(
    module: nn.Module, tape: Tape | None, on_call: Callable[[], object] = lambda: None
) -> Callable[..., Any]:
    """Return a forward that interprets the graphs of a region, or of a module inside, past their guards."""
    capture = required_capture(module)
    return _Forward(module, capture.specializations, capture, tape, on_call)


@dataclasses.dataclass
class _Forward:
    module: nn.Module
    specializations: Sequence[Specialization]
    capture: Capture
    tape: Tape | None
    on_call: Callable[[], object] = lambda: None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.on_call()
        for specialization in self.specializations[:-1]:
            with contextlib.suppress(GuardMiss):
                return self._run(specialization, args, kwargs)
        return self._run(self.specializations[-1], args, kwargs)

    def _run(self, specialization: Specialization, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unguarded = dataclasses.replace(specialization, guards=())
        self.module.__dict__["_fxopt_capture"] = dataclasses.replace(self.capture, specializations=[unguarded])
        try:
            selected = select(self.module, args, kwargs)
        finally:
            self.module.__dict__["_fxopt_capture"] = self.capture
        values = selected[1] if selected is not None else []
        return _Runner(self.module, specialization.graph, self.tape).run(*values)


class _Runner(GraphRunner):
    """Tell the tape which node runs."""

    def __init__(self, module: nn.Module, graph: fx.Graph, tape: Tape | None) -> None:
        super().__init__(module, graph)
        self.tape = tape

    def run_node(self, n: fx.Node) -> Any:
        if self.tape is not None:
            self.tape.at(n.meta.get("origin", n.name))
        return super().run_node(n)
