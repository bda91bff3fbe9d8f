"""Flatten a model for every mode and every kind of call that its own graphs cover."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ..errors import ArchiveError
from ..tracing.capture import Variant, capture_of
from ..tracing.leaves import is_leaf
from ..tracing.preserve import in_phase
from .conditions import Apply, Read, parts
from .flat_code import FlatVariant
from .flatten import Flattening, NotNow
from .holdings import Holdings

__all__ = ["flat_variants"]


def flat_variants(
    model: nn.Module, holdings: Holdings, opaque: Mapping[str, tuple[str, str]], eval_only: bool
) -> tuple[list[FlatVariant], frozenset[bool]]:
    """Return a model's flat graphs, and the values of `training` that they cover.

    The mode that the model is in must be covered; the other one is where it can be.

    Args:
        model: it runs from graphs.
        holdings: of the model.
        opaque: name of a module that could not be captured -> line and reason.
        eval_only: the model was rewritten for evaluation, so its graphs may say nothing about training.

    Raises:
        ArchiveError: naming the module, the line and the reason, if some of the model cannot be flattened.
    """
    capture = capture_of(model)
    if capture is None or not capture.variants:
        place, reason = opaque.get("", ("", _why_without_graph(model)))
        raise ArchiveError(f"module '(root)'{f' ({place})' if place else ''}: {reason}")
    holdings.check_callable(model)
    search = _Search(model, holdings, opaque, capture.variants)
    found = search.in_mode(model.training)
    if eval_only or not search.asks_for_mode:
        return found, frozenset((False,) if eval_only else (False, True))
    try:
        return [*found, *search.in_mode(not model.training)], frozenset((False, True))
    except ArchiveError:
        return found, frozenset((model.training,))


def _why_without_graph(model: nn.Module) -> str:
    if is_leaf(model):
        return f"a torch.nn.{type(model).__name__} by itself has no graph; put it into a torch.nn.Sequential"
    return "it has no graph; fxopt.optimize(model, [], example_inputs=...) makes one"


@dataclass
class _Search:
    """Flatten the graphs of one model.

    Attributes:
        asks_for_mode: some graph made so far holds in training, or in evaluation, only.
    """

    model: nn.Module
    holdings: Holdings
    opaque: Mapping[str, tuple[str, str]]
    variants: Sequence[Variant]
    asks_for_mode: bool = field(default=False, init=False)

    def in_mode(self, training: bool) -> list[FlatVariant]:
        """Return the graphs of every kind of call in a mode, with gradients and, where that matters, without.

        Raises:
            ArchiveError: if one cannot be flattened, or there is none.
        """
        with in_phase(self.model, training):
            with torch.enable_grad():
                found = self._flattened()
            if any(_asks_for_gradients(variant) for variant in found):
                with torch.no_grad():
                    found += self._flattened()
        self.asks_for_mode = self.asks_for_mode or any(_asks_for_mode(variant) for variant in found)
        if not found:
            self.asks_for_mode = True
            raise ArchiveError(f"it has no graph for {'training' if training else 'evaluation'}")
        return found

    def _flattened(self) -> list[FlatVariant]:
        found: list[FlatVariant] = []
        for variant in self.variants:
            try:
                found.append(Flattening(self.holdings, self.opaque).run(variant))
            except NotNow:
                self.asks_for_mode = True
        return found


def _asks_for_mode(variant: FlatVariant) -> bool:
    asked = (part for condition in variant.conditions for part in parts(condition.tree))
    return any(isinstance(part, Read) and part.target.rpartition(".")[2] == "training" for part in asked)


def _asks_for_gradients(variant: FlatVariant) -> bool:
    asked = (part for condition in variant.conditions for part in parts(condition.tree))
    return any(isinstance(part, Apply) and part.operation == "torch.is_grad_enabled" for part in asked)
