"""Deep belief networks: restricted Boltzmann machines in a stack, trained one after the other from below."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, TypedDict, TypeVar, Unpack, cast

import torch
from torch import Tensor, nn

from ...errors import UsageError, expect, positive_integer
from .checks import rows_of_width
from .data import Data, rows_in
from .rbm import RBM

__all__ = ["DeepBeliefNetwork", "DeepBeliefRelaxationNetwork"]

Value = TypeVar("Value", int, float)


class FitOptions(TypedDict, total=False):
    """What `RBM.fit` takes, the same for each machine; a test compares the two."""

    batch_size: int | None
    k: int
    persistent: bool
    momentum: float
    weight_decay: float
    sparsity_target: float | None
    sparsity_cost: float
    generator: torch.Generator | None
    progress: bool


class DeepBeliefNetwork(nn.Module):
    """A stack of restricted Boltzmann machines; the forward gives the probabilities of the topmost units.

    Hinton, Osindero and Teh, "A fast learning algorithm for deep belief nets" (2006). `sample` draws from the network
    as a generative model, `to_feedforward` makes the network that is fine-tuned as a classifier.

    Args:
        sizes: units of each layer, from the visible ones up: two at least.
        kind: of the visible units of the lowest machine, `"bernoulli"`, `"gaussian"` or `"softmax"`; all others are
            binary.
        classes: of softmax units, as of `RBM`.

    Raises:
        UsageError: a size is no positive integer, there are fewer than two, or the kind is unknown.
    """

    machines: nn.ModuleList

    def __init__(
        self,
        sizes: Sequence[int],
        kind: str = "bernoulli",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        classes: int | None = None,
    ) -> None:
        super().__init__()
        expect(sizes, Sequence, "sizes", "a list such as [784, 500, 250]")
        if len(sizes) < 2:
            raise UsageError(f"sizes is {list(sizes)!r}; give the visible units and at least one layer of hidden ones")
        kinds = [kind] + ["bernoulli"] * (len(sizes) - 2)
        each_classes = [classes] + [None] * (len(sizes) - 2)
        parts = zip(sizes, sizes[1:], kinds, each_classes, strict=False)
        self.machines = nn.ModuleList(
            RBM(low, high, each, device, dtype, classes=own) for low, high, each, own in parts
        )

    def reset_parameters(self) -> None:
        """Draw new weights for all machines."""
        for machine in self._machines():
            machine.reset_parameters()

    def forward(self, v: Tensor) -> Tensor:
        """Return the probabilities of the topmost units, [..., top], given visible ones, [..., visible]."""
        for machine in self.machines:
            v = machine(v)
        return v

    def fit(
        self,
        data: Data,
        epochs: int | Sequence[int] = 10,
        learning_rate: float | Sequence[float] = 0.05,
        **options: Unpack[FitOptions],
    ) -> DeepBeliefNetwork:
        """Train each machine on the probabilities that the one below it gives, and return this network.

        Args:
            data: rows [rows, visible], or a loader of such, as in `RBM.fit`.
            epochs: of each machine; a list gives each its own.
            learning_rate: of each machine; a list gives each its own (Gaussian visible units need a lower one).
            options: see `RBM.fit`, as for errors.
        """
        machines = self._machines()
        rates, times = _for_each(learning_rate, machines, "learning_rate"), _for_each(epochs, machines, "epochs")
        for machine, rate, count in zip(machines, rates, times, strict=True):
            machine.fit(data, count, learning_rate=rate, **options)
            data = _raised(data, machine)
        return self

    @torch.no_grad()
    def sample(
        self,
        rows: int,
        steps: int = 1000,
        *,
        start: Tensor | None = None,
        means: bool = False,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return draws of the visible units, [rows, visible]: Gibbs steps in the top machine, then down.

        Args:
            rows: how many.
            steps: Gibbs steps in the top machine.
            start: visible units [rows, visible] to go up from; random ones in the top machine by default.
            means: give the expectations of the visible units, rather than draws, at the very end.
            generator: of all that is drawn.

        Raises:
            UsageError: a number is out of its range, or `start` is of another shape.
        """
        h = self._top_units(positive_integer(rows, "rows"), start, generator)
        machines = self._machines()
        for _ in range(positive_integer(steps, "steps")):
            h = machines[-1].sample_hidden(machines[-1].sample_visible(h, generator), generator)
        for machine in machines[:0:-1]:
            h = machine.sample_visible(h, generator)
        return machines[0].visible_means(h) if means else machines[0].sample_visible(h, generator)

    def to_feedforward(self, classes: int, activation: Callable[[], nn.Module] = nn.Sigmoid) -> nn.Sequential:
        """Return the classifier to be fine-tuned: `Linear`, activation, ..., a new `Linear`; weights are copies.

        Raises a UsageError where `classes` is no positive integer.
        """
        machines = self._machines()
        weight = machines[-1].weight
        layers: list[nn.Module] = []
        for machine in machines:
            layers += [_linear(machine), activation()]
        head = nn.Linear(
            weight.shape[0], positive_integer(classes, "classes"), device=weight.device, dtype=weight.dtype
        )
        return nn.Sequential(*layers, head)

    def _machines(self) -> list[RBM]:
        return [cast("RBM", machine) for machine in self.machines]

    def _top_units(self, rows: int, start: Tensor | None, generator: torch.Generator | None) -> Tensor:
        """Return hidden units of the top machine to start from: random ones, or what is drawn on the way up."""
        machines = self._machines()
        if start is None:
            weight = machines[-1].weight
            return weight.new_empty(rows, weight.shape[0]).bernoulli_(0.5, generator=generator)
        if rows_of_width(start, machines[0].visible, machines[0].weight.dtype).shape != (rows, machines[0].visible):
            raise UsageError(f"start has the shape {list(start.shape)}; give [rows, visible], here {rows} rows")
        for machine in machines:
            start = machine.sample_hidden(start, generator)
        return start


DeepBeliefRelaxationNetwork = DeepBeliefNetwork
"""The name that some documents give to a deep belief network, for short DBRX; unrelated to the transformer DBRX."""


class _Raised:
    """The batches of a loader, as a trained machine sees them."""

    def __init__(self, loader: Iterable[Any], machine: RBM) -> None:
        self._loader, self._machine = loader, machine

    def __len__(self) -> int:
        return len(cast("Sized", self._loader))

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self._loader:
            yield _probabilities(rows_in(batch), self._machine)


def _raised(data: Data, machine: RBM) -> Data:
    return _probabilities(data, machine) if isinstance(data, Tensor) else _Raised(data, machine)


@torch.no_grad()
def _probabilities(rows: Tensor, machine: RBM) -> Tensor:
    return machine(rows.to(machine.weight))


def _for_each(value: Value | Sequence[Value], machines: Sequence[RBM], name: str) -> Sequence[Value]:
    """Return one value for each machine, from one for all or from as many as there are."""
    if not isinstance(value, Sequence):
        return [value] * len(machines)
    if len(value) != len(machines):
        raise UsageError(
            f"{name} has {len(value)} values for {len(machines)} machines; give one for each, or one for all"
        )
    return value


@torch.no_grad()
def _linear(machine: RBM) -> nn.Linear:
    """Return the layer with the same logits."""
    weight = machine.weight
    layer = nn.Linear(machine.visible, machine.hidden, device=weight.device, dtype=weight.dtype)
    layer.weight.copy_(weight)
    layer.bias.copy_(machine.hidden_bias)
    return layer
