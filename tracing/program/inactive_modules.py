"""Let modules run the original forward and keep their graphs: if no pass changed them, or if they check exact types."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch import nn

from ...compat import all_modules, children_of
from ...runtime.graphs import Capture, Region, capture_of, context_regions, install, own_class, required_capture
from ...runtime.values import ModelNames, all_inside, user_class
from ..reads import checks_exact_types

__all__ = [
    "deactivate",
    "deactivate_type_checkers",
    "inactive_inside_type_checkers",
    "type_checkers_around_changes",
    "type_checkers_without_answer",
]


def deactivate(modules: Collection[nn.Module]) -> None:
    """Let each module of a model whose graphs are as they were captured run its original forward; the graphs are kept.

    So whatever no pass has changed is as fast as before, runs the user's code, and is of the user's very class. Its
    graphs count for as long as the attributes that are part of them are what they were. What asks for the exact class
    of a module that a pass has changed goes on to run from its graph, which has the answer.
    """
    able = [module for module in modules if _may_be_inactive(module)]
    checkers = _type_checkers(able)
    around = _around(modules, _changed(modules)) if checkers else set[nn.Module]()
    _deactivate_all(module for module in able if module not in checkers or module not in around)


def _may_be_inactive(module: nn.Module) -> bool:
    capture = capture_of(module)
    if capture is None or capture.lost or capture.inactive or isinstance(module, Region):
        return False
    return not (capture.rewritten or _is_rewritten_inside(module))


def _is_rewritten_inside(module: nn.Module) -> bool:
    """Say whether a pass changed what the module runs under a context: its original forward would not call that."""
    regions = context_regions(vars(module)).values()
    return any(required_capture(region).rewritten or _is_rewritten_inside(region) for region in regions)


def _deactivate_all(modules: Iterable[nn.Module]) -> None:
    inactive: dict[int, Capture] = {}
    for module in modules:
        capture = required_capture(module)
        if id(capture) not in inactive:
            inactive[id(capture)] = capture.set_inactive(True)
        install(module, inactive[id(capture)])


def _changed(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Return the modules of a model that are of a class of their own, also when what can be is inactive."""
    return {m for m in modules if not isinstance(m, Region) and _has_own_class(m)}


def _has_own_class(module: nn.Module) -> bool:
    if own_class(module) is not user_class(type(module)):
        return True
    capture = capture_of(module)
    return capture is not None and not capture.inactive and not _may_be_inactive(module)


def _around(modules: Iterable[nn.Module], changed: Collection[nn.Module]) -> set[nn.Module]:
    """Return the modules of a model that are changed, or have such inside."""
    holders: dict[nn.Module, list[nn.Module]] = {}
    for module in modules:
        for child in children_of(module).values():
            if child is not None:
                holders.setdefault(child, []).append(module)
    found, pending = set(changed), list(changed)
    while pending:
        for holder in holders.get(pending.pop(), ()):
            if holder not in found:
                found.add(holder)
                pending.append(holder)
    return found


def _type_checkers(modules: Iterable[nn.Module], *, forwards: bool = True) -> dict[nn.Module, str]:
    """Return those of `modules` that may ask for a module's exact class, each with the line where it does.

    Args:
        modules: of one model.
        forwards: count what their original forwards ask, and not only what runs around these, such as hooks.
    """
    checkers = list(modules)
    if not checks_exact_types(checkers, forwards=forwards):
        return {}
    asked = {module: checks_exact_types([module], forwards=forwards) for module in checkers}
    return {module: place for module, place in asked.items() if place}


def type_checkers_without_answer(modules: Iterable[nn.Module], captured: Collection[nn.Module]) -> dict[nn.Module, str]:
    """Return those of `modules` that may ask for a module's exact class where no graph has the answer, each with where.

    Args:
        modules: of one model.
        captured: the modules that have a graph, of what runs in their forwards.
    """
    modules = list(dict.fromkeys(modules))
    opaque = [module for module in modules if module not in captured]
    return {**_type_checkers(modules, forwards=False), **_type_checkers(opaque)}


def type_checkers_around_changes(modules: Collection[nn.Module]) -> dict[nn.Module, str]:
    """Return the modules that check exact types and are changed, or hold changed modules, each with that place."""
    checkers = _type_checkers(modules)
    around = _around(modules, _changed(modules)) if checkers else set[nn.Module]()
    return {module: place for module, place in checkers.items() if module in around}


def deactivate_type_checkers(model: nn.Module) -> None:
    """Make modules with exact type checks, and all modules inside them, inactive: of the user's very class."""
    inside = all_inside(_type_checkers(all_modules(model)))
    _deactivate_all(module for module in inside if _may_be_inactive(module))


def inactive_inside_type_checkers(names: ModelNames, captured: Mapping[str, Capture]) -> dict[str, Capture]:
    """Return captures, inactive those of modules whose exact type may be checked where no graph has the answer.

    Args:
        names: of the model.
        captured: name -> capture, nothing of it installed yet.
    """
    having = {names.modules[name] for name in captured}
    inside = all_inside(type_checkers_without_answer(names.modules.values(), having))
    if not inside:
        return dict(captured)
    inactive = {id(capture): capture.set_inactive(True) for capture in captured.values()}
    return {
        name: inactive[id(capture)] if names.modules[name] in inside else capture for name, capture in captured.items()
    }
