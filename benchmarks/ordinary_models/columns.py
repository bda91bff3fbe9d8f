"""The columns of the table: what each makes of a network."""

from __future__ import annotations

import copy
import importlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

import fxopt
from fxopt.runtime.values import map_tensors

from .cases import Case

__all__ = [
    "COLUMNS", "IN_TRAINING", "OPTIMIZED", "OWN_THREADS", "RACES", "Prepared", "Subject", "first_tensor", "imported",
    "optimized",
]  # fmt: skip

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Subject:
    """What a column is given.

    Attributes:
        case: the row of the table.
        model: its network.
        arguments: of the call.
        threads: how many there are.
        optimizer: of a training step.
    """

    case: Case
    model: nn.Module
    arguments: tuple[Any, ...]
    threads: int
    optimizer: Any = None


@dataclass(frozen=True)
class Prepared:
    """What is called, and what is to be said of it.

    Attributes:
        call: makes one call, and returns the first tensor of the result.
        notes: sites that were rewritten, of how many, and why the first others were not.
        model: what is trained instead of the network.
    """

    call: Call
    notes: Mapping[str, Any]
    model: nn.Module | None = None


Column = Callable[[Subject], Prepared]


def first_tensor(result: Any) -> Tensor:
    """Return the first tensor of a result."""
    if isinstance(result, Tensor):
        return result
    return first_tensor(next(iter(result.values() if hasattr(result, "values") else result)))


def _calling(model: Callable[..., Any], of: Subject, notes: Mapping[str, Any] | None = None) -> Prepared:
    def call() -> Tensor:
        return first_tensor(model(*of.arguments))

    return Prepared(call, notes or {}, model if isinstance(model, nn.Module) else None)


def eager(of: Subject) -> Prepared:
    """Leave a network as it is."""
    return _calling(of.model, of)


def eager_bf16(of: Subject) -> Prepared:
    """Convert a network and its inputs to bfloat16; tokens stay."""
    arguments = map_tensors(lambda each: each.bfloat16() if each.is_floating_point() else each, of.arguments)
    return _calling(copy.deepcopy(of.model).bfloat16(), replace(of, arguments=arguments))


