"""What sets some modules of an optimized model apart: the root has the record; lost forwards raise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from ...compat import all_modules, submodule
from ...runtime.graphs import (
    Capture,
    ContextRegion,
    Region,
    capture_of,
    install,
    own,
    recompile,
    required_capture,
    uninstall,
)
from ...runtime.record import Record
from ...runtime.state import RECORD_KEY, STATE_MAP, KeepsOriginalNames, StateMap, checkpointing_class, holder_of
from ...runtime.values import qualified
from ..sites import OwnForward
from .history import Rewrite

__all__ = ["forbid_lost_forwards", "make_root", "remember"]


def make_root(model: nn.Module, record: Record) -> None:
    """Make `model` the root of an optimized model, whether or not its original forward could be captured."""
    for path, state_map in {"": StateMap(names=record.state_map.names), **record.state_map.apart()}.items():
        module = submodule(model, path)
        if module is not None:
            _keep_original_names(module, state_map)
    model.__dict__[RECORD_KEY] = record


def remember(model: nn.Module, record: Record) -> None:
    """Let an optimized model have another record: tensors of the same names, mapped otherwise."""
    for path, state_map in {"": StateMap(names=record.state_map.names), **record.state_map.apart()}.items():
        module = submodule(model, path)
        if module is not None:
            module.__dict__[STATE_MAP] = state_map
    model.__dict__[RECORD_KEY] = record


def _keep_original_names(module: nn.Module, state_map: StateMap) -> None:
    capture = capture_of(module)
    uninstall(module, keep_regions=True)
    if not isinstance(module, KeepsOriginalNames):
        object.__setattr__(module, "__class__", checkpointing_class(type(module)))
    install(module, capture or Capture(type(module), []))
    module.__dict__[STATE_MAP] = state_map


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
    if stated is OwnForward.WRONG or (stated is None and not rewrite.pass_.numerics.keeps_function):
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
