"""Tidy a traced graph, and let its checks start over: what happened before them is taken back, or must be nothing."""

from __future__ import annotations

import dis
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache
from types import CodeType
from typing import Any, NoReturn

from torch import Tensor, fx, nn

from ...compat import operator_format
from ...runtime.guards import DESCRIPTIONS, SWITCHES, require
from ...runtime.values import Path, TensorMeta, keep
from ..analyses import function_uses_host_random, may_draw, module_may_draw, tree_uses_host_random
from ..examples import Untraceable
from ..isolation import Change
from ..proxies import Tracer
from ..reads import source_of, user_frame
from .decisions import Decisions

__all__ = ["NoneGuards", "drop_unused", "is_statement", "late_checks", "only_reads", "order_checks"]


_Lasting = Callable[[fx.Node], Change | None]


def order_checks(graph: fx.Graph, module: nn.Module, decisions: Decisions, lasting: _Lasting, *, marks: bool) -> None:
    """Move checks to before what cannot be done twice, or let the graph note what is to be taken back; else give up.
    `lasting` tells what running a node changes that outlives the call; with `marks`, the graph announces that.
    """
    _Order(graph, module, decisions, lasting).run(marks=marks)


class _Order:
    def __init__(self, graph: fx.Graph, module: nn.Module, decisions: Decisions, lasting: _Lasting) -> None:
        self._graph, self._module, self._decisions, self._lasting = graph, module, decisions, lasting

    def run(self, *, marks: bool) -> None:
        by_data = self._decisions.by_data
        late = late_checks(
            self._graph, lambda node: self._lasting(node) is not None, by_data, self._decisions.read_later
        )
        # Checks by data are careful with random numbers too: they miss although the model is used as it was.
        drawn = self._by_data_after(self._has_random_effects)
        checks = list(dict.fromkeys((*late, *drawn)))
        kept = self._kept(checks, random=bool(drawn)) if checks else None
        for check in checks:
            if kept is None and check not in self._decisions.structural:
                self._refuse(check)
            check.args = (*check.args[:3], kept or False, *check.args[4:])
        if marks:
            self._mark_changes(set() if kept is None else set(_up_to_last(self._graph, checks)))
        self._mark_random_effects()

    def _mark_changes(self, noted: Collection[fx.Node]) -> None:
        """Mark what changes objects and is not noted here before: the generated forward announces it to its callers."""
        for node in self._graph.nodes:
            change = self._lasting(node)
            if change is not None and (change.objects or change.paths):
                node.meta["changes"] = node.op == "call_module" or node not in noted

    def _mark_random_effects(self) -> None:
        """Mark what draws outside torch, for callers to take back, and before a check, for the generated forward to."""
        checks = self._graph.find_nodes(op="call_function", target=require)
        before = set(_up_to_last(self._graph, checks) if checks else ())
        from_host = tree_uses_host_random(self._module)
        for node in self._graph.nodes:
            if self._uses_host_random(node, modules=from_host) and self._has_random_effects(node):
                node.meta["draws"] = "host"
            elif node in before and self._has_random_effects(node):
                node.meta["draws"] = "torch"

    def _uses_host_random(self, node: fx.Node, *, modules: bool) -> bool:
        if node.op == "call_module":
            return modules and tree_uses_host_random(self._callee(node))
        return node.op == "call_function" and function_uses_host_random(node.target)

    def _by_data_after(self, first: Callable[[fx.Node], bool]) -> list[fx.Node]:
        """Return the checks by data that come after a node for which `first` holds."""
        found: list[fx.Node] = []
        by_data, is_after = self._decisions.by_data, False
        for node in self._graph.nodes if by_data else ():
            is_after = is_after or first(node)
            if is_after and node in by_data:
                found.append(node)
        return found

    def _refuse(self, check: fx.Node) -> NoReturn:
        what = "the data in a tensor" if check in self._decisions.by_data else "an intermediate value"
        raise Untraceable(
            f"its control flow depends on {what} after a change that cannot be undone", check.meta["source"]
        )

    def _callee(self, node: fx.Node) -> nn.Module:
        return self._module.get_submodule(str(node.target))

    def _kept(self, checks: Collection[fx.Node], *, random: bool) -> fx.Node | None:
        """Note what is changed up to the last of some checks before it is; None where that cannot be taken back."""
        before = _up_to_last(self._graph, checks)
        changes = {node: change for node in before if (change := self._lasting(node)) is not None}
        if not all(change.revocable for change in changes.values()):
            return None
        first = next(node for node in before if node in changes or (random and self._has_random_effects(node)))
        with self._graph.inserting_before(first):
            options: dict[str, Any] = {"random": True} if random else {}
            setters = dict.fromkeys(place for change in changes.values() for place in change.attributes)
            if setters:
                options["attributes"] = tuple((self._graph.get_attr(target), name) for target, name in setters)
            if not options and all(node.op == "call_module" for node in changes):
                options["subscribes"] = True
            kept = self._graph.call_function(keep, _paths(changes.values()), options)
        kept.meta["source"] = next(iter(checks)).meta["source"]
        return kept

    def _has_random_effects(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return any(map(module_may_draw, self._callee(node).modules()))
        return may_draw(node)


def _up_to_last(graph: fx.Graph, checks: Collection[fx.Node]) -> list[fx.Node]:
    nodes, wanted = list(graph.nodes), set(checks)
    return nodes[: max(number for number, node in enumerate(nodes) if node in wanted)]


def _paths(changes: Iterable[Change]) -> tuple[Any, ...]:
    """Return what `keep` is to be given: each object that is changed, and the paths in it."""
    paths: dict[fx.Node, dict[Path, None]] = {}
    for change in changes:
        for root, found in change.paths.items():
            paths.setdefault(root, {}).update(dict.fromkeys(found))
    return tuple(argument for root, found in paths.items() for argument in (root, tuple(found)))


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
    return operator_format(function) is not None and not isinstance(node.meta.get("val"), TensorMeta)


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
