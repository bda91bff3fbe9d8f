"""What candidates for a group of sites are compared with: the module around it, as it was before."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from ...compat import all_modules
from ...runtime.graphs import specializations_of
from ...runtime.state import StateMap
from ...runtime.values import tensors_within
from ...tracing.examples import Inputs
from ...tracing.isolation import shallow_clone
from ...tracing.program import deactivate, is_on_meta
from .. import timing, verification
from ..contract import Pass
from ..rewriting import Edit
from ..sites import Numerics, Reason
from ..timing import Stage
from ..verification import modes_to_check, no_peer
from .context import Check, RunContext
from .groups import WITH_THE_WHOLE, Group, Race

__all__ = ["UNNAMED", "Comparison"]

UNNAMED = "after"
"""The candidate of a pass that knows one way of rewriting a site."""
_COMPARED_SMALLER_FROM = 10e-3
"""Where the forward of the model takes more seconds, rewrites of the whole are compared on the recorded call in its own
types, and in float64 on a smaller one, as rewrites are that are verified on the whole model together."""
_LEAST = 1.01  # what seems to gain less in three long rounds is not timed further
_COARSE = 1e-3
"""Where a pass may err by so much, float32 is exact enough to compare with; float64 takes many times as long."""
_IN_MODE = {True: ", in training,", False: ", in evaluation,", None: ""}


class Comparison:
    """Verify candidates against, and time them beside, the module around a group as it was. `timed`: seconds for
    timing. `brief`: on recorded inputs only, as an equal group was verified with noise. `check`: where time is left in
    full, else on one call, in one mode, in float32, or not here. `simulated`: see `Pass.reference`.
    """

    def __init__(
        self, context: RunContext, pass_: Pass, group: Group, *, timed: float, brief: bool = False,
        check: Check = Check.NOW, simulated: nn.Module | None = None,
    ) -> None:  # fmt: skip
        self._program, self._budget = context.program, context.budget
        self._check, self._seed = context.request.verify, context.request.seed
        asked = context.asks(pass_, group)
        self._calls = context.calls.of(group.owner) if asked else ()
        self._under = context.calls.under(group.owner) if asked else None
        self.pass_, self.group, self.timed, self._limit = pass_, group, timed > 0, timed
        self._phase = group.phase or pass_.phase
        self._by_the_whole = check is Check.WITH_THE_WHOLE
        self._hurried = self._by_the_whole or check is Check.BRIEFLY
        # What is owed is checked however long that takes.
        may_end = group.may_be_left(pass_) and not self._hurried
        self._in_time = self._budget.ending(self._budget.for_checks if may_end else lambda: math.inf)
        self._brief, self._simulated = brief or self._hurried, simulated
        self._references: verification.References | None = None
        self._simulation: verification.References | None = None
        self._original: nn.Module | None = None  # once references are taken: the module as it was
        self.before = self.runner()
        self._seconds = 0.0 if self.before is None else self.before.seconds
        if not self._has_time_to_time_one():
            self.timed, self.before = False, None

    @contextmanager
    def _running(self, stage: Stage = Stage.CHECKING) -> Generator[None]:
        """Run what is run here as the model does, under its autocast, and count it on the budget."""
        with self._budget.spending(stage), nullcontext() if self._under is None else self._under.entered():
            yield

    @property
    def _owner(self) -> nn.Module:
        """Return the module around the group as it is now: a rewrite may put another in its place."""
        return self._program.module(self.group.owner)

    def _has_time_to_time_one(self) -> bool:
        """Say whether there is time to time a lowering that takes as long as what is there."""
        if self.before is None or self.group.required or self._takes([self._seconds]) <= self._limit:
            return True
        with self._running(Stage.TIMING):
            self._seconds = min(self._seconds, self.before.seconds_in_one_thread())
        return self._takes([self._seconds]) <= self._limit

    def has_time_for_another(self, written: Sequence[timing.Runner | None]) -> bool:
        """Say whether there is time to time one lowering more, of which a call takes as long as of those written."""
        if self.group.required:
            return True
        seconds = [self._seconds if each is None else min(each.seconds, self._seconds) for each in written]
        return self._takes([*seconds, fmean(seconds)]) <= self._limit

    def _takes(self, lowerings: Sequence[float]) -> float:
        """Return what timing takes, given what a call of each lowering does; of a contested pass, which is not to be
        taken untimed, what it takes where the answer is clear.
        """
        every = self._seconds + sum(lowerings)
        if self.pass_.contested:
            return timing.CALLS_OF_CLEAR * every
        return timing.CALLS_OF_TWO / 2 * (self._seconds + min(lowerings)) + timing.CALLS_OF_EACH * every

    def within(self, seconds: float) -> None:
        """Take no more seconds for timing: writing may have taken what there was."""
        self._limit = min(self._limit, seconds)

    def rough_gain(self, runner: timing.Runner) -> float:
        """Return how many times as fast as before a candidate is, from few calls."""
        with self._running(Stage.TIMING):
            return 0.0 if self.before is None else timing.rough_ratio(self.before, runner)

    @property
    def checks(self) -> bool:
        """Return whether there is anything to verify candidates on."""
        return self._check and bool(self._calls) and not is_on_meta(self._owner)

    def take_references(self) -> None:
        """Run the module as it was, unless that was done; the group is not rewritten yet."""
        if self._references is not None:
            return
        if not self.checks or self._by_the_whole:
            return
        self._original = shallow_clone(self._owner)
        modes, gradients = self._modes()
        with self._running():
            self._references = self._taken(self._original, modes)
            if self._simulated is not None:  # noise would fill what is zero there
                self._simulation = verification.References.taken(
                    self._simulated, self._compared_calls, modes, gradients=gradients, seed=self._seed,
                    in_time=self._in_time, steady=True, brief=True, widest=self._widest(),
                )  # fmt: skip

    def _taken(self, module: nn.Module, modes: Sequence[bool | None]) -> verification.References:
        """Run the module as it was in some modes."""
        lossy, semantic = (self.pass_.numerics is each for each in (Numerics.APPROXIMATE, Numerics.SEMANTIC))
        coarse, gradients = lossy and self.pass_.error_budget >= _COARSE, self._modes()[1]
        is_whole = not self.group.owner and self._budget.forward > _COMPARED_SMALLER_FROM
        is_smaller = is_whole and self.pass_.numerics.keeps_function and not gradients
        return verification.References.taken(
            module, self._compared_calls, modes, gradients=gradients, seed=self._seed, in_time=self._in_time,
            brief=self._brief or lossy or semantic, widest=self._widest(coarse=coarse),
            sizes=verification.Sizes.SMALLER_AND_RECORDED if is_smaller else verification.Sizes.RECORDED,
        )  # fmt: skip

    def _widest(self, *, coarse: bool = False) -> torch.dtype:
        """Return the type of exact runs; autocast casts float32 down, and remembers what it has cast."""
        return torch.float32 if (coarse or self._hurried) and self._under is None else torch.float64

    @property
    def _compared_calls(self) -> Sequence[Inputs]:
        """Return the recorded calls to compare on; where there is no time, one that runs the graph of the sites."""
        several = len(specializations_of(self._owner)) > 1
        return self._calls[:1] if self._hurried and not several else self._calls

    def _modes(self) -> tuple[Sequence[bool | None], bool]:
        """Return the modes to compare in, and whether gradients count."""
        gradients, training = self._phase.covers_training, self._program.training
        original = self._owner if self._original is None else self._original
        modes = modes_to_check(original, self._phase, training, self._owner)
        if self._hurried:
            return modes[:1], training and not self._phase.covers_evaluation
        return (modes[:1], gradients and training) if self._brief else (modes, gradients)

    def verdict(self, edit: Edit) -> verification.Verdict | None:
        """Return the worst verdict on a rewrite over the phases, or None where nothing can be checked."""
        pass_, owner, state_map, found = self.pass_, self._owner, edit.state_map(), list[verification.Verdict]()
        with self._running():
            for references in self._all_references():
                found += references.verdicts(
                    owner, map_state=state_map.forward, numerics=pass_.numerics, budget=pass_.error_budget,
                    keeps_form=pass_.keeps_form,
                    peer=partial(pass_.peer, owner) if self._program.training else no_peer,
                )  # fmt: skip
            if self._simulation is not None:
                # What a lossy pass takes away does not come back: of these only the way there counts.
                found += self._simulation.verdicts(owner, map_state=partial(StateMap.forward, state_map))
        return verification.worst(found)

    def _all_references(self) -> Iterator[verification.References]:
        """Yield what the module gave as it was, and then in the modes that matter to the rewritten module alone."""
        if self._references is None or self._original is None:
            return
        yield self._references
        known = {each.conditions.training for each in self._references.runs}
        if missed := [mode for mode in self._modes()[0] if mode not in known]:
            yield self._taken(self._original, missed)

    def runner(self) -> timing.Runner | None:
        """Return a function that calls the module as it runs now, to be timed; unchanged modules in it are inactive."""
        if not self.timed:
            return None
        runnable = shallow_clone(self._owner)
        deactivate(all_modules(runnable))
        training = self._program.training and self._phase.covers_training
        # What comes before a module in the middle of a network needs its gradients too.
        inner = True if self.group.owner else None
        with self._running(Stage.TIMING):
            return timing.Runner(
                runnable, self._calls, training=training, input_gradients=inner, given=self._given if inner else None
            )

    @property
    def _given(self) -> Sequence[Tensor]:
        """Return what the model is given in the example calls."""
        return tuple(tensors_within([(call.args, call.kwargs) for call in self._program.whole_calls]))

    def timings(self, runners: Mapping[str, timing.Runner | None]) -> timing.Timings:
        """Time candidates side by side, and beside the module as it was."""
        every = {"before": self.before, **runners}
        known = {name: runner for name, runner in every.items() if runner is not None}
        with self._running(Stage.TIMING):
            return timing.time_candidates(
                known,
                limit=self._limit,
                cold=self._program.measuring.is_cold,
                worth=0.0 if self.group.required else _LEAST,
            )

    def judged(self, race: Race, wrong: Sequence[str]) -> tuple[dict[str, Any], Reason | None]:
        """Return the figures of the best candidate of a race, and why it does not pay, if so; others were `wrong`."""
        timings, best = race.timings, race.best
        figures = timing.timing_figures(timings, best)
        # By the ratios that the best was chosen by: "before" was timed in fewer rounds than the best ones.
        took = timing.microseconds(timings, best)
        figures["lowerings"] = {name: took * timings.ratio(name, best).mid for name in race.candidates}
        known: dict[str, Any] = {"lowering": best if best != UNNAMED else "", "wrong": list(wrong)}
        values = {name: value for name, value in known.items() if value}
        return figures, None if self.group.required else timing.no_gain(timings.ratio("before", best), **values)

    def figures(self, verdict: verification.Verdict | None) -> dict[str, Any]:
        """Return what reports and plans say of how a rewrite was checked."""
        if verdict is None:
            return {"checked": self._unchecked()}
        if verdict.checked_in == verification.NO_ELEMENTS:
            return {"checked": "unverified: empty examples"}
        if self.pass_.numerics is Numerics.SEMANTIC and self._simulated is None:
            return {"checked": "that it runs (its results differ by design)"}
        return {
            "checked": f"{verdict.checked_in} on one call" if self._hurried else verdict.checked_in,
            "meaning_error": verdict.meaning_error,
            "precision_error": verdict.precision_error,
            **({"gradient_jump": verdict.jump} if verdict.jump else {}),
            **({"hurried": self._said_of_hurry()} if self._hurried else {}),
        }

    def _said_of_hurry(self) -> str:
        (mode,), gradients = self._modes()
        results, where = "results and gradients" if gradients else "results", _IN_MODE[mode]
        return f"{self._budget} was spent: only {results} of one call{where} were compared"

    def _unchecked(self) -> str:
        if not self._check:
            return "unverified: verify=False"
        if self._by_the_whole:
            return WITH_THE_WHOLE
        if is_on_meta(self._owner):
            return "unverified: meta"
        return "unverified: never called" if self._program.inputs else "unverified: no example inputs"
