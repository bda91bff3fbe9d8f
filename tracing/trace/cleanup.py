"""Tidy a traced graph: drop reads that nothing uses, and see whether its checks may start over."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import fx

from ...compat import operator_format
from ...runtime.guards import DESCRIPTIONS, SWITCHES, require
from ..examples import TensorMeta

__all__ = ["drop_unused", "late_checks", "only_reads"]

_LOOK_UPS = (getattr, hasattr, len, list, operator.getitem, operator.contains, operator.is_not)


def drop_unused(graph: fx.Graph) -> None:
    """Erase reads of shapes, attributes and items that were made for a decision and that nothing uses."""
    for node in reversed(graph.nodes):
        if not node.users and only_reads(node):
            graph.erase_node(node)


def only_reads(node: fx.Node) -> bool:
    """Tell whether a node only looks something up: a shape, an attribute, an item."""
    if node.op == "get_attr":
        return True
    if node.op == "call_method":
        return node.target in DESCRIPTIONS
    if node.op != "call_function":
        return False
    function: Any = node.target
    if function in _LOOK_UPS or function in SWITCHES:
        return True
    return operator_format(function) is not None and not _is_tensor(node)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), TensorMeta)


def late_checks(
    graph: fx.Graph,
    lasting: Callable[[fx.Node], bool],
    fixed: Collection[fx.Node] = (),
    later: Collection[fx.Node] = (),
) -> list[fx.Node]:
    """Return the checks behind the first node that is `lasting`: it must not be done twice, so they cannot start over.

    Those that need nothing of what is done there are moved to before it, but for `fixed` ones, and what reads `later`.
    """
    checks = graph.find_nodes(op="call_function", target=require)
    if not checks:
        return []
    first = next((node for node in graph.nodes if lasting(node)), None)
    if first is None:
        return []
    late = set(_from(first))
    return [check for check in checks if check in late and (check in fixed or not _advanced(check, first, late, later))]


def _from(first: fx.Node) -> Iterator[fx.Node]:
    node = first
    while node.op != "root":
        yield node
        node = node.next


def _advanced(check: fx.Node, first: fx.Node, late: set[fx.Node], later: Collection[fx.Node]) -> bool:
    """Move a check, and what it reads, from `late` to before `first`; say whether none of it has to stay there."""
    needed: dict[fx.Node, None] = {check: None}
    pending = [check]
    while pending:
        for used in pending.pop().all_input_nodes:
            if used in late and used not in needed:
                if used is first or not only_reads(used) or used in later:
                    return False
                needed[used] = None
                pending.append(used)
    for node in [node for node in _from(first) if node in needed]:
        first.prepend(node)
        late.discard(node)
    return True
