"""onnxruntime: computations by way of an ONNX model."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...compat.export import onnx_log_off
from ...storage import byte_text
from .engine import Engine

__all__ = ["OnnxRuntime"]

_MOST = 2**31 - 1
"""Bytes of a message of protobuf, which an ONNX model is."""


class OnnxRuntime(Engine):
    """Compile for the CPU by onnxruntime, with all sizes free."""

    name: ClassVar[str] = "onnxruntime"
    packages: ClassVar[tuple[str, ...]] = ("onnxruntime", "onnx")
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.int8)

    def compile(self, computation: nn.Module, example: Sequence[Tensor], dtype: torch.dtype, threads: int) -> _Session:
        onnxruntime = self.imported()
        if (size := sum(each.nbytes for each in computation.buffers())) > _MOST:
            raise ValueError(f"its tensors take {byte_text(size)}, and an ONNX model has less than 2 GiB")
        names = [f"input{place}" for place in range(len(example))]
        sizes = {name: {d: f"{name}_{d}" for d in range(x.dim())} for name, x in zip(names, example, strict=True)}
        written: Any = io.BytesIO()
        # The exporter of torch.export takes several times as long, and fixes more sizes. This one never lets go of what
        # is traced already: it traces by itself.
        with onnx_log_off():
            torch.onnx.export(computation, tuple(example), written, dynamo=False, input_names=names, dynamic_axes=sizes)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 3
        return _Session(onnxruntime.InferenceSession(written.getvalue(), options, ["CPUExecutionProvider"]))


class _Session:
    def __init__(self, session: Any) -> None:
        self._session, self._names = session, [each.name for each in session.get_inputs()]

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        given = {f"input{place}": value.numpy() for place, value in enumerate(inputs)}
        results = self._session.run(None, {name: given[name] for name in self._names})
        return [torch.from_numpy(result) for result in results]
