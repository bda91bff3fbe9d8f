"""The batched operations that fused graphs call: N members at once, the members along dimension 0.

Each is the fewest torch calls that do the job: with small members the calls cost most of the time. Shapes have N
members, `*` for any number of leading dimensions, none included; an empty batch is fine everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "align_members", "batched_linear", "concatenate_members", "gather_members", "grouped_linear", "have_one_shape",
    "select_members", "shared_batched_linear", "shared_grouped_linear", "split_vectors", "stack_members",
    "sum_members", "unbind_members", "wide_linear",
]  # fmt: skip


# -- linear --------------------------------------------------------------------------------------------------------


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply N linears to one shared input [*, in] as a single matrix product, to [N, *, out]; weight is [N, out, in].
    Bias is [N, out] or [N * out]; of several rows the result is a view of a contiguous [N, out, *].
    """
    rows = x if x.ndim == 2 else x.flatten(0, -2) if x.ndim > 2 else x.unsqueeze(0)
    results = _wide_product(rows, weight, bias)
    if x.ndim == 2:
        return results
    return torch.unflatten(results, 1, x.shape[:-1]) if x.ndim > 2 else results.squeeze(1)


def _wide_product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return [N, rows, out], with the fewest views for one row, where they take a third of the time."""
    count, size, width = weight.shape
    flat = weight.reshape(count * size, width)
    if rows.shape[0] == 1:
        return F.linear(rows, flat, None if bias is None else bias.flatten()).view(count, 1, size)
    columns = rows.t()
    wide = torch.mm(flat, columns) if bias is None else torch.addmm(bias.reshape(-1, 1), flat, columns)
    return wide.view(count, size, rows.shape[0]).mT


def batched_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply linear i to input i, [N, *, in], as one batched matrix product, to [N, *, out]; weight is [N, out, in].
    Bias is [N, out] or [N * out]; the result is a view of a contiguous [N, out, *] where `x` is one.
    """
    if x.ndim == 3:
        return _batched_product(x, weight, bias)
    if x.ndim == 2:
        return _batched_product(x.unsqueeze(1), weight, bias).squeeze(1)
    return torch.unflatten(_batched_product(x.flatten(1, -2), weight, bias), 1, x.shape[1:-1])


def _batched_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # The form that needs no copy of x, forward or backward: up to three times as fast as the other on a CPU.
    if x.stride(-2) == 1:
        if bias is None:
            return torch.bmm(weight, x.mT).mT
        return torch.baddbmm(bias.reshape(weight.shape[0], weight.shape[1], 1), weight, x.mT).mT
    if bias is None:
        return torch.bmm(x, weight.mT)
    return torch.baddbmm(bias.reshape(weight.shape[0], 1, weight.shape[1]), x, weight.mT)


def shared_batched_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply N linears to one shared input [*, in], expanded and not copied, as one batched product: [N, *, out]."""
    return batched_linear(x.expand(weight.shape[0], *x.shape), weight, bias)


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply linear i to input i, [N, *, in], as a convolution with one group for each member: [N, *, out]."""
    if x.numel() == 0 or weight.numel() == 0:
        return batched_linear(x, weight, bias)  # a convolution refuses an empty sequence, and empty channels
    columns = x.flatten(1, -2).mT if x.ndim > 2 else x.unsqueeze(-1)
    # The rows lie along the sequence, not the batch: up to nine times as fast on a CPU from 256 rows on.
    kernel = weight.flatten(0, 1).unsqueeze(-1)
    wide = F.conv1d(
        columns.flatten(0, 1).unsqueeze(0), kernel, None if bias is None else bias.flatten(), groups=weight.shape[0]
    )
    return wide.view(weight.shape[0], weight.shape[1], -1).mT.reshape(*x.shape[:-1], weight.shape[1])


