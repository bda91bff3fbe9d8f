"""AOTInductor: computations compiled to libraries by torch itself and a C++ compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from ...compat.inductor import compiled_ahead, has_cpp_compiler
from .engine import Engine, OtherSizes

__all__ = ["AOTInductor"]


class AOTInductor(Engine):
    """Compile by AOTInductor, with those sizes free that `torch.export` can leave so: a size of 1 is fixed."""

    name: ClassVar[str] = "aoti"
    packages: ClassVar[tuple[str, ...]] = ("torch",)
    by_name: ClassVar[bool] = True

    def reason_against(self, dtype: torch.dtype) -> str:
        if reason := super().reason_against(dtype):
            return reason
        return "" if has_cpp_compiler() else "aoti needs a C++ compiler: install g++, or set CXX to the path of one"

    def compile(self, computation: nn.Module, example: Sequence[Tensor], dtype: torch.dtype, threads: int) -> _Session:
        given = tuple(x.contiguous() for x in example)
        free = tuple({d: Dim.AUTO if size > 1 else Dim.STATIC for d, size in enumerate(x.shape)} for x in given)
        exported = torch.export.export(computation, given, dynamic_shapes=(free,))
        return _Session(compiled_ahead(exported, threads), _sizes_of(exported, given))


def _sizes_of(exported: ExportedProgram, example: Sequence[Tensor]) -> list[list[tuple[str, float, float]]]:
    """Return for each size of each input a name, which equal sizes share, and its bounds."""
    bounds = cast("Any", exported).range_constraints
    free = {str(size): (float(each.lower), float(each.upper)) for size, each in bounds.items()}
    traced = {node.name: node.meta["val"].shape for node in exported.graph.find_nodes(op="placeholder")}
    return [
        [(str(name), *free.get(str(name), (size, size))) for name, size in zip(traced[place], x.shape, strict=True)]
        for place, x in zip(exported.graph_signature.user_inputs, example, strict=True)
    ]


class _Session:
    def __init__(
        self, run: Callable[[list[Tensor]], list[Tensor]], sizes: list[list[tuple[str, float, float]]]
    ) -> None:
        self._run, self._sizes = run, sizes

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        found: dict[str, int] = {}
        for x, sizes in zip(inputs, self._sizes, strict=True):
            if x.dim() != len(sizes):
                raise OtherSizes(f"an input has {x.dim()} dimensions instead of {len(sizes)}")
            for size, (name, least, most) in zip(x.shape, sizes, strict=True):
                if not (least <= size <= most and found.setdefault(name, size) == size):
                    raise OtherSizes(f"it is compiled for another size than {size}")
        return self._run(list(inputs))
