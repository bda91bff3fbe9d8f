"""Write what a model computes as a file; it is read back and compared before it replaces an older one."""

from __future__ import annotations

import io
import re
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor, nn

from ..compat import is_registered_operator
from ..compat.export import batches_by_vmap
from ..compat.quantized import simulating
from ..cuda_ops import written_out
from ..errors import ArchiveError, FxoptError, InputError, UsageError, one_line
from ..interrupts import interruptible
from ..layers.packed import ReleasedWeight
from ..operators import canonical_name, has_random_effects
from ..runtime.values import flatten, plain, structure
from ..storage import atomic_file
from ..tracing.examples import Inputs, check_whole
from ..tracing.isolation import in_phase, outside_inference_mode, preserved
from ..tracing.reads import raised_at
from ..tracing.recording import copy_inputs
from .comparison import Comparison, FreeSizes, check_plain, tensors_of, up_to, without_caches
from .exported import drop_checksum, load_exported, sha256_of, write_checksum
from .folding import fold_parameters
from .formats.fresh import results_in_fresh_process
from .formats.kinds import PT2, Format
from .formats.source import Source
from .formats.writers import WRITERS

__all__ = ["export_model"]

_TAKEN = (Tensor, bool, int, float, str, type(None))
_FIXED = re.compile(r"marked (\S+) as dynamic but your code specialized it to be a constant \((\d+)\)")
_UNKNOWN = ("No conversion rule", "No ONNX function", ":Dictionary", ":Only tensors")
"""How the lines begin that say what an exporter does not know: those of OpenVINO, ONNX and TorchScript."""
_ERROR, _ERROR_IN_8_BITS = 1e-4, 1e-1
"""What another runtime may be off, relative to the scale of a result: it sums in another order, and a number that lies
between two steps of 8 bits may be rounded to the other."""


def export_model(model: nn.Module, path: Path, calls: Sequence[Inputs], *, dynamic_batch: bool, form: Format) -> float:
    """Write a model to `path`, read back and compared, or not at all; return the error; see `fxopt.export`."""
    _check_calls(calls)
    _check_tensors(model)
    sizes = FreeSizes.among(calls, dynamic_batch)
    with ExitStack() as stack:
        stack.enter_context(outside_inference_mode())
        stack.enter_context(preserved(model))
        stack.enter_context(in_phase(model, training=False))
        stack.enter_context(simulating())  # with kernels, results would differ where a number lies between two steps
        caches = set[str]()
        simplified = model.register_forward_hook(lambda _, __, output: without_caches(plain(output), caches))
        stack.callback(simplified.remove)
        file = stack.enter_context(atomic_file(path))
        stack.enter_context(interruptible())  # within the one above: where exporters swallow Ctrl-C, the old file stays
        comparison = Comparison(path, model)
        comparison.run_model(calls, sizes)
        _tell_of_caches(caches, path)
        if form is not PT2:
            stack.enter_context(written_out())
            return _write(form, model, calls[0], comparison, sizes, file)
        program = _exported(model, calls[0], sizes)
        _warn_of_random(program, path)
        _save(program, file)
        comparison.check_module(_read_back(Path(file.name), path))
        digest = sha256_of(Path(file.name))
        drop_checksum(path)
    write_checksum(path, digest)
    return comparison.error


def _write(
    form: Format, model: nn.Module, call: Inputs, comparison: Comparison, sizes: FreeSizes, file: BinaryIO
) -> float:
    """Write files of another format than `.pt2` once a fresh process gives with them what the model gives."""
    if form.is_flat and (written := comparison.written()):
        raise ArchiveError(
            f"the model writes into its arguments ({', '.join(written)}), and {form.name} leaves them as they are; let "
            "it write into copies, or export it as .pt2"
        )
    program = None if form.is_traced else _exported(model, call, sizes)
    if program is not None:
        _refuse_effects(program, form)
    calls = [(call, given) for _, call, given in comparison.expected]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        try:
            files = WRITERS[form.name](Source(model, call, calls[0][1], program), Path(folder))
        except (FxoptError, OSError):
            raise
        except Exception as error:  # exporters raise whatever they meet
            raise ArchiveError(f"{form.name} cannot take this {type(model).__name__}: {_cause(error)}") from error
        found = results_in_fresh_process(form, files[0], model, calls)
        comparison.check(found, up_to(_ERROR_IN_8_BITS if program and _is_in_8_bits(program) else _ERROR))
        beside = [stack.enter_context(_beside(comparison.path, each.suffix)) for each in files[1:]]
        for source, target in zip(files, (file, *beside), strict=True):
            with source.open("rb") as written:
                shutil.copyfileobj(written, target)
        if beside:  # the old graph does not go with new numbers
            comparison.path.unlink(missing_ok=True)
        drop_checksum(comparison.path)  # of a .pt2 file of the same name
    return comparison.error


def _beside(path: Path, suffix: str) -> AbstractContextManager[BinaryIO]:
    """Open the file that goes with the one at `path`; raise `UsageError` for one of something else."""
    target = path.with_suffix(suffix)
    if target.exists() and not path.exists():
        raise UsageError(f"{target} is there without {path.name}, so it is not overwritten: write to another file")
    return atomic_file(target)


def _tell_of_caches(names: set[str], path: Path) -> None:
    if names:
        warnings.warn(
            f"{path.name} gives no cache: {', '.join(sorted(names))} among the model's results is left out; to see no "
            "warning, give use_cache=False with the example inputs",
            stacklevel=5,
        )


