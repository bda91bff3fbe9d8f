"""Archives of kind *standalone*: what a captured model computes, and its weights; they load without its classes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import ArchiveError, one_line
from ..passes.record import record_of
from ..passes.state_map import StateMap
from ..tracing.capture import capture_of, required_capture
from ..version import VERSION
from .container import LONGEST_JSON, read_container, read_json, write_container
from .flat_code import FlatCode
from .flat_model import FlatModel, program_of
from .flat_program import FlatProgram
from .flat_variants import flat_variants
from .holdings import Holdings
from .weights import WEIGHTS, read_weights, stored_once, weights_bytes

__all__ = ["KIND", "flat_program", "load", "save"]

KIND = "standalone"
PROGRAM = "program.json"


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a model that runs from graphs to `path`, whole or not at all.

    Args:
        model: an optimized model, one that `fxopt.capture` gave, or a `FlatModel`.
        path: of the file to write or replace.

    Raises:
        ArchiveError: some of the model has no graph, or its graph does what archives cannot say; the message names the
            module, the line and the reason.
        OSError: the file cannot be written.
    """
    try:
        program, tensors = flat_program(model)
    except ArchiveError as error:
        raise ArchiveError(f"the model cannot be saved as standalone: {error}") from error
    text = json.dumps(program.to_json(), allow_nan=False).encode()
    if len(text) > LONGEST_JSON:
        raise ArchiveError(f"the model's graph takes {len(text):,} bytes; at most {LONGEST_JSON:,} are read again")
    stored, aliases = stored_once(tensors)
    shared = next(iter(aliases.items()), None)
    if shared is not None:
        raise ArchiveError(f"{shared[0]!r} and {shared[1]!r} share their memory without being one tensor; tie them")
    # What cannot be read again is not written.
    FlatModel(FlatProgram.from_json(json.loads(text)), stored)
    manifest = {"kind": KIND, "fxopt": VERSION, "torch": str(torch.__version__)}
    write_container(path, manifest, {PROGRAM: text, WEIGHTS: weights_bytes(stored)})


def load(path: str | os.PathLike[str]) -> FlatModel:
    """Return the model that an archive describes; nothing is imported, and nothing from the file is run.

    Raises:
        ArchiveError: unreadable, damaged, too new, or it names what archives may not.
    """
    where = Path(path)
    manifest, members = read_container(where, (PROGRAM, WEIGHTS))
    if manifest.get("kind") != KIND:
        raise ArchiveError(f"{where} is of kind {manifest.get('kind')!r}, not {KIND!r}")
    data = read_json(where, PROGRAM, members[PROGRAM])
    tensors = read_weights(where, members[WEIGHTS])
    try:
        return FlatModel(FlatProgram.from_json(data), tensors)
    except ArchiveError as error:
        raise ArchiveError(f"{where}: {one_line(error)}") from error


def flat_program(model: nn.Module) -> tuple[FlatProgram, Mapping[str, Tensor]]:
    """Return what an archive says of a model, and the tensors to store, by name.

    Raises:
        ArchiveError: see `save`.
    """
    record, holdings = record_of(model), Holdings(model)
    earlier = program_of(model)
    state_map = StateMap() if earlier is None else earlier.state_map
    if earlier is not None and record is None and capture_of(model) is None:
        code, modes = earlier.code, earlier.modes
    else:
        opaque = {name: (place, reason) for name, place, reason in record.opaque} if record else {}
        variants, modes = flat_variants(
            model, holdings, opaque, eval_only=record is not None and bool(record.eval_only)
        )
        signature = required_capture(model).parameters
        code = FlatCode(signature, variants, holdings.attributes, holdings.modules)
        state_map = state_map.compose(record.state_map) if record else state_map
    tensors, stored = holdings.held_tensors()
    modules = holdings.held_modules()
    return FlatProgram(code, modules, tensors, modes, holdings.in_training(), state_map), stored