def autocast_bf16(of: Subject) -> Prepared:
    """Run a network under autocast."""

    def call(*arguments: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return of.model(*arguments)

    return _calling(call, of)


def passes(preset: str, kind: str, int8: str) -> list[str]:
    """Return the passes of a column: exact ones, and for `kind` those that err."""
    if kind == "own":
        return [f"{preset}{{engine=none}}"]
    if preset == "training":
        return [preset, "channels_last", *(["autocast"] if kind == "bf16" else [])]
    if kind == "bf16":
        return [f"{preset}{{dtype=bfloat16}}"]
    return [preset, int8] if kind == "int8" else [preset]


def optimized(of: Subject, *, kind: str, last: Sequence[str] = ()) -> Prepared:
    """Optimize a network as a user does, with the default budget of time; `last` are passes behind those of a kind."""
    listed = [*passes("training" if of.case.labels else "inference", kind, of.case.int8), *last]
    fast = fxopt.optimize(of.model, listed, example_inputs=fxopt.Inputs(*of.arguments), optimizer=of.optimizer)
    decisions = fxopt.plan(fast).decisions
    reasons = list(dict.fromkeys(f"{each.pass_name}: {each.reason}" for each in decisions if each.reason))
    applied = [each.pass_name for each in decisions if each.status == "applied"]
    counts = {name: applied.count(name) for name in dict.fromkeys(applied)}
    return _calling(fast, of, {"applied": counts, "sites": len(decisions), "reasons": reasons[:8]})


def compiled(of: Subject, *, frozen: bool = False) -> Prepared:
    """Compile a network, in evaluation with its weights frozen: by Inductor's own setting, its option does nothing."""
    inductor: Any = importlib.import_module("torch._inductor.config")
    inductor.freezing = frozen
    fast: Any = torch.compile(of.model)
    return _calling(fast, of)


def _exported(of: Subject, folder: str) -> str:
    path = str(Path(folder) / "model.onnx")
    torch.onnx.export(of.model, of.arguments, path, dynamo=True, verbose=False)
    return path


def onnxruntime(of: Subject) -> Prepared:
    """Export a network and run it by onnxruntime."""
    runtime: Any = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = of.threads, 1
    with tempfile.TemporaryDirectory() as folder:
        session = runtime.InferenceSession(_exported(of, folder), options, providers=["CPUExecutionProvider"])
    names, output = [given.name for given in session.get_inputs()], session.get_outputs()[0].name
    feeds = {name: each.numpy() for name, each in zip(names, _tensors(of.arguments), strict=True)}
    return Prepared(lambda: torch.from_numpy(session.run([output], feeds)[0]), {})


def openvino(of: Subject, *, precision: str = "f32") -> Prepared:
    """Run a network by OpenVINO, of fixed sizes: in the precision that is named, for by itself it takes bfloat16."""
    runtime: Any = importlib.import_module("openvino")
    tensors = _tensors(of.arguments)
    settings = {
        "INFERENCE_NUM_THREADS": of.threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": precision,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        model = _converted(runtime, of, [list(each.shape) for each in tensors]) or _exported(of, folder)
        ready = runtime.Core().compile_model(model, "CPU", settings)
    request, given = ready.create_infer_request(), [each.numpy() for each in tensors]

    def call() -> Tensor:
        return torch.from_numpy(request.infer(given, share_inputs=True, share_outputs=True)[0])

    return Prepared(call, {})


def _converted(runtime: Any, of: Subject, shapes: list[list[int]]) -> Any:
    """Return what OpenVINO makes of a network without an export; None where that has other inputs."""
    try:
        model = runtime.convert_model(of.model, example_input=of.arguments)
        if len(model.inputs) != len(shapes):
            return None
        model.reshape(dict(enumerate(shapes)))
    except Exception:  # whatever its frontend does not know
        return None
    return model


def _tensors(arguments: tuple[Any, ...]) -> list[Tensor]:
    listed: list[Tensor] = []
    for each in arguments:
        listed += [each] if isinstance(each, Tensor) else cast("list[Tensor]", each)
    return listed


def imported(column: str) -> None:
    """Import what a column needs, so that this is not counted as its preparation."""
    needed = {"onnxruntime": ("onnx", "onnxscript", "onnxruntime"), "openvino": ("onnx", "onnxscript", "openvino")}
    for name in needed.get(column.partition(" ")[0], ("torch._inductor.config",) if "compile" in column else ()):
        importlib.import_module(name)


COLUMNS: Mapping[str, Column] = {
    "eager": eager,
    "exact": partial(optimized, kind="exact"),
    "exact, own": partial(optimized, kind="own"),
    "bf16": partial(optimized, kind="bf16"),
    "int8": partial(optimized, kind="int8"),
    "compile": compiled,
    "compile frozen": partial(compiled, frozen=True),
    "onnxruntime": onnxruntime,
    "openvino": openvino,
    "eager bf16": eager_bf16,
    "autocast bf16": autocast_bf16,
    "openvino bf16": partial(openvino, precision="bf16"),
}
RACES: Mapping[str, tuple[str, ...]] = {
    "float32": ("exact", "eager", "exact, own", "compile", "compile frozen", "onnxruntime", "openvino"),
    "bfloat16": ("bf16", "eager", "eager bf16", "autocast bf16", "onnxruntime", "openvino", "openvino bf16"),
}
"""Precision -> the column of fxopt, and those that it is to be as fast as: in bfloat16 also those of float32."""

OPTIMIZED = ("exact", "exact, own", "bf16", "int8")
"""Columns of fxopt."""

IN_TRAINING = ("eager", "exact", "bf16", "compile")
OWN_THREADS = ("onnxruntime", "openvino", "openvino bf16")
"""Columns whose threads are not torch's."""
