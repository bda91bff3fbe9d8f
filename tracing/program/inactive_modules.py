"""Let modules run the original forward and keep their graphs: if no pass changed them, or if code checks their type."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from ...compat import all_modules
from ...runtime.graphs import Capture, Region, capture_of, context_regions, install, required_capture
from ...runtime.values import ModelNames
from ..reads import checks_exact_types

__all__ = ["deactivate", "exact_types", "with_inactive"]


def deactivate(modules: Collection[nn.Module]) -> None:
    """Let modules whose graphs are as captured run their original forward, in the user's class; graphs are kept."""
    inactive: dict[int, Capture] = {}
    for module in filter(_may_be_inactive, modules):
        capture = required_capture(module)
        if id(capture) not in inactive:
            inactive[id(capture)] = capture.set_inactive(True)
        install(module, inactive[id(capture)])


def _may_be_inactive(module: nn.Module) -> bool:
    capture = capture_of(module)
    if capture is None or capture.lost or capture.inactive or isinstance(module, Region):
        return False
    return not (capture.rewritten or _is_rewritten_inside(module))


def _is_rewritten_inside(module: nn.Module) -> bool:
    """Say whether a pass changed what the module runs under a context: its original forward would not call that."""
    regions = context_regions(vars(module)).values()
    return any(required_capture(region).rewritten or _is_rewritten_inside(region) for region in regions)


def exact_types(names: ModelNames) -> dict[nn.Module, str]:
    """Return the modules whose exact class may be asked for, by code of theirs or around them, each with where."""
    found: dict[nn.Module, str] = {}
    if checks_exact_types(names.distinct):
        for module in names.distinct:
            place = checks_exact_types([module])
            why = f"module {names.name(module) or '(root)'!r}: its code checks an exact type ({place})"
            found = {**dict.fromkeys(all_modules(module) if place else (), why), **found}
    return found


def with_inactive(
    captured: Mapping[str, Capture], names: ModelNames, modules: Collection[nn.Module]
) -> dict[str, Capture]:
    """Return captures by the names of their modules, inactive those of some modules; none is installed yet."""
    inactive = {id(capture): capture.set_inactive(True) for capture in captured.values()} if modules else {}
    return {
        name: inactive[id(capture)] if names.modules[name] in modules else capture for name, capture in captured.items()
    }
