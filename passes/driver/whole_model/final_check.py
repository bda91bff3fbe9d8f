"""Compare the model as it is handed over with the original one, and undo the rewrites that make it another."""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from ....errors import BudgetError
from ....runtime.values import tensors_by_name
from ....tracing.examples import Inputs
from ....tracing.isolation import copied_module, shallow_clone
from ....tracing.program import deactivate
from ...contract import Pass
from ...sites import Cause, Numerics, Phase, Reason
from ...timing import OutOfTimeError
from ...verification import Original, modes_to_check, no_peer
from ..context import RunContext
from ..halving import longest_right
from ..history import Rewrite
from ..tuner import Tuner
from .full_check import FullCheck, phase_of
from .reference_check import with_references

__all__ = ["FinalCheck"]

_LEAST_SECONDS = 2.0  # so long what is wrong is looked for, however short the time budget is
_CALLS_BESIDES = 3.0  # a comparison makes two calls of each example, and as many as of so many more: with more rows
_WITH_BACKWARD = 3.0  # a call with its backward takes as long as so many without
_OF_BUDGET = 0.25  # so long a part of the time budget the next way may take where nothing is left of it


class _NoTime(enum.StrEnum):
    """What no time was left for: it is no objection to the model."""

    TO_COMPARE = "no time was left to compare the model"
    TO_CHECK = "no time was left to check what was left to the whole model"


class _Way(enum.Enum):
    """How models are compared, from the most thorough on; a value is what the report says of it."""

    USUAL = ""
    SMALLER = "the whole model was compared on a smaller call alone"
    OWN_TYPES = "the whole model was compared in its own types alone, on a smaller call"


