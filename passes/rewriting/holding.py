"""What a graph stands on that computes what calls of modules did: that these are what they were."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import cast

from torch import nn

from ...layers.members import seal, settings_of, written_out
from ...layers.written_out import Opened, UnchangedGuard
from ...runtime.graphs import required_capture
from ...runtime.guards import SELF, Applied, Guard, Is, key_of
from .edit import Edit

__all__ = ["asks_unchanged", "hold_written_out", "opened_by", "paths_to"]

_REASON = "a module that the graph computes itself was replaced, or given another class, forward or hook"


def hold_written_out(
    edit: Edit, paths: Sequence[str], free: Callable[[nn.Module], Collection[str]] = lambda _: ()
) -> None:
    """Seal modules whose calls are written out, and let the site's graph hold only while they are what they are. A seal
    refuses what goes through attributes, and says why. What goes past them (`_modules[...]`, `__class__`,
    `__dict__["forward"]`, hooks on all modules) is seen at the next call, which runs the module's original forward.
    `free` gives the settings of a module that may change: where they count, the graph does not hold.
    """
    for path, names in written_out(edit.owner, paths).items():
        module = edit.owner.get_submodule(path)
        edit.on_undo(seal(module, names.difference(free(module) if path in paths else ())), module)
    if paths:
        _ask(edit, paths, free)


def _ask(edit: Edit, paths: Sequence[str], free: Callable[[nn.Module], Collection[str]]) -> None:
    """Add modules to those that the graph's one guard of this kind asks for."""
    owner, known = edit.owner, dict[str, Opened]()
    guards = required_capture(owner).specializations[edit.site.specialization].guards
    before = [guard for guard in guards if asks_unchanged(guard) and cast("Applied", guard.source).args[0] == SELF]
    for guard in before:
        known |= {each.path: each for each in opened_by(guard)}
    for path in paths:
        module = owner.get_submodule(path)
        fixed = [name for name in settings_of(module) if name not in free(module)]
        known[path] = Opened.computed(path, module, fixed)
    for path in list(known):
        for way in paths_to(path):
            known.setdefault(way, Opened.computed(way, owner.get_submodule(way), ()))
    edit.hold_where([unchanged_guard(known.values())], instead_of=before)


def unchanged_guard(opened: Iterable[Opened]) -> Guard:
    """Return the condition that modules are what they were."""
    ordered = sorted(opened, key=lambda each: each.path.count("."))
    return Guard(Applied(UnchangedGuard(ordered, None, compiled=True), (SELF,)), Is(key_of(True)), _REASON)


def asks_unchanged(guard: Guard, *, compiled: bool = True) -> bool:
    """Say whether a condition, of the kind for compilers or the other, is that written out modules are unchanged."""
    source = guard.source
    return (
        isinstance(source, Applied)
        and isinstance(source.function, UnchangedGuard)
        and source.function.compiled is compiled
    )


def opened_by(guard: Guard) -> Sequence[Opened]:
    """Return the modules that such a condition asks for."""
    return cast("UnchangedGuard", cast("Applied", guard.source).function).opened


def paths_to(path: str) -> list[str]:
    """Return the path of each module on the way to one, and its own."""
    parts = path.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]
