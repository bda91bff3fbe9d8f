"""Names and forms in which transformers saves its models: of a mixture a tensor for each expert, not their stack."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from ...errors import StateError
from ...runtime.state import Concatenate, Rename, Stack, StateMap, StateStep

__all__ = ["saved_form"]

_Parts = dict[str, list[str]]
"""What one tensor is made of: by the pattern of their names, the tensors that a checkpoint has, in their order."""


def saved_form(model: nn.Module, given: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> StateMap:
    """Return how tensors of the names that a checkpoint has become those of a model; both without data.

    The rules are those by which transformers loads a model. StateError where one computes more than stacks.
    """
    if given.keys() <= wanted.keys() or not _is_of_transformers(model):
        return StateMap()
    names = _Names(cast("Any", model), wanted)
    steps, merged = list[StateStep](), dict[str, tuple[Any, _Parts]]()
    for name in given:
        new, converter, pattern = names.of(name)
        if converter is not None:
            merged.setdefault(new, (converter, {}))[1].setdefault(pattern, []).append(name)
        elif new != name:
            steps.append(Rename(name, new))
    for new, (converter, parts) in merged.items():
        steps += _merged(new, converter, parts, given, len(wanted[new]))
    return StateMap(tuple(steps))


def _is_of_transformers(model: nn.Module) -> bool:
    transformers: Any = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


class _Names:
    """The names that tensors of a checkpoint get in a model."""

    def __init__(self, model: Any, wanted: Mapping[str, Tensor]) -> None:
        rules = _rules(model)
        self._converters = [rule for rule in rules if hasattr(rule, "operations")]
        self._renamings = [rule for rule in rules if not hasattr(rule, "operations")]
        self._prefix, self._wanted = f"{model.base_model_prefix}.", wanted

    def of(self, name: str) -> tuple[str, Any, str]:
        """Return the name of what a tensor becomes, by which converter, if any, and for which of its patterns."""
        if name in self._wanted:
            return name, None, ""
        new = name
        for rule in self._renamings:
            new, _ = rule.rename_source_key(new)
        for rule in self._converters:
            merged, pattern = rule.rename_source_key(new)
            known = self._known(merged)
            if pattern is not None and known is not None:
                return known, rule, pattern
        return self._known(new) or name, None, ""

    def _known(self, name: str) -> str | None:
        """Return the name as the model has it, whose body may be saved alone."""
        spellings = (name, self._prefix + name, name.removeprefix(self._prefix))
        return next((each for each in spellings if each in self._wanted), None)


def _rules(model: Any) -> Sequence[Any]:
    """Return what transformers, from 5 on, does to the tensors of a checkpoint."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return ()
    return cast("Any", get_model_conversion_mapping)(model)


def _merged(new: str, converter: Any, parts: _Parts, given: Mapping[str, Tensor], length: int) -> list[StateStep]:
    """Return the steps that make one tensor of several: stacks of those of a pattern, behind one another.
    `length` is the first size of the tensor.
    """
    operations = {type(each).__name__: each for each in converter.operations}
    stacks, joined = operations.pop("MergeModulelist", None), operations.pop("Concatenate", None)
    if operations or (stacks is not None and stacks.dim != 0):
        raise StateError(
            f"'{new}' is saved in a form that fxopt does not read ({', '.join(operations) or 'stacks'}); load the "
            "checkpoint by from_pretrained, and save it by save_pretrained(folder, save_original_format=False)"
        )
    patterns = [pattern for pattern in converter.source_patterns if pattern in parts]
    if stacks is None:
        return _behind_one_another(new, [name for each in patterns for name in parts[each]], joined, given)
    for pattern in patterns:
        _check_numbers(new, parts[pattern], length)
    if joined is None:
        return [Stack(tuple(_by_number(parts[patterns[0]])), new)]
    stacked = [Stack(tuple(_by_number(parts[pattern])), f"{new}/{pattern}") for pattern in patterns]
    forms = {step.new: given[step.olds[0]].unsqueeze(0) for step in stacked}
    return [*stacked, *_behind_one_another(new, list(forms), joined, forms)]


def _behind_one_another(new: str, names: Sequence[str], how: Any, forms: Mapping[str, Tensor]) -> list[StateStep]:
    dim = int(how.dim)
    return [Concatenate(tuple(names), new, dim, tuple(forms[name].shape[dim] for name in names))]


def _check_numbers(new: str, names: Sequence[str], length: int) -> None:
    """Raise StateError where a checkpoint has not one tensor for each expert of a stack."""
    by_number = {_numbers(name)[-1]: name for name in names}
    missing, others = sorted({*range(length)} - by_number.keys()), sorted(by_number.keys() - {*range(length)})
    if missing:
        like, which = next(iter(by_number.values())), ", ".join(map(str, missing))
        reason = (
            f"of tensors such as '{like}', the checkpoint lacks number {which}; it is not whole, or of a smaller model"
        )
        raise StateError(f"'{new}' is a stack of {length}: {reason}")
    if others:
        reason = f"'{by_number[others[0]]}' is one too many; the checkpoint is of a model with more experts"
        raise StateError(f"'{new}' is a stack of {length}: {reason}")


def _by_number(names: Sequence[str]) -> list[str]:
    """Return names in the order of the numbers in them."""
    return sorted(names, key=_numbers)


def _numbers(name: str) -> list[int]:
    return [int(part) for part in name.split(".") if part.isdigit()]
