"""Whether a rewritten module may still run its original forward: where no graph fits a call, that is all there is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import fx, nn

from ...compat import modules_by_name, own_buffers, own_parameters, submodule, transient_buffers
from ...tracing.graphs import Capture, ContextRegion, Region, capture_of, own, recompile, required_capture
from ...tracing.values import qualified
from ..sites import Numerics, OwnForward
from ..state import Holder, holder_of
from .history import Rewrite
from .record import Record

__all__ = ["forbid_lost_forwards"]

_OTHER_FUNCTION = (Numerics.APPROXIMATE, Numerics.SEMANTIC)


def forbid_lost_forwards(model: nn.Module, rewrites: Iterable[Rewrite], record: Record) -> None:
    """Let modules whose original forward would no longer do raise GuardError where no graph fits a call.

    A pass may say so itself (`Pass.own_forward`). Else these are modules that a pass made compute something else, on
    purpose or within an error budget; that run a region, whose wrapper would be left out; or that read tensors of which
    no original one knows.

    Args:
        model: the optimized model.
        rewrites: the rewrites that stand.
        record: of the model.
    """
    changed = [(rewrite, name) for rewrite in rewrites for name in rewrite.edit.changed_owners]
    for rewrite, name in changed:
        module = submodule(model, name)
        capture = None if module is None else capture_of(module)
        if module is None or capture is None:
            continue
        holder = holder_of(model, name)
        owner = holder.module
        if required_capture(owner).lost:
            continue
        reason = next(_reasons(rewrite, name, module, capture, record, holder), "")
        if reason:
            own(owner).lost = reason
            recompile(owner)


def _reasons(
    rewrite: Rewrite, owner: str, module: nn.Module, capture: Capture, record: Record, holder: Holder
) -> Iterator[str]:
    name, stated = rewrite.pass_.name, rewrite.pass_.own_forward
    if stated is OwnForward.ACCEPTABLE:
        return
    if stated is OwnForward.WRONG or (stated is None and rewrite.pass_.numerics in _OTHER_FUNCTION):
        yield f"pass '{name}' changed what it computes"
    known = {*record.state_map.names, *record.state_map.targets}
    borrowed = module.origins if isinstance(module, Region) else {}
    for node in (node for specialization in capture.specializations for node in specialization.graph.nodes):
        target = str(node.target)
        added = node.op == "call_module" and target not in borrowed
        added = added and submodule(record.skeleton, qualified(owner, target)) is None
        called = module.get_submodule(target) if added else None
        if isinstance(called, ContextRegion):
            continue
        if called is not None and any(isinstance(inner, Region) for inner in called.modules()):
            yield f"it would leave out the region '{target}'"
        names = _read(node, module) if called is None else _lasting_inside(called, target)
        new = next((n for n in names if holder.qualified(n) not in known), None)
        if new is not None:
            yield f"it does not know '{new}', which pass '{name}' added"


def _read(node: fx.Node, module: nn.Module) -> Iterator[str]:
    """Yield the name of the parameter or lasting buffer that a node reads, if it reads one."""
    if node.op == "get_attr":
        path, _, name = str(node.target).rpartition(".")
        if name in _lasting(module.get_submodule(path)):
            yield str(node.target)


def _lasting_inside(module: nn.Module, name: str) -> Iterator[str]:
    """Yield the names of the parameters and lasting buffers of a module called `name`, and of those inside it."""
    for path, inner in modules_by_name(module).items():
        yield from (qualified(qualified(name, path), own_name) for own_name in _lasting(inner))


def _lasting(module: nn.Module) -> list[str]:
    """Return the names of what a module itself writes into a state dict."""
    buffers = own_buffers(module).keys() - transient_buffers(module)
    found = {**own_parameters(module), **{name: own_buffers(module)[name] for name in buffers}}
    return [name for name, tensor in found.items() if tensor is not None]
