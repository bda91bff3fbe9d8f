"""Equal groups in equal blocks: one is decided, the others follow it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from torch import nn

from ...runtime.record import Decision
from ...runtime.state import StateMap
from ...tracing.analyses import Described, HashLevel, StructuralHash
from ...tracing.examples import Inputs
from ...tracing.program import Program
from ..contract import Pass
from ..rewriting import Edit
from ..sites import Numerics, Refusal, Site
from .groups import Group, identity, timed_identity

__all__ = ["Block", "EqualBlocks", "Precedent", "kinds_to_time"]


@dataclass(frozen=True)
class Precedent:
    """What was decided at the first of several equal groups, what the block was like afterwards, and its state map."""

    decision: Decision
    chosen: Group | None = None
    result: tuple[Hashable, StateMap] | None = None


@dataclass(frozen=True)
class Block:
    """An untouched module around a group: `key` is equal for groups decided alike, `timed_key` if they take as long."""

    module: nn.Module
    described: Described
    numbers: dict[Hashable, int]
    key: Hashable
    timed_key: Hashable

    def result_of(self, edit: Edit) -> tuple[Hashable, StateMap] | None:
        """Return what a rewrite made of the block, or None where it put in tensors that nothing is known of."""
        state_map = edit.state_map()
        after = StructuralHash(HashLevel.REWRITTEN, self.numbers).whole(edit.owner)
        new = {name for tensor, name in after.tensors.items() if tensor not in self.described.tensors}
        return (after.key, state_map) if new <= state_map.targets else None


class EqualBlocks:
    """Remember decisions by everything that they hang on; see docs/decisions/007-equal-blocks.md."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Precedent | None] = {}
        self._timed: dict[Hashable, Precedent] = {}
        self._numbers: dict[Hashable, int] = {}

    def block(self, pass_: Pass, step: int, group: Group, module: nn.Module, calls: Sequence[Inputs]) -> Block | None:
        """Describe the block around a group, or return None where it can have no equal."""
        if pass_.numerics is Numerics.SEMANTIC or not group.owner:
            return None
        likeness = StructuralHash(HashLevel.REWRITTEN, self._numbers)
        timed = StructuralHash(HashLevel.TIMED, self._numbers)
        key = (step, _wanted(group, identity)), likeness.whole(module, calls).key
        timed_key = (step, _wanted(group, timed_identity)), timed.whole(module, calls).key
        return Block(module, likeness.whole(module), self._numbers, key, timed_key)

    def precedent(self, block: Block | None) -> Precedent | None:
        """Return what was decided at an equal group, if there was one."""
        return None if block is None else self._known.get(block.key)

    def timed(self, block: Block | None) -> Precedent | None:
        """Return what was timed at a group that takes as long, if there was one; it need not be equal."""
        return None if block is None else self._timed.get(block.timed_key)

    def remember(self, block: Block | None, decision: Decision, chosen: Group, edit: Edit | None) -> None:
        """Note the first decision at equal groups, also that nothing can be written there."""
        if block is None or decision.status == "skipped":
            return
        if decision.measured.speedup is not None:
            self._timed.setdefault(block.timed_key, Precedent(decision, None if edit is None else chosen))
        if edit is None:
            self._known.setdefault(block.key, Precedent(decision))
            return
        result = block.result_of(edit)
        # Where tensors came in that nothing is known of, each block is decided by itself.
        self._known.setdefault(block.key, None if result is None else Precedent(decision, chosen, result))


def _wanted(group: Group, identified: Callable[[Site], Hashable]) -> Hashable:
    return tuple(
        (identified(site), site.specialization, site.choices, site.choice, site.phase, site.required)
        for site in group.sites
    )


def kinds_to_time(program: Program, found: Sequence[Group | Refusal]) -> list[int]:
    """Return, for each that a pass found, in how many kinds of blocks it and those after it are; at least one."""
    likeness = StructuralHash(HashLevel.TIMED)
    kinds = [_kind(program, each, likeness) if isinstance(each, Group) else None for each in found]
    begun, left = set[Hashable](), list[int]()
    for kind in kinds:
        left.append(0 if kind is None or kind in begun else 1)
        begun.update(() if kind is None else (kind,))
    return [max(1, count) for count in reversed(list(itertools.accumulate(reversed(left))))]


def _kind(program: Program, group: Group, likeness: StructuralHash) -> Hashable:
    return likeness.of(program.module(group.owner)), _wanted(group, timed_identity)
