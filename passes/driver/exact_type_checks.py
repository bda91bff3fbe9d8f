"""Modules that ask for the exact class of others: a rewritten one has a class of its own, and none may see that."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from ...compat import all_modules
from ...runtime.graphs import capture_of, own, recompile
from ...tracing.program import Program, type_checkers_around_changes, type_checkers_without_answer

__all__ = ["TypeCheckers", "forbid_type_checking_forwards"]


class TypeCheckers:
    """The modules that check exact types where no graph has the answer.

    Attributes:
        around: module -> what refusals say of one of those around it.
    """

    def __init__(self, around: dict[nn.Module, str]) -> None:
        self.around = around

    @classmethod
    def compute(cls, program: Program) -> TypeCheckers:
        modules = program.names.modules.values()
        captured = {module for module in modules if capture_of(module) is not None}
        around: dict[nn.Module, str] = {}
        for module, place in type_checkers_without_answer(modules, captured).items():
            name = program.name_of(module) or "(root)"
            reason = f"module {name!r} has no graph, and its code checks an exact type ({place})"
            around.update(dict.fromkeys(all_modules(module), reason))
        return cls(around)


def forbid_type_checking_forwards(modules: Collection[nn.Module]) -> None:
    """Let modules that check the exact type of a rewritten one raise GuardError where no graph fits a call."""
    for module, place in type_checkers_around_changes(modules).items():
        capture = capture_of(module)
        if capture is not None and capture.specializations and not capture.lost:
            own(module).lost = f"it checks the exact type of a rewritten module ({place})"
            recompile(module)
