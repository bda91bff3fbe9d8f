"""What quantizes a whole model outside of fxopt: PT2E, onnxruntime, and NNCF for OpenVINO.

All are calibrated on the call that is timed, as fxopt is, and keep its sizes. Their parameters are those that their
documentation recommends for CPUs with VNNI; transformers are told to be such where there is an option for it.
"""

from __future__ import annotations

import importlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .prepared import Inputs, Prepared, Way, finished, first_tensor

__all__ = ["PEERS"]

os.environ.setdefault("NNCF_CI", "1")  # it sends no telemetry then


class _Of(nn.Module):
    """A model of tensors alone, whose first result is all that it returns."""

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.model, (_, self.structure) = model, pytree.tree_flatten(inputs)

    def forward(self, *leaves: Tensor) -> Tensor:
        inputs = pytree.tree_unflatten(leaves, self.structure)
        return first_tensor(self.model(**inputs) if isinstance(inputs, dict) else self.model(*inputs))


def _leaves(*args: Any, **kwargs: Any) -> list[Tensor]:
    return pytree.tree_leaves(kwargs or args)


def _convolves(model: nn.Module) -> bool:
    return any(isinstance(each, nn.Conv2d) for each in model.modules())


def pt2e(model: nn.Module, inputs: Inputs, *, is_dynamic: bool) -> Prepared:
    """Export a model, quantize by the quantizer for x86 processors, and compile that."""
    x86: Any = importlib.import_module("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
    steps: Any = importlib.import_module("torchao.quantization.pt2e.quantize_pt2e")
    start, leaves = time.perf_counter(), tuple(pytree.tree_leaves(inputs))
    settings = x86.get_default_x86_inductor_quantization_config(is_dynamic=is_dynamic)
    with torch.no_grad():
        exported = torch.export.export(_Of(model, inputs), leaves).module()
        observed = steps.prepare_pt2e(exported, x86.X86InductorQuantizer().set_global(settings))
        observed(*leaves)
        quantized = steps.convert_pt2e(observed)
    done = finished(start, quantized, leaves, compiled=True)
    return Prepared(_from_leaves(done.model), done.seconds, done.size)


def _from_leaves(run: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return run(*_leaves(*args, **kwargs))

    return call


def _exported(model: nn.Module, inputs: Inputs, path: Path) -> list[Tensor]:
    """Write an ONNX file, and return the inputs that it takes in turn."""
    leaves = pytree.tree_leaves(inputs)
    torch.onnx.export(_Of(model, inputs), tuple(leaves), str(path), dynamo=True, verbose=False, external_data=False)
    return leaves


def _size(folder: Path, name: str) -> int:
    return sum(each.stat().st_size for each in folder.glob(f"{name}.*"))


class _Once:
    """Data of one call, as onnxruntime reads them."""

    def __init__(self, feeds: dict[str, Any]) -> None:
        self._left = [feeds]

    def get_next(self) -> dict[str, Any] | None:
        return self._left.pop() if self._left else None


def onnxruntime(model: nn.Module, inputs: Inputs, *, is_dynamic: bool) -> Prepared:
    """Export a model, and quantize and run it by onnxruntime."""
    runtime: Any = importlib.import_module("onnxruntime")
    quantization: Any = importlib.import_module("onnxruntime.quantization")
    preparing: Any = importlib.import_module("onnxruntime.quantization.shape_inference")
    kinds, start = quantization.QuantType, time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = [folder / f"{stage}.onnx" for stage in ("exported", "inferred", "quantized")]
        leaves = _exported(model, inputs, files[0])
        preparing.quant_pre_process(files[0], files[1], skip_optimization=True, skip_symbolic_shape=True)
        names = [each.name for each in runtime.InferenceSession(files[1]).get_inputs()]
        settings = {"per_channel": True, "weight_type": kinds.QInt8}
        if is_dynamic:
            quantization.quantize_dynamic(*files[1:], **settings)
        else:
            reader = type("Reader", (_Once, quantization.CalibrationDataReader), {})
            feeds = {name: leaf.numpy() for name, leaf in zip(names, leaves, strict=True)}
            quantization.quantize_static(*files[1:], reader(feeds), activation_type=kinds.QUInt8, **settings)
        options = runtime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        session, size = runtime.InferenceSession(files[2], options), _size(folder, "quantized")

    def call(*args: Any, **kwargs: Any) -> Tensor:
        leaves = _leaves(*args, **kwargs)
        return torch.from_numpy(session.run(None, {name: x.numpy() for name, x in zip(names, leaves, strict=True)})[0])

    return finished(start, call, inputs, size=size)


def nncf(model: nn.Module, inputs: Inputs) -> Prepared:
    """Convert a model for OpenVINO, quantize by NNCF and compile that; what stays in floats is computed in float32."""
    compression: Any = importlib.import_module("nncf")
    runtime: Any = importlib.import_module("openvino")
    start, leaves = time.perf_counter(), pytree.tree_leaves(inputs)
    try:
        converted = runtime.convert_model(_Of(model, inputs), example_input=tuple(leaves))
    except Exception:  # whatever its own frontend does not know
        with tempfile.TemporaryDirectory() as folder:
            _exported(model, inputs, path := Path(folder) / "exported.onnx")
            converted = runtime.convert_model(path)
    converted.reshape({place: list(x.shape) for place, x in enumerate(leaves)})
    given = [x.numpy() for x in leaves]
    quantized = compression.quantize(
        converted, compression.Dataset([dict(enumerate(given))]), subset_size=1,
        model_type=None if _convolves(model) else compression.ModelType.TRANSFORMER,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        runtime.save_model(quantized, Path(folder) / "quantized.xml", compress_to_fp16=False)
        size = _size(Path(folder), "quantized")
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1}
    request = runtime.Core().compile_model(quantized, "CPU", settings).create_infer_request()

    def call(*args: Any, **kwargs: Any) -> Tensor:
        given: Sequence[Any] = [x.numpy() for x in _leaves(*args, **kwargs)]
        return torch.from_numpy(request.infer(given, share_inputs=True, share_outputs=True)[0])

    return finished(start, call, inputs, size=size)


PEERS: dict[str, Way] = {
    "PT2E dynamic compiled": partial(pt2e, is_dynamic=True),
    "PT2E static compiled": partial(pt2e, is_dynamic=False),
    "onnxruntime dynamic": partial(onnxruntime, is_dynamic=True),
    "onnxruntime static": partial(onnxruntime, is_dynamic=False),
    "NNCF on OpenVINO": nncf,
}
