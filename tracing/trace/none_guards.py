"""See to it that what a forward read of an object is there again: `is None` asks no proxy, so every read counts."""

from __future__ import annotations

import dis
import itertools
import operator
from functools import lru_cache
from types import CodeType
from typing import Any

from torch import Tensor, fx

from ...compat import operator_format
from ...runtime.guards import require
from ..reads import source_of, user_frame
from .checks import only_reads
from .decisions import Decisions
from .protocol import Tracer

__all__ = ["NoneGuards", "is_statement"]

_TAKING_APART = (getattr, len, operator.getitem, operator.setitem)
_COMPARISONS = (operator.eq, operator.ne)
"""Operators that take None for an operand."""


class NoneGuards:
    """Collect what a traced forward read of objects and found there, and check it once the whole graph is known."""

    def __init__(self, tracer: Tracer, decisions: Decisions) -> None:
        self._tracer = tracer
        self._decisions = decisions
        self._found: dict[fx.Node, str] = {}
        self._changing: set[fx.Node] = set()

    def note(self, node: fx.Node, *, changes: bool) -> None:
        """Note a node that has a value, which may be None in another call; one that `changes` does more than read."""
        read = self._tracer.data.is_read(node)
        if read and self._decisions.present(node, source_of(), lifted=True):
            return
        if (read and not (node.op == "call_method" and is_statement())) or self._is_part(node):
            self._found[node] = source_of()
            if changes:
                self._changing.add(node)

    def _is_part(self, node: fx.Node) -> bool:
        """Tell whether a node is an item of a tuple that an object's method gave."""
        if node.op != "call_function" or node.target is not operator.getitem:
            return False
        owner: Any = node.args[0]
        return owner.op == "call_method" and self._tracer.data.is_read(owner)

    def settle(self) -> None:
        """Check, in the graph, what would not raise by itself if it was None, and tensors that may not be there yet."""
        for node, place in self._found.items():
            tensor = isinstance(self._tracer.examples[node], Tensor) and not self._is_part(node)
            if (tensor and node not in self._changing) or not any(_refuses_none(user, node) for user in node.users):
                self._decisions.present(node, place)


def is_statement() -> bool:
    """Tell whether the user's line that runs now calls something and never looks at what it gives."""
    frame = user_frame()
    return frame is not None and frame.f_lasti in _statements(frame.f_code)


@lru_cache(maxsize=1024)
def _statements(code: CodeType) -> frozenset[int]:
    """Return where in the code calls are whose results are thrown away."""
    steps = list(dis.get_instructions(code))
    return frozenset(step.offset for step, after in itertools.pairwise(steps) if after.opname == "POP_TOP")


def _refuses_none(user: fx.Node, node: fx.Node) -> bool:
    function: Any = user.target
    if user.op == "call_function" and function in (require, type):
        return True  # what is required is never None; a type that was asked for is compared
    if not user.users and only_reads(user):
        return False
    if user.op == "call_function" and operator_format(function) is not None:
        return function not in _COMPARISONS
    if not user.args or user.args[0] is not node:
        return False
    if user.op == "call_function":
        return function in _TAKING_APART or (getattr(function, "__module__", None) or "").startswith("torch")
    return user.op == "call_method"
