"""The functions, methods and attributes that a standalone archive may name; it can name nothing else.

They compute with tensors and numbers. What reads or writes files, runs text or code, hands out memory or takes
functions is left out, and so is every private name.
"""

from __future__ import annotations

import inspect
import math
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..compat import native_torch_functions
from ..errors import ArchiveError
from ..layers import batched_layers, batched_recurrent, ensemble
from ..layers.folded import expect_dimensions
from ..passes.operators import resolve
from ..tracing.guards import require

__all__ = [
    "ATTRIBUTES",
    "check_path",
    "checked_attribute",
    "checked_method",
    "find_function",
    "is_method",
    "name_of_function",
    "takes_path",
]

_UNFIT_FAMILIES = tuple(
    "cudnn_ fbgemm_ from_ miopen_ mkldnn_ native_ quantized_ rnn_ segment_ sparse_ batch_norm_ fused_ q_ sym_ lstm gru "
    "choose_ resize_ unsafe_".split()
)
"""What begins so is a kernel of one backend, reaches for files or memory, or builds tensors that nothing checks."""

_UNFIT_FUNCTIONS = frozenset(
    "asarray embedding_renorm_ frombuffer hash_tensor is_distributed is_vulkan_available slice_inverse".split()
)

_TORCH_PYTHON = (
    "atleast_1d atleast_2d atleast_3d block_diag broadcast_shapes broadcast_tensors cartesian_prod cdist chain_matmul "
    "einsum istft meshgrid norm split stft tensordot unique unique_consecutive unravel_index device finfo iinfo "
    "is_grad_enabled is_inference_mode_enabled is_autocast_enabled"
).split()

_UNFIT_FUNCTIONALS = frozenset(
    "assert_int_or_pair boolean_dispatch handle_torch_function has_torch_function has_torch_function_unary "
    "has_torch_function_variadic triplet_margin_with_distance_loss Optional".split()
)

_UNFIT_OPERATORS = frozenset("attrgetter call delitem itemgetter length_hint methodcaller".split())

_UNFIT_METHODS = frozenset(
    "apply_ as_subclass const_data_ptr data_ptr is_pinned is_set_to map2_ map_ new numpy pin_memory record_stream "
    "requires_grad_ retain_grad set_ slice_inverse to_dense to_mkldnn to_padded_tensor untyped_storage".split()
)

_UNFIT_METHOD_FAMILIES = ("_", "q_", "resize_", "sparse_", "to_sparse", "unsafe_")

_PYTHON_METHODS = "istft norm split stft unflatten unique unique_consecutive".split()

ATTRIBUTES = frozenset(
    # of tensors
    "H T data device dtype imag is_cpu is_cuda is_leaf is_meta is_nested is_quantized is_sparse itemsize layout mH mT "
    "nbytes ndim real requires_grad shape "
    # of types, devices, and of what finfo and iinfo return
    "bits eps index is_complex is_floating_point is_signed max min resolution smallest_normal tiny type "
    # of what comes from functions that return several tensors
    "L LU P Q R S U V Vh bin_edges eigenvalues eigenvectors exponent hist indices info logabsdet mantissa pivots rank "
    "residuals sign singular_values solution values".split()
)
"""What a graph may read from a value."""


def find_function(name: object) -> Callable[..., Any]:
    """Return the function that an archive means by a name.

    Raises:
        ArchiveError: if it is none that archives may call.
    """
    found = _functions().get(name) if isinstance(name, str) else None
    if found is None:
        raise ArchiveError(f"{name!r} is no function that an archive may call, or this torch lacks it")
    return found


def name_of_function(function: Any) -> str | None:
    """Return the name by which archives call a function, or None if they may not."""
    return _names().get(id(function))


def is_method(name: object) -> bool:
    """Say whether an archive may call a method of this name."""
    return isinstance(name, str) and name in _methods()


