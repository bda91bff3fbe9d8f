"""Decisions of earlier runs on equal models: repeated here, compared with the model, and kept for later runs."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from contextlib import nullcontext
from dataclasses import dataclass

from torch import nn

from ...collection import collection_paused
from ...errors import EngineWarning
from ...layers.delegated import fix_regions, fixed_regions, judged_outside
from ...runtime.record import record_of
from ...tracing.isolation import in_phase
from ...tracing.program import Program, is_on_meta
from ..cache import Cache, Entry, key_of, key_of_numbers
from ..sites import Cause
from ..timing import TimeBudget
from .context import Request
from .manager import Manager

__all__ = ["KeptDecisions", "looked_up", "recalled"]

_LOG = logging.getLogger("fxopt")
_LONGEST = 1e9
"""Seconds: more time than that is as much."""
_BY_NUMBERS = {Cause.JUDGED_WRONG, Cause.NO_MATCH, Cause.DIFFERS, Cause.MODEL_DIFFERS}
"""Why rewrites are left that may be right with other weights, such as those without NaN."""


@dataclass
class KeptDecisions:
    """Where the decisions on a model are kept."""

    cache: Cache
    key: str
    _exact_key: str | None = None  # that of decisions which hang on the numbers in weights

    @classmethod
    def of(cls, program: Program, request: Request) -> KeptDecisions | None:
        """Return where the decisions on a captured model are kept; None where a later run cannot repeat them.

        Nothing is kept of a model that was optimized before, nor where nothing would be compared or timed.
        """
        if request.cache is None or not request.decides or not program.whole_calls or request.twin is not None:
            return None
        if is_on_meta(program.model) or record_of(program.model) is not None:
            return None
        asked = {
            "verify": request.verify, "measure": request.measure.value, "seed": request.seed,
            "pass_timeout": request.settings.pass_timeout, "engines": request.settings.engines,
        }  # fmt: skip
        key = key_of(program, request.passes, asked)
        return None if key is None else cls(Cache(request.cache), key)

    def entry(self, program: Program, request: Request) -> Entry | None:
        """Return what was decided earlier, if that is about these passes, and there was no less time for it."""
        entry = self._read(self.key, program, request)
        if entry is None:
            self._exact_key = key_of_numbers(self.key, program)
            entry = self._read(self._exact_key, program, request) if self._exact_key else None
        return entry

    def _read(self, key: str, program: Program, request: Request) -> Entry | None:
        entry = self.cache.read(key)
        if entry is None or _granted(request, entry.forward) > entry.granted:
            return None
        plan, names = entry.plan, [pass_.name for pass_ in request.passes]
        is_of_these = all(names[each.step : each.step + 1] == [each.pass_name] for each in plan.decisions)
        same = plan.pipeline == tuple(map(str, request.passes)) and program.training == (plan.phase == "train")
        return entry if is_of_these and same else None

    def write(self, manager: Manager, request: Request) -> None:
        """Keep what was decided now, unless all that was rewritten was lost for want of time to check or compare it."""
        lost = any(each.status == "undone" and each.cause == Cause.NOT_CHECKED for each in manager.decisions)
        if lost and not manager.rewrites:
            return
        forward = manager.context.budget.forward
        is_hurried = any("hurried" in decision.figures for decision in manager.decisions)
        self._write(Entry(
            manager.plan(request.passes), manager.timings, manager.memory, rounding=manager.rounding,
            granted=_granted(request, forward), forward=forward,
            is_compared=not (is_hurried or manager.context.budget.concessions),
            fixed=fixed_regions(manager.program.model),
        ))  # fmt: skip

    def note_comparison(self, manager: Manager, entry: Entry) -> None:
        """Note how a model was compared, where that says more than the entry: as usual, or closely for its rounding."""
        new = dataclasses.replace(
            entry,
            is_compared=entry.is_compared or not manager.context.budget.concessions,
            rounding=max(entry.rounding, manager.rounding),
        )
        if new != entry:
            self._write(new)

    def _write(self, entry: Entry) -> None:
        by_numbers = any(decision.cause in _BY_NUMBERS for decision in entry.plan.decisions)
        key = self._exact_key if by_numbers else self.key
        if key is not None:
            self.cache.write(key, entry)


def looked_up(program: Program, request: Request, *, recalls: bool) -> tuple[KeptDecisions | None, Entry | None]:
    """Return where the decisions on a captured model are kept, and what was decided earlier, where it `recalls` that;
    where nothing was, graphs that are unchecked are checked.
    """
    kept = KeptDecisions.of(program, request)
    entry = kept.entry(program, request) if kept is not None and recalls else None
    if entry is None and program.check():
        return looked_up(program, request, recalls=recalls)  # of a model with other graphs
    return kept, entry


def _granted(request: Request, forward: float) -> float:
    """Return the seconds that there are for a model of which a call takes so long."""
    return min(TimeBudget.granted(request.time_budget, forward).seconds, _LONGEST)


def recalled(manager: Manager, request: Request, original: nn.Module, entry: Entry) -> Manager | None:
    """Repeat decisions on the captured copy of a model, untimed; None where the model is not right then."""
    program, plan = manager.program, entry.plan
    try:
        with collection_paused(), warnings.catch_warnings():
            warnings.simplefilter("error", EngineWarning)  # the engine that was there is gone
            with judged_outside(), in_phase(program.model, program.training):
                manager.repeat(request.passes, plan, verified=False)
                fix_regions(program.model, entry.fixed)
            with judged_outside() if entry.is_compared else nullcontext():
                is_right = manager.is_right(original, brief=entry.is_compared, rounding=entry.rounding)
    except Exception as error:  # whatever comes of an entry that does not fit: the run in full says what is wrong
        _LOG.debug("decisions of an earlier run are not repeated: %s: %s", type(error).__name__, error)
        return None
    if not is_right:
        _LOG.debug("decisions of an earlier run make the model another, and are not repeated")
        return None
    for rewrite in manager.rewrites:
        rewrite.replayed = False  # it was checked as its figures say
    manager.timings, manager.memory = entry.timings, entry.memory
    manager.decisions[:] = plan.decisions
    decided = [sum(each.step == step for each in plan.decisions) for step in range(len(manager.traces))]
    manager.traces = [dataclasses.replace(t, decided=n) for t, n in zip(manager.traces, decided, strict=True)]
    return manager
