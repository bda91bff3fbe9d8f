"""OpenVINO: computations on Intel's and other x86 CPUs."""

from __future__ import annotations

import importlib
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ...compat.export import without_repetitions
from ...errors import one_line
from ...interrupts import interruptible
from .engine import Engine
from .one_thread import OneThread, numbers_of
from .result_memory import ResultMemory, is_large

__all__ = ["OpenVINO"]

_PLACES = re.compile(r"(?:Exception from \S+:\d+:|Caught exception:)\s*")
"""What texts of errors have of the code that raised."""

_MOST_LARGE = 8
"""For so many shapes of inputs large results are written into memory of torch, by a request for each."""

_Shapes = tuple[torch.Size, ...]
_TELEMETRY = "openvino_telemetry"
_PRECISION = {torch.float32: "f32", torch.bfloat16: "bf16", torch.int8: "f32"}
"""Of what is computed in floats."""


_READY, _NODE, _FORWARDS = 0.076, 0.0007, 5.7
"""Seconds for a region and for each node, and calls of it: fitted to 17 models of up to 1,959 nodes and 495 MB, in one
thread of an AMD EPYC (Zen 3), busy. They took 0.8 to 1.7 times that. The size of the weights tells nothing beside."""


class OpenVINO(Engine):
    """Compile for the CPU by OpenVINO, with all sizes free."""

    name: ClassVar[str] = "openvino"
    packages: ClassVar[tuple[str, ...]] = ("openvino",)
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.int8)
    shares_memory: ClassVar[bool] = True

    def imported(self) -> Any:
        """Return the package, imported without its telemetry, which would send something and write files."""
        modules = cast("dict[str, Any]", sys.modules)
        modules.setdefault(_TELEMETRY, None)  # then openvino takes an empty stand-in
        try:
            return importlib.import_module(self.packages[0])
        finally:
            if modules.get(_TELEMETRY) is None:
                modules.pop(_TELEMETRY, None)

    def seconds_to_take(self, nodes: int, forward: float) -> float:
        return _READY + _NODE * nodes + _FORWARDS * forward

    def compile(self, computation: nn.Module, example: Sequence[Tensor], dtype: torch.dtype, threads: int) -> _Session:
        openvino = self.imported()
        frontend = openvino.frontend.FrontEndManager().load_by_framework("pytorch")
        decoders = importlib.import_module("openvino.frontend.pytorch.ts_decoder")
        # `openvino.convert_model` does the same in twice the time.
        traced = cast("Any", torch.jit).trace(computation, tuple(example), check_trace=False)
        # Its decoder goes through the nodes in Python, and two in three are constants that others have, too.
        graph = without_repetitions(traced.inlined_graph)
        decoder = decoders.TorchScriptPythonDecoder(traced, graph_element=graph, alias_db=graph.alias_db())
        model = frontend.convert(frontend.load(decoder))
        if dtype is not torch.float32:
            _fold_ranges(openvino, model)
        settings = {
            "INFERENCE_PRECISION_HINT": _PRECISION[dtype], "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1,
        }  # fmt: skip
        return _Session(openvino, model, settings)


def _fold_ranges(openvino: Any, model: Any) -> None:
    """Let the ranges of fake quantization be constants, without which it is computed in floats as it stands."""
    passes = importlib.import_module(f"{openvino.__name__}.passes")
    manager = passes.Manager()
    manager.register_pass(passes.ConstantFolding())
    manager.run_passes(model)


@cache
def _core(openvino: Any) -> Any:
    """Return the one core of the process, which stays.

    Each lets the thread that made it handle signals on a stack of its own, and puts the stack before back when it goes.
    Where cores go in another order than they came, that may be the stack of one that is gone: the next signal crashes.
    """
    return openvino.Core()


