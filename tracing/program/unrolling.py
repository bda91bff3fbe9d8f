"""Look at one recorded call of a module as it went, operation by operation, whatever its data decided."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from ...compat import all_modules
from ..graphs import Specialization
from ..recording import Call, ModelState, restoring
from ..rules import tracing_session
from ..trace import TracingSession, UnrollingTracer
from ..values import signature_of, user_class
from .program import Program

__all__ = ["Unrolled", "Unroller", "unrolling"]


@dataclass(frozen=True)
class Unrolled:
    """One call of a module as it went.

    Attributes:
        specialization: its graph, and what it holds under, but for what data decided.
        values: node -> its value in that call.
    """

    specialization: Specialization
    values: Mapping[fx.Node, Any]

    @property
    def graph(self) -> fx.Graph:
        return self.specialization.graph


class Unroller:
    """Trace recorded calls as they went; see `unrolling`."""

    def __init__(self, program: Program, session: TracingSession) -> None:
        self._program, self._session = program, session

    def unroll(self, owner: str, call: Call, opened: Collection[nn.Module] = ()) -> Unrolled:
        """Return a recorded call of the module called `owner`.

        Args:
            owner: its name.
            call: as `Program.recording` has it.
            opened: the modules inside whose calls are traced through.

        Raises:
            Untraceable: if the forward does something that no graph can say.
            Exception: whatever the forward raises when it is run on proxies.
        """
        call = dataclasses.replace(call, children=[])  # they may be called otherwise than they were
        tracer = UnrollingTracer(self._session, self._program.names, owner, call, lambda _: False, {})
        tracer.opened = frozenset(opened)
        forward = user_class(type(tracer.module)).forward
        signature = signature_of(forward)
        return Unrolled(tracer.trace(signature), tracer.seen)


@contextmanager
def unrolling(program: Program) -> Generator[Unroller]:
    """Trace, while inside, recorded calls of modules as they went; the model stays as it is."""
    modules = list(all_modules(program.model))
    with restoring(ModelState(program.model)), tracing_session(modules) as session:
        yield Unroller(program, session)
