"""TorchScript, as a trace of the model: deprecated by torch, and what older deployments load."""

from __future__ import annotations

import traceback
import warnings
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from ...compat.quantized import simulating
from ...runtime.values import map_leaves
from .source import Source

__all__ = ["write_torchscript"]

_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))


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
    frames = (each for each in reversed(traceback.extract_stack()[:-2]) if each.name != "__torch_function__")
    frame = next(each for each in frames if not each.filename.endswith(("/warnings.py", "/torch/overrides.py")))
    return {} if frame.filename.startswith(_OWN) else {f"{Path(frame.filename).name}:{frame.lineno}": None}


def _of_tensors(source: Source) -> nn.Module:
    """Return a module that takes the tensors among the arguments, by name; all else is as in the example."""
    graph = fx.Graph()
    placeholders = iter([graph.placeholder(name) for name in source.arguments])

    def placed(leaf: Any) -> Any:
        return next(placeholders) if isinstance(leaf, Tensor) else leaf

    args, kwargs = map_leaves(placed, (source.call.args, source.call.kwargs))
    graph.output(graph.call_module("model", args, kwargs))
    return fx.GraphModule({"model": source.model}, graph)
