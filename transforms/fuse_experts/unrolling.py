"""Look at one recorded call of a module as it went, operation by operation, whatever its data decided."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from torch import Tensor, fx, nn

from ...compat import all_modules
from ...runtime.graphs import Specialization
from ...runtime.values import INTERNAL, has_attributes, put_members_back, same_members, signature_of, user_class
from ...tracing.examples import Untraceable
from ...tracing.isolation import ModelState, restoring
from ...tracing.program import Program
from ...tracing.recording import Call
from ...tracing.rules import tracing_session
from ...tracing.trace import Decided, TracingSession, UnrollingTracer
from .members import Source, find_sources

__all__ = ["Unrolled", "Unroller", "unrolling"]


@dataclass(frozen=True)
class Unrolled:
    """One call of a module as it went: its graph, the value of each node, what data decided, what it shaped."""

    module: nn.Module
    specialization: Specialization
    values: Mapping[fx.Node, Any]
    decided: Sequence[Decided]
    shaped: frozenset[fx.Node]

    @property
    def graph(self) -> fx.Graph:
        return self.specialization.graph

    @cached_property
    def sources(self) -> Mapping[fx.Node, tuple[Source, int]]:
        """Return the nodes that read or call what belongs to one expert: of which family, and which expert."""
        return find_sources(self.module, self.graph, self.values)


class Unroller:
    """Trace recorded calls as they went; see `unrolling`."""

    def __init__(self, program: Program, session: TracingSession) -> None:
        self._program, self._session = program, session

    def unroll(
        self,
        owner: str,
        call: Call,
        opened: Collection[nn.Module] = (),
        overwritten: Mapping[str, Tensor] | None = None,
    ) -> Unrolled:
        """Return a call of a module, traced through `opened` modules, with other values for `overwritten` nodes.
        Untraceable: no graph can say it. What the forward raises is raised.
        """
        call = dataclasses.replace(call, children=[])  # they may be called otherwise than they were
        tracer = UnrollingTracer(self._session, self._program.names, owner, call, lambda _: False, {})
        tracer.opened, tracer.overwritten = frozenset(opened), overwritten or {}
        forward = user_class(type(tracer.module)).forward
        signature = signature_of(forward)
        objects = _Objects([tracer.module, *opened])
        try:
            specialization = tracer.trace(signature)
        finally:
            changed = objects.restore()
        if changed is not None:
            raise Untraceable(f"it changes {changed}", "")
        return Unrolled(tracer.module, specialization, tracer.seen, tracer.decided, frozenset(tracer.data.shaped))


@contextmanager
def unrolling(program: Program) -> Generator[Unroller]:
    """Trace, while inside, recorded calls of modules as they went; the model stays as it is."""
    modules = list(all_modules(program.model))
    with restoring(ModelState(program.model)), tracing_session(modules) as session:
        yield Unroller(program, session)


class _Objects:
    """What is in the objects and containers that modules hold: a forward that is traced through writes into them."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._held: list[tuple[str, Any, Any]] = []
        for module in dict.fromkeys(modules):
            for name, value in list(vars(module).items()):
                if name not in INTERNAL:
                    self._note(f"{type(module).__name__}.{name}", value)

    def _note(self, path: str, value: Any, depth: int = 1) -> None:
        if type(value) in (list, dict, set, deque):
            self._held.append((path, value, type(value)(value)))
        elif has_attributes(value):
            inside = vars(cast("object", value))
            self._held.append((path, inside, dict(inside)))
            for name, inner in self._held[-1][2].items() if depth else ():
                self._note(f"{path}.{name}", inner, depth - 1)

    def restore(self) -> str | None:
        """Put everything back; return what was changed first."""
        changed = [each for each in self._held if not same_members(each[1], each[2])]
        for _, value, before in changed:
            put_members_back(value, before)
        return changed[0][0] if changed else None
