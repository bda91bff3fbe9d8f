"""One name for each operator, however the user spelled it: function, method, in-place or Python operator.

Modules need no table: the forward of a `torch.nn` leaf is traced, and what it calls is looked up here.
"""

from __future__ import annotations

import builtins
import inspect
import operator
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import fx, nn

from ..compat import native_functions
from ..tracing.autograd_functions import FunctionCall

__all__ = [
    "KEEP_RANK",
    "POINTWISE",
    "VECTORIZABLE",
    "canonical_name",
    "function_of",
    "function_path",
    "in_place_signature",
    "is_random",
    "mutates",
    "operator_of_module",
    "resolve",
]

_UNARY = (
    "abs acos acosh asin asinh atan atanh bitwise_not ceil cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1 "
    "floor frac isfinite isinf isnan lgamma log log10 log1p log2 logical_not logit neg positive rad2deg reciprocal "
    "relu round rsqrt sgn sigmoid sign signbit sin sinc sinh sqrt square tan tanh trunc celu elu gelu hardshrink "
    "hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu6 selu silu softplus softshrink softsign "
    "tanhshrink threshold"
).split()
_BINARY = (
    "add atan2 bitwise_and bitwise_or bitwise_xor copysign div eq floor_divide fmax fmin fmod ge gt hypot le "
    "logaddexp logaddexp2 logical_and logical_or logical_xor lt maximum minimum mul ne pow remainder sub xlogy"
).split()
_TERNARY = "addcdiv addcmul clamp lerp where".split()

POINTWISE = frozenset(_UNARY + _BINARY + _TERNARY)
"""Operators that compute each element of their (broadcast) result from one element of each operand."""

_DIMENSIONAL = (
    "softmax log_softmax softmin logsumexp cumsum cumprod mean sum amax amin prod var std flatten unflatten transpose "
    "permute unsqueeze squeeze glu normalize narrow chunk split tensor_split unbind cat stack flip roll"
).split()
_LAYERS = (
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d layer_norm group_norm rms_norm "
    "instance_norm embedding bilinear prelu max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d "
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d "
    "adaptive_max_pool3d lp_pool1d lp_pool2d pad interpolate pixel_shuffle pixel_unshuffle upsample "
    "local_response_norm scaled_dot_product_attention dropout"
).split()
_SHAPES = (
    "reshape view expand contiguous float half double bfloat16 to type clone detach expand_as view_as type_as "
    "masked_fill tril triu diagonal matmul bmm einsum gather index_select take_along_dim getitem norm argmax argmin"
).split()
_ATTRIBUTES = ("shape", "size", "dim", "numel", "len")

VECTORIZABLE = frozenset((*_DIMENSIONAL, *_LAYERS, *_SHAPES, *_ATTRIBUTES))
"""Further operators without side effects that `torch.func.vmap` computes for N members at once."""

KEEP_RANK = frozenset(
    "linear contiguous float half double bfloat16 to dropout softmax log_softmax layer_norm group_norm rms_norm "
    "batch_norm normalize clone detach conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
    "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
    "adaptive_avg_pool3d cumsum transpose permute".split()
)
"""Operators whose result has as many dimensions as their first operand."""

_PYTHON = cast(
    "Mapping[str, tuple[Callable[..., Any], ...]]",
    {
        "add": (operator.add, operator.iadd),
        "sub": (operator.sub, operator.isub),
        "mul": (operator.mul, operator.imul),
        "div": (operator.truediv, operator.itruediv),
        "floor_divide": (operator.floordiv, operator.ifloordiv),
        "remainder": (operator.mod, operator.imod),
        "pow": (operator.pow, operator.ipow),
        "neg": (operator.neg,),
        "positive": (operator.pos,),
        "matmul": (operator.matmul,),
        "getitem": (operator.getitem,),
        "eq": (operator.eq,),
        "ne": (operator.ne,),
        "lt": (operator.lt,),
        "le": (operator.le,),
        "gt": (operator.gt,),
        "ge": (operator.ge,),
    },
)
_IN_PLACE_NAMES = "iadd iand iconcat ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor".split()
_IN_PLACE_PYTHON = frozenset(getattr(operator, name) for name in _IN_PLACE_NAMES)
_IN_PLACE_METHODS = frozenset(["__setitem__", "__delitem__", *(f"__{name}__" for name in _IN_PLACE_NAMES)])

_SYNONYMS = {
    "linear": ("linear",),
    "cat": ("cat", "concat", "concatenate"),
    "stack": ("stack",),
    "add": ("add", "__add__", "__radd__", "__iadd__"),
    "sub": ("sub", "subtract"),
    "mul": ("mul", "multiply"),
    "div": ("div", "divide", "true_divide"),
    "clamp": ("clamp", "clip"),
    "neg": ("neg", "negative"),
    "abs": ("abs", "absolute"),
    "matmul": ("matmul",),
    "unbind": ("unbind",),
    "sum": ("sum",),
    "mean": ("mean",),
}
_RANDOM = frozenset(
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout feature_dropout bernoulli multinomial "
    "normal poisson rand rand_like randint randint_like randn randn_like randperm rrelu uniform exponential geometric "
    "cauchy log_normal random gumbel_softmax fractional_max_pool2d fractional_max_pool3d "
    "scaled_dot_product_attention".split()
)
_NAMESPACES: tuple[Any, ...] = (torch, F, torch.special, native_functions())


