"""What a use is tried on: a small model that is built anew each time, its inputs, and the passes that rewrite it."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxopt

Arguments = tuple[Any, ...]
Maker = Callable[[int, int], Arguments]
"""From a size and a seed to positional arguments."""


@dataclass(frozen=True)
class Sample:
    """A model for one pass, in one spelling."""

    pipeline: str
    spelling: str
    build: Callable[[], nn.Module]
    make: Maker
    size: int = 4
    training: bool = True
    near: float = 0.0
    """The relative error that the pass may make; 0 where it computes the same function."""
    form: bool = False
    """The pass makes another function of the model by design: only what raises, shapes and types are compared."""
    zeros: bool = False
    """The pass sets weights to zero: compared with the plain model that has these zeros, while nothing trains it."""
    adds: bool = False
    """The pass adds tensors to state dicts."""
    serves: bool = False
    """The pass is for inference: what it makes has no parameters to train."""
    gate: str = ""
    """The weight that routes tokens, one row for each expert."""
    seed: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def last(self) -> str:
        """Return the name of the last pass of the pipeline, which the sample is for."""
        return re.sub(r"{[^}]*}", "", self.pipeline).rpartition(",")[2]


def rows(width: int, *more: int) -> Maker:
    """Return a maker of random rows, [size, *more, width]."""
    return lambda size, seed: (torch.randn(size, *more, width, generator=torch.Generator().manual_seed(seed)),)


def images(channels: int, side: int = 6, dimensions: int = 2) -> Maker:
    """Return a maker of random images, [size, channels, side, ...]."""
    shape = (channels, *[side] * dimensions)
    return lambda size, seed: (torch.randn(size, *shape, generator=torch.Generator().manual_seed(seed)),)


def tokens(vocabulary: int, length: int = 5) -> Maker:
    """Return a maker of identifiers, [size, length]."""
    return lambda size, seed: (
        torch.randint(vocabulary, (size, length), generator=torch.Generator().manual_seed(seed)),
    )


def floats_of(arguments: Arguments) -> list[Tensor]:
    return [each for each in arguments if isinstance(each, Tensor) and each.is_floating_point()]


class Subject:
    """One side of a comparison: makes the plain model of a sample, or the rewritten one, as often as a use asks."""

    def __init__(self, sample: Sample, *, fast: bool, verify: bool = False, nudge: int = 0, noise: float = 0.0) -> None:
        self.sample, self.fast, self.verify, self.nudge, self.noise = sample, fast, verify, nudge, noise
        self.random = random.Random(sample.seed)
        self.names = [name for name, _ in sample.build().named_parameters()]
        self.children = [name for name, _ in sample.build().named_modules() if name]

    def skip_where_split(self) -> None:
        """Leave out what ends the process where layers are split over several, in torch itself."""
        if self.sample.last in ("parallel", "tensor_parallel"):
            raise NotForThis

    def build(self, seed: int = 0) -> nn.Module:
        """Return the plain model, with weights off by `noise`, or by a few units in the last place, where nudged."""
        model = self.sample.build()
        with torch.no_grad():
            if seed:
                generator = torch.Generator().manual_seed(seed)
                for parameter in model.parameters():
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
            for parameter in model.parameters() if self.nudge else ():
                parameter.mul_(1 + self._noise(parameter))
        return model

    def new(self) -> nn.Module:
        """Return a model of this side, made anew."""
        if not self.fast and self.sample.zeros:
            model = self.build()
            with quiet():
                model.load_state_dict(Subject(self.sample, fast=True).new().state_dict())
            return model
        return self.optimize(self.build())

    def optimize(self, model: nn.Module, **options: Any) -> nn.Module:
        """Return what is used: the model itself on the plain side."""
        if not self.fast:
            return model
        options.setdefault("example_inputs", self.arguments())
        with quiet():
            return fxopt.optimize(model, self.sample.pipeline, measure=False, verify=self.verify, **options)

    def arguments(self, size: int | None = None, seed: int = 0) -> Arguments:
        made = self.sample.make(self.sample.size if size is None else size, seed)
        if not self.nudge:
            return made
        return pytree.tree_map_only(Tensor, lambda x: x * (1 + self._noise(x)) if x.is_floating_point() else x, made)

    def _noise(self, like: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(self.nudge)
        scale = max(4 * torch.finfo(like.dtype).eps, self.noise)
        return scale * torch.randn(like.shape, generator=generator).to(like.dtype)

    def parameters(self, model: nn.Module) -> dict[str, Any]:
        """Return what stands under the original names of parameters, wherever their numbers lie now."""
        found: dict[str, Any] = {}
        for name in self.names:
            holder, _, last = name.rpartition(".")
            found[name] = getattr(model.get_submodule(holder), last, None)
        return found

    def gradients(self, model: nn.Module) -> dict[str, Tensor | None]:
        """Return the gradients under the original names; none where slices were cut off the parameters."""
        if self.sample.zeros:
            return {}
        return {f"gradient of {name}": getattr(each, "grad", None) for name, each in self.parameters(model).items()}


def quiet() -> warnings.catch_warnings:
    """Return a context in which warnings are not shown: what a net looks for are results."""
    return warnings.catch_warnings(action="ignore")


class NotForThis(Exception):
    """A use that means nothing for a sample."""
