"""Equal sites in equal blocks: one is decided, the others follow it."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import nn

from ..tracing.inputs import Inputs
from .base import Numerics, Pass, Site
from .edit import Edit
from .likeness import Likeness, Unlike
from .plan import Decision
from .state_map import StateMap
from .together import identity, parts_of, together

__all__ = ["Block", "EqualBlocks", "Precedent"]


@dataclass(frozen=True)
class Precedent:
    """What was decided at the first of several equal sites.

    Attributes:
        decision: the site's own.
        chosen: the site with its choice; of several decided together those that were rewritten.
        result: what the block was like afterwards, where it was rewritten.
        state_map: what that did to tensors, by their names in the block.
    """

    decision: Decision
    chosen: Site | None = None
    result: Hashable = None
    state_map: StateMap | None = None

    def at(self, site: Site) -> Site | None:
        """Return an equal site with the choices that were made at the first, or None where nothing was rewritten."""
        if self.chosen is None or not site.parts:
            return self.chosen and dataclasses.replace(site, choice=self.chosen.choice)
        choices = {identity(part): part.choice for part in parts_of(self.chosen)}
        parts = [part for part in site.parts if identity(part) in choices]
        return together([dataclasses.replace(part, choice=choices[identity(part)]) for part in parts])


@dataclass(frozen=True)
class Block:
    """A module around a site, before anything is done to it.

    Attributes:
        module: the site's home.
        likeness: of the module as it was.
        key: equal for sites that are to be decided alike.
    """

    module: nn.Module
    likeness: Likeness
    key: Hashable

    def result_of(self, edit: Edit) -> tuple[Hashable, StateMap] | None:
        """Return what a rewrite made of the block, or None where it put in tensors that nothing is known of."""
        state_map = edit.state_map()
        try:
            after = Likeness(self.module)
        except Unlike:
            return None
        new = {name for tensor, name in after.tensors.items() if tensor not in self.likeness.tensors}
        return (after.description, state_map) if new <= state_map.targets else None


class EqualBlocks:
    """Remember decisions by everything that they hang on; see docs/decisions/007-equal-blocks.md."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Precedent | None] = {}

    def block(self, pass_: Pass, step: int, site: Site, module: nn.Module, calls: Sequence[Inputs]) -> Block | None:
        """Describe the block around a site, or return None where it can have no equal."""
        if pass_.numerics not in (Numerics.EXACT, Numerics.REASSOCIATED) or not site.home:
            return None
        try:
            likeness = Likeness(module)
            called = likeness.of_calls(calls)
        except Unlike:
            return None
        wanted = tuple(map(_wanted, parts_of(site)))
        return Block(module, likeness, (step, wanted, likeness.description, called))

    def precedent(self, block: Block | None) -> Precedent | None:
        """Return what was decided at an equal site, if there was one."""
        return None if block is None else self._known.get(block.key)

    def remember(
        self, block: Block | None, decision: Decision, chosen: Site | None = None, edit: Edit | None = None
    ) -> None:
        """Note the first decision at equal sites; one for which nothing could be written is tried again elsewhere."""
        if block is None or decision.status == "refused":
            return
        if chosen is None or edit is None:
            self._known.setdefault(block.key, Precedent(decision))
            return
        result = block.result_of(edit)
        # Where tensors came in that nothing is known of, each block is decided by itself.
        self._known.setdefault(block.key, None if result is None else Precedent(decision, chosen, *result))


def _wanted(site: Site) -> Hashable:
    return identity(site), site.variant, site.choices, site.choice, site.phase, site.required
