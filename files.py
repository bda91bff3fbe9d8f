"""The public functions that write models to files and read them: plain orchestration, as in `api.py`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable

from torch import nn

from .api import optimize, restore, state_dict
from .deploy import archive, compact
from .deploy.export import export_model
from .deploy.formats.kinds import chosen_format, warn_of_format
from .deploy.opening import open_file
from .errors import StateWarning, expect
from .passes.pipeline import unfinished
from .runtime.record import Plan, needed_record, record_of
from .runtime.state import refuse_sharded, writes_files
from .storage import as_path
from .tracing.examples import normalize_inputs
from .tracing.isolation import in_phase

__all__ = ["export", "load", "save", "save_compact"]


def save(model: nn.Module, path: str | os.PathLike[str], *, factory: str | None = None) -> None:
    """Save an optimized model, whole or not at all: how to build the original, the plan and the weights; no pickle.

    Loading gives the user's class back. What is to run without the user's code is exported instead. Of a sharded model
    (FSDP2) every rank calls this, and rank 0 writes.

    Args:
        model: an optimized model.
        path: where to.
        factory: `package.module:function` that builds the unoptimized model; by default the model's class, if it can be
            built without arguments.

    Raises:
        ArchiveError: a tensor cannot be stored.
        StateError: the model was not optimized.
        OSError: the file cannot be written.
    """
    target = as_path(path)
    expect(factory, (str, type(None)), "factory", "'package.module:function', or leave it out")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StateWarning)  # the archive keeps the tensors as they are now
        record, state = needed_record(model), state_dict(model)
    if writes_files(model):
        archive.save(model, target, record=record, state=state, factory=factory)


def save_compact(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write a model that `prune{method=structured}` made smaller, in its real sizes, for code that does not know fxopt.

    Of a model of `transformers` whose configuration has fields for its sizes, the folder is what `from_pretrained` of
    its class loads. Layers that were left in other sizes than their like have zeros up to the size of the largest.
    Else the folder has `model.safetensors`, `sizes.json` and `compact_loader.py`, whose `load(model)` gives an unpruned
    model the sizes and tensors. Before anything is written, the model so loaded is compared with the pruned one on
    calls drawn in the form of the example inputs.

    Args:
        model: the pruned model; what else was done to it leaves the numbers as they are.
        folder: where to; it is made if it is not there, and files in it are replaced.

    Raises:
        StateError: the model was not optimized, is sharded, or had its tensors merged before it was pruned.
        UsageError: nothing was cut out of it, or it is quantized.
        ArchiveError: the model's own code cannot run in these sizes; or a tensor has no values.
        OSError: the folder cannot be written.
    """
    target = as_path(folder, "folder")
    record = needed_record(model)
    refuse_sharded(model, "compact files hold whole tensors", "load fxopt.state_dict(model) into one process first")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StateWarning)  # what is cut away is left out
        state = state_dict(model)
    compact.save_compact(model, target, record=record, state=state)


def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    example_inputs: object,
    *,
    format: str | None = None,  # noqa: A002 - what it is
    dynamic_batch: bool = True,
) -> float:
    """Write what a model computes in evaluation mode as a file, which runs without the user's code.

    The file is read back and compared with the model before it takes its place: on every example call, and on the first
    one with other numbers of rows. Other formats than `.pt2` are loaded in a fresh process for that, which has torch
    and what reads the format. What passes have rewritten is written as what it computes: packed layers and regions of
    engines by torch's own operations, static int8 as quantization and dequantization.

    Outputs come as tuples, lists and dictionaries: a dataclass as its fields by name. `onnx` and `openvino` take and
    give tensors by names; `torchscript` takes them in the order of the arguments.
    Beside a `.pt2` file, `NAME.sha256` has its checksum, which torch's format lacks; `fxopt.load` compares it where it
    is there.

    Args:
        model: any module, optimized or not; it is left as it is, in its mode.
        path: where to; a file there is replaced.
        example_inputs: as for `optimize`. The first call is exported; the others have the same arguments. Sizes that
            differ between calls are free in the file.
        format: `pt2` (torch.export), `onnx`, `openvino` (its graph; the numbers go to NAME.bin), `aoti` (a library that
            AOTInductor compiles for this kind of processor) or `torchscript` (a trace; torch has deprecated it). By
            default what the name of the file says (`.onnx`, `.xml`, `.ts`), else `pt2`.
        dynamic_batch: leave the batch size free, too: the first dimension of the first tensor, and of every other
            tensor in which it is as large. Otherwise it is that of the example, unless calls differ in it.

    Returns:
        The largest difference of its results from the model's, relative to the scale of each.

    Raises:
        ArchiveError: the model cannot be exported so, or the file does something else; the message says what.
        InputError: the model refuses its example inputs.
        UsageError: there are no example inputs, they are no plain values, or the packages of a format are missing.
        OSError: the file cannot be written.
    """
    expect(model, nn.Module, "model", "a torch.nn.Module")
    expect(dynamic_batch, bool, "dynamic_batch", "True or False")
    expect(format, (str, type(None)), "format", "the name of a format, such as 'onnx', or leave it out")
    target = as_path(path)
    form = chosen_format(format, target)
    warn_of_format(form, target)
    calls = normalize_inputs(example_inputs, model)
    return export_model(model, target, calls, dynamic_batch=dynamic_batch, form=form)


def load(
    path: str | os.PathLike[str], *, model: nn.Module | None = None, trust: str | Iterable[str] | bool = (),
    example_inputs: object = None,
) -> nn.Module:  # fmt: skip
    """Load a model from an archive, from a `.pt2` file, or, trusted, from a pickle.

    Args:
        path: of the file; its content tells what it is.
        model: of an archive: the unoptimized model to use instead of importing the archive's factory. Of an optimized
            one, such as that of `qat`, what `restore` gives is used.
        trust: packages (or one) from which an archive's factory may be imported and run. True trusts the file
            altogether: any factory, and pickles (`torch.save(model, path)`), which run any code.
        example_inputs: as for `optimize`, where capture needs them; by default `example_inputs()` beside the factory,
            or inputs drawn in the form of those that the model was optimized on.

    Raises:
        ArchiveError: unreadable, corrupt, too new, or it would run code that is not trusted.
        UsageError: `model` is given for a file that holds the whole model.
        StateError: `model` is optimized, and sharded.
    """

    def replay(original: nn.Module, plan: Plan, phase: str, inputs: object, *, drawn: bool = False) -> nn.Module:
        verify = False if drawn else None
        with in_phase(original, phase == "train"):
            return optimize(original, plan=unfinished(plan), phase=phase, example_inputs=inputs, verify=verify)

    expect(model, (nn.Module, type(None)), "model", "the unoptimized torch.nn.Module, or leave it out")
    expect(trust, (bool, str, Iterable), "trust", "names of packages, or True")
    trusted = trust if isinstance(trust, bool) else (trust,) if isinstance(trust, str) else tuple(trust)
    original = model if model is None or record_of(model) is None else restore(model)
    return open_file(as_path(path), replay=replay, model=original, trust=trusted, inputs=example_inputs)