def checked_method(name: object) -> str:
    """Return the name of a method.

    Raises:
        ArchiveError: if it is none that archives may call.
    """
    if not isinstance(name, str) or not is_method(name):
        raise ArchiveError(f"{name!r} is no method that an archive may call, or this torch lacks it")
    return name


def checked_attribute(name: object) -> str:
    """Return the name of an attribute.

    Raises:
        ArchiveError: if it is none that archives may read.
    """
    if not isinstance(name, str) or name not in ATTRIBUTES:
        raise ArchiveError(f"{name!r} is no attribute that an archive may read")
    return name


@cache
def takes_path(function: Callable[..., Any]) -> bool:
    """Say whether the first argument of a function of fxopt's own names another function, by `operators.resolve`."""
    own = (ensemble, batched_layers, batched_recurrent)
    is_own = inspect.isfunction(function) and function.__module__ in {home.__name__ for home in own}
    return is_own and next(iter(inspect.signature(function).parameters), None) == "path"


def check_path(path: object) -> None:
    """Make sure that what `operators.resolve` finds by a name is a function or method that archives may call.

    Raises:
        ArchiveError: if it is none.
    """
    if isinstance(path, str) and path.startswith("."):
        checked_method(path[1:])
        return
    try:
        function = resolve(path) if isinstance(path, str) else None
    except KeyError:
        function = None
    if function in (None, getattr, require) or name_of_function(function) is None:
        raise ArchiveError(f"{path!r} is no function that an archive may call, or this torch lacks it")


@cache
def _functions() -> Mapping[str, Callable[..., Any]]:
    return dict((*_torch_functions(), *_functionals(), *_plain_functions()))


@cache
def _names() -> Mapping[int, str]:
    names: dict[int, str] = {}
    for name, function in _functions().items():
        names.setdefault(id(function), name)
    return names


def _torch_functions() -> Iterator[tuple[str, Any]]:
    for name in native_torch_functions():
        if not name.startswith(("_", *_UNFIT_FAMILIES)) and name not in _UNFIT_FUNCTIONS:
            yield f"torch.{name}", getattr(torch, name)
    for name in _TORCH_PYTHON:
        yield f"torch.{name}", getattr(torch, name)
    for home in ("linalg", "fft", "special"):
        for name, function in _contents(getattr(torch, home)):
            if isinstance(function, types.BuiltinFunctionType) and not name.startswith("_"):
                yield f"torch.{home}.{name}", function


def _contents(module: types.ModuleType) -> list[tuple[str, Any]]:
    return list(vars(module).items())


def _functionals() -> Iterator[tuple[str, Any]]:
    for name, function in _contents(F):
        is_torchs = str(getattr(function, "__module__", None) or "torch").startswith("torch")
        unfit = name.startswith("_") or name in _UNFIT_FUNCTIONALS or inspect.isclass(function)
        if callable(function) and is_torchs and not unfit:
            yield f"torch.nn.functional.{name}", function


def _plain_functions() -> Iterator[tuple[str, Any]]:
    for name, function in _contents(operator):
        if name in operator.__all__ and name not in _UNFIT_OPERATORS:
            yield f"operator.{name}", function
    for name, function in _contents(math):
        if isinstance(function, types.BuiltinFunctionType) and not name.startswith("_"):
            yield f"math.{name}", function
    for home in (ensemble, batched_layers, batched_recurrent):
        for name, function in _contents(home):
            if name in home.__all__ and inspect.isfunction(function):
                yield f"fxopt.layers.{name}", function
    yield "fxopt.layers.expect_dimensions", expect_dimensions
    for function in (getattr, len, list, round):
        yield f"builtins.{function.__name__}", function
    yield "fxopt.require", require


@cache
def _methods() -> frozenset[str]:
    base = Tensor.__base__
    native = {name for name in dir(base) if isinstance(getattr(base, name), types.MethodDescriptorType)}
    fit = {name for name in native - _UNFIT_METHODS if not name.startswith(_UNFIT_METHOD_FAMILIES)}
    return frozenset(fit.union(_PYTHON_METHODS))
