"""What decisions rest on, as one digest: models that have it in common, in whatever process, are decided alike."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any, cast

import torch
from torch import fx, nn
from torch.nn import functional

from ...compat import cpu_capabilities
from ...errors import FxoptError
from ...known_passes import TRANSFORMS
from ...layers.delegated import engines, is_forked, sum_of
from ...runtime.graphs import Capture, capture_of
from ...runtime.values import PLAIN_TYPES, all_tensors, tensors_in
from ...tracing.analyses import HashLevel, StructuralHash
from ...tracing.program import Program
from ...tracing.reads import reached_functions
from ...version import VERSION
from ..contract import Pass
from ..pipeline import parse
from ..sites import Numerics

__all__ = ["key_of", "key_of_numbers"]

_ROOT = Path(__file__).resolve().parents[2]
_TORCH = str(Path(torch.__file__).parent)
_PLACE = " at 0x"
"""In texts of objects that have none of their own."""


class _Untold(Exception):
    """There is no text that says in another process what something is."""


def key_of(program: Program, passes: Sequence[Pass], asked: Mapping[str, Any]) -> str | None:
    """Return the digest of all that the decisions of a run rest on; None where that cannot be said.

    Args:
        program: captured, and not rewritten yet.
        passes: those that run.
        asked: plain values, by name, of what else the user asked for.
    """
    if not all(map(_is_told, passes)) or not _is_torch_itself(program):
        return None
    keeping = all(pass_.numerics.keeps_function for pass_ in passes)
    try:
        parts = [
            _text(_surroundings()), _text(tuple(asked.items())), *map(str, passes), _of_model(program),
            *_of_graphs(program), *_of_code(program), "" if keeping else _of_numbers(program),
        ]  # fmt: skip
    except Exception:  # what users' objects raise while they are described; odd tensors; _Untold
        return None
    return hashlib.sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()


def key_of_numbers(key: str, program: Program) -> str | None:
    """Return the digest under which decisions stand that hang on numbers in weights and inputs; None without one."""
    try:
        return hashlib.sha256(f"{key}\0{_of_numbers(program)}".encode()).hexdigest()
    except Exception:  # odd tensors
        return None


def _is_told(pass_: Pass) -> bool:
    """Say whether the text of a pass says all of it, and whether comparing the model afterwards says that it is right.

    What changes the function is right by what a plan says is removed: nothing would object to another plan.
    """
    if not type(pass_).__module__.startswith(f"{TRANSFORMS}.") or pass_.finishes or pass_.numerics is Numerics.SEMANTIC:
        return False
    beside = (getattr(pass_, each.name) for each in dataclasses.fields(cast("Any", pass_)) if not each.compare)
    try:
        return all(value is None or value == () for value in beside) and parse(str(pass_)) == (pass_,)
    except (FxoptError, RuntimeError, ValueError):  # an option without text, or a tensor that equals no text
        return False


def _is_torch_itself(program: Program) -> bool:
    """Say whether modules without graphs run torch's own code and functions: no key says what others do."""
    graphless = {
        getattr(type(module), "forward", None)  # TorchScript has none
        for module in program.names.distinct if capture_of(module) is None
    }  # fmt: skip
    return (
        None not in graphless
        and all(map(_is_of_torch, graphless))
        and all(map(_is_of_torch, vars(functional).values()))
    )


def _is_of_torch(value: object) -> bool:
    """Say whether a value is no function, or one that stands in a file of torch."""
    code = getattr(value, "__code__", None)
    return code is None or str(code.co_filename).startswith(_TORCH) or "<" in code.co_filename


# -- the model -------------------------------------------------------------------------------------------------------


def _of_model(program: Program) -> str:
    """Describe modules, forms of tensors, which of them are one, and the calls."""
    numbers: dict[Hashable, int] = {}
    described = StructuralHash(HashLevel.TIMED, numbers).whole(program.model, program.inputs)
    flags = tuple(program.names.name(module) for module in program.names.distinct if module.training)
    places = tuple(call.module for call in program.inputs)
    return _text((tuple(numbers), described.key, flags, places, program.training))


