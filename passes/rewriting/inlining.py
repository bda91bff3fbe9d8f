"""Which modules may be looked into from outside, and where a graph of theirs holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils import parametrize

from ...compat import all_modules, has_hooks
from ...runtime.graphs import Capture, Specialization, WrappedRegion
from ...runtime.guards import SELF, Argument, Attribute, Guard, Source, is_outside, is_switch
from ...runtime.values import user_class
from ..sites import VOLATILE, is_volatile

__all__ = [
    "lasting_guards",
    "obstacle_at",
    "obstacle_to_inlining",
    "unmet_guard",
    "unmet_guards",
]


def obstacle_to_inlining(module: nn.Module) -> str | None:
    """Return why a module, or one inside it, must stay one call (hooks, parametrizations, contexts), or None."""
    return next((reason for reason in map(obstacle_at, all_modules(module)) if reason is not None), None)


def obstacle_at(module: nn.Module) -> str | None:
    """Return why a module must stay one call, whatever is inside it, or None; all that look into modules ask this."""
    if isinstance(module, WrappedRegion):
        return f"it opens {module.context}"
    if user_class(type(module)).__call__ is not nn.Module.__call__ and not isinstance(module, fx.GraphModule):
        return "it has a __call__ of its own"
    if has_hooks(module):
        return "it has hooks"
    if parametrize.is_parametrized(module):
        return "it has parametrizations"
    if "forward" in vars(module):
        return "its forward was replaced"
    return VOLATILE if is_volatile(module) else None


def unmet_guard(module: nn.Module, capture: Capture, given: Mapping[str, Any]) -> Guard | None:
    """Return a condition of a captured module's graph that one call of it does not always meet, or None.

    What is `given` and no constant stands for a value that may be any tensor.
    """
    return next(iter(unmet_guards(module, capture.specializations[0], given)), None)


def unmet_guards(module: nn.Module, specialization: Specialization, given: Mapping[str, Any]) -> list[Guard]:
    """Return all such conditions; see `unmet_guard`."""
    names = {"self": module, **given}
    return [g for g in specialization.guards if _may_change(g, module) or not g.holds(names)]


def lasting_guards(module: nn.Module, specialization: Specialization, given: Mapping[str, Any]) -> list[Guard]:
    """Return the conditions that whoever writes a module's graph out has to go on asking there.

    All but those that constants among the arguments meet for ever.
    """
    unmet = unmet_guards(module, specialization, given)
    return [guard for guard in specialization.guards if guard in unmet or not _is_on_arguments_alone(guard)]


def _is_on_arguments_alone(guard: Guard) -> bool:
    sources = list(guard.sources())
    return any(isinstance(each, Argument) for each in sources) and not any(
        each == SELF or is_outside(each) for each in sources
    )


def _may_change(guard: Guard, module: nn.Module) -> bool:
    """Say whether a condition may change from call to call although arguments and module stay the same."""
    is_global = guard.asks_for_training or any(is_switch(each) or is_outside(each) for each in guard.sources())
    return is_global or any(_looks_inside(source, module) for source in guard.sources())


def _looks_inside(source: Source, module: nn.Module) -> bool:
    """Say whether a source is what a plain attribute of the module holds: that may change unnoticed."""
    if not isinstance(source, Attribute) or source.owner != SELF or source.name == "_modules":
        return False
    value = vars(module).get(source.name)
    return value is not None and not isinstance(value, torch.Tensor)
