"""Shifts of biases that make up for what layers of 8 bits err by in the mean, found by running the model on data."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from ....layers.quantized import FakeQuantized
from ....passes.rewriting import layer_of
from ....progress_bar import progress_bar
from ....runtime.state import text_of_numbers
from ....tracing.examples import Inputs
from ....tracing.isolation import preserved
from ....tracing.program import Program
from ...calibration import run_call
from ..layers import is_tied
from ..options import Options
from .rounded import RoundedLayer
from .scaling import InputForm
from .sensitivity import RoundedModel

__all__ = ["corrected"]

Means = dict[str, Tensor]
"""The mean of each output of layers that a call reaches once, [outputs], by their names."""
_See = Callable[[str, Tensor], Tensor | None]
"""From the name of a layer and the mean of each output, or what that is off, to what is added to these, if anything."""


def corrected(
    program: Program, forms: Mapping[str, InputForm], options: Options, seen: Sequence[Inputs], judged: Sequence[Inputs]
) -> Mapping[str, InputForm]:
    """Return the forms with shifts of biases where these help: each layer on a call that was not `seen`, the last of
    `judged`, and the model on all that are judged.

    Nagel et al., "Data-Free Quantization through Weight Equalization and Bias Correction" (ICCV 2019), section 4.2 with
    data as in its appendix: layer by layer, behind those that are corrected already.
    """
    plain = {name: replace(form, shift="") for name, form in forms.items()}
    layers = {name: RoundedLayer.of(program.module(name), form, options.group) for name, form in plain.items()}
    some = {name: layer for name, layer in layers.items() if _takes_shift(layer.module, program)}
    if not some:
        return forms
    run = _Runs(program.model, layers, some)
    found: dict[str, list[Tensor]] = {}
    with progress_bar("fxopt: correcting biases", len(seen)) as move:
        for call in seen:
            for name, off in run.added(call, lambda _, off: off).items():
                found.setdefault(name, []).append(off)
            move(1)
    means = {name: torch.stack(each).mean(0) for name, each in found.items()}

    def that_helps(name: str, off: Tensor) -> Tensor | None:
        shift = means.get(name)
        # of the squares of all errors of an output, this is what a shift changes
        return shift if shift is not None and float((shift * (shift - 2 * off)).sum()) < 0 else None

    shifts = run.added(judged[-1], that_helps)
    texts = {name: text_of_numbers((shift / layers[name].scales).bfloat16()) for name, shift in shifts.items()}
    other = {name: replace(form, shift=texts.get(name, "")) for name, form in plain.items()}
    ways: list[Mapping[str, InputForm]] = [plain, other]
    if any(form.shift for form in forms.values()):
        ways.append(forms)
    return min(ways, key=lambda way: RoundedModel(program, way, options.group, judged).error(list(way)))


def _takes_shift(module: nn.Module, program: Program) -> bool:
    return not isinstance(module, FakeQuantized) and not is_tied(module, program)


@dataclass(frozen=True)
class _Runs:
    """A model, its `layers` of 8 bits, and `some` of them whose means are compared."""

    model: nn.Module
    layers: Mapping[str, RoundedLayer]
    some: Mapping[str, RoundedLayer]

    def added(self, call: Inputs, choose: _See) -> Means:
        """Return what is added to the outputs of layers in the model of 8 bits, as `choose` says from what each is off
        in the mean, behind others that have what was added to them.
        """
        expected, found = self._expected(call), Means()

        def see(name: str, mean: Tensor) -> Tensor | None:
            if name in expected and (shift := choose(name, expected[name] - mean)) is not None:
                found[name] = shift
            return found.get(name)

        self._run_rounded(call, see)
        return found

    def _expected(self, call: Inputs) -> Means:
        """Return the means of the model in floats."""
        found: dict[str, list[Tensor]] = {}

        def see(name: str, mean: Tensor) -> None:
            found.setdefault(name, []).append(mean)

        with self._watched(see):
            self._run(call)
        return {name: means[0] for name, means in found.items() if len(means) == 1}

    def _run_rounded(self, call: Inputs, see: _See) -> None:
        with ExitStack() as stack:
            for layer in self.layers.values():
                stack.enter_context(layer.computed_rounded())
            stack.enter_context(self._watched(see))
            self._run(call)

    def _run(self, call: Inputs) -> None:
        with torch.no_grad(), preserved(self.model):
            run_call(self.model, call, 0)

    @contextmanager
    def _watched(self, see: _See) -> Generator[None]:
        def watch(name: str, module: nn.Module, _: object, result: Tensor) -> Tensor | None:
            channels = result.ndim - 1 - _rank_of(module)
            if not result.numel():
                return None
            others = [each for each in range(result.ndim) if each != channels]
            added = see(name, result.float().mean(others) if others else result.float())
            if added is None:
                return None
            return result + added.to(result.dtype).reshape(-1, *[1] * (result.ndim - 1 - channels))

        handles = [layer.module.register_forward_hook(partial(watch, name)) for name, layer in self.some.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _rank_of(module: nn.Module) -> int:
    layer = layer_of(module)
    return 0 if layer is None else layer.rank
