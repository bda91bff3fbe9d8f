"""ONNX files, by the exporter that takes exported programs."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any, cast

import torch

from ...compat.export import onnx_notes_off
from ...errors import ArchiveError
from ...storage import byte_text
from .source import Source, result_names

__all__ = ["write_onnx"]

_MOST = 2**31 - 1
"""Bytes of a message of protobuf, which an ONNX model is."""


def write_onnx(source: Source, folder: Path) -> tuple[Path, ...]:
    """Write `model.onnx` into a folder."""
    program = cast("Any", source.program)
    if (size := sum(tensor.nbytes for tensor in program.state_dict.values())) > _MOST:
        raise ArchiveError(f"its tensors take {byte_text(size)}, and one ONNX file holds less than 2 GiB")
    with onnx_notes_off(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: Any = torch.onnx.export(
            program, dynamo=True, verbose=False, input_names=list(source.arguments),
            output_names=result_names(source.given),
        )  # fmt: skip
    written = io.BytesIO()
    made.save(written)
    file = folder / "model.onnx"
    file.write_bytes(written.getvalue())
    return (file,)
