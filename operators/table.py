"""The table: one row for operators of which the same is known, each operator in one row."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch.nn.functional as F
from torch import nn

from .attention import scaled_dot_product_attention
from .info import Chance, OpInfo
from .layout import laid_last

__all__ = ["TABLE"]

_FORMS: Mapping[str, Any] = {
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
    "setitem": (operator.setitem,),
    "eq": (operator.eq,),
    "ne": (operator.ne,),
    "lt": (operator.lt,),
    "le": (operator.le,),
    "gt": (operator.gt,),
    "ge": (operator.ge,),
    "laid_last": (laid_last,),
    "scaled_dot_product_attention": (F.scaled_dot_product_attention, scaled_dot_product_attention),
}
_PYTHON = cast("Mapping[str, tuple[Callable[..., Any], ...]]", _FORMS)
_MODULES: Mapping[str, tuple[type[nn.Module], ...]] = {
    "identity": (nn.Identity,),
    "batch_norm": (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    "cross_entropy": (nn.CrossEntropyLoss,),
    "pad": (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d),
}
"""Beside those whose name is the operator's, but for case and underscores."""
_KEPT = frozenset(
    "packed conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d batch_norm group_norm layer_norm "
    "rms_norm instance_norm local_response_norm prelu dropout dropout1d dropout2d dropout3d alpha_dropout identity "
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d "
    "adaptive_max_pool3d avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d interpolate upsample pad "
    "pixel_shuffle pixel_unshuffle softmax log_softmax normalize glu cumsum amax amin logsumexp mean prod sum norm std "
    "var flip roll cat stack chunk split flatten unsqueeze squeeze expand expand_as getitem narrow reshape permute "
    "transpose unbind laid_last to clone detach float double half bfloat16 type type_as masked_fill".split()
)
"""Their results may lie in memory like what they are given."""
_ANEW = frozenset("linear matmul bmm mm einsum contiguous size shape dim numel len setitem argmax argmin item".split())
_DROPOUT = Chance("p", 1, 0.5), Chance("training", 2, True)
_RECURRENT = Chance("dropout", 5, 0.0), Chance("train", 6, True)
"""Of packed sequences, which have one operand more, these places hold the number of layers and the probability."""


def _rows(names: str, **known: Any) -> list[OpInfo]:
    """Return a row for each name; `abs|absolute` is `abs`, also spelled `absolute`."""
    split = [word.split("|") for word in names.split()]
    known = {"pure": True, "random": False, "fresh": False, **known}
    return [
        OpInfo(
            name, tuple(aliases), _PYTHON.get(name, ()), _modules(name),
            order="kept" if name in _KEPT else "anew" if name in _ANEW else None, **known,
        )
        for name, *aliases in split
    ]  # fmt: skip


def _modules(name: str) -> tuple[type[nn.Module], ...]:
    """Return the modules of torch.nn that compute an operator."""
    return (*_MODULES.get(name, ()), *_NAMED.get(name.replace("_", ""), ()))


_NAMED: Mapping[str, tuple[type[nn.Module], ...]] = {
    name.lower(): (value,)
    for name, value in vars(nn).items()
    if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__.startswith("torch.nn.modules")
}


def _elementwise(names: str, **known: Any) -> list[OpInfo]:
    return _rows(names, **{"elementwise": True, "fresh": True, "keeps_type": True, **known})


def _batched(names: str, **known: Any) -> list[OpInfo]:
    return _rows(names, vectorizable=True, **known)


