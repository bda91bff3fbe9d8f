"""What each operator of torch does with the dimensions of its operands: one row for those that do the same."""

from __future__ import annotations

from collections.abc import Mapping

from . import elementwise as e
from . import products as p
from . import reductions as r
from . import shapes as s

__all__ = ["RULES"]

_COUNTS = ", in which a zero counts, too: such units (classes, say) stay"
_NUMBERS = ", which gives numbers of units, as a router of experts does: these are not followed"

_TABLE: Mapping[str, e.Rule] = {
    # Element by element: whether the result is zero, by whether the operands are.
    "relu relu6 gelu silu tanh sin tan asin atan sinh asinh atanh sqrt abs neg negative positive leaky_relu elu "
    "hardswish mish celu selu sign sgn erf expm1 log1p clone detach alias _to_copy lift_fresh lift contiguous square "
    "round floor ceil trunc frac nan_to_num softshrink hardshrink rrelu_with_noise prelu _prelu_kernel erfinv deg2rad "
    "native_dropout dropout feature_dropout alpha_dropout zeros_like empty_like real imag isnan isinf _conj to zero "
    "rad2deg div true_divide floor_divide fmod remainder pow": e.elementwise(e.first),
    "sigmoid exp cos log log2 log10 reciprocal rsqrt softplus hardsigmoid logical_not bitwise_not log_sigmoid "
    "log_sigmoid_forward erfc cosh acos ones_like full_like fill rand_like randn_like bernoulli threshold exp2 digamma "
    "lgamma uniform normal exponential geometric random isfinite logit i0 randint_like eq ge le atan2 xlogy logaddexp "
    "nextafter float_power polar complex isclose": e.elementwise(e.never),
    "add sub rsub maximum minimum copy hypot ne fmax fmin bitwise_or bitwise_xor logical_or logical_xor gt lt":
        e.elementwise(all, scalars=2),
    "mul bitwise_and logical_and": e.elementwise(any),
    "addcmul addcdiv": e.elementwise(lambda flags: bool(flags[0]) and any(flags[1:])),
    "lerp": e.elementwise(lambda flags: all(flags[:2])),
    "clamp clip clamp_min hardtanh": e.clamp,
    "clamp_max": e.clamp_max,
    "where": e.elementwise(lambda flags: all(flags[1:]), scalars=3),
    "masked_fill": e.masked_fill,
    # By index.
    "embedding": e.embedding,
    "index_select": r.along(zero=True),
    "index _unsafe_index": e.index,
    "gather": e.gather,
    "scatter_add scatter scatter_reduce index_add index_reduce": e.add_index,
    "index_put _index_put_impl": e.index_put,
    # Shapes.
    "view _unsafe_view reshape flatten squeeze squeeze_ _reshape_alias unflatten": s.view,
    "t transpose numpy_T swapaxes": s.transpose,
    "permute": s.permute,
    "unsqueeze": s.unsqueeze,
    "expand broadcast_to expand_as": s.expand,
    "slice": s.slice_,
    "select": s.select,
    "unbind": s.unbind,
    "split unsafe_split chunk unsafe_chunk tensor_split": s.split,
    "split_with_sizes unsafe_split_with_sizes split_with_sizes_copy": s.split_with_sizes,
    "cat concat": s.cat,
    "stack": s.stack,
    "flip": s.flip,
    "as_strided": s.as_strided,
    "glu": s.glu,
    "repeat": s.repeat,
    "repeat_interleave": s.repeat_interleave,
    "tril triu": r.in_last(2),
    "constant_pad_nd": s.pad,
    # Products.
    "mm": p.MM,
    "bmm": p.BMM,
    "mv": p.MV,
    "dot": p.product((0, 0), {}, {}),
    "_grouped_mm": p.grouped_mm,
    "addmm": p.added(p.MM),
    "addmv": p.added(p.MV),
    "baddbmm": p.added(p.BMM),
    "linear": p.linear,
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention scaled_dot_product_attention "
    "_scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math_for_mps": p.attention,
    "convolution _convolution convolution_overrideable": p.convolution,
    # In space.
    "max_pool1d avg_pool1d adaptive_avg_pool1d adaptive_max_pool1d upsample_nearest1d upsample_linear1d "
    "reflection_pad1d replication_pad1d _upsample_nearest_exact1d max_pool1d_with_indices": r.in_last(1),
    "max_pool2d max_pool2d_with_indices avg_pool2d adaptive_avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d "
    "upsample_nearest2d upsample_bilinear2d upsample_bicubic2d reflection_pad2d replication_pad2d "
    "_upsample_nearest_exact2d _upsample_bilinear2d_aa mkldnn_max_pool2d grid_sampler_2d": r.in_last(2),
    "max_pool3d max_pool3d_with_indices avg_pool3d adaptive_avg_pool3d _adaptive_avg_pool3d adaptive_max_pool3d "
    "upsample_nearest3d upsample_trilinear3d reflection_pad3d replication_pad3d _upsample_nearest_exact3d":
        r.in_last(3),
    "pixel_shuffle": p.pixel_shuffle,
    "im2col": s.im2col,
    "col2im": s.col2im,
    "unfold": s.unfold,
    "pixel_unshuffle": p.pixel_unshuffle,
    "channel_shuffle native_channel_shuffle": p.channel_shuffle,
    # Reductions and norms.
    "sum nansum": r.reduction(additive=True),
    "mean": r.reduction(observed="mean"),
    "linalg_vector_norm norm": r.reduction(1, additive=True),
    "amax amin max min aminmax median mode kthvalue prod any all std var std_mean var_mean": r.reduction(),
    "logsumexp argmax argmin": r.reduction(zero=False),
    "softmax _softmax log_softmax _log_softmax _safe_softmax": r.along(because=_COUNTS),
    "cumsum cumprod logcumsumexp": r.along(zero=True),
    "roll": r.along(1, default=None, zero=True),
    "sort argsort": r.along(default=-1, because=_NUMBERS),
    "topk": r.along(1, default=-1, because=_NUMBERS),
    "native_batch_norm cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit _batch_norm_with_update "
    "_native_batch_norm_legit_no_training _batch_norm_no_update batch_norm": r.batch_norm,
    "native_layer_norm layer_norm": r.normalized("layer"),
    "rms_norm _fused_rms_norm": r.normalized("rms"),
    "native_group_norm": r.group_norm,
}  # fmt: skip

RULES: Mapping[str, e.Rule] = {name: rule for names, rule in _TABLE.items() for name in names.split()}
"""Name of an operator -> its rule."""