class _Session:
    """A request for each thread, on memory of torch: inputs are shared, large results are written into it, small ones
    copied.

    With one thread, `infer` tells of no error: it leaves the results of the call before, and the failed computation in
    a queue, where it is tried again in place of later calls, also of other models (seen in 2026.4.1; a crash where the
    failed request is gone). So the first call of each shape is computed asynchronously, which raises.

    It is compiled at its first call: where there is a session for the shapes that are used, that may never come.
    """

    def __init__(self, openvino: Any, model: Any, settings: Mapping[str, Any]) -> None:
        self._openvino, self._model, self._settings, self._tensor = openvino, model, settings, openvino.Tensor
        self._compiled: Any = None
        self._outputs = range(len(model.outputs))
        self._computed = set[_Shapes]()  # those of inputs that it can compute
        self._large: dict[_Shapes, list[tuple[torch.Size, torch.dtype]]] = {}
        """Of large results their shapes and types, by the shapes of inputs; nothing where numbers decide shapes."""
        self._failed = ""
        self._local, self._one_at_a_time = threading.local(), threading.Lock()

    def fixed(self, example: Sequence[Tensor]) -> _Session:
        """Return a session for inputs of the shapes of `example` alone."""
        return _Session(self._openvino, self._reshaped(example), self._settings)

    def _reshaped(self, example: Sequence[Tensor]) -> Any:
        model = self._model.clone()
        model.reshape({place: list(x.shape) for place, x in enumerate(example)})
        return model

    @property
    def is_compiled(self) -> bool:
        return self._compiled is not None

    def _request(self) -> Any:
        with self._one_at_a_time:
            if self._compiled is None:
                with interruptible():
                    self._compiled = _core(self._openvino).compile_model(self._model, "CPU", self._settings)
        return self._compiled.create_infer_request()

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        shapes = tuple([value.shape for value in inputs])
        if self._large.get(shapes):
            return self._into_memory(inputs, shapes)
        request = getattr(self._local, "request", None)
        if request is None:
            request = self._local.request = self._request()
        self._compute(request, inputs, shapes)
        results = [torch.from_numpy(request.get_output_tensor(place).data) for place in self._outputs]
        if shapes not in self._large and is_large(results) and len(self._large) < _MOST_LARGE:
            is_known = all(each.partial_shape.is_static for each in self._reshaped(inputs).outputs)
            self._large[shapes] = [(result.shape, result.dtype) for result in results] if is_known else []
        with OneThread(numbers_of(results)):
            return [result.clone() for result in results]  # the request writes to these again at its next call

    def _into_memory(self, inputs: Sequence[Tensor], shapes: _Shapes) -> list[Tensor]:
        """Return large results in the memory that they are written into."""
        known = self._local.__dict__.setdefault("direct", {})
        if shapes not in known:
            known[shapes] = self._request(), ResultMemory(self._large[shapes])
        request, memory = known[shapes]
        results = memory.lend()
        for place, result in enumerate(results):
            request.set_output_tensor(place, self._tensor(result.numpy(), shared_memory=True))
        self._compute(request, inputs, shapes)
        return results

    def _compute(self, request: Any, inputs: Sequence[Tensor], shapes: _Shapes) -> None:
        """Compute with inputs of such shapes."""
        for place, value in enumerate(inputs):
            request.set_input_tensor(place, self._tensor(value.numpy(), shared_memory=True))
        with self._one_at_a_time:  # as the engine does anyway; so none computes while another fails
            self._infer(request, shapes)

    def _infer(self, request: Any, shapes: _Shapes) -> None:
        """Compute with the inputs that a request has."""
        if shapes in self._computed:
            request.infer()
            return
        if self._failed:  # what it has of the failed call is not put right
            raise RuntimeError(self._failed)
        try:
            request.start_async()
            request.wait()
        except Exception as error:
            self._failed = _PLACES.sub("", one_line(error))
            self._computed.clear()
            raise RuntimeError(self._failed) from error
        self._computed.add(shapes)