def _refuse_effects(program: torch.export.ExportedProgram, form: Format) -> None:
    changed = _changed(program)
    if changed:
        raise ArchiveError(
            f"the model changes {', '.join(changed)} at each call, and {form.name} keeps nothing between calls; "
            "export it as .pt2"
        )
    if drawing := _drawing(program):
        raise ArchiveError(
            f"the model draws random numbers ({', '.join(drawing)}), so no results could be compared; export it as .pt2"
        )


def _changed(program: torch.export.ExportedProgram) -> list[str]:
    """Return the buffers that a program writes to."""
    if any(getattr(getattr(node.target, "_schema", None), "is_mutable", False) for node in program.graph.nodes):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of torch's own code, about itself
            program = program.run_decompositions({})  # writes become results
    return [*program.graph_signature.buffers_to_mutate.values()]


def _is_in_8_bits(program: torch.export.ExportedProgram) -> bool:
    return any("quantize_per_tensor" in str(node.target) for node in program.graph.nodes)


def _check_tensors(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, ReleasedWeight):
            raise InputError(f"{name!r} was freed by 'release'; export the model as it was before that pass")
        if tensor.is_meta:
            raise InputError(f"{name!r} is on the meta device and has no values to export; load its weights first")


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


def _exported(model: nn.Module, call: Inputs, sizes: FreeSizes) -> torch.export.ExportedProgram:
    several = call if sizes.rows(call) != 1 else sizes.with_rows(call, 2)  # torch takes one row for a constant
    example = copy_inputs(several)  # torch marks what it exports with
    shapes: Any = torch.export.ShapesCollection()
    for tensor, free in zip(tensors_of(example), sizes.free, strict=True):
        shapes[tensor] = dict.fromkeys(free, torch.export.Dim.DYNAMIC)
    try:
        with torch.enable_grad(), warnings.catch_warnings():  # without gradients, attention is one kernel of inference
            warnings.simplefilter("ignore")  # what torch is unsure of is compared
            program = torch.export.export(model, example.args, example.kwargs, dynamic_shapes=shapes, strict=False)
            program = program.run_decompositions({}) if batches_by_vmap(program.graph) else program
            fold_parameters(program)
            first = copy_inputs(call)
            program.example_inputs = (first.args, first.kwargs)
            return program
    except Exception as error:  # torch raises whatever it meets
        raise ArchiveError(f"torch cannot export this {type(model).__name__}: {_reason(error)}") from error


def _drawing(program: torch.export.ExportedProgram) -> list[str]:
    """Return the operators of a program that draw random numbers."""
    return list(
        dict.fromkeys(
            canonical_name(node) or str(node.target)
            for node in program.graph.nodes
            if is_registered_operator(node.target) and has_random_effects(node)
        )
    )


def _warn_of_random(program: torch.export.ExportedProgram, path: Path) -> None:
    if drawing := _drawing(program):
        warnings.warn(
            f"{path.name} draws random numbers ({', '.join(drawing)}), so its results differ from run to run; it was "
            "compared with the model on equal draws only",
            stacklevel=4,
        )


def _reason(error: Exception) -> str:
    """Return what torch complains of, and the line of the user's code; torch writes pages, on options of its own."""
    fixed = [(re.sub(r"L\['(\w+)'\]", r"\1", where), size) for where, size in _FIXED.findall(str(error))]
    if fixed:
        is_batch = all(where.endswith("[0]") for where, _ in fixed)
        wanted = "the batch size must be free" if is_batch else "that differs between the example calls"
        found = " and ".join(f"{where.replace('.size()', '.shape')} to {size}" for where, size in fixed)
        return (
            f"its code fixes {found}, but {wanted}; give dynamic_batch=False (--no-dynamic-batch) "
            "and example calls of one size"
        )
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    place = raised_at(error)
    return f"{type(error).__name__}: {one_line(Exception(first))}" + (f" (at {place})" if place else "")


def _cause(error: BaseException) -> str:
    """Return what an exporter did not know, of the pages that it writes, or its first line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip(" -")] or [""]
    found = next((line for line in lines if line.startswith(_UNKNOWN)), lines[0])
    return f"{type(error).__name__}: {one_line(Exception(found.removeprefix(':')))}"


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


def _check_calls(calls: Sequence[Inputs]) -> None:
    """Make sure that there is a call, that all have plain arguments, and that they differ in sizes and numbers only."""
    if not calls:
        raise UsageError("export needs an example call; give example inputs")
    check_whole(calls)
    for number, call in enumerate(calls):
        for name, value in (*enumerate(call.args), *call.kwargs.items()):
            check_plain(value, f"example call {number}: argument {name!r}", _TAKEN, UsageError)
        if _form(call) != _form(calls[0]):
            raise UsageError(
                f"example call {number} has other arguments than call 0 (more, or otherwise given, of other types or "
                "plain values); an exported file takes one kind of call: export one file for each"
            )


def _form(call: Inputs) -> object:
    """Return what calls of one kind have in common."""
    leaves = flatten((call.args, call.kwargs))
    known = [(leaf.dtype, leaf.dim()) if isinstance(leaf, Tensor) else leaf for leaf in leaves.values()]
    return structure((call.args, call.kwargs)), known  # the structure tells True from 1
