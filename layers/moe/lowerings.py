"""How experts can be applied to the tokens that chose them: all lowerings are equal, each is fast somewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ...compat import autocast_dtype

__all__ = [
    "LOWERINGS", "Compute", "Linear", "Lowering", "Projection", "Task", "combine", "loop_over_experts",
    "outputs_in_blocks",
]  # fmt: skip

_SHORT = 4
"""So many tokens of an expert are few: products that start from its weights are faster."""

Linear = Callable[[Tensor], Tensor]
"""One projection, of the expert that each row belongs to: [..., in] -> [..., out]."""

Compute = Callable[[Tensor, Sequence[Linear]], Tensor]
"""What an expert computes from its tokens and its projections: [..., in] -> [..., out], each row by itself.

It is called with the rows of one expert or of many, in two dimensions or three. In three, a token may stand in several
rows, of which one counts.
"""

Lowering = Literal["loop", "grouped", "padded", "blocks", "gathered", "dense"]


_Sum = Callable[["Task", Tensor, "torch.dtype | None"], Tensor]
"""Of a task, the weights of each token's experts [tokens, k] and the dtype of the sum, by default that of outputs."""


class Projection(NamedTuple):
    """One linear layer of all experts: weights [experts, out, in], or [experts, in, out] if `transposed`.
    They, and the biases [experts, out], may be a tensor for each expert, which the loop alone can use.
    """

    weight: Tensor | Sequence[Tensor]
    bias: Tensor | Sequence[Tensor] | None = None
    transposed: bool = False

    @property
    def is_stacked(self) -> bool:
        """Whether the weights of all experts are one tensor."""
        return isinstance(self.weight, Tensor)

    def stacked(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight [experts, in, out], as a view, and the bias [experts, out]."""
        weight, bias = cast("tuple[Tensor, Tensor | None]", self[:2])
        return weight if self.transposed else weight.transpose(1, 2), bias

    def chosen(self, experts: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the weights [n, in, out] and biases [n, out] of some experts [n], copied as they lie in memory."""
        weight, bias = cast("tuple[Tensor, Tensor | None]", self[:2])
        return Projection(
            weight.index_select(0, experts), None if bias is None else bias.index_select(0, experts), self.transposed
        ).stacked()

    def members(self) -> tuple[Sequence[Tensor], Sequence[Tensor] | None]:
        """Return weights and biases that can be indexed by expert.
        Where gradients are wanted, stacked tensors are cut once: a gradient of every cut is as large as the stack.
        """
        return _cut(self.weight), None if self.bias is None else _cut(self.bias)


def _cut(tensors: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    if isinstance(tensors, Tensor) and tensors.requires_grad and torch.is_grad_enabled():
        return tensors.unbind()
    return cast("Sequence[Tensor]", tensors)


class _Pairs(NamedTuple):
    """The pairs of a token and an expert that it chose, sorted by expert: their numbers before, and where each ends."""

    order: Tensor
    experts: Tensor
    ends: Tensor

    @property
    def counts(self) -> Tensor:
        """How many tokens each expert has [experts]."""
        return self.ends.diff(prepend=self.ends.new_zeros(1)).long()

    def unsorted(self, values: Tensor) -> Tensor:
        """Return numbers [pairs], one for each sorted pair, in the order before sorting."""
        return torch.empty_like(self.order).scatter_(0, self.order, values)


def _sort(indices: Tensor, num_experts: int) -> _Pairs:
    experts, order = indices.reshape(-1).sort(stable=True)
    numbers = torch.arange(num_experts, device=indices.device)
    return _Pairs(order, experts, torch.searchsorted(experts, numbers, right=True, out_int32=True))


@dataclass
class Task:
    """What there is to compute: `x` [tokens, in], and the experts of each token, `indices` [tokens, k] int64."""

    x: Tensor
    indices: Tensor
    projections: Sequence[Projection]
    compute: Compute
    _pairs: _Pairs | None = field(default=None, init=False, repr=False)

    @property
    def num_experts(self) -> int:
        """How many experts there are."""
        return len(self.projections[0].weight)

    @property
    def pairs(self) -> _Pairs:
        """The pairs of tokens and experts, sorted."""
        if self._pairs is None:
            self._pairs = _sort(self.indices, self.num_experts)
        return self._pairs

    @property
    def longest(self) -> int:
        """How many tokens the busiest expert has; finding out waits for the device."""
        return int(self.pairs.counts.max())

    def sorted_rows(self) -> Tensor:
        """Return the token of each sorted pair [pairs, in]."""
        return self.x.index_select(0, self.pairs.order // self.indices.shape[1])

    def unsorted(self, rows: Tensor) -> Tensor:
        """Return rows [pairs, out], one for each sorted pair, as [tokens, k, out]."""
        places = self.pairs.unsorted(torch.arange(rows.shape[0], device=rows.device))
        return rows.index_select(0, places).view(*self.indices.shape, rows.shape[-1])


def combine(outputs: Tensor, weights: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the sum [tokens, out] of outputs [tokens, k, out] times weights [tokens, k], in their dtype or another."""
    if outputs.shape[1] == 1:
        return (outputs.squeeze(1) * weights).to(dtype or outputs.dtype)
    return (outputs * weights.unsqueeze(-1)).sum(1).to(dtype or outputs.dtype)


def _added(task: Task, rows: Tensor, weights: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the weighted sum [tokens, out] of rows [pairs, out]; on CPUs each is added in its place."""
    if task.x.device.type != "cpu":
        return combine(task.unsorted(rows), weights, dtype)
    own = _exact(weights).reshape(-1).index_select(0, task.pairs.order).unsqueeze(1)
    counted = rows * own
    total = counted.new_zeros(task.x.shape[0], rows.shape[-1])
    return total.index_add_(0, task.pairs.order // task.indices.shape[1], counted).to(dtype or rows.dtype)


def _exact(weights: Tensor) -> Tensor:
    """Return weights in the dtype to add up in: float32 at least."""
    return weights.to(torch.promote_types(weights.dtype, torch.float32))


def loop_over_experts(x: Tensor, indices: Tensor, num_experts: int, expert: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Call experts one after another, each with its own tokens, and return their outputs [tokens, k, out].
    `expert` gives [n, out] of an expert, by its number, for its tokens [n, in]; those that have none are not called.
    """
    tokens, k = indices.shape
    if tokens == 1:
        return torch.stack([expert(number, x) for number in cast("list[int]", indices[0].tolist())], 1)
    pairs = _sort(indices, num_experts)
    rows = torch.split(x.index_select(0, pairs.order // k), cast("list[int]", pairs.counts.tolist()))
    done = torch.cat([expert(number, own) for number, own in enumerate(rows) if len(own)])
    places = pairs.unsorted(torch.arange(tokens * k, device=x.device))
    return done.index_select(0, places).view(tokens, k, done.shape[-1])


def _expert_of(task: Task) -> Callable[[int, Tensor], Tensor]:
    """Return what gives the output [n, out] of an expert, by its number, for its tokens [n, in]."""
    members = [(*projection.members(), projection.transposed) for projection in task.projections]

    def linear(number: int, member: tuple[Sequence[Tensor], Sequence[Tensor] | None, bool], rows: Tensor) -> Tensor:
        weights, biases, transposed = member
        weight = weights[number].t() if transposed else weights[number]
        return F.linear(rows, weight, None if biases is None else biases[number])

    def expert(number: int, rows: Tensor) -> Tensor:
        return task.compute(rows, [partial(linear, number, member) for member in members])

    return expert


def _looped(task: Task) -> Tensor:
    return loop_over_experts(task.x, task.indices, task.num_experts, _expert_of(task))


def _dense(task: Task, weights: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Call every expert with every token, where all were chosen: nothing is sorted, copied or waited for."""
    x, expert = task.x, _expert_of(task)
    own = _exact(weights)
    counts = own.new_zeros(x.shape[0], task.num_experts).scatter_add(1, task.indices, own).unsqueeze(-1).unbind(1)
    first = expert(0, x)
    total = first * counts[0]
    for number in range(1, task.num_experts):
        total += expert(number, x) * counts[number]
    return total.to(dtype or first.dtype)


def _grouped(task: Task, weights: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Sort the pairs by expert, and multiply all groups by `torch.nn.functional.grouped_mm`."""
    pairs, multiply = task.pairs, _weights_first if _has_short_groups(task) else F.grouped_mm

    def linear(projection: Projection, rows: Tensor) -> Tensor:
        weight, bias = projection.stacked()
        product = multiply(as_autocast(rows), as_autocast(weight), offs=pairs.ends)
        return product if bias is None else product + as_autocast(bias).index_select(0, pairs.experts)

    linears = [partial(linear, projection) for projection in task.projections]
    return _added(task, task.compute(task.sorted_rows(), linears), weights, dtype)


def _has_short_groups(task: Task) -> bool:
    """Tell whether experts have so few tokens on average that `_weights_first` is faster, in float32 on a CPU."""
    is_plain = task.x.device.type == "cpu" and autocast_dtype(task.x) == torch.float32
    return is_plain and not torch.is_grad_enabled() and task.indices.numel() <= _SHORT * task.num_experts


def _weights_first(rows: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
    """Multiply as `grouped_mm` does, each group transposed: W x' reads the weights of few rows once, as they lie."""
    return F.grouped_mm(weight.transpose(1, 2), rows.t(), offs=offs).t().contiguous()


def as_autocast(tensor: Tensor) -> Tensor:
    """Return a tensor as autocast hands it to products; `grouped_mm` is not on its list."""
    return tensor.to(autocast_dtype(tensor))


def _batched(weight: Tensor, bias: Tensor | None, rows: Tensor) -> Tensor:
    """Multiply [blocks, rows, in] by [blocks, in, out]."""
    return torch.bmm(rows, weight) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, weight)


def _gathered(task: Task) -> Tensor:
    """Copy the weights for each pair: for very few tokens, and for none."""
    experts, k = task.indices.reshape(-1), task.indices.shape[1]
    rows = task.x.unsqueeze(1).expand(-1, k, -1).reshape(-1, 1, task.x.shape[-1])
    linears = [partial(_batched, *projection.chosen(experts)) for projection in task.projections]
    outputs = task.compute(rows, linears)
    return outputs.view(*task.indices.shape, outputs.shape[-1])


def _padded(task: Task) -> Tensor:
    """Give each expert one block, as long as the tokens of the busiest; multiply all blocks at once."""
    x, pairs, (tokens, k) = task.x, task.pairs, task.indices.shape
    blocks, length = task.num_experts, task.longest
    numbers = torch.arange(blocks, device=x.device)
    cells = _cells(task, numbers, length)
    source = _tokens(task, numbers, torch.zeros_like(numbers), length)
    if torch.is_grad_enabled():  # a row that is NaN would spoil the gradients of an expert that it is not for
        finite = x.detach().isfinite().all(1).long().argmax()
        source = torch.where((pairs.counts == 0).unsqueeze(1), finite, source)
    rows = x.index_select(0, source.view(-1)).view(blocks, length, x.shape[-1])
    outputs = task.compute(rows, [partial(_batched, *each.stacked()) for each in task.projections]).flatten(0, 1)
    return outputs.index_select(0, pairs.unsorted(cells)).view(tokens, k, outputs.shape[-1])


def outputs_in_blocks(task: Task) -> Tensor:
    """Give each expert as many short blocks as it needs, and copy its weights for each: [tokens, k, out]. Of blocks
    for an expert's average number of tokens twice as many as experts do, so shapes follow from shapes.
    """
    x, pairs, (tokens, k), experts = task.x, task.pairs, task.indices.shape, task.num_experts
    is_symbolic = _is_symbolic(tokens)
    # Where it is symbolic, it is over 1 by its form, without a maximum, which would be one more guard.
    length = tokens * k // experts + 2 if is_symbolic else max((tokens * k + experts - 1) // experts, 1)
    blocks = 2 * experts if is_symbolic else min(tokens * k, 2 * experts)
    needed = (pairs.counts + (length - 1)) // length
    ends = needed.cumsum(0)
    numbers = torch.arange(blocks, device=x.device).minimum(ends[-1] - 1)  # the last one again where they are spare
    owners = torch.searchsorted(ends, numbers, right=True)
    starts = ends - needed
    cells = _cells(task, starts, length)
    block, place = cells // length, cells % length
    rows = x[_tokens(task, owners, (numbers - starts[owners]) * length, length)]
    outputs = task.compute(rows, [partial(_batched, *each.chosen(owners)) for each in task.projections])
    return outputs[pairs.unsorted(block), pairs.unsorted(place)].view(tokens, k, outputs.shape[-1])


def _is_symbolic(size: int) -> bool:
    """Tell whether code that is traced stands for any size."""
    if not torch.compiler.is_compiling():
        return isinstance(size, torch.SymInt)
    from torch.fx.experimental.symbolic_shapes import has_static_value  # it takes time

    return not has_static_value(size)


def _cells(task: Task, starts: Tensor, length: int) -> Tensor:
    """Return the cells of sorted pairs [pairs] in blocks of a length, by the first block of each expert [experts]."""
    pairs = task.pairs
    first = starts * length - pairs.ends + pairs.counts  # where the expert's cells start, less where its pairs do
    return first.index_select(0, pairs.experts) + torch.arange(pairs.order.shape[0], device=task.x.device)


def _tokens(task: Task, experts: Tensor, skipped: Tensor, length: int) -> Tensor:
    """Return which token is in each cell [blocks, length]; cells that are left hold the expert's last one."""
    pairs = task.pairs
    last = (pairs.ends - 1).clamp(min=0).index_select(0, experts).unsqueeze(1)
    first = (pairs.ends - pairs.counts).index_select(0, experts) + skipped
    places = (first.unsqueeze(1) + torch.arange(length, device=first.device)).minimum(last)
    return pairs.order[places] // task.indices.shape[1]


def _combined(outputs: Callable[[Task], Tensor]) -> _Sum:
    """Return a lowering that first has the outputs of the experts of each token [tokens, k, out]."""
    return lambda task, weights, dtype: combine(outputs(task), weights, dtype)


LOWERINGS: Mapping[Lowering, _Sum] = {
    "loop": _combined(_looped),
    "grouped": _grouped,
    "padded": _combined(_padded),
    "blocks": _combined(outputs_in_blocks),
    "gathered": _combined(_gathered),
    "dense": _dense,
}
"""Each gives the weighted sum of the outputs of the experts of each token [tokens, out], as `combine` does."""
