"""Contrastive divergence, written for speed: three matrix products a step, and noise drawn for many steps at once.

A bias is the weight of a unit that is always on: with one on each side, weights and biases are one matrix
[hidden + 1, visible + 1]. The corner, where the two meet, is so large that either keeps the other on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...errors import UsageError, expect, positive_integer
from ..distributed import is_replicated
from .checks import non_negative
from .units import VisibleUnits

__all__ = ["ContrastiveDivergence", "Options", "trainable"]

_CORNER = 1e6
_ACTIVITY_DECAY = 0.9
"""Of the mean activity of hidden units, which sparsity is about: Hinton's practical guide (2010), section 11."""


@dataclass(frozen=True)
class Options:
    """How a step changes the weights; `RBM.fit` says what each means."""

    learning_rate: float
    k: int
    persistent: bool
    momentum: float
    weight_decay: float
    sparsity_target: float | None
    sparsity_cost: float

    def __post_init__(self) -> None:
        non_negative(self.learning_rate, "learning_rate")
        positive_integer(self.k, "k")
        expect(self.persistent, bool, "persistent", "True or False")
        non_negative(self.momentum, "momentum", below=1)
        non_negative(self.weight_decay, "weight_decay")
        non_negative(self.sparsity_cost, "sparsity_cost")
        if self.sparsity_target is not None and not 0 < non_negative(self.sparsity_target, "sparsity_target") < 1:
            raise UsageError(f"sparsity_target is {self.sparsity_target!r}; give a probability between 0 and 1")

    @property
    def plain(self) -> bool:
        """Say whether a step adds its gradient, and nothing else."""
        return not self.momentum and not self.weight_decay and self.sparsity_target is None


def trainable(module: nn.Module, names: Sequence[str]) -> list[Tensor]:
    """Return these parameters; a UsageError says if one is computed or replicated, or all are frozen."""
    parameters = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    for name in names:
        if name not in parameters:
            computed = f"{name} is computed from other parameters (a parametrization, or pruning)"
            raise UsageError(f"{computed}, which fit cannot train; use contrastive_loss and an optimizer")
        if is_replicated(parameters[name]):
            alone = f"{name} is one of a replica of ddp, and fit would train each process's by itself"
            raise UsageError(f"{alone}; call fit before ddp, or use contrastive_loss and an optimizer")
    if not any(parameters[name].requires_grad for name in names):
        raise UsageError("all parameters of the RBM are frozen; call requires_grad_() on those that fit is to train")
    return [parameters[name] for name in names]


