"""Sites that no pass may rewrite, whatever it finds there."""

from __future__ import annotations

from ...tracing.program import Program
from ..sites import VOLATILE, Refusal, Site, is_volatile
from ..state import owner_of
from .asked_classes import Askers

__all__ = ["admitted"]


def admitted(program: Program, item: Site | Refusal) -> Site | Refusal:
    """Return what a pass found, or a refusal in the place of a site that nothing may be done at."""
    if isinstance(item, Refusal):
        return item
    reason = _obstacle(program, item)
    return item if reason is None else Refusal(reason, at=item.home or "(root)")


def _obstacle(program: Program, site: Site) -> str | None:
    if is_volatile(owner_of(program.model, site.home).module):
        return VOLATILE
    around = program.analyses[Askers].around
    return around.get(program.module(site.home)) if around else None
