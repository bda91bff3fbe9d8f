"""The pass: layers that round their inputs and weights while they are trained."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import nn

from ..errors import MatchFailure, UsageError
from ..layers.quantized import TRAINED, FakeQuantized, Range, check_in_floats, fake_quantized, freezable, freeze
from ..passes.contract import Pass, check_named, module_words, word_for
from ..passes.rewriting import Edit, holds_inputs_first
from ..passes.sites import Goal, Numerics, OwnForward, Phase, Refusal, Site
from ..runtime.values import user_class
from ..tracing.program import Program, is_on_meta
from .calibration import calls, ranges_of, replayable
from .quantize import candidates

__all__ = ["Qat", "freeze"]

_NO_CONV1D = "it is a Conv1D of transformers, for which there is no layer that rounds while it is trained"
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class Qat(Pass):
    """Train linear layers and convolutions as they will compute in 8 bits.

    Before: y = conv(x, weight)        After: y = conv(rounded(x), rounded(weight))
    Refuses: tied weights, layers with hooks, weights that other code reads, layers that are never called.

    After training, `quantize{scheme=int8_static}` on the model takes over the ranges that were found or learned.

    Options:
        observer: `moving_average` follows what is seen in training; `learned` trains scale and zero point (LSQ).
        keep: what stays as it is: names of modules, which may hold `*`, or their classes.
        freeze_after: after so many training forwards ranges, and the statistics of batch norms, stay as they are.
        per_channel: one scale for each output of a weight, or one for all.
        calibration: a loader, an iterator or a list of batches, for the ranges to begin with; by default the example
            inputs. The option text leaves it out.
        batches: how many batches of it are used.
    """

    observer: Literal["moving_average", "learned"] = "moving_average"
    keep: tuple[str, ...] = ()
    freeze_after: int | None = None
    per_channel: bool = True
    batches: int = 8
    calibration: Any = field(default=None, compare=False, repr=False)

    numerics: ClassVar[Numerics] = Numerics.SEMANTIC
    goal: ClassVar[Goal] = Goal.SIZE
    own_forward: ClassVar[OwnForward | None] = OwnForward.RIGHT  # what is replaced is in its place there, too
    prepares: ClassVar[str] = "quantize{scheme=int8_static}"

    def __post_init__(self) -> None:
        object.__setattr__(self, "keep", module_words(self.name, "keep", self.keep))
        object.__setattr__(self, "calibration", replayable(self.calibration))

    @classmethod
    def searched(cls, phase: Phase, goals: Collection[Goal]) -> Mapping[str, Sequence[Any]] | None:
        return {"observer": ("moving_average", "learned")} if phase is Phase.EVAL else None

    def check(self, model: nn.Module) -> None:
        if self.observer not in ("moving_average", "learned"):
            raise UsageError(f"pass 'qat': observer={self.observer!r}; use 'moving_average' or 'learned'")
        for name, value in (("freeze_after", self.freeze_after), ("batches", self.batches)):
            if value is not None and (isinstance(value, bool) or value < 1):
                raise UsageError(f"pass 'qat': {name}={value}; give a positive number, such as 100")
        check_named(self.name, "keep", self.keep, model)
        check_in_floats(self.name, model)
        if is_on_meta(model):
            raise UsageError("pass 'qat': the model is on the meta device, so its layers have no ranges; load it first")

    def find(self, program: Program) -> Iterable[Site | Refusal]:
        found, refused = candidates(self.keep, program, runs_here=False)
        yield from refused
        yield from (Refusal(_NO_CONV1D, name) for name, layer in found.items() if holds_inputs_first(layer))
        layers = {
            name: layer for name, layer in found.items()
            if not isinstance(layer, FakeQuantized) and not holds_inputs_first(layer)
        }  # fmt: skip
        if layers:
            yield from self._layers(program, layers)
            yield from self._norms(program)

    def _layers(self, program: Program, layers: dict[str, nn.Module]) -> Iterator[Site | Refusal]:
        ranges = ranges_of(program, layers, calls(self.calibration, self.batches, program, self.name), "minmax")
        for name in layers:
            if name in ranges:
                data = {"scale": ranges[name].scale, "zero_point": ranges[name].zero_point}
                yield Site(program, name, {}, data=data, detail=f"range from {data['scale']:.2g} a step")
            else:
                yield Refusal("the calibration data never reaches it", name)

    def _norms(self, program: Program) -> Iterator[Site]:
        for module in program.names.distinct:
            name = program.names.name(module)
            if user_class(type(module)) in _NORMS and name and word_for(self.keep, name, program) is None:
                yield Site(program, name, {}, data={"freezes": True}, detail="its statistics can be frozen")

    def rewrite(self, site: Site, edit: Edit) -> None:
        old, kind = edit.owner, user_class(type(edit.owner))
        if kind not in TRAINED:  # a plan says what the layer is
            again = "; repeat the plan on the model as it was before qat" if kind in TRAINED.values() else ""
            raise MatchFailure(f"it is a {kind.__name__} by now{again}")
        if kind in _NORMS:
            edit.replace_module("", freezable(old, self.freeze_after))
            return
        start, group = Range(site.data["scale"], site.data["zero_point"]), 0 if self.per_channel else -1
        learns = self.observer == "learned"
        edit.replace_module("", fake_quantized(old, start, learns=learns, freeze_after=self.freeze_after, group=group))