class ContrastiveDivergence:
    """Trains weight [hidden, visible] and biases in a matrix of its own, block by block; `write` puts them back."""

    @torch.inference_mode()
    def __init__(
        self, parameters: Sequence[Tensor], units: VisibleUnits, options: Options, generator: torch.Generator | None
    ) -> None:
        self._parameters, self._units, self._options, self._generator = parameters, units, options, generator
        weight, dtype = parameters[0], torch.promote_types(parameters[0].dtype, torch.float32)
        self._matrix = weight.new_empty(weight.shape[0] + 1, weight.shape[1] + 1, dtype=dtype)
        self._parts = self._matrix[:-1, :-1], self._matrix[-1, :-1], self._matrix[:-1, -1]
        for part, tensor in zip(self._parts, parameters, strict=True):
            part.copy_(tensor)
        pairs = zip(self._parts, parameters, strict=True)
        self._frozen = [(part, part.clone()) for part, tensor in pairs if not tensor.requires_grad]
        self._matrix[-1, -1] = _CORNER
        self._velocity = torch.zeros_like(self._matrix)
        self._activity = self._matrix.new_full((weight.shape[0],), options.sparsity_target or 0.0)
        self._chains: Tensor | None = None
        self._workspaces: dict[tuple[int, int], _Workspace] = {}

    @torch.inference_mode()
    def write(self, epoch: int) -> None:
        """Put weights and biases into the parameters, or raise a UsageError where they are not finite."""
        dtype = self._parameters[0].dtype
        if not all(bool(torch.isfinite(part.to(dtype)).all()) for part in self._parts):
            rate = f"learning_rate, which is {self._options.learning_rate:g}"
            raise UsageError(f"the training diverges in epoch {epoch}: weights are not finite; lower {rate}")
        for part, parameter in zip(self._parts, self._parameters, strict=True):
            if parameter.requires_grad:
                parameter.copy_(part)

    @torch.inference_mode()
    def train(self, block: Tensor) -> None:
        """Take the steps of a block, [steps, rows, visible]."""
        work = self._workspace(*block.shape[:2])
        work.data.copy_(block)
        self._units.noise_(work.visible_noise, self._generator)
        work.hidden_noise.uniform_(generator=self._generator)
        (self._persistent_steps if self._options.persistent else self._fresh_steps)(work)

    def _workspace(self, steps: int, rows: int) -> _Workspace:
        work = self._workspaces.get((steps, rows))
        if work is None:
            work = self._workspaces[steps, rows] = _Workspace(self._matrix, steps, rows, self._options.k, self._chains)
            self._chains = work.chains if self._options.persistent else None
        return work

    def _persistent_steps(self, work: _Workspace) -> None:
        """Take steps that go on with the chains; the hidden units of data and samples are one product."""
        matrix, to_hidden, draw, change = self._matrix, self._matrix.t(), self._units.draw_, self._change
        chains, both, of_samples, last = work.chains, work.probabilities, work.of_samples, self._options.k - 1
        for units, _, samples, noise, hidden_noise in work.steps:
            for number, drawn in enumerate(noise):
                torch.mm(chains, matrix, out=samples)
                draw(samples, drawn)
                if number < last:
                    torch.mm(samples, to_hidden, out=of_samples).sigmoid_()
                else:
                    torch.mm(units, to_hidden, out=both).sigmoid_()
                torch.lt(hidden_noise[number], of_samples, out=chains)
            change(units, work)

    def _fresh_steps(self, work: _Workspace) -> None:
        """Take steps whose samples start from the data."""
        matrix, to_hidden, draw, change = self._matrix, self._matrix.t(), self._units.draw_, self._change
        chains, of_data, of_samples = work.chains, work.of_data, work.of_samples
        for units, data, samples, noise, hidden_noise in work.steps:
            probabilities = torch.mm(data, to_hidden, out=of_data).sigmoid_()
            for drawn, of_hidden in zip(noise, hidden_noise, strict=True):
                torch.lt(of_hidden, probabilities, out=chains)
                torch.mm(chains, matrix, out=samples)
                draw(samples, drawn)
                probabilities = torch.mm(samples, to_hidden, out=of_samples).sigmoid_()
            change(units, work)

    def _change(self, units: Tensor, work: _Workspace) -> None:
        """Add the mean of h v over the data, less that over the samples, and what else the options ask for."""
        options = self._options
        rate = options.learning_rate / work.rows
        if options.plain:
            work.weigh_samples()
            self._matrix.addmm_(work.transposed, units, alpha=rate)
            self._restore_frozen()
            return
        if options.sparsity_target is not None:
            self._activity.lerp_(work.of_data[:, :-1].mean(0), 1 - _ACTIVITY_DECAY)
        work.weigh_samples()
        self._velocity.addmm_(work.transposed, units, beta=options.momentum, alpha=rate)
        self._add_penalties(units[: work.rows])
        self._matrix.add_(self._velocity)
        self._restore_frozen()

    def _restore_frozen(self) -> None:
        for part, value in self._frozen:
            part.copy_(value)

    def _add_penalties(self, data: Tensor) -> None:
        options, weights = self._options, self._velocity[:-1]
        if options.weight_decay:
            weights[:, :-1].add_(self._matrix[:-1, :-1], alpha=-options.learning_rate * options.weight_decay)
        if options.sparsity_target is not None:
            excess = self._activity - options.sparsity_target
            weights.addr_(excess, data.mean(0), alpha=-options.learning_rate * options.sparsity_cost)


class _Workspace:
    """The tensors that the steps of a block are made in, and their parts, the data's first; used again and again."""

    def __init__(self, matrix: Tensor, steps: int, rows: int, k: int, chains: Tensor | None) -> None:
        hidden, visible = matrix.shape
        self.rows = rows
        self.chains = _none_on(matrix, rows) if chains is None else chains
        samples = len(self.chains)
        both = matrix.new_ones(steps, rows + samples, visible)
        self.data = both[:, :rows, :-1]
        self.visible_noise = matrix.new_empty(steps, k, samples, visible)
        self.hidden_noise = matrix.new_empty(steps, k, samples, hidden)
        parts = both, both[:, :rows], both[:, rows:]
        noises = ([draw.unbind() for draw in noise] for noise in (self.visible_noise, self.hidden_noise))
        self.steps = list(zip(*(part.unbind() for part in parts), *noises, strict=True))
        self.probabilities = matrix.new_empty(rows + samples, hidden)
        self.transposed = self.probabilities.t()
        self.of_data, self.of_samples = self.probabilities[:rows], self.probabilities[rows:]
        self._weight = -rows / samples

    def weigh_samples(self) -> None:
        """Make the sum over all rows the difference of means, times the rows of the data."""
        if self._weight == -1:
            self.of_samples.neg_()  # a third of the time that a product with a number takes
        else:
            self.of_samples.mul_(self._weight)


def _none_on(matrix: Tensor, rows: int) -> Tensor:
    """Return hidden units of which only the one for the bias is on."""
    chains = matrix.new_zeros(rows, len(matrix))
    chains[:, -1] = 1
    return chains
