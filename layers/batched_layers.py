"""Layers of N members at once, beyond the linear ones: convolutions, norms, pools, and whatever `vmap` computes.
Convolutions, batch norms and pools work on channels side by side, [B, N*C, ...], and give views of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import FusedMemberError
from ..operators import resolve
from .ensemble import align_members

__all__ = [
    "attend_members", "batch_norm_members", "convolve_members", "embed_members", "group_norm_members",
    "layer_norm_members", "member_dim", "member_numel", "member_size", "members_training",
    "normalize_member", "pool_members", "reshape_members", "results_of_member", "rms_norm_members",
]  # fmt: skip


def side_by_side(x: Tensor, spatial: int) -> Tensor:
    """Return [N, B, C, ...] as [B, N*C, ...], [N, C, ...] as [N*C, ...]; `spatial` dimensions follow the channels."""
    channels = x.ndim - 2 - spatial
    return x.movedim(0, channels).flatten(channels, channels + 1)


def apart(x: Tensor, members: int, spatial: int) -> Tensor:
    """Undo `side_by_side`; the result is a view."""
    channels = x.ndim - 1 - spatial
    sizes = (*x.shape[:channels], members, x.shape[channels] // members, *x.shape[channels + 1 :])
    return x.view(sizes).movedim(channels, 0)


# -- convolutions --------------------------------------------------------------------------------------------------


def convolve_members(
    path: str, x: Tensor, weight: Tensor, bias: Tensor | None, shared: bool, groups: int, options: dict[str, Any]
) -> Tensor:
    """Convolve x [B, C, ...] if `shared`, else [N, B, C, ...], all in one convolution, to [N, B, out, ...].
    Weight is [N, out, C / groups, ...] or, transposed, [N, C, out / groups, ...], bias [N, out]; there may be no batch.
    """
    count, spatial = weight.shape[0], weight.ndim - 3
    kernel, flat_bias = weight.flatten(0, 1), None if bias is None else bias.flatten()
    if not shared or groups > 1:
        wide, groups = side_by_side(_given_to_all(x, count) if shared else x, spatial), count * groups
    else:
        wide = x  # one convolution with everybody's output channels
        kernel = weight.movedim(0, 1).flatten(1, 2) if "transpose" in path else kernel
    return apart(resolve(path)(wide, kernel, flat_bias, groups=groups, **options), count, spatial)


def _given_to_all(x: Tensor, count: int) -> Tensor:
    return x.expand(count, *x.shape)


# -- norms ---------------------------------------------------------------------------------------------------------


def layer_norm_members(
    x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float, shared: bool
) -> Tensor:
    """Normalize the last dimensions, then scale and shift by each member's own [N, *shape]; x is [N, ...] or shared."""
    return _scaled(F.layer_norm(x, shape, None, None, eps), weight, bias, x.ndim + shared, len(shape))


def rms_norm_members(x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None, shared: bool) -> Tensor:
    """Divide by the root mean square of the last dimensions, then scale by each member's own [N, *shape]."""
    return _scaled(F.rms_norm(x, shape, None, eps), weight, None, x.ndim + shared, len(shape))


def group_norm_members(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, shared: bool
) -> Tensor:
    """Normalize groups of channels of x, [B, C, ...] if `shared` else [N, B, C, ...], with weights [N, C]."""
    if shared:
        normal, behind = F.group_norm(x, groups, None, None, eps), x.ndim - 2
    else:
        flat = F.group_norm(x.flatten(0, 1), groups, None, None, eps)
        normal, behind = flat.reshape(x.shape), x.ndim - 3
    ones = (1,) * behind
    weight = None if weight is None else weight.reshape(*weight.shape, *ones)
    bias = None if bias is None else bias.reshape(*bias.shape, *ones)
    return _scaled(normal, weight, bias, x.ndim + shared, 1 + behind)


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None, ndim: int, own: int) -> Tensor:
    """Scale and shift by tensors whose last `own` dimensions are x's, behind the members'."""
    between = (1,) * (ndim - 1 - own)
    if weight is not None:
        weight = weight.reshape(weight.shape[0], *between, *weight.shape[1:])
        if bias is None:
            return x * weight
        return torch.addcmul(bias.reshape(bias.shape[0], *between, *bias.shape[1:]), x, weight)
    return x if bias is None else x + bias.reshape(bias.shape[0], *between, *bias.shape[1:])


