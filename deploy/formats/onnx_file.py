"""ONNX files, by the exporter that takes exported programs."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ...compat.export import ONNX_EXPORTER
from ...compat.logs import unheard
from ...errors import ArchiveError
from ...storage import byte_text
from .source import Source, result_names

__all__ = ["write_onnx"]

_MOST = 2**31 - 1
"""Bytes of a message of protobuf, which an ONNX model is."""


def write_onnx(source: Source, folder: Path) -> tuple[Path, ...]:
    """Write `model.onnx` into a folder."""
    program = cast("Any", source.program)
    if any(node.target in _SPELT_OUT for node in program.graph.nodes):
        program = program.run_decompositions(_SPELT_OUT)
    if (size := sum(tensor.nbytes for tensor in program.state_dict.values())) > _MOST:
        raise ArchiveError(f"its tensors take {byte_text(size)}, and one ONNX file holds less than 2 GiB")
    with unheard(ONNX_EXPORTER):  # it tells which packages it would also know operators of
        made: Any = torch.onnx.export(
            program, dynamo=True, verbose=False, input_names=list(source.arguments),
            output_names=result_names(source.given),
        )  # fmt: skip
    written = io.BytesIO()
    made.save(written)
    file = folder / "model.onnx"
    file.write_bytes(written.getvalue())
    return (file,)


def _sorted(x: Tensor, *, stable: bool, dim: int = -1, descending: bool = False) -> Any:  # noqa: ARG001 - torch passes it
    return torch.sort(x, dim=dim, descending=descending)  # in ONNX, the first of equal numbers comes first


def _searched(
    ordered: Tensor, x: Tensor, *, out_int32: bool = False, right: bool = False, side: str | None = None,
    sorter: Tensor | None = None,
) -> Any:  # fmt: skip
    if ordered.dim() != 1 or sorter is not None:
        return NotImplemented
    is_before = ordered <= x[..., None] if right or side == "right" else ordered < x[..., None]
    return is_before.sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


def _remainder(x: Tensor, size: Any) -> Any:
    return NotImplemented if x.is_floating_point() or type(size) is int else x - torch.floor_divide(x, size) * size


_SPELT_OUT = {
    torch.ops.aten.sort.stable: _sorted, torch.ops.aten.searchsorted.Tensor: _searched,
    torch.ops.aten.remainder.Scalar: _remainder,
}  # fmt: skip
"""Operators that the exporter does not know (the last one, of free sizes): experts order their tokens by these."""