@dataclass
class FinalCheck:
    """Compare with the user's own model, of which only copies run, and undo by halving."""

    tuner: Tuner
    model: nn.Module
    brief: bool = False  # on the example calls alone
    rounding: float = 0.0  # see `Original`
    _all: list[Rewrite] = field(default_factory=list[Rewrite], init=False)
    _until: float = field(default=math.inf, init=False)
    _twin: nn.Module = field(init=False)
    _models: dict[tuple[int, ...], nn.Module | None] = field(init=False)
    _originals: dict[tuple[int, bool | None, bool, _Way], Original | None] = field(init=False)
    _in_full: FullCheck = field(init=False)
    _way: _Way = field(default=_Way.USUAL, init=False)
    _end: float = field(default=math.inf, init=False)
    _is_wrong: bool = field(default=False, init=False)  # what is wrong is looked for
    _undoes: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._twin, self._models, self._originals = shallow_clone(self.model), {}, {}
        end = self._context.budget.ending(lambda: self._until if self._is_wrong else self._context.budget.end_of_check)
        self._in_full = FullCheck(self._context, self.model, self._chosen_calls, end)

    @property
    def _context(self) -> RunContext:
        return self.tuner.context

    def undo_what_is_wrong(self) -> bool:
        """Compare, and undo what makes the model another; return whether anything was undone."""
        self._all, budget = list(self._context.history.rewrites), self._context.budget
        self._undoes, self._until, once = True, budget.spent + max(budget.seconds, _LEAST_SECONDS), True
        self._is_wrong = False
        while self._context.history.rewrites and (reason := self._objection()):
            if isinstance(reason, _NoTime):
                self._undo_unchecked(self._may_go if reason is _NoTime.TO_COMPARE else self._unseen)
                continue
            self._is_wrong = True
            if self._put_weights_back() and once:
                once = False  # a rewrite that writes to weights is wrong, however often they are put back
                continue
            if not self._repeats():
                break  # it tells nothing that the model differs from one that differs from itself
            self._undo(reason)
        return len(self._context.history.rewrites) < len(self._all)

    def is_right(self) -> bool:
        """Compare without undoing anything; a model that differs from itself tells nothing, as above."""
        return not self._objection() or not (self._put_weights_back() or self._repeats())

    @property
    def seen_rounding(self) -> float:
        """Return how far results on the example calls were, of the scale, that a closer look found right."""
        return max((each.seen for each in self._originals.values() if each is not None), default=0.0)

    def _repeats(self) -> bool:
        self._end = math.inf  # one call of each: without it nothing that differs could be told
        return all(original.repeats() for original in self._originals.values() if original is not None)

    def _objection(self) -> str:
        """Return what is wrong with the model as it stands, or "": in the first way that there is time for."""
        budget, ways = self._context.budget, list(_Way)
        if not self.brief and self._unchecked:
            if found := self._in_full.objection(self._context.history.rewrites):
                return found
            if self._undoes and self._unseen:  # where nothing is undone, an earlier run has checked it
                return _NoTime.TO_CHECK
        is_open = self._is_wrong or not self._undoes
        end = self._until if is_open else budget.spent + budget.for_comparing
        if not self._fits_as_usual(end):
            self._way = max(self._way, _Way.SMALLER, key=ways.index)
        self._end = end if self._may_go else math.inf  # what cannot be left is compared however long it takes
        for way in ways[ways.index(self._way) :]:
            self._way = way
            try:
                found = self._compared()
            except OutOfTimeError:
                self._end = budget.spent + _OF_BUDGET * budget.seconds
                continue
            budget.concessions.update({way.value: None} if way.value else {})
            return found
        return _NoTime.TO_COMPARE

    def _fits_as_usual(self, end: float) -> bool:
        """Say whether a comparison in its own types, as it is usually made, fits before the `end`."""
        calls = len(self._chosen_calls)
        share = calls / max(1, len(self._context.program.whole_calls))
        seconds = 2 * (calls + _CALLS_BESIDES) / calls * share * self._context.budget.forward
        backward = any(gradients for mode, gradients in self._modes(self._context.history.rewrites) if mode is None)
        seconds *= _WITH_BACKWARD if backward and not self._context.program.training else 1.0
        return self._context.budget.spent + seconds <= end

    @property
    def _may_go(self) -> list[Rewrite]:
        """Return the rewrites that go where nothing shows them to be right."""
        standing = self._context.history.rewrites
        return [rewrite for rewrite in standing if rewrite.group.may_be_left(rewrite.pass_)]

    @property
    def _unchecked(self) -> list[Rewrite]:
        """Return the rewrites that were left to the whole model for want of time, and need not stand."""
        return [rewrite for rewrite in self._may_go if rewrite.is_unchecked and rewrite.pass_.skippable]

    @property
    def _unseen(self) -> list[Rewrite]:
        """Return those of them that were not compared in full in each of their modes."""
        return self._in_full.unseen(self._unchecked, self._context.history.rewrites)

    def _undo_unchecked(self, gone: Sequence[Rewrite]) -> None:
        standing = self._context.history.rewrites
        self._take_away(gone, standing, Reason(Cause.NOT_CHECKED, self._context.budget.values))

    def _compared(self) -> str:
        rewrites, program = self._context.history.rewrites, self._context.program
        deactivate(program.names.distinct)
        map_state, budget = self._context.history.state_map().forward, _budget(rewrites)
        model, keeps_form = self._to_be_equal_to(rewrites), all(rewrite.pass_.keeps_form for rewrite in rewrites)
        for original in self._runs_of_original(model or self._twin, rewrites):
            verdict = original.verdict(
                program.model, map_state=map_state, budget=budget, only_runs=model is None, keeps_form=keeps_form,
                peer=partial(_peer, rewrites, program.model) if program.training else no_peer,
            )  # fmt: skip
            if not verdict.ok:
                return verdict.reason
        return ""

    # -- the original ----------------------------------------------------------------------------------------------

    def _to_be_equal_to(self, rewrites: Sequence[Rewrite]) -> nn.Module | None:
        """Return the original with the references of passes that change the function in it; None without one."""
        changing = [rewrite for rewrite in rewrites if rewrite.pass_.numerics is Numerics.SEMANTIC]
        key = tuple(map(id, changing))
        if key not in self._models:
            sites = [(rewrite.pass_, rewrite.group.sites[0]) for rewrite in changing]
            self._models[key] = with_references(copied_module(self.model), sites) if sites else self._twin
        return self._models[key]

    def _runs_of_original(self, model: nn.Module, rewrites: Sequence[Rewrite]) -> Iterator[Original]:
        for training, gradients in self._modes(rewrites):
            key = id(model), training, gradients, self._way
            if key not in self._originals:
                self._originals[key] = self._run_original(model, training, gradients)
            original = self._originals[key]
            if original is not None:
                yield original

    def _run_original(self, model: nn.Module, training: bool | None, gradients: bool) -> Original | None:
        """Run the original, or return None where it does not run in a mode that the user did not give it in."""
        calls, usual = self._chosen_calls, self._way is _Way.USUAL
        try:
            return Original(
                model, calls if usual else calls[:1], training=training, gradients=gradients,
                seed=self._context.request.seed, is_usual=usual and training is None,
                widest=torch.float32 if self._way is _Way.OWN_TYPES else torch.float64,
                in_time=self._context.budget.ending(lambda: self._end), brief=self.brief, rounding=self.rounding,
            )  # fmt: skip
        except Exception:  # whatever the user's code raises; in the mode that was recorded it has run before
            return None

    @property
    def _chosen_calls(self) -> Sequence[Inputs]:
        """Return the first example call, one in the middle, and the last."""
        inputs = self._context.program.whole_calls
        return [inputs[number] for number in dict.fromkeys((0, (len(inputs) - 1) // 2, len(inputs) - 1))]

    def _modes(self, rewrites: Sequence[Rewrite]) -> list[tuple[bool | None, bool]]:
        """Return the modes to compare in, those that the user gave first, each with whether gradients count."""
        model = self.model
        phase = phase_of(rewrites)
        modes = modes_to_check(self._context.program.model, phase, model.training)
        trains, covers = any(parameter.requires_grad for parameter in model.parameters()), phase is not Phase.EVAL
        wanted = {
            mode: trains and ((model.training if mode is None else mode) or (covers and len(modes) == 1))
            for mode in modes
        }
        return [(None if mode is model.training else mode, gradients) for mode, gradients in wanted.items()]

    def _put_weights_back(self) -> bool:
        """Give the model's tensors the values of the original's where these changed; return whether any had."""
        moved = {name for step in self._context.history.state_map().steps for name in step.targets}
        originals, changed = tensors_by_name(self.model), False
        for name, tensor in tensors_by_name(self._context.program.model).items():
            source = originals.get(name)
            if source is None or name in moved or source.shape != tensor.shape or source.dtype != tensor.dtype:
                continue
            if not torch.equal(source, tensor) and not source.isnan().any():
                tensor.data.copy_(source)
                changed = True
        return changed

    # -- halving ---------------------------------------------------------------------------------------------------

    def _undo(self, reason: str) -> None:
        """Undo the first rewrite that is wrong or, of those with an error budget, the least valuable ones."""
        standing = self._context.history.rewrites
        order = sorted(standing, key=lambda rewrite: (_is_lossy(rewrite.pass_), -_value(rewrite)))

        def objection(count: int) -> str:
            self._stand(order[:count])
            return self._objection()

        right, reason = longest_right(len(order), reason, objection, lambda: self._has_time)
        gone = order[right:] if _is_lossy(order[right].pass_) else [order[right]]
        found = Reason.of(Cause.MODEL_DIFFERS, problem=reason)
        if not self._has_time:
            gone = self._unproven(order, right, reason)
            found = Reason(found.cause, {**found.values, **self._context.budget.values})
        self._take_away(gone, standing, found)

    def _take_away(self, gone: Sequence[Rewrite], standing: Sequence[Rewrite], reason: Reason) -> None:
        """Let the others of what stood stand, and note what went: also what cannot be written without these."""
        self._stand([rewrite for rewrite in standing if rewrite not in gone])
        for rewrite in standing:
            if rewrite not in self._context.history.rewrites:
                self._context.history.undo(rewrite, reason if rewrite in gone else Reason(Cause.DEPENDENT))

    def _unproven(self, order: Sequence[Rewrite], right: int, reason: str) -> Sequence[Rewrite]:
        """Return what goes where no time is left to find the wrong one; raise BudgetError if that is not for speed."""
        unproven = order[right:]
        skippable = [rewrite for rewrite in unproven if rewrite.pass_.skippable]
        if 0 < len(skippable) < len(unproven):
            self._stand([rewrite for rewrite in order if rewrite not in skippable])
            if not self._objection():
                return skippable
        owed = dict.fromkeys(rewrite.pass_.name for rewrite in unproven if not rewrite.pass_.skippable)
        if len(unproven) - len(skippable) > 1:
            raise BudgetError(
                f"the model as handed over is wrong with what {' and '.join(owed)} did: {reason}; no time was left to "
                "find at which place; give a larger time_budget"
            )
        return unproven

    @property
    def _has_time(self) -> bool:
        """Say whether to go on looking for what is wrong: it may take as long again as all checks and timing."""
        return self._context.budget.spent < self._until

    def _stand(self, wanted: Collection[Rewrite]) -> None:
        """Let these rewrites alone stand; what cannot be written without another one is left out."""
        standing = set(self._context.history.rewrites)
        differs = (number for number, rewrite in enumerate(self._all) if (rewrite in wanted) != (rewrite in standing))
        first = next(differs, len(self._all))
        later = self._all[first:]
        self.tuner.stand_again([r for r in later if r in standing], (r for r in later if r in wanted))
        self._context.forget()
        self._put_weights_back()


def _is_lossy(pass_: Pass) -> bool:
    return pass_.numerics is Numerics.APPROXIMATE


def _budget(rewrites: Sequence[Rewrite]) -> float | None:
    """Return the sum of the passes' error budgets; None where all keep the function."""
    budgets = {str(rewrite.pass_): rewrite.pass_.error_budget for rewrite in rewrites if _is_lossy(rewrite.pass_)}
    return sum(budgets.values()) if budgets else None


def _peer(rewrites: Sequence[Rewrite], model: nn.Module) -> AbstractContextManager[object] | None:
    """Return what a pass behind some rewrites says that torch approximates a model by, if one does."""
    lossy = dict.fromkeys(rewrite.pass_ for rewrite in rewrites if _is_lossy(rewrite.pass_))
    return next(filter(None, (pass_.peer(model) for pass_ in lossy)), None)


def _value(rewrite: Rewrite) -> float:
    """Return what a rewrite with an error budget gains for the error that it makes; of others the order counts."""
    return rewrite.decision.measured.saved_per_error if _is_lossy(rewrite.pass_) else 0.0
