"""TorchScript, as a trace of the model: deprecated by torch, and what older deployments load."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from ...compat.quantized import simulating
from ...runtime.values import map_leaves
from .source import Source

__all__ = ["write_torchscript"]

_OWN = ("torch", __name__.partition(".")[0])
_PASSED_ON = ("/warnings.py", "/torch/overrides.py")


def write_torchscript(source: Source, folder: Path) -> tuple[Path, ...]:
    """Write `model.ts` into a folder."""
    tensors = tuple(tensor.detach().clone() for tensor in source.arguments.values())
    jit = cast("Any", torch.jit)
    places = dict[str, None]()

    def note(*_: object, **__: object) -> None:
        places.update(_deciding())

    with warnings.catch_warnings(), simulating(False), torch.enable_grad():  # quantized layers: torch's own operators
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", ".*Python boolean", jit.TracerWarning)
        warnings.showwarning = note
        traced = jit.trace(_of_tensors(source), tensors, check_trace=False, strict=False)
        file = folder / "model.ts"
        jit.save(traced, str(file))
    if places:
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        warnings.warn(
            f"the model decides by tensors or sizes (at {next(iter(places))}{more}), and a trace always goes the way "
            "of the example; give example calls that go each way, which are compared, or export it as .pt2",
            stacklevel=2,
        )
    return (file,)


def _deciding() -> dict[str, None]:
    """Return the line that asks a traced tensor for a decision; none of torch or fxopt: these compare fitting sizes."""
    frame: FrameType | None = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and (frame.f_code.co_filename.endswith(_PASSED_ON) or _is_dispatch(frame)):
        frame = frame.f_back
    if frame is None or str(frame.f_globals.get("__name__", "")).partition(".")[0] in _OWN:
        return {}
    return {f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}": None}


def _is_dispatch(frame: FrameType) -> bool:
    return frame.f_code.co_name == "__torch_function__"


def _of_tensors(source: Source) -> nn.Module:
    """Return a module that takes the tensors among the arguments, by name; all else is as in the example."""
    graph = fx.Graph()
    placeholders = iter([graph.placeholder(name) for name in source.arguments])

    def placed(leaf: Any) -> Any:
        return next(placeholders) if isinstance(leaf, Tensor) else leaf

    args, kwargs = map_leaves(placed, (source.call.args, source.call.kwargs))
    graph.output(graph.call_module("model", args, kwargs))
    return fx.GraphModule({"model": source.model}, graph)
