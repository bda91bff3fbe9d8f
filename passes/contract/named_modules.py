"""Options that name modules of a model: by their names, which may hold `*`, or by their classes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import cast

from torch import nn

from ...compat import modules_by_name
from ...errors import UsageError, did_you_mean
from ...runtime.values import user_class
from ...tracing.program import Program

__all__ = ["check_named", "module_words", "names_module", "word_for"]


def module_words(pass_name: str, option: str, given: object) -> tuple[str, ...]:
    """Return the words by which an option names modules, one or several; raise UsageError if it is something else."""
    several = isinstance(given, Iterable) and not isinstance(given, (str, type))
    items: list[object] = list(cast("Iterable[object]", given)) if several else [given]
    return tuple(_word(pass_name, option, item) for item in items)


def _word(pass_name: str, option: str, item: object) -> str:
    if isinstance(item, str):
        return item
    if isinstance(item, type):
        return user_class(cast("type[nn.Module]", item)).__name__
    kind = type(item).__name__
    raise UsageError(f"pass '{pass_name}': {option} has a value of type {kind}; give names of modules, or classes")


def names_module(word: str, name: str, module: nn.Module) -> bool:
    """Say whether a word names a module: by its qualified name, which may hold `*`, or by its class."""
    return fnmatchcase(name, word) or user_class(type(module)).__name__ == word


def word_for(words: Sequence[str], name: str, program: Program) -> str | None:
    """Return the first of the words (see `names_module`) that names a module, or one around it; None if none does."""
    parts = name.split(".") if name else []
    around = {path: program.module(path) for count in range(len(parts) + 1) for path in [".".join(parts[:count])]}
    return next((word for word in words if any(names_module(word, *each) for each in around.items())), None)


def check_named(pass_name: str, option: str, words: Sequence[str], model: nn.Module) -> None:
    """Raise UsageError, with the nearest name, where a word of an option names no module."""
    modules: dict[str, nn.Module] = modules_by_name(model)
    for word in words:
        if not any(names_module(word, name, module) for name, module in modules.items()):
            names = [name for name in modules if name]
            names += [user_class(type(module)).__name__ for module in modules.values()]
            raise UsageError(
                f"pass '{pass_name}': {option}={word!r} names nothing in the model{did_you_mean(word, names)}"
            )
