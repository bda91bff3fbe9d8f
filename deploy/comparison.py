"""Compare what a model gives with what a file that was written of it gives, in all sizes that are free."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from ..errors import ArchiveError, FxoptError, InputError, one_line
from ..passes.verification import Tolerance, distance, form_difference, rounding, scale_of
from ..runtime.values import flatten, map_tensors, tensors_in
from ..tracing.examples import Inputs
from ..tracing.isolation import ModelState, restoring
from ..tracing.recording import copy_inputs
from .formats.source import named_tensors

__all__ = [
    "SEED", "Allowance", "Comparison", "FreeSizes", "check_plain", "leaves_of", "tensors_of", "up_to", "without_caches",
]  # fmt: skip

_GIVEN = (Tensor, bool, int, float, type(None))
"""What results are made of, in plain containers."""
SEED = 0
Allowance: TypeAlias = Callable[[Tensor], Tolerance]


def up_to(share: float) -> Allowance:
    """Return a tolerance for what another runtime computes: a share of the scale of each tensor, or its last places."""

    def allowed(expected: Tensor) -> Tolerance:
        last = rounding(expected)
        return Tolerance(0.0, max(last.absolute, share * scale_of(expected))) if last.absolute else last

    return allowed


class Comparison:
    """What a model, whose outputs are plain, gives on its calls, for the file at `path`.

    Attributes:
        expected: where that was, the call, and what it gave, leaf by leaf.
        error: the largest difference that was found, relative to the scale of the tensor.
    """

    def __init__(self, path: Path, model: nn.Module) -> None:
        self.path, self.model, self.error = path, model, 0.0
        self.expected: list[tuple[str, Inputs, Mapping[str, Any]]] = []

    def run_model(self, calls: Sequence[Inputs], sizes: FreeSizes) -> None:
        """Note what the model gives on the example calls, and on the first one with other numbers of rows."""
        for number, call in enumerate(calls):
            try:
                given = _results(self.model, call)
            except FxoptError:
                raise
            except Exception as error:
                raise InputError(
                    f"the model raises {type(error).__name__} on example call {number}: {one_line(error)}"
                ) from error
            self.expected.append((f"on example call {number}", call, given))
        for rows in sizes.other_rows(calls[0]):
            call = sizes.with_rows(calls[0], rows)
            with suppress(Exception):  # what the model itself does not take need not be exported
                self.expected.append((f"with {rows} row{'s' * (rows != 1)}", call, _results(self.model, call)))

    def written(self) -> list[str]:
        """Return the arguments that the model writes to."""
        found: dict[str, None] = {}
        for _, call, given in self.expected:
            names = {id(tensor): name for name, tensor in named_tensors(self.model, call).items()}
            for where, leaf in flatten((call.args, call.kwargs), "argument ").items():
                if isinstance(leaf, Tensor) and not _is_same(leaf, given[where]):
                    found[names.get(id(leaf), where)] = None
        return list(found)

    def check_module(self, module: nn.Module) -> None:
        """Raise `ArchiveError` if a module gives something else than what was noted."""
        for where, call, expected in self.expected:
            try:
                found = _results(module, call)
            except Exception as error:
                raise self._unequal(where, f"raises {type(error).__name__}: {one_line(error)}") from error
            self._compare(where, expected, found, rounding)

    def check(self, found: Sequence[Mapping[str, Any] | str], allowed: Allowance) -> None:
        """Raise `ArchiveError` if what was found on the calls is something else, or an error."""
        for (where, _, expected), given in zip(self.expected, found, strict=True):
            if isinstance(given, str):
                raise self._unequal(where, f"raises {one_line(Exception(given))}")
            self._compare(where, expected, given, allowed)

    def _compare(self, where: str, expected: Mapping[str, Any], found: Mapping[str, Any], allowed: Allowance) -> None:
        if expected.keys() != found.keys():
            raise self._unequal(where, f"gives {_listed(found)} where the model gives {_listed(expected)}")
        for name, value in expected.items():
            if reason := self._difference(value, found[name], allowed):
                raise self._unequal(where, f"differs from the model: {name} {reason}")

    def _difference(self, expected: Any, found: Any, allowed: Allowance) -> str:
        if not isinstance(expected, Tensor):
            return "" if expected == found or expected != expected else f"is {found!r}, not {expected!r}"
        if reason := form_difference(expected, found):
            return reason
        apart = distance(expected, found, allowed(expected))
        self.error = max(self.error, apart.error)
        return apart.reason

    def _unequal(self, where: str, what: str) -> ArchiveError:
        calls = "" if len(self.expected) == 1 else "Give example calls of one kind; "
        return ArchiveError(
            f"{self.path} was not written: {where}, the exported model {what}. {calls}dynamic_batch=False "
            "(--no-dynamic-batch) exports the example's batch size alone"
        )


def _is_same(one: Tensor, other: Any) -> bool:
    return isinstance(other, Tensor) and one.shape == other.shape and bool(((one == other) | (one != one)).all())


def _results(module: nn.Module, call: Inputs) -> dict[str, Any]:
    """Return what a call gives and what it leaves of its arguments, leaf by leaf; the module is left as it was."""
    copy = copy_inputs(call)
    with restoring(ModelState(module)), torch.enable_grad():  # as it is exported
        torch.manual_seed(SEED)
        output = module(*copy.args, **copy.kwargs)
        check_plain(output, "output", _GIVEN, ArchiveError)
        return leaves_of(output, copy)


def leaves_of(output: Any, call: Inputs) -> dict[str, Any]:
    """Return the leaves of an output, and those of the arguments after the call, by name."""
    found = flatten(output, "output") | flatten((call.args, call.kwargs), "argument ")
    return {name: leaf.detach() if isinstance(leaf, Tensor) else leaf for name, leaf in found.items()}


def check_plain(value: Any, name: str, leaves: tuple[type, ...], error: type[FxoptError]) -> None:
    """Make sure that a value is made of nothing else than `leaves` in plain containers."""
    kind = cast("type[Any]", type(value))
    if kind in (dict, OrderedDict):
        for key, item in cast("Mapping[Any, Any]", value).items():
            check_plain(item, f"{name}[{key!r}]", leaves, error)
    elif kind in (tuple, list):
        for index, item in enumerate(value):
            check_plain(item, f"{name}[{index}]", leaves, error)
    elif not isinstance(value, leaves):
        advice = "; switch the cache off: give use_cache=False with the example inputs" if _is_cache(value) else ""
        raise error(
            f"{name} is a {kind.__name__}; an exported file takes tensors, numbers and text and gives tensors and "
            f"numbers, in tuples, lists and dictionaries{advice}"
        )


def without_caches(output: Any, left_out: set[str]) -> Any:
    """Return a plain output without the caches that stand beside results, as language models give; note their names."""
    kept: Any = None
    caches = set[str]()
    if type(output) in (dict, OrderedDict):
        items = cast("dict[str, Any]", output)
        caches = {str(name) for name, item in items.items() if _is_cache(item)}
        kept = {name: item for name, item in items.items() if name not in caches}
    elif type(output) is tuple:
        parts = cast("tuple[Any, ...]", output)
        caches = {f"result {index}" for index, item in enumerate(parts) if _is_cache(item)}
        kept = tuple(item for item in parts if not _is_cache(item))
    if not kept:
        return cast("Any", output)
    left_out |= caches
    return kept


def _is_cache(value: object) -> bool:
    return "Cache" in type(value).__name__


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(name for name in names if name.startswith("output")) or "nothing"


@dataclass(frozen=True)
class FreeSizes:
    """Which dimensions of each tensor among the arguments are `free`, and whether the first counts rows (`batched`)."""

    free: tuple[frozenset[int], ...]
    batched: tuple[bool, ...]

    @staticmethod
    def among(calls: Sequence[Inputs], dynamic_batch: bool) -> FreeSizes:
        """Return those that differ between calls, and, if wanted, the first of every tensor of one batch size."""
        batches = [next((tensor.shape[0] for tensor in tensors_of(call) if tensor.dim()), None) for call in calls]
        free: list[frozenset[int]] = []
        batched: list[bool] = []
        for tensors in zip(*map(tensors_of, calls), strict=True):
            sizes = [set(same) for same in zip(*(tensor.shape for tensor in tensors), strict=True)]
            pairs = zip(tensors, batches, strict=True)
            batched.append(dynamic_batch and all(t.dim() > 0 and t.shape[0] == rows for t, rows in pairs))
            differing = {dimension for dimension, seen in enumerate(sizes) if len(seen) > 1}
            free.append(frozenset(differing | ({0} if batched[-1] else set())))
        return FreeSizes(tuple(free), tuple(batched))

    def rows(self, call: Inputs) -> int | None:
        """Return the batch size of a call, or None where it is not free."""
        pairs = zip(tensors_of(call), self.batched, strict=True)
        return next((tensor.shape[0] for tensor, is_batched in pairs if is_batched), None)

    def other_rows(self, call: Inputs) -> tuple[int, ...]:
        """Return batch sizes to compare at, beside the call's own: torch takes for granted that it is not 1."""
        rows = self.rows(call)
        return () if not rows else (rows + 1,) if rows == 1 else (1, rows + 1)

    def with_rows(self, call: Inputs, count: int) -> Inputs:
        """Return the call with `count` rows: its own, over and over."""
        batched = dict(zip(map(id, tensors_of(call)), self.batched, strict=True))

        def repeated(tensor: Tensor) -> Tensor:
            if not batched[id(tensor)]:
                return tensor
            return tensor[torch.arange(count, device=tensor.device) % tensor.shape[0]]

        args, kwargs = map_tensors(repeated, (call.args, call.kwargs))
        return Inputs(*args, **kwargs)


def tensors_of(call: Inputs) -> list[Tensor]:
    """Return the tensors among the arguments of a call, in order."""
    return list(tensors_in((call.args, call.kwargs)))
