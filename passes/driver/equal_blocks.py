"""Equal groups in equal blocks: one is decided, the others follow it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import nn

from ...tracing.recording import Alike, Described, Likeness
from ...tracing.values import Inputs
from ..contract import Pass
from ..pipeline import Decision
from ..rewriting import Edit
from ..sites import Site
from ..state import StateMap
from .groups import Group, identity, keeps_function

__all__ = ["Block", "EqualBlocks", "Precedent"]


@dataclass(frozen=True)
class Precedent:
    """What was decided at the first of several equal groups.

    Attributes:
        decision: on the group.
        chosen: the sites that were rewritten, with their lowerings; None where none were.
        result: what the block was like afterwards, and what that did to tensors, by their names in the block.
    """

    decision: Decision
    chosen: Group | None = None
    result: tuple[Hashable, StateMap] | None = None


@dataclass(frozen=True)
class Block:
    """A module around a group, before anything is done to it.

    Attributes:
        module: the group's owner.
        described: the module as it was.
        numbers: by which it and others are compared.
        key: equal for groups that are to be decided alike.
    """

    module: nn.Module
    described: Described
    numbers: dict[Hashable, int]
    key: Hashable

    def result_of(self, edit: Edit) -> tuple[Hashable, StateMap] | None:
        """Return what a rewrite made of the block, or None where it put in tensors that nothing is known of."""
        state_map = edit.state_map()
        after = Likeness(Alike.REWRITTEN, self.numbers).whole(edit.owner)
        new = {name for tensor, name in after.tensors.items() if tensor not in self.described.tensors}
        return (after.key, state_map) if new <= state_map.targets else None


class EqualBlocks:
    """Remember decisions by everything that they hang on; see docs/decisions/007-equal-blocks.md."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Precedent | None] = {}
        self._numbers: dict[Hashable, int] = {}

    def block(self, pass_: Pass, step: int, group: Group, module: nn.Module, calls: Sequence[Inputs]) -> Block | None:
        """Describe the block around a group, or return None where it can have no equal."""
        if not keeps_function(pass_) or not group.owner:
            return None
        likeness = Likeness(Alike.REWRITTEN, self._numbers)
        wanted = tuple(map(_wanted, group.sites))
        return Block(module, likeness.whole(module), self._numbers, (step, wanted, likeness.whole(module, calls).key))

    def precedent(self, block: Block | None) -> Precedent | None:
        """Return what was decided at an equal group, if there was one."""
        return None if block is None else self._known.get(block.key)

    def remember(self, block: Block | None, decision: Decision, chosen: Group, edit: Edit | None) -> None:
        """Note the first decision at equal groups; one for which nothing could be written is tried again elsewhere."""
        if block is None or decision.status == "refused":
            return
        if edit is None:
            self._known.setdefault(block.key, Precedent(decision))
            return
        result = block.result_of(edit)
        # Where tensors came in that nothing is known of, each block is decided by itself.
        self._known.setdefault(block.key, None if result is None else Precedent(decision, chosen, result))


def _wanted(site: Site) -> Hashable:
    return identity(site), site.specialization, site.choices, site.choice, site.phase, site.required
