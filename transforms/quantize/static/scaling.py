"""How what comes into a layer becomes numbers: by a range, and before that scaled, input by input (SmoothQuant)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ....compat.quantized import static_format
from ....layers.quantized import Range
from ....runtime.state import powers_of
from ....tracing.examples import Inputs
from ....tracing.program import CallSites, Program
from ..layers import linear_of, outputs_first, weight_of
from ..methods import treatment
from ..options import Options
from ..statistics import statistics

__all__ = ["InputForm", "exponents_of"]


@dataclass(frozen=True)
class InputForm:
    """The range of a layer's input; before that its inputs are divided by powers of two, if `exponents` has some."""

    range: Range
    exponents: str = ""

    def factors(self, weight: Tensor) -> Tensor | None:
        """Return what the inputs of a weight, [outputs, inputs], are multiplied with, in its type."""
        return powers_of(self.exponents, weight.shape[1], -1).to(weight) if self.exponents else None

    def rounded(self, x: Tensor) -> Tensor:
        """Return an input, [..., inputs], rounded to what its numbers stand for."""
        if not self.exponents:
            return self.range.rounded(x)
        factors = powers_of(self.exponents, x.shape[-1], -1).to(x)
        return self.range.rounded(x * factors) / factors


def exponents_of(
    options: Options, program: Program, layers: Mapping[str, nn.Module], calls: Sequence[Inputs]
) -> dict[str, str]:
    """Return the scales of inputs, as exponents of two, of the linear layers for which some err less.

    Layers that read one value have the same, so its numbers are made once.
    """
    inputs = {name: linear.channels[0] for name, module in layers.items() if (linear := linear_of(module)) is not None}
    modules = {name: layers[name] for name in inputs}
    found: dict[str, str] = {}
    for seen in statistics(program, modules, inputs, calls, moments=False):
        for together in _readers(program, {name: modules[name] for name in seen}):
            weights = [outputs_first(modules[name], weight_of(modules[name]).detach()) for name in together]
            weight = torch.cat([each.cpu() for each in weights])
            exponents = treatment(options, static_format(), weight, seen[together[0]]).exponents
            found |= dict.fromkeys(together if exponents else (), exponents)
    return found


def _readers(program: Program, layers: Mapping[str, nn.Module]) -> list[list[str]]:
    """Return the names of layers, with those together that read one value in a graph, and nothing else."""
    sites = program.analyses[CallSites]
    found: dict[object, list[str]] = {}
    for name, module in layers.items():
        node = next((site.node for site in sites.of(module)), None)
        is_plain = node is not None and node.args and sites.count(module) == 1
        found.setdefault(node.args[0] if node is not None and is_plain else name, []).append(name)
    return list(found.values())