@cache
def _functions() -> dict[Any, str]:
    table: dict[Any, str] = {}
    for name in (*POINTWISE, *VECTORIZABLE, *_RANDOM, *_SYNONYMS):
        for spelling in _SYNONYMS.get(name, (name,)):
            for namespace in _NAMESPACES:
                for candidate in (spelling, f"{spelling}_"):
                    function = getattr(namespace, candidate, None)
                    if callable(function):
                        table[function] = name
    for name, forms in _PYTHON.items():
        table.update(dict.fromkeys(forms, name))
    return table


@cache
def _methods() -> dict[str, str]:
    """Return method name -> operator; `x.where(condition, y)` takes its operands in another order and is left out."""
    table = {spelling: name for name, spellings in _SYNONYMS.items() for spelling in spellings}
    names = (*POINTWISE, *VECTORIZABLE, *_RANDOM)
    table.update({name: name for name in names if name not in table and name != "where"})
    table.update({f"{spelling}_": name for spelling, name in table.items() if not spelling.startswith("__")})
    return table


def canonical_name(node: fx.Node) -> str | None:
    """Return the operator that a call_function or call_method node computes, or None where it is not known."""
    if node.op == "call_function":
        if node.target is getattr:
            return "shape" if node.args[1:] == ("shape",) else None
        if node.target is len:
            return "len"
        try:
            return _functions().get(node.target)
        except TypeError:
            return None
    if node.op == "call_method":
        return _methods().get(str(node.target))
    return None


@cache
def function_of(name: str, *, keywords: bool = False) -> Callable[..., Any]:
    """Return the out-of-place function that computes operator `name`; Python's own operators where they exist.

    Args:
        name: canonical.
        keywords: whether it will be given keyword arguments, which Python's operators do not take.

    Raises:
        KeyError: if `name` is not an operator of this table.
    """
    if name in _PYTHON and not keywords:
        return _PYTHON[name][0]
    for namespace in _NAMESPACES:
        function = getattr(namespace, name, None)
        if callable(function):
            return function
    raise KeyError(name)


_PREFIXES: Mapping[str, Any] = {
    "torch": torch, "torch.nn.functional": F, "torch.special": torch.special, "torch._C._nn": native_functions(),
    "operator": operator, "builtins": builtins,
}  # fmt: skip


def function_path(node: fx.Node) -> str | None:
    """Return a name that `resolve` finds the node's function by; methods are called like `.flatten`; else None."""
    if node.op == "call_method":
        return f".{node.target}"
    names = (getattr(node.target, "__name__", ""), canonical_name(node) or "")
    for prefix, namespace in _PREFIXES.items():
        for name in names:
            if name and getattr(namespace, name, None) is node.target:
                return f"{prefix}.{name}"
    return None


@cache
def resolve(path: str) -> Callable[..., Any]:
    """Return the function that `function_path` named.

    Raises:
        KeyError: if there is none.
    """
    prefix, _, name = path.rpartition(".")
    namespace = _PREFIXES[prefix] if prefix else torch.Tensor
    function = getattr(namespace, name, None)
    if not callable(function):
        raise KeyError(path)
    return function


def operator_of_module(module_type: type[nn.Module]) -> str | None:
    """Return the operator that a `torch.nn` leaf class computes, or None: `nn.Linear` is `linear`, `nn.GELU` `gelu`."""
    is_leaf = module_type.__module__.startswith("torch.nn.modules")
    if not is_leaf or getattr(nn, module_type.__name__, None) is not module_type:
        return None
    name = module_type.__name__.lower()
    known = {"leakyrelu": "leaky_relu"}.get(name, name)
    return known if known in POINTWISE or known == "linear" else None


def mutates(node: fx.Node) -> bool:
    """Say whether a node writes into one of its operands."""
    if node.op == "call_method":
        name = str(node.target)
        return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE_METHODS
    if node.op != "call_function":
        return False
    if node.target in (operator.setitem, operator.delitem) or node.target in _IN_PLACE_PYTHON:
        return True
    if "out" in node.kwargs or _asks_in_place(node):
        return True
    if isinstance(node.target, FunctionCall):
        return bool(node.meta.get("writes", True))
    name = getattr(node.target, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def _asks_in_place(node: fx.Node) -> bool:
    """Say whether a call passes `inplace=True`, by keyword or by position."""
    asked: Any = node.kwargs.get("inplace", False)
    signature = in_place_signature(node.target)
    if signature is not None:
        place = list(signature.parameters).index("inplace")
        asked = node.args[place] if place < len(node.args) else asked
    return asked is not None and asked is not False


def in_place_signature(function: Any) -> inspect.Signature | None:
    """Return the signature of a function of `torch.nn.functional` with a parameter `inplace`; None for any other."""
    name = getattr(function, "__name__", "")
    return _in_place_signature(name) if getattr(F, name, None) is function else None


@cache
def _in_place_signature(name: str) -> inspect.Signature | None:
    try:
        signature = inspect.signature(getattr(F, name))
    except (TypeError, ValueError):
        return None
    return signature if "inplace" in signature.parameters else None


def is_random(node: fx.Node) -> bool:
    """Say whether a call may draw random numbers."""
    return canonical_name(node) in _RANDOM
