"""How what comes into a layer becomes numbers: by a range, and before that scaled, input by input (SmoothQuant); and
which weight is rounded, where calibration data give another one (GPTQ).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ....compat.quantized import static_format
from ....layers.quantized import Range
from ....runtime.state import powers_of
from ....tracing.examples import Inputs
from ....tracing.program import CallSites, Program
from ..layers import linear_of, outputs_first, product_of, weight_of
from ..methods import Treatment, check_processes, treatment
from ..options import Options
from ..statistics import statistics

__all__ = ["InputForm", "treatments_of"]


@dataclass(frozen=True)
class InputForm:
    """The range of a layer's input; before that its inputs are divided by powers of two, if `exponents` has some.
    `weight`: what the data of this run have given the layer to round in the place of its own, [outputs, inputs].
    `shift`: what they add to the sums of products, in steps of the weight's scales, as text.
    """

    range: Range
    exponents: str = ""
    weight: Tensor | None = field(default=None, compare=False, repr=False)
    shift: str = field(default="", compare=False, repr=False)

    def factors(self, weight: Tensor) -> Tensor | None:
        """Return what the inputs of a weight, [outputs, inputs], are multiplied with, in its type."""
        return powers_of(self.exponents, weight.shape[1], -1).to(weight) if self.exponents else None

    def rounded(self, x: Tensor) -> Tensor:
        """Return an input, [..., inputs], rounded to what its numbers stand for."""
        if not self.exponents:
            return self.range.rounded(x)
        factors = powers_of(self.exponents, x.shape[-1], -1).to(x)
        return self.range.rounded(x * factors) / factors


def treatments_of(
    options: Options, program: Program, layers: Mapping[str, nn.Module], calls: Sequence[Inputs]
) -> dict[str, Treatment]:
    """Return what data give layers so that they err less: scales of inputs of linear ones, or other weights.

    Layers that read one value have the same scales, so its numbers are made once.
    """
    check_processes(options)
    by_gptq = options.method == "gptq"
    products = {name: rows for name, module in layers.items() if by_gptq and (rows := product_of(module)) is not None}
    modules = {name: module for name, module in layers.items() if name in products or linear_of(module) is not None}
    weights = {name: outputs_first(each, weight_of(each).detach()).flatten(1) for name, each in modules.items()}
    inputs = {name: weight.shape[1] for name, weight in weights.items()}
    found: dict[str, Treatment] = {}
    for seen in statistics(program, modules, inputs, calls, moments=by_gptq, products=products):
        some = {name: modules[name] for name in seen}
        for together in [[name] for name in some] if by_gptq else _readers(program, some):
            weight = torch.cat([weights[name].cpu() for name in together])
            found |= dict.fromkeys(together, treatment(options, static_format(), weight, seen[together[0]]))
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
