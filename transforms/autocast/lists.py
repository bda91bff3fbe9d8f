"""Which operators gain in 16 bits and which need float32, as torch's autocast on CUDA has it; and which follow."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from torch import nn

from ...layers import batched_layers, ensemble
from ...layers.moe import MixtureOfExperts
from ...operators import operator_info, operator_of_module

__all__ = ["FLOAT32", "FOLLOWING", "LOWER", "Kind", "kind_of", "kind_of_fused", "kind_of_layer"]


class Kind(enum.Enum):
    """What a region does with an operator."""

    LOWER = "lower"
    """It gains: a region is made around it."""
    FOLLOWS = "follows"
    """It belongs to a region where it reads what is computed there."""
    ROUNDS = "rounds"
    """It follows where all that it reads is bfloat16; else, and in float16, it stays in float32."""
    FLOAT32 = "float32"
    """It stays outside, and so in float32."""


LOWER = frozenset(
    "linear bilinear matmul bmm mm mv addmm addmv addbmm addr baddbmm einsum conv1d conv2d conv3d "
    "conv_transpose1d conv_transpose2d conv_transpose3d scaled_dot_product_attention".split()
)
"""Products of matrices and convolutions."""

FLOAT32 = frozenset(
    "acos asin cosh sinh tan erfinv exp exp2 expm1 log log2 log10 log1p logsigmoid logit pow reciprocal rsqrt softplus "
    "xlogy logaddexp logaddexp2 lgamma digamma atan2 addcdiv hypot "
    "softmax log_softmax softmin logsumexp layer_norm group_norm rms_norm instance_norm local_response_norm normalize "
    "norm renorm cdist pdist dist cosine_similarity sum mean prod cumsum cumprod var std "
    "binary_cross_entropy binary_cross_entropy_with_logits cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss "
    "huber_loss kl_div poisson_nll_loss gaussian_nll_loss hinge_embedding_loss cosine_embedding_loss "
    "margin_ranking_loss multi_margin_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss ctc_loss".split()
)
"""What loses in 16 bits: powers, exponentials and logarithms, norms, sums over many terms, losses."""

ROUNDING = frozenset("pow softmax softmin layer_norm group_norm rms_norm instance_norm".split())
"""Of these: what torch computes in float32 within, so that of bfloat16, which has the range, it rounds once more."""

FOLLOWING = frozenset(
    "batch_norm dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout prelu rrelu identity glu "
    "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d "
    "adaptive_max_pool1d adaptive_max_pool2d pad interpolate pixel_shuffle pixel_unshuffle "
    "cat stack chunk flatten split tensor_split tril triu unflatten unsqueeze squeeze diagonal expand expand_as "
    "getitem narrow reshape unbind view view_as permute transpose to contiguous clone flip roll masked_fill detach "
    "laid_last dim numel shape size len".split()
)
"""Beside those that work element by element."""


def kind_of_fused(function: object) -> Kind | None:
    """Return what a region does with a function that fused members are computed by; None for any other."""
    return next((kind for kind, functions in _FUSED.items() if function in functions), None)


_FUSED: Mapping[Kind, tuple[object, ...]] = {
    Kind.LOWER: (
        ensemble.wide_linear,
        ensemble.batched_linear,
        ensemble.shared_batched_linear,
        ensemble.grouped_linear,
        ensemble.shared_grouped_linear,
        batched_layers.convolve_members,
        batched_layers.attend_members,
    ),
    Kind.FOLLOWS: (
        ensemble.gather_members,
        ensemble.select_members,
        ensemble.split_vectors,
        ensemble.align_members,
        ensemble.stack_members,
        ensemble.concatenate_members,
        ensemble.unbind_members,
        batched_layers.batch_norm_members,
        batched_layers.reshape_members,
    ),
}


def kind_of_layer(cls: type[nn.Module]) -> Kind:
    """Return what a region does with a leaf: as with its operator; experts gain, whose router stays in float32."""
    return Kind.LOWER if issubclass(cls, MixtureOfExperts) else kind_of(operator_of_module(cls))


def kind_of(name: str | None) -> Kind:
    """Return what a region does with an operator, by its canonical name; with an unknown one, nothing."""
    if name in ROUNDING:
        return Kind.ROUNDS
    if name is None or name in FLOAT32:
        return Kind.FLOAT32
    if name in LOWER:
        return Kind.LOWER
    return Kind.FOLLOWS if name in FOLLOWING or operator_info(name).elementwise else Kind.FLOAT32
