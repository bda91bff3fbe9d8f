"""Write what a model computes as a `.pt2` file; it is read back and compared before it replaces an older one."""

from __future__ import annotations

import io
import os
import re
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor, nn

from ..compat import is_registered_operator
from ..compat.export import batches_by_vmap
from ..compat.quantized import simulating
from ..errors import ArchiveError, FxoptError, InputError, UsageError, one_line
from ..layers.packed import ReleasedWeight
from ..operators import canonical_name, has_random_effects
from ..passes.verification import distance, form_difference, rounding
from ..runtime.values import flatten, map_tensors, plain, structure, tensors_in
from ..storage import atomic_file
from ..tracing.examples import Inputs, check_whole
from ..tracing.isolation import ModelState, in_phase, outside_inference_mode, preserved, restoring
from ..tracing.reads import raised_at
from ..tracing.recording import copy_inputs
from .exported import drop_checksum, load_exported, sha256_of, write_checksum
from .folding import fold_parameters

__all__ = ["export_model"]

_TAKEN = (Tensor, bool, int, float, str, type(None))
_GIVEN = (Tensor, bool, int, float, type(None))
_FIXED = re.compile(r"marked (\S+) as dynamic but your code specialized it to be a constant \((\d+)\)")
_SEED = 0
_SUFFIX = ".pt2"


def export_model(
    model: nn.Module, path: str | os.PathLike[str], calls: Sequence[Inputs], *, dynamic_batch: bool
) -> None:
    """Write a model and its checksum to `path`, read back and compared, or not at all; see `fxopt.export`."""
    _check_calls(calls)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, ReleasedWeight):
            raise InputError(f"{name!r} was freed by 'release'; export the model as it was before that pass")
        if tensor.is_meta:
            raise InputError(f"{name!r} is on the meta device and has no values to export; load its weights first")
    _warn_of_name(Path(path))
    sizes = _FreeSizes.among(calls, dynamic_batch)
    with ExitStack() as stack:
        stack.enter_context(outside_inference_mode())
        stack.enter_context(preserved(model))
        stack.enter_context(in_phase(model, training=False))
        stack.enter_context(simulating())  # with kernels, results would differ where a number lies between two steps
        stack.callback(model.register_forward_hook(lambda _, __, output: plain(output)).remove)
        file = stack.enter_context(atomic_file(path))
        comparison = _Comparison(Path(path), model)
        comparison.run_model(calls, sizes)
        program = _exported(model, calls[0] if sizes.rows(calls[0]) != 1 else sizes.with_rows(calls[0], 2), sizes)
        first = copy_inputs(calls[0])
        program.example_inputs = (first.args, first.kwargs)
        _warn_of_random(program, Path(path))
        _save(program, file)
        comparison.check(_read_back(Path(file.name), Path(path)))
        digest = sha256_of(Path(file.name))
        drop_checksum(Path(path))
    write_checksum(Path(path), digest)


