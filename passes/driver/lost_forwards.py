"""Modules that may no longer run their original forward, though no graph fits a call: it would be wrong, or raise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from ...compat import all_modules, submodule
from ...runtime.graphs import Capture, ContextRegion, Region, capture_of, own, recompile, required_capture
from ...runtime.record import Record
from ...runtime.state import holder_of
from ...runtime.values import qualified
from ..sites import Numerics, OwnForward
from .history import Rewrite

__all__ = ["forbid_lost_forwards"]

_OTHER_FUNCTION = (Numerics.APPROXIMATE, Numerics.SEMANTIC)


def forbid_lost_forwards(model: nn.Module, rewrites: Iterable[Rewrite], record: Record) -> None:
    """Let modules whose original forward is no longer right raise GuardError where no graph fits a call.

    Without a word from the pass (`Pass.own_forward`), these compute something else on purpose, or run a region.
    """
    changed = [(rewrite, name) for rewrite in rewrites for name in rewrite.edit.changed_owners]
    for rewrite, name in changed:
        module = submodule(model, name)
        capture = None if module is None else capture_of(module)
        if module is None or capture is None:
            continue
        owner = holder_of(model, name).module
        if required_capture(owner).lost:
            continue
        reason = next(_reasons(rewrite, name, module, capture, record), "")
        if reason:
            own(owner).lost = reason
            recompile(owner)


def _reasons(rewrite: Rewrite, owner: str, module: nn.Module, capture: Capture, record: Record) -> Iterator[str]:
    name, stated = rewrite.pass_.name, rewrite.pass_.own_forward_of(rewrite.group.sites, owner)
    if stated is OwnForward.ACCEPTABLE:
        return
    if stated is OwnForward.WRONG or (stated is None and rewrite.pass_.numerics in _OTHER_FUNCTION):
        yield f"pass '{name}' changed what it computes"
    borrowed = module.borrowed if isinstance(module, Region) else ()
    for node in (node for specialization in capture.specializations for node in specialization.graph.nodes):
        target = str(node.target)
        added = node.op == "call_module" and target not in borrowed
        added = added and submodule(record.skeleton, qualified(owner, target)) is None
        called = module.get_submodule(target) if added else None
        if isinstance(called, ContextRegion):
            continue
        inside = () if called is None else all_modules(called)
        if any(isinstance(inner, Region) and inner.changes_results for inner in inside):
            yield f"it would leave out the region '{target}'"
