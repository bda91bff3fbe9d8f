"""What calibration data say of the inputs of linear layers: means, largest values, some rows and second moments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ...tracing.examples import Inputs
from ...tracing.program import Program
from ..calibration import check_finite, observed

__all__ = ["InputStatistics", "statistics"]

_ROWS = 512
"""So many rows of each input are kept, from all calls alike."""

_BYTES = 2**30
"""Of second moments that are held at a time; the data run once for each part of the layers."""


@dataclass
class InputStatistics:
    """What is known of a layer's inputs, [rows, inputs]: sums over rows, and a part of the rows."""

    rows_of_a_call: int
    moments: Tensor | None = None  # x.T @ x, [inputs, inputs]
    count: int = 0
    total: Tensor = field(default_factory=lambda: torch.zeros(()))
    absolute: Tensor = field(default_factory=lambda: torch.zeros(()))
    largest: Tensor = field(default_factory=lambda: torch.zeros(()))
    some: list[Tensor] = field(default_factory=list[Tensor])

    def see(self, name: str, x: Tensor) -> None:
        """Take note of an input, [..., inputs] in float32."""
        rows = x.reshape(-1, x.shape[-1]).cpu()
        absolute = rows.abs()
        self.total = self.total + rows.sum(0)
        self.absolute = self.absolute + absolute.sum(0)
        self.largest = torch.maximum(absolute.amax(0), self.largest)
        check_finite(name, self.absolute)
        self.count += len(rows)
        self.some.append(rows[:: max(1, -(-len(rows) // self.rows_of_a_call))].clone())
        if self.moments is not None:
            self.moments.addmm_(rows.T, rows)

    @property
    def mean(self) -> Tensor:
        """Return the mean of each input, [inputs]."""
        return self.total / self.count

    @property
    def rows(self) -> Tensor:
        """Return some rows, [rows, inputs]."""
        return torch.cat(self.some)


def statistics(
    program: Program, layers: Mapping[str, nn.Module], inputs: Mapping[str, int], calls: Sequence[Inputs],
    moments: bool, products: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
) -> Iterator[dict[str, InputStatistics]]:  # fmt: skip
    """Yield, part by part, what the calls say of each layer that they reach; `inputs`: how many each layer has;
    `products`: what makes the rows of a layer, [rows, inputs], where its input is not that.
    """
    made = products or {}
    for part in _parts(inputs) if moments else [list(layers)]:
        found = {
            name: InputStatistics(
                max(1, _ROWS // len(calls)), torch.zeros(inputs[name], inputs[name]) if moments else None
            )
            for name in part
        }
        some = {name: layers[name] for name in part}

        def see(name: str, x: Tensor, found: Mapping[str, InputStatistics] = found) -> None:
            found[name].see(name, made[name](x) if name in made else x)

        seen = observed(program, some, calls, see)
        yield {name: each for name, each in found.items() if name in seen}


def _parts(inputs: Mapping[str, int]) -> Iterator[list[str]]:
    part, size = list[str](), 0
    for name, count in inputs.items():
        if part and size + 4 * count**2 > _BYTES:
            yield part
            part, size = [], 0
        part.append(name)
        size += 4 * count**2
    if part:
        yield part