def _save(program: torch.export.ExportedProgram, file: BinaryIO) -> None:
    """Write a program to a file; where that raises, torch's code would end the process, so it does not hear of it."""
    failed: list[OSError] = []

    class Sink(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def seekable(self) -> bool:
            return True

        def seek(self, offset: int, whence: int = 0, /) -> int:
            return file.seek(offset, whence)

        def write(self, data: Any) -> int:
            if not failed:
                try:
                    return file.write(data)
                except OSError as error:
                    failed.append(error)
            return len(data)

    torch.export.save(program, cast("Any", Sink()))
    if failed:
        raise failed[0]
    file.flush()


def _exported(model: nn.Module, call: Inputs, sizes: _FreeSizes) -> torch.export.ExportedProgram:
    example = copy_inputs(call)  # torch marks the tensors that it exports with
    shapes: Any = torch.export.ShapesCollection()
    for tensor, free in zip(_tensors(example), sizes.free, strict=True):
        shapes[tensor] = dict.fromkeys(free, torch.export.Dim.DYNAMIC)
    try:
        with torch.enable_grad(), warnings.catch_warnings():  # without gradients, attention is one kernel of inference
            warnings.simplefilter("ignore")  # what torch is unsure of is compared
            program = torch.export.export(model, example.args, example.kwargs, dynamic_shapes=shapes, strict=False)
            program = program.run_decompositions({}) if batches_by_vmap(program.graph) else program
            fold_parameters(program)
            return program
    except Exception as error:  # torch raises whatever it meets
        raise ArchiveError(f"torch cannot export this {type(model).__name__}: {_reason(error)}") from error


def _warn_of_random(program: torch.export.ExportedProgram, path: Path) -> None:
    drawing = dict.fromkeys(
        canonical_name(node) or str(node.target)
        for node in program.graph.nodes
        if is_registered_operator(node.target) and has_random_effects(node)
    )
    if drawing:
        warnings.warn(
            f"{path.name} draws random numbers ({', '.join(drawing)}), so its results differ from run to run; it was "
            "compared with the model on equal draws only",
            stacklevel=4,
        )


def _reason(error: Exception) -> str:
    """Return what torch complains of, and the line of the user's code; torch writes pages, on options of its own."""
    fixed = [(re.sub(r"L\['(\w+)'\]", r"\1", where), size) for where, size in _FIXED.findall(str(error))]
    if fixed:
        found = " and ".join(f"{where.replace('.size()', '.shape')} to {size}" for where, size in fixed)
        return (
            f"its code fixes {found}, but the batch size must be free; give dynamic_batch=False (--no-dynamic-batch) "
            "and example calls of one size"
        )
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    place = raised_at(error)
    return f"{type(error).__name__}: {one_line(Exception(first))}" + (f" (at {place})" if place else "")


def _read_back(temporary: Path, path: Path) -> nn.Module:
    """Return the module in the file that was just written, which errors are to call by its name to be."""
    try:
        return load_exported(temporary)[0]
    except ArchiveError as error:
        text = str(error).replace(str(temporary), str(path))
        raise ArchiveError(
            f"{path} was not written: fxopt could not read it back: {text}. To write a file that fxopt does not check, "
            "with operators of others, use torch.export.save, and torch.export.load where they are imported"
        ) from error


class _Comparison:
    """Compare what a model, whose outputs are plain, gives with what the file at `path` gives."""

    def __init__(self, path: Path, model: nn.Module) -> None:
        self.path, self.model = path, model
        self.expected: list[tuple[str, Inputs, Mapping[str, Any]]] = []

    def run_model(self, calls: Sequence[Inputs], sizes: _FreeSizes) -> None:
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

    def check(self, module: nn.Module) -> None:
        """Raise `ArchiveError` if a module gives something else than what was noted."""
        for where, call, expected in self.expected:
            try:
                found = _results(module, call)
            except Exception as error:
                raise self._unequal(where, f"raises {type(error).__name__}: {one_line(error)}") from error
            if expected.keys() != found.keys():
                raise self._unequal(where, f"gives {_listed(found)} where the model gives {_listed(expected)}")
            for name, value in expected.items():
                if reason := _difference(value, found[name]):
                    raise self._unequal(where, f"differs from the model: {name} {reason}")

    def _unequal(self, where: str, what: str) -> ArchiveError:
        calls = "" if len(self.expected) == 1 else "Give example calls of one kind; "
        return ArchiveError(
            f"{self.path} was not written: {where}, the exported model {what}. {calls}dynamic_batch=False "
            "(--no-dynamic-batch) exports the example's batch size alone"
        )


def _results(module: nn.Module, call: Inputs) -> dict[str, Any]:
    """Return what a call gives and what it leaves of its arguments, leaf by leaf; the module is left as it was."""
    copy = copy_inputs(call)
    with restoring(ModelState(module)), torch.enable_grad():  # as it is exported
        torch.manual_seed(_SEED)
        output = module(*copy.args, **copy.kwargs)
        _check_plain(output, "output", _GIVEN, ArchiveError)
        found = flatten(output, "output") | flatten((copy.args, copy.kwargs), "argument ")
        return {name: leaf.detach() if isinstance(leaf, Tensor) else leaf for name, leaf in found.items()}


def _difference(expected: Any, found: Any) -> str:
    if not isinstance(expected, Tensor):
        return "" if expected == found or expected != expected else f"is {found!r}, not {expected!r}"
    return form_difference(expected, found) or distance(expected, found, rounding(expected)).reason


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(name for name in names if name.startswith("output")) or "nothing"


@dataclass(frozen=True)
class _FreeSizes:
    """Which dimensions of each tensor among the arguments are `free`, and whether the first counts rows (`batched`)."""

    free: tuple[frozenset[int], ...]
    batched: tuple[bool, ...]

    @staticmethod
    def among(calls: Sequence[Inputs], dynamic_batch: bool) -> _FreeSizes:
        batches = [next((tensor.shape[0] for tensor in _tensors(call) if tensor.dim()), None) for call in calls]
        free: list[frozenset[int]] = []
        batched: list[bool] = []
        for tensors in zip(*map(_tensors, calls), strict=True):
            sizes = [set(same) for same in zip(*(tensor.shape for tensor in tensors), strict=True)]
            pairs = zip(tensors, batches, strict=True)
            batched.append(dynamic_batch and all(t.dim() > 0 and t.shape[0] == rows for t, rows in pairs))
            differing = {dimension for dimension, seen in enumerate(sizes) if len(seen) > 1}
            free.append(frozenset(differing | ({0} if batched[-1] else set())))
        return _FreeSizes(tuple(free), tuple(batched))

    def rows(self, call: Inputs) -> int | None:
        """Return the batch size of a call, or None where it is not free."""
        pairs = zip(_tensors(call), self.batched, strict=True)
        return next((tensor.shape[0] for tensor, is_batched in pairs if is_batched), None)

    def other_rows(self, call: Inputs) -> tuple[int, ...]:
        """Return batch sizes to compare at, beside the call's own: torch takes for granted that it is not 1."""
        rows = self.rows(call)
        return () if not rows else (rows + 1,) if rows == 1 else (1, rows + 1)

    def with_rows(self, call: Inputs, count: int) -> Inputs:
        """Return the call with `count` rows: its own, over and over."""
        batched = dict(zip(map(id, _tensors(call)), self.batched, strict=True))

        def repeated(tensor: Tensor) -> Tensor:
            if not batched[id(tensor)]:
                return tensor
            return tensor[torch.arange(count, device=tensor.device) % tensor.shape[0]]

        args, kwargs = map_tensors(repeated, (call.args, call.kwargs))
        return Inputs(*args, **kwargs)


def _tensors(call: Inputs) -> list[Tensor]:
    return list(tensors_in((call.args, call.kwargs)))


def _warn_of_name(path: Path) -> None:
    if path.suffix not in ("", _SUFFIX):
        warnings.warn(
            f"'{path.name}' is written in the format of {_SUFFIX} files, whatever its name says; name it "
            f"'{path.with_suffix(_SUFFIX).name}'",
            stacklevel=4,
        )


def _check_calls(calls: Sequence[Inputs]) -> None:
    """Make sure that there is a call, that all have plain arguments, and that they differ in sizes and numbers only."""
    if not calls:
        raise UsageError("export needs an example call; give example inputs")
    check_whole(calls)
    for number, call in enumerate(calls):
        for name, value in (*enumerate(call.args), *call.kwargs.items()):
            _check_plain(value, f"example call {number}: argument {name!r}", _TAKEN, UsageError)
        if _form(call) != _form(calls[0]):
            raise UsageError(
                f"example call {number} has other arguments than call 0 (more, or otherwise given, of other types or "
                "plain values); a .pt2 file takes one kind of call: export one file for each"
            )


def _check_plain(value: Any, name: str, leaves: tuple[type, ...], error: type[FxoptError]) -> None:
    """Make sure that a value is made of nothing else than `leaves` in plain containers."""
    kind = cast("type[object]", type(value))
    if kind in (dict, OrderedDict):
        for key, item in cast("Mapping[Any, Any]", value).items():
            _check_plain(item, f"{name}[{key!r}]", leaves, error)
    elif kind in (tuple, list):
        for index, item in enumerate(value):
            _check_plain(item, f"{name}[{index}]", leaves, error)
    elif not isinstance(value, leaves):
        is_cache = "Cache" in kind.__name__  # as models of transformers give
        advice = "; switch the cache off: give use_cache=False with the example inputs" if is_cache else ""
        raise error(
            f"{name} is a {kind.__name__}; a .pt2 file takes tensors, numbers and text and gives tensors and numbers, "
            f"in tuples, lists and dictionaries{advice}"
        )


def _form(call: Inputs) -> object:
    """Return what calls of one kind have in common."""
    leaves = flatten((call.args, call.kwargs))
    known = [(leaf.dtype, leaf.dim()) if isinstance(leaf, Tensor) else leaf for leaf in leaves.values()]
    return structure((call.args, call.kwargs)), known  # the structure tells True from 1
