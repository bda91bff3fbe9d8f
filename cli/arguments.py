"""What MODEL, --weights, --inputs and --trust mean on the command line."""

from __future__ import annotations

import random
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from .. import api, files
from ..deploy.archive import factory_of
from ..deploy.exported import load_exported
from ..deploy.factory import build_model, importable
from ..deploy.opening import FileKind, kind_of_file
from ..deploy.source import inputs_beside, load_weights, read_inputs
from ..errors import UsageError
from ..passes.verification import with_rows
from ..runtime.record import record_of
from ..tracing.examples import Inputs, check_whole, normalize_inputs
from ..tracing.program import Program
from .prechecks import MAKE_INPUTS

__all__ = [
    "calls_for",
    "factory_for",
    "in_threads",
    "open_both",
    "open_model",
    "program_of",
    "script_factory",
    "weights_of_both",
]

ANYTHING = "all"
"""Trusting this package trusts a file altogether."""


def open_model(
    model: str,
    weights: Path | None = None,
    inputs: Path | None = None,
    trust: Sequence[str] | None = None,
    seed: int = 0,
) -> tuple[nn.Module, object]:
    """Return the model that MODEL means, and its example inputs (by default those beside the factory), or None.

    A factory that draws its weights draws the same ones for the same `seed`.
    """
    random.seed(seed)
    torch.manual_seed(seed)
    # Like `python -m`, find the user's own modules in the folder the command is run in.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    given = None if inputs is None else read_inputs(inputs)
    if Path(model).is_file():
        built, example_inputs = _read(Path(model), trust, given)
    else:
        spec = importable(model)
        built = build_model(spec)
        example_inputs = inputs_beside(spec, built) if given is None else None
    if weights is not None:
        load_weights(built, weights)
    return built, example_inputs if given is None else given


def open_both(
    a: str,
    b: str,
    weights: Path | None,
    inputs: Path | None,
    trust: Sequence[str] | None,
    seed: int,
    rows: int | None = None,
) -> tuple[nn.Module, nn.Module, list[Inputs]]:
    """Return two models, and the calls to run both on: those of the first, or else of the second."""
    state = weights_of_both(a, b, weights)
    before, own = open_model(a, state[a], inputs, trust, seed)
    after, others = open_model(b, state[b], None, trust, seed)
    return before, after, calls_for(before, others if own is None else own, rows)


def calls_for(model: nn.Module, example_inputs: object, rows: int | None = None) -> list[Inputs]:
    """Return the calls of a model that example inputs mean, with so many rows each if a number is given.

    Raises `UsageError` if there is none, or one of a part.
    """
    calls = normalize_inputs(example_inputs, model)
    if not calls:
        raise UsageError(f"there are no example inputs; {MAKE_INPUTS}")
    check_whole(calls)
    return [call if rows is None else _with_rows(call, rows) for call in calls]


def _with_rows(call: Inputs, rows: int) -> Inputs:
    made = with_rows((call.args, call.kwargs), rows)
    if made is None:
        raise UsageError("--batch: the example inputs have no tensor with rows; leave it out")
    return Inputs(*made[0], **made[1])


@contextmanager
def in_threads(count: int | None) -> Generator[None]:
    """Let torch compute in so many threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def weights_of_both(a: str, b: str, weights: Path | None) -> Mapping[str, Path | None]:
    """Return the weights to load into each of two models: those given, unless it is a file; both may not be."""
    if weights is not None and all(Path(model).is_file() for model in (a, b)):
        raise UsageError(f"--weights {weights}: both models are files with weights of their own; leave it out")
    return {model: None if Path(model).is_file() else weights for model in (a, b)}


def _read(path: Path, trust: Sequence[str] | None, given: object) -> tuple[nn.Module, object]:
    kind = kind_of_file(path)
    if kind is FileKind.EXPORTED:
        return load_exported(path)
    built = files.load(path, trust=True if trust and ANYTHING in trust else trust or (), example_inputs=given)
    factory = factory_of(path) if kind is FileKind.RECIPE and given is None else None
    return built, None if factory is None else inputs_beside(factory, built)  # loading has imported it, as it may


def factory_for(model: str) -> str | None:
    """Return how MODEL is built, None where its archive leaves that open; raise `UsageError` for other files."""
    if not Path(model).is_file():
        return importable(model)
    if kind_of_file(Path(model)) is not FileKind.RECIPE:
        raise UsageError(
            f"{model} does not say how its model is built, so it cannot be saved; leave -o out, or use fxopt export"
        )
    return factory_of(model)


def script_factory(model: str) -> str | None:
    """Return how a script builds MODEL; None where that takes a file."""
    return None if Path(model).is_file() else importable(model)


def program_of(model: nn.Module, example_inputs: object) -> Program:
    """Return the graphs that a model runs, or would run if it were captured, with the model."""
    return Program(model) if record_of(model) is not None else api.capture(model, example_inputs)
