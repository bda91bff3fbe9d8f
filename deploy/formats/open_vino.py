"""OpenVINO's own files: the graph in NAME.xml, the numbers in NAME.bin."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from ...layers.delegated import engine_named
from .kinds import FORMATS
from .onnx_file import write_onnx
from .source import Source, result_names

__all__ = ["write_openvino"]


def write_openvino(source: Source, folder: Path) -> tuple[Path, ...]:
    """Write `model.xml` and `model.bin` into a folder."""
    openvino = cast("Any", engine_named("openvino")).imported()
    program = cast("Any", source.program)
    model = _converted(openvino, source, folder)
    for parameter in model.get_parameters():
        if not parameter.output(0).get_target_inputs() and parameter.get_element_type().is_dynamic():
            model.remove_parameter(parameter)  # stands for a number or a flag, which are constants
    model.reshape(dict(enumerate(_shapes(program))))  # the converter frees all sizes
    for ports, names in ((model.inputs, source.arguments), (model.outputs, result_names(source.given))):
        for port, name in zip(ports, names, strict=True):
            port.get_tensor().set_names({name})
    graph = folder / "model.xml"
    openvino.save_model(model, graph, compress_to_fp16=False)
    return graph, graph.with_suffix(".bin")


def _converted(openvino: Any, source: Source, folder: Path) -> Any:
    """Return the model by OpenVINO's own converter, or, of operators that it does not know, by way of ONNX."""
    try:
        with warnings.catch_warnings():  # the converter copies the program by a class of torch that warns of itself
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
            return openvino.convert_model(cast("Any", source.program))
    except openvino.frontend.OpConversionFailure:
        if any(importlib.util.find_spec(package) is None for package in FORMATS["onnx"].packages):
            raise
        (file,) = write_onnx(source, folder)
        return openvino.convert_model(file)


def _shapes(program: Any) -> list[list[int]]:
    """Return the shape of each tensor among a program's arguments, -1 for what is free."""
    names = program.graph_signature.user_inputs
    values = {node.name: node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")}
    found = [values[name] for name in names if isinstance(name, str)]
    return [[size if type(size) is int else -1 for size in value.shape] for value in found if isinstance(value, Tensor)]
