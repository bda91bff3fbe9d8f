"""Who writes the files of each format other than `.pt2`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from .aot_inductor import write_aoti
from .onnx_file import write_onnx
from .open_vino import write_openvino
from .source import Source
from .torchscript import write_torchscript

__all__ = ["WRITERS"]

Writer: TypeAlias = Callable[[Source, Path], tuple[Path, ...]]
"""Writes files named `model` and a suffix into a folder; the one to load is the first of those that it returns."""

WRITERS: Mapping[str, Writer] = MappingProxyType(
    {"onnx": write_onnx, "openvino": write_openvino, "aoti": write_aoti, "torchscript": write_torchscript}
)