def shared_grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply N linears to one shared input [*, in] as a convolution with one group for each member: [N, *, out]."""
    return grouped_linear(x.expand(weight.shape[0], *x.shape), weight, bias)


# -- operands ------------------------------------------------------------------------------------------------------


def split_vectors(x: Tensor, count: int, size: int) -> Tensor:
    """Return the vectors [count, size] that lie behind one another in a parameter [count * size], as a view.
    Of a parameter that is divided, a process has some of them.
    """
    return x.view(-1 if size else count, size)


def have_one_shape(*members: Tensor) -> bool:
    """Say whether tensors all have one shape."""
    return all(member.shape == members[0].shape for member in members[1:])


def gather_members(*members: Tensor) -> Tensor:
    """Stack N separate tensors of one shape [...] into [N, ...]."""
    return torch.stack(members)


def select_members(x: Tensor, dim: int, count: int) -> Tensor:
    """Return the first `count` slices of `x` along `dim` as members: slice i is member i of [N, ...], a view.
    Raises an IndexError if `x` has fewer, as the member that reads the missing one would have.
    """
    if x.shape[dim] < count:
        raise IndexError(f"{count} members read dimension {dim} of a tensor with shape {list(x.shape)}")
    return x.narrow(dim, 0, count).movedim(dim, 0)


def align_members(x: Tensor, *others: Tensor, shared: Sequence[object] = ()) -> Tensor:
    """Return a view of x [N, ...] that broadcasts against other members' and what is `shared`: [N, 1, ..., 1, ...]."""
    ranks = [other.ndim for other in others] + [y.ndim + 1 for y in shared if isinstance(y, Tensor)]
    rank = max(ranks, default=0)
    for _ in range(rank - x.ndim):
        x = x.unsqueeze(1)
    return x


# -- where members come apart and together -------------------------------------------------------------------------
#
# Results are contiguous, as those of the calls they stand for are: somebody may `view` them. They are copied only where
# they are not so yet, unless `copy` asks for memory of their own: somebody may write into them while `x` is still read.


def stack_members(x: Tensor, dim: int = 0, copy: bool = False) -> Tensor:
    """Return what `torch.stack` of the members of x [N, ...] along `dim` gives; a `copy` shares no memory."""
    moved = x.movedim(0, dim) if dim else x
    return moved.clone(memory_format=torch.contiguous_format) if copy else moved.contiguous()


def concatenate_members(x: Tensor, dim: int = 0, copy: bool = False) -> Tensor:
    """Return what `torch.cat` of the members of x along `dim` gives, contiguous; a `copy` shares no memory.
    Raises an IndexError if a member has no such dimension.
    """
    rank = x.ndim - 1
    if not -rank <= dim < rank:
        raise IndexError(f"cannot concatenate members with {rank} dimensions along dimension {dim}")
    dim %= rank
    if copy:
        return stack_members(x, dim, copy=True).flatten(dim, dim + 1)
    if dim == 1 and rank == 2 and x.shape[1] == 1:
        return x.reshape(1, -1)  # members of one row lie behind one another already
    moved = x.transpose(0, 1) if dim == 1 else x.movedim(0, dim) if dim else x
    return moved.flatten(dim, dim + 1).contiguous()


def sum_members(x: Tensor) -> Tensor:
    """Return the sum of the members, [...] of [N, ...]; contiguous."""
    return x.sum(0).contiguous()


def unbind_members(x: Tensor, copy: bool = False) -> tuple[Tensor, ...]:
    """Return the members one by one, each [...] of [N, ...]; contiguous, and apart in memory from each other.
    Each may be written in place, which autograd forbids for `unbind`; with `copy` none shares memory with `x`.
    """
    x = x.clone(memory_format=torch.contiguous_format) if copy else x.contiguous()
    if x.ndim == 1 or x.shape[1] == 0:
        return tuple(member.squeeze(0) for member in torch.unsafe_split(x, 1))
    return torch.unsafe_split(x.flatten(0, 1), x.shape[1])  # many times as fast as the other, for many members
