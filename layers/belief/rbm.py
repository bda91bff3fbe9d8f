"""The restricted Boltzmann machine: its distributions, energies and likelihoods; how it is trained is beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...errors import UsageError, did_you_mean, positive_integer
from ...progress_bar import progress_bar
from .checks import check_values, rows_of_width
from .data import Data, blocks_of
from .partition import LogPartition, annealed
from .training import ContrastiveDivergence, Options, trainable
from .units import KINDS, Softmax, VisibleUnits, drawn

__all__ = ["RBM"]

_FIRST_WEIGHTS = 0.01
"""The standard deviation of new weights, from Hinton, "A practical guide to training RBMs" (2010), section 8."""


class RBM(nn.Module):
    """A restricted Boltzmann machine: `hidden` binary units over `visible` ones.

    Its energy is `-v b - h c - h W v` for binary visible units, and `|v - b|^2 / 2 - h c - h W v` for Gaussian ones,
    whose variance is one: scale each column of the data to mean 0 and variance 1. Softmax units have the energy of
    binary ones, and of each group of `classes` one is on (Salakhutdinov, Mnih and Hinton, "Restricted Boltzmann
    machines for collaborative filtering", 2007). The forward gives the probabilities
    of the hidden units, [..., visible] to [..., hidden], so that machines stack in `nn.Sequential`.

    Smolensky, "Information processing in dynamical systems" (1986); Hinton, "Training products of experts by minimizing
    contrastive divergence" (2002).

    Args:
        kind: `"bernoulli"`, values in [0, 1]; `"gaussian"`, real values; `"softmax"`, one of `classes` in each group.
        classes: of softmax units, side by side; `visible` is a multiple of them.

    Attributes:
        weight: W, [hidden, visible].
        visible_bias: b, [visible].
        hidden_bias: c, [hidden].

    Raises:
        UsageError: a size is no positive integer, the kind is unknown, or the classes do not fit.
    """

    def __init__(
        self,
        visible: int,
        hidden: int,
        kind: str = "bernoulli",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        classes: int | None = None,
    ) -> None:
        super().__init__()
        kinds = (*KINDS, "softmax")
        if not isinstance(kind, str) or kind not in kinds:
            raise UsageError(f"unknown kind {kind!r} of visible units{did_you_mean(str(kind), kinds)}")
        self.classes = _checked_classes(classes, kind, positive_integer(visible, "visible"))
        self.visible, self.hidden = positive_integer(visible, "visible"), positive_integer(hidden, "hidden")
        self.kind = kind
        self.weight = nn.Parameter(torch.empty(hidden, visible, device=device, dtype=dtype))
        self.visible_bias = nn.Parameter(torch.empty(visible, device=device, dtype=dtype))
        self.hidden_bias = nn.Parameter(torch.empty(hidden, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw small weights, and set the biases to zero."""
        nn.init.normal_(self.weight, std=_FIRST_WEIGHTS)
        nn.init.zeros_(self.visible_bias)
        nn.init.zeros_(self.hidden_bias)

    def extra_repr(self) -> str:
        classes = "" if self.classes is None else f", classes={self.classes}"
        return f"visible={self.visible}, hidden={self.hidden}, kind={self.kind!r}{classes}"

    def forward(self, v: Tensor) -> Tensor:
        """Return the probabilities of the hidden units, [..., hidden]."""
        return self.hidden_probabilities(v)

    def hidden_probabilities(self, v: Tensor) -> Tensor:
        """Return p(h = 1 | v), [..., hidden]."""
        return torch.sigmoid(self._hidden_logits(v))

    @torch.no_grad()
    def sample_hidden(self, v: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return a draw of p(h | v), [..., hidden], zeros and ones."""
        return drawn(self._hidden_logits(v), generator)

    def visible_means(self, h: Tensor) -> Tensor:
        """Return the expectations of p(v | h), [..., visible]: probabilities of binary units."""
        return self._units().mean(self._visible_input(h))

    @torch.no_grad()
    def sample_visible(self, h: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return a draw of p(v | h), [..., visible]."""
        return self._units().sample(self._visible_input(h), generator)

    def gibbs_step(self, v: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return visible units after hidden ones were drawn for them, and visible ones for those."""
        return self.sample_visible(self.sample_hidden(v, generator), generator)

    def gibbs(self, v: Tensor, steps: int, generator: torch.Generator | None = None) -> Tensor:
        """Return visible units after so many Gibbs steps, [..., visible]; CD-k's samples, or a chain's next state."""
        for _ in range(positive_integer(steps, "steps")):
            v = self.gibbs_step(v, generator)
        return v

    def reconstruct(self, v: Tensor) -> Tensor:
        """Return the expectations of the visible units, given the probabilities of the hidden ones, [..., visible]."""
        return self.visible_means(self.hidden_probabilities(v))

    def free_energy(self, v: Tensor) -> Tensor:
        """Return F(v) = -log sum over h of exp(-E(v, h)), [...]: the lower, the more probable is v."""
        v = self._rows(v)
        logits = self._hidden_logits(v)
        return self._units().energy(v, self.visible_bias) - F.softplus(logits).sum(-1)

    def contrastive_loss(self, v: Tensor, samples: Tensor) -> Tensor:
        """Return the mean free energy of data over that of samples: its gradient is that of contrastive divergence.

        Samples are `gibbs(v, k)` for CD-k, or the state of a chain for persistent CD; the two may differ in rows.
        Raises an InputError where there are no rows, or values that visible units of this kind do not take.
        """
        v, samples = self._rows(v), self._rows(samples).detach()
        check_values(v, self._units(), "the batch")
        check_values(samples, self._units(), "the batch of samples")
        return self.free_energy(v).mean() - self.free_energy(samples).mean()

    @torch.no_grad()
    def pseudo_log_likelihood(
        self, v: Tensor, flips: int | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Return the sum [...] over visible units i of log p(v_i | all others), for binary units; Besag (1975).

        Args:
            v: zeros and ones, [..., visible].
            flips: how many units, drawn for each row, stand for all of them; None is all, and exact.
            generator: of those draws.

        Raises:
            UsageError: the visible units are not binary.
        """
        if self.kind != "bernoulli":
            raise UsageError("the pseudo-likelihood is for binary visible units; use `log_partition`")
        v = self._rows(v)
        logits, every = self._hidden_logits(v), torch.arange(self.visible, device=v.device)
        if flips is not None:
            shape = (*v.shape[:-1], positive_integer(flips, "flips"))
            every = torch.randint(self.visible, shape, generator=generator, device=v.device)
        now = F.softplus(logits).sum(-1)
        scores = [self._log_conditional(v, logits, now, unit.expand(v.shape[:-1])) for unit in every.unbind(-1)]
        return torch.stack(scores).mean(0) * self.visible

    @torch.no_grad()
    def log_partition(
        self,
        steps: int = 1000,
        chains: int = 100,
        *,
        data: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> LogPartition:
        """Estimate the logarithm of the normalizing constant Z; rows have the log-likelihood -F(v) - log Z.

        Annealed importance sampling (Neal 2001), as Salakhutdinov and Murray, "On the quantitative analysis of deep
        belief networks" (2008), do it: chains start from visible units alone, and the weights grow in even steps. Z is
        estimated without bias, so that log Z is rather too low: more steps help where it rises with them.

        Args:
            steps: temperatures from the first machine to this one, each with a Gibbs step.
            chains: how many are averaged.
            data: rows [rows, visible], whose means visible units start from; from their biases by default.
            generator: of all that is drawn.

        Raises:
            InputError: the data have no rows, or values that the visible units do not take.
            UsageError: a number is out of its range, or the data are of another width.
        """
        tensors = (self.weight, self.visible_bias, self.hidden_bias)
        weight, bias, hidden_bias = (each.to(torch.promote_types(each.dtype, torch.float32)) for each in tensors)
        units, base = self._units(), bias
        if data is not None:
            rows = self._rows(data)
            check_values(rows, units, "the data")
            rows = rows.reshape(-1, self.visible).to(bias)
            base = units.bias_of(rows.mean(0), len(rows))
        steps, chains = positive_integer(steps, "steps"), positive_integer(chains, "chains")
        return annealed((weight, bias, hidden_bias), units, base, steps, chains, generator)

    def fit(
        self,
        data: Data,
        epochs: int = 10,
        *,
        batch_size: int | None = None,
        learning_rate: float = 0.05,
        k: int = 1,
        persistent: bool = False,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        sparsity_target: float | None = None,
        sparsity_cost: float = 0.1,
        generator: torch.Generator | None = None,
        progress: bool = True,
    ) -> RBM:
        """Train by contrastive divergence, or by its persistent form, and return this machine.

        Hinton (2002); Tieleman, "Training restricted Boltzmann machines using approximations to the likelihood
        gradient" (2008). The rest is as in Hinton's practical guide (2010). Frozen parameters stay as they are, and
        narrow dtypes are trained in float32. What is drawn comes from the generator
        alone, or from torch's own without one: the same random state gives the same weights.

        Args:
            data: rows [rows, visible], shuffled in each epoch; or what gives batches of such rows each time that it is
                iterated over, such as a `DataLoader` (of a batch that is a tuple, the first is taken).
            epochs: how often all rows are seen.
            batch_size: rows of a step, 32 by default; for a tensor only.
            learning_rate: of the mean gradient of a batch.
            k: Gibbs steps of each training step.
            persistent: go on with the chains of the step before, as many as the first batch has rows.
            momentum: the share of the last step that is repeated.
            weight_decay: the share of each weight, times the learning rate, that it loses in a step.
            sparsity_target: the mean probability that hidden units are pulled to.
            sparsity_cost: how strongly.
            generator: of all that is drawn, on the device of the parameters.
            progress: show a bar where standard error is a terminal.

        Raises:
            InputError: rows of another width, none at all, or values that the visible units do not take.
            UsageError: an option is out of its range, a parameter is computed from others, all are frozen, or the
                training diverges. The parameters are then those of the last whole epoch.
        """
        parameters = trainable(self, ("weight", "visible_bias", "hidden_bias"))
        options = Options(learning_rate, k, persistent, momentum, weight_decay, sparsity_target, sparsity_cost)
        epochs, units = positive_integer(epochs, "epochs"), self._units()
        blocks = blocks_of(data, batch_size, self.weight, units)
        trainer = ContrastiveDivergence(parameters, units, options, generator)
        total = None if blocks.steps is None else epochs * blocks.steps
        with progress_bar(f"RBM {self.visible}-{self.hidden}", total, progress) as move:
            for epoch in range(epochs):
                for block in blocks.epoch(generator):
                    trainer.train(block)
                    move(len(block))
                trainer.write(epoch + 1)
        return self

    def _units(self) -> VisibleUnits:
        return KINDS[self.kind] if self.classes is None else Softmax(self.classes)

    def _rows(self, v: Any) -> Tensor:
        return rows_of_width(v, self.visible, self.weight.dtype)

    def _hidden_logits(self, v: Tensor) -> Tensor:
        return _linear(self._rows(v), self.weight, self.hidden_bias)

    def _visible_input(self, h: Tensor) -> Tensor:
        h = rows_of_width(h, self.hidden, self.weight.dtype, "hidden units")
        return _linear(h, self.weight.t(), self.visible_bias)

    def _log_conditional(self, v: Tensor, logits: Tensor, now: Tensor, unit: Tensor) -> Tensor:
        """Return log p(v_i | all others), [...], for one unit i of each row."""
        change = 1 - 2 * v.gather(-1, unit[..., None]).squeeze(-1)
        flipped = logits + change[..., None] * self.weight.t()[unit]
        return F.logsigmoid(now - F.softplus(flipped).sum(-1) - change * self.visible_bias[unit])


def _checked_classes(classes: object, kind: str, visible: int) -> int | None:
    """Return the classes of softmax units, None for other kinds, or raise a UsageError."""
    if kind != "softmax":
        if classes is not None:
            raise UsageError(f"classes is for softmax units, and the kind is {kind!r}; leave it out")
        return None
    if classes is None:
        raise UsageError("softmax units need classes=, how many are in a group")
    if visible % (found := positive_integer(classes, "classes")):
        raise UsageError(f"{visible} visible units are no groups of {found} classes; give a multiple")
    return found


def _linear(units: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return what units get; dtypes are compared where it fails, since a graph would hold for one dtype only."""
    try:
        return F.linear(units, weight, bias)
    except RuntimeError as error:
        if units.dtype == weight.dtype:
            raise
        raise UsageError(f"an RBM in {weight.dtype} was given {units.dtype}; give {weight.dtype}") from error