def _of_graphs(program: Program) -> Iterator[str]:
    """Yield the graphs with their guards, and why there are none: they hold whatever code and settings gave them."""
    known: dict[int, str] = {}
    for name, capture in program.captures.items():
        if id(capture) not in known:
            known[id(capture)] = f"#{len(known)}: {_of_capture(capture)}"
        text = known[id(capture)]
        yield f"{name} {text}"
        known[id(capture)] = text.partition(":")[0]
    yield from map(str, program.opaque.values())
    yield _text(tuple((program.names.name(module), why) for module, why in program.exact_types.items()))


def _of_capture(capture: Capture) -> str:
    return _text(
        tuple(
            (each.guards, tuple(each.arguments.items()), each.reads, each.volatile, _of_graph(each.graph))
            for each in capture.specializations
        )
    )


def _of_graph(graph: fx.Graph) -> str:
    text = "\n".join(str(node.format_node()) for node in graph.nodes)
    if _PLACE in text:
        raise _Untold
    return text


def _of_code(program: Program) -> list[str]:
    """Return the code that forwards run: where it is as it was, graphs that were compared with it need not be again."""
    return sorted(_of_function(each.function.__code__) for each in reached_functions(program.names.distinct))


def _of_function(code: CodeType) -> str:
    constants = (_of_function(each) if isinstance(each, CodeType) else _text(each) for each in code.co_consts)
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return _text((code.co_code, code.co_exceptiontable, names, tuple(constants)))


def _of_numbers(program: Program) -> str:
    """Return a checksum of all weights and inputs: errors that are within a budget hang on them."""
    calls = [tensor for call in program.inputs for tensor in tensors_in((call.args, call.kwargs))]
    return str(sum_of([tensor.detach().cpu() for tensor in (*all_tensors(program.names.distinct), *calls)]))


# -- where it runs ---------------------------------------------------------------------------------------------------


def _surroundings() -> Hashable:
    """Return versions, the machine, and what torch is told to compute with."""
    flags = (
        torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(),
        torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled, is_forked(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"),
    )  # fmt: skip
    installed = tuple((name, engine.version) for name, engine in engines().items())
    return _versions(), installed, _machine(), flags


@cache
def _versions() -> Hashable:
    return VERSION, _source(), torch.__version__, platform.python_version()


@cache
def _source() -> str:
    """Return a digest of the files of this package, by size and time: whoever edits them decides anew."""
    found = hashlib.sha256()
    for folder, folders, files in os.walk(_ROOT):
        folders[:] = sorted(each for each in folders if (Path(folder) / each / "__init__.py").is_file())
        for name in sorted(each for each in files if each.endswith(".py")):
            path = Path(folder) / name
            status = path.stat()
            found.update(f"{path.relative_to(_ROOT)} {status.st_size} {status.st_mtime_ns}\n".encode())
    return found.hexdigest()


@cache
def _machine() -> Hashable:
    told = cpu_capabilities()
    names = tuple(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))
    capable = tuple(sorted(f"{name}={value}" for name, value in told.items()))
    return platform.machine(), _processor(), torch.backends.cpu.get_cpu_capability(), capable, os.cpu_count(), names


def _processor() -> str:
    """Return the name and the flags of the processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    except (OSError, ValueError):
        return platform.processor()
    return "\n".join(line for line in lines if line.startswith(("model", "vendor", "stepping", "flags", "Features")))


# -- text --------------------------------------------------------------------------------------------------------------


def _text(value: Any) -> str:
    """Write a value as every process writes it; raise _Untold for an object that is equal to itself only."""
    if type(value) in PLAIN_TYPES:
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"({','.join(map(_text, cast('Sequence[Any]', value)))})"
    if isinstance(value, (set, frozenset)):
        return f"{{{','.join(sorted(map(_text, cast('frozenset[Any]', value))))}}}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [each.name for each in dataclasses.fields(value) if each.compare]
        return _text((type(value), *(getattr(value, name) for name in names)))
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    text = repr(value)
    if _PLACE in text or isinstance(value, nn.Module):
        raise _Untold
    return text
