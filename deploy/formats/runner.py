"""Run a file on calls, in a process that has neither fxopt nor the model's code: `runner.py FORMAT FILE CALLS RESULTS`.

Only torch, for the tensors, and what reads the format are imported.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

Run = Callable[[dict[str, Tensor], Any, Any], Any]
"""Takes the tensors among the arguments by name, and the arguments."""


def _onnx(file: str) -> Run:
    onnxruntime = importlib.import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(file, options, ["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def run(named: dict[str, Tensor], *_: Any) -> Any:
        given = {name: named[name].detach().cpu().numpy() for name in names}
        return [torch.from_numpy(each) for each in session.run(None, given)]

    return run


def _openvino(file: str) -> Run:
    cast("dict[str, Any]", sys.modules)["openvino_telemetry"] = None  # then openvino takes an empty stand-in
    openvino = importlib.import_module("openvino")
    compiled = openvino.Core().compile_model(file, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def run(named: dict[str, Tensor], *_: Any) -> Any:
        request = compiled.create_infer_request()
        for name, tensor in named.items():
            request.set_tensor(name, openvino.Tensor(tensor.detach().cpu().contiguous().numpy()))
        request.start_async()  # `infer` tells of no error
        request.wait()
        return [torch.from_numpy(request.get_tensor(port).data).clone() for port in compiled.outputs]

    return run


def _pt2(file: str) -> Run:
    importlib.import_module("torch.ao.quantization.fx._decomposed")  # registers what int8 is written in
    module = torch.export.load(file).module()
    return lambda _, args, kwargs: module(*args, **kwargs)


def _aoti(file: str) -> Run:
    package = importlib.import_module("torch._inductor").aoti_load_package(file)
    return lambda _, args, kwargs: package(*args, **kwargs)


def _torchscript(file: str) -> Run:
    load = cast("Any", torch.jit).load
    load(file)  # a file that cannot be loaded is told from a call that fails

    def run(named: dict[str, Tensor], *_: Any) -> Any:
        return load(file)(*named.values())  # anew: it may keep something between calls

    return run


_LOADERS: dict[str, Callable[[str], Run]] = {
    "pt2": _pt2, "onnx": _onnx, "openvino": _openvino, "aoti": _aoti, "torchscript": _torchscript,
}  # fmt: skip


def _main(form: str, file: str, calls: str, results: str) -> None:
    found: list[Any] = []
    try:
        run = _LOADERS[form](file)
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}")
    for named, args, kwargs, seed in torch.load(calls, weights_only=True):
        torch.manual_seed(seed)
        try:
            found.append((run(named, args, kwargs), args, kwargs))
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            is_traceback = lines[0].startswith("The following operation failed in the TorchScript interpreter")
            found.append(lines[-1] if is_traceback else f"{type(error).__name__}: {lines[0]}")
    torch.save(found, results)


if __name__ == "__main__":
    _main(*sys.argv[1:])
