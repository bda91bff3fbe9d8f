"""Sites that no pass may rewrite, whatever it finds there."""

from __future__ import annotations

from ...tracing.program import Program
from ..sites import VOLATILE, Refusal, Site, is_volatile
from ..state import holder_of
from .exact_type_checks import TypeCheckers

__all__ = ["admitted"]


def admitted(program: Program, item: Site | Refusal) -> Site | Refusal:
    """Return what a pass found, or a refusal in the place of a site that nothing may be done at."""
    if isinstance(item, Refusal):
        return item
    reason = _obstacle(program, item)
    return item if reason is None else Refusal(reason, at=item.owner or "(root)")


def _obstacle(program: Program, site: Site) -> str | None:
    if is_volatile(holder_of(program.model, site.owner).module):
        return VOLATILE
    around = program.analyses[TypeCheckers].around
    return around.get(program.module(site.owner)) if around else None