TABLE: tuple[OpInfo, ...] = (
    # -- element by element ----------------------------------------------------------------------------------------
    *_elementwise(
        "abs|absolute acos acosh asin asinh atan atanh ceil cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1 "
        "floor frac lgamma log log10 log1p log2 logit neg|negative rad2deg reciprocal relu round rsqrt sgn "
        "sigmoid|expit sign sin sinc sinh sqrt square tan tanh trunc celu elu gelu hardshrink hardsigmoid hardswish "
        "hardtanh leaky_relu logsigmoid mish relu6 selu silu softplus softshrink softsign tanhshrink threshold"
    ),
    *_elementwise("positive", fresh=False),
    *_elementwise("bitwise_not", differentiable=False),
    *_elementwise("isfinite isinf isnan logical_not signbit", keeps_type=False, differentiable=False),
    *_elementwise(
        "atan2 copysign div|divide|true_divide floor_divide fmod pow remainder sub|subtract xlogy addcdiv addcmul "
        "clamp|clip lerp"
    ),
    *_elementwise("where", alone="nonzero"),
    *_elementwise(
        "add|__add__|__radd__|__iadd__ mul|multiply fmax fmin hypot logaddexp logaddexp2 maximum minimum",
        commutative=True,
    ),
    *_elementwise("bitwise_and bitwise_or bitwise_xor", commutative=True, differentiable=False),
    *_elementwise("ge gt le lt", keeps_type=False, differentiable=False),
    *_elementwise("eq ne logical_and logical_or logical_xor", commutative=True, keeps_type=False, differentiable=False),
    # -- layers ----------------------------------------------------------------------------------------------------
    *_rows("linear", fresh=True, keeps_rank=True, has_dimensions=True),
    *_batched("derived"),
    *_rows("packed static_int8", fresh=True, keeps_rank=True, has_dimensions=True),
    *_rows("packed_lstm condition delegated"),
    *_batched(
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d group_norm layer_norm rms_norm",
        fresh=True,
        keeps_rank=True,
        has_dimensions=True,
    ),
    *_rows("batch_norm", pure=False, counts=True, fresh=True, keeps_rank=True, has_dimensions=True),
    *_rows("native_batch_norm", pure=False, counts=True),
    *_batched("instance_norm", pure=False),
    *_batched("embedding", fresh=True, has_dimensions=True),
    *_batched("bilinear", fresh=True),
    *_rows("cross_entropy", fresh=True),
    *_batched("adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d lp_pool1d lp_pool2d prelu", fresh=True),
    *_batched(
        "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d avg_pool1d avg_pool2d avg_pool3d max_pool1d "
        "max_pool2d max_pool3d",
        fresh=True,
        keeps_rank=True,
        has_dimensions=True,
    ),
    *_batched("glu", fresh=True, has_dimensions=True),
    *_batched("interpolate pad", keeps_rank=True, has_dimensions=True),
    *_batched("local_response_norm pixel_shuffle pixel_unshuffle upsample"),
    *_rows("identity"),
    # -- along dimensions ------------------------------------------------------------------------------------------
    *_batched("softmax log_softmax cumsum", fresh=True, keeps_rank=True),
    *_batched("normalize", keeps_rank=True),
    *_batched("amax amin cumprod gather index_select logsumexp mean prod sum", fresh=True),
    *_batched("norm softmin std take_along_dim var flip roll"),
    *_batched("argmax argmin", fresh=True, differentiable=False),
    *_rows("argsort", differentiable=False),
    # -- products and joins ----------------------------------------------------------------------------------------
    *_batched("matmul", fresh=True),
    *_batched("bmm", fresh=True, has_dimensions=True),
    *_batched("einsum"),
    *_rows("mm mv addmm addmv addbmm addr baddbmm", fresh=True),
    *_batched("cat|concat|concatenate stack", fresh=True, has_dimensions=True),
    # -- what a tensor looks like ----------------------------------------------------------------------------------
    *_batched("chunk flatten split tril triu unflatten unsqueeze", has_dimensions=True),
    *_batched("diagonal expand expand_as getitem narrow reshape squeeze tensor_split unbind view view_as"),
    *_batched("bfloat16 contiguous double float half permute to transpose", keeps_rank=True),
    *_rows("laid_last", keeps_rank=True),
    *_batched("type type_as"),
    *_batched("clone", fresh=True, keeps_rank=True),
    *_batched("detach", keeps_rank=True, differentiable=False),
    *_batched("dim numel shape size len", differentiable=False),
    *_rows("item numpy tolist", differentiable=False),
    # -- shaped by the first operand, or by data -------------------------------------------------------------------
    *_batched("masked_fill", fresh=True, shape="first"),
    *_rows("masked_scatter index_copy index_add index_put scatter scatter_add zeros_like ones_like", shape="first"),
    *_rows("empty_like", shape="first"),
    *_rows("setitem", pure=False, shape="first"),
    *_rows("nonzero argwhere masked_select unique unique_consecutive bincount histogram combinations", shape="data"),
    # -- random ----------------------------------------------------------------------------------------------------
    *_batched("dropout", random=True, chances=_DROPOUT, keeps_rank=True),
    *_batched(
        "scaled_dot_product_attention",
        random=True,
        chances=(Chance("dropout_p", 4, 0.0),),
        fresh=True,
        has_dimensions=True,
    ),
    *_rows(
        "dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout feature_dropout native_dropout bernoulli "
        "binomial multinomial normal poisson rand rand_like randint randint_like randn randn_like randperm rrelu "
        "rrelu_with_noise uniform exponential geometric cauchy log_normal random gumbel_softmax fractional_max_pool2d "
        "fractional_max_pool2d_with_indices fractional_max_pool3d fractional_max_pool3d_with_indices "
        "multi_head_attention_forward",
        random=True,
    ),
    *_rows("gru lstm rnn_relu rnn_tanh", random=True, chances=_RECURRENT),
    # -- what does more than compute -------------------------------------------------------------------------------
    *_rows("manual_seed seed save load", pure=False),
)