def batch_norm_members(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    batches: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    shared: bool,
) -> Tensor:
    """Normalize each member's channels [N, B, C, ...]; running statistics [N, C] are updated in place in training.
    Takes x [B, C, ...] if `shared`; weight and bias [N, C]; batches [N], how many were seen.
    """
    known = next((t for t in (weight, running_mean) if t is not None), None)
    count = x.shape[0] if known is None else known.shape[0]
    members = _given_to_all(x, count) if shared else x
    spatial = members.ndim - 3
    flat = [None if t is None else t.flatten() for t in (running_mean, running_var, weight, bias)]
    normal = normalize_member(
        side_by_side(members, spatial), flat[0], flat[1], flat[2], flat[3], batches, training, momentum, eps
    )
    return apart(normal, count, spatial)


def normalize_member(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    batches: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    """Do what the forward of `nn.BatchNorm1d`, 2d and 3d does."""
    if training and batches is not None:
        batches.add_(1)
    by_batch = training or running_mean is None
    return F.batch_norm(x, running_mean, running_var, weight, bias, by_batch, momentum, eps)


# -- attention -----------------------------------------------------------------------------------------------------


def attend_members(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Attend as `F.scaled_dot_product_attention` does, in each member's own [N, *, length, width]."""
    given = (query, key, value)
    query, key, value = (align_members(x, *given) for x in given)
    return F.scaled_dot_product_attention(query, key, value, **options)


# -- embeddings ----------------------------------------------------------------------------------------------------


def embed_members(indices: Tensor, weight: Tensor, padding: int | None, shared: bool) -> Tensor:
    """Look indices, [*] if `shared`, else [N, *], up in each member's own table.
    Takes weight [N, V, D], gives [N, *, D]; the row `padding` gets no gradient.
    """
    count, rows = weight.shape[:2]
    if shared:
        indices = indices.expand(count, *indices.shape)
    first = torch.arange(0, count * rows, rows, device=indices.device, dtype=indices.dtype)
    found = F.embedding(indices + first.view(count, *(1,) * (indices.ndim - 1)), weight.flatten(0, 1))
    if padding is None:
        return found
    return torch.where((indices == padding % rows).unsqueeze(-1), found.detach(), found)


# -- pools, shapes -------------------------------------------------------------------------------------------------


def pool_members(path: str, x: Tensor, spatial: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Pool [N, B, C, ...], or [N, C, ...], channel by channel."""
    return apart(resolve(path)(side_by_side(x, spatial), *args, **kwargs), x.shape[0], spatial)


def reshape_members(x: Tensor, *shape: Any) -> Tensor:
    """Reshape each member of x [N, ...]; a copy is made where the members' layout does not allow a view."""
    whole = len(shape) == 1 and isinstance(shape[0], (tuple, list))
    sizes = cast("Sequence[int]", shape[0]) if whole else shape
    return x.reshape(x.shape[0], *sizes)


def member_size(x: Tensor, dim: int | None = None) -> Any:
    """Return what `size` of one member of [N, ...] gives: its shape, or the length of one dimension."""
    return x.shape[1:] if dim is None else x.shape[1:][dim]


def member_dim(x: Tensor) -> int:
    """Return the number of dimensions that one member of [N, ...] has."""
    return x.ndim - 1


def member_numel(x: Tensor) -> int:
    """Return the number of elements that one member of [N, ...] has."""
    return x[0].numel()


def results_of_member(results: Any, index: int) -> Any:
    """Return one member's part of several stacked results, in the structure that these have."""
    return pytree.tree_map_only(Tensor, lambda stacked: stacked[index], results)


def members_training(*flags: bool) -> bool:
    """Return the members' common mode, or raise a FusedMemberError."""
    if len(set(flags)) > 1:
        raise FusedMemberError(
            "some members of a fused ensemble are in training mode and others are not; set "
            "all to one mode, or call fxopt.restore(model) to get the original structure back"
        )
    return flags[0]
