"""What MODEL, --weights, --inputs and --trust mean on the command line."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn

from .. import api
from ..deploy.archive import factory_of
from ..deploy.exported import load_exported
from ..deploy.factory import build_model, importable
from ..deploy.opening import FileKind, kind_of_file
from ..deploy.source import inputs_beside, load_weights, read_inputs
from ..errors import UsageError
from ..runtime.record import record_of
from ..tracing.program import Program

__all__ = ["factory_for", "open_model", "program_of", "weights_of_both"]

ANYTHING = "all"
"""Trusting this package trusts a file altogether."""


def open_model(
    model: str, weights: Path | None = None, inputs: Path | None = None, trust: Sequence[str] | None = None
) -> tuple[nn.Module, object]:
    """Return the model that MODEL means, and its example inputs (by default those beside the factory), or None."""
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


def weights_of_both(a: str, b: str, weights: Path | None) -> Mapping[str, Path | None]:
    """Return the weights to load into each of two models: those given, unless it is a file; both may not be."""
    if weights is not None and all(Path(model).is_file() for model in (a, b)):
        raise UsageError(f"--weights {weights}: both models are files with weights of their own; leave it out")
    return {model: None if Path(model).is_file() else weights for model in (a, b)}


def _read(path: Path, trust: Sequence[str] | None, given: object) -> tuple[nn.Module, object]:
    kind = kind_of_file(path)
    if kind is FileKind.EXPORTED:
        return load_exported(path)
    built = api.load(path, trust=True if trust and ANYTHING in trust else trust or (), example_inputs=given)
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


def program_of(model: nn.Module, example_inputs: object) -> Program:
    """Return the graphs that a model runs, or would run if it were captured, with the model."""
    return Program(model) if record_of(model) is not None else api.capture(model, example_inputs)
