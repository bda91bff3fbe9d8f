"""What a module did before a rewrite: in float64 and in its own types, as it is and with noise on inputs and state."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import InputError
from ...layers.delegated import as_converted
from ...runtime.graphs import capture_of, select
from ...runtime.guards import GuardMiss
from ...runtime.values import Arguments
from ...tracing.examples import Inputs
from ...tracing.isolation import shallow_clone
from .demands import Verdict
from .execution import Conditions
from .inputs import (
    Asked,
    ServedCall,
    alike,
    are_same,
    larger,
    nothing,
    one_row,
    other_rows,
    other_strides,
    permuted,
    perturbed_inputs,
    perturbed_state,
    picks_by_data,
    served_calls,
    smaller,
    uneven,
    zeros,
)
from .module_harness import ModuleHarness
from .outcome import Outcome
from .runs import Runs, coarsest_epsilon, raised_by
from .samples import Data, Reference, Sample, Sizes
from .tape import SteadyDraws
from .uses import taken_uses
from .verify import verify

__all__ = ["References", "reference", "worst"]

_CALLS = 3
"""Of a module called often, this many calls are run, or one for each of its graphs if these are more."""

_Test = Callable[[Outcome], bool]


@as_converted()
def reference(
    module: nn.Module,
    calls: Sequence[Inputs],
    *,
    training: bool | None = None,
    gradients: bool = True,
    seed: int = 0,
    keyed: bool | None = None,  # by default where it has a graph; False is for a rewritten module that has none
    brief: bool = False,  # take no samples with noise
    whole: bool = False,  # run the module as it is handed over, and not its graph
    sizes: Sizes = Sizes.RECORDED,
    inner: Sequence[str] = (),
    widest: torch.dtype = torch.float64,  # of exact runs; float32 is much faster, for errors above a thousandth
    in_time: Callable[[], object] = lambda: None,  # asked before each run; see `Conditions`
) -> Reference:
    """Run `module`, which is left as it was, on its recorded calls, and keep what verification compares with. It must
    stay as it is: what rounding does is read off it later. For what is not said here see `Conditions`. InputError if it
    does not run on them.
    """
    by_node = capture_of(module) is not None
    keyed = by_node if keyed is None else by_node and keyed
    conditions = Conditions(training, gradients, seed, widest, keyed=keyed, whole=whole, inner=inner, in_time=in_time)
    runs = Runs(ModuleHarness(module), conditions)
    made = _Maker(runs, brief, sizes).make([(call.args, call.kwargs) for call in calls])
    runs.let_go()
    return made


@dataclass(frozen=True)
class References:
    """What a module gives in each mode, to compare rewritten modules with."""

    runs: Sequence[Reference]
    is_steady: bool = False  # whether each random draw was served the same number, and is again

    @classmethod
    def of(
        cls, module: nn.Module, calls: Sequence[Inputs], modes: Sequence[bool | None], *, is_steady: bool = False,
        **how: Any,
    ) -> References:  # fmt: skip
        """Run a module, which is left as it was and may be rewritten then, in each mode; for `how` see `reference`."""
        kept = shallow_clone(module)
        with SteadyDraws() if is_steady else nullcontext():
            return cls([reference(kept, calls, training=mode, **how) for mode in modes], is_steady)

    @classmethod
    def taken(
        cls, module: nn.Module, calls: Sequence[Inputs], modes: Sequence[bool | None], *, steady: bool = False,
        **how: Any,
    ) -> References:  # fmt: skip
        """Do the same. `steady`: sizes inside the rewritten module may differ, so that no random draws fit both: each
        is then served the same number.
        """
        found = cls.of(module, calls, modes, **how)
        is_steady = steady and found.are_random
        return cls.of(module, calls, modes, is_steady=True, whole=True, **how) if is_steady else found

    @property
    def are_random(self) -> bool:
        """Say whether random operators run."""
        return any(each.conditions.random for each in self.runs)

    def verdicts(self, module: nn.Module, **asked: Any) -> list[Verdict]:
        """Return what a rewritten module is worth in each mode; for what is `asked` see `verify`."""
        with SteadyDraws() if self.is_steady else nullcontext():
            return [verify(each, module, **asked) for each in self.runs]


def worst(verdicts: Iterable[Verdict]) -> Verdict | None:
    """Return the verdict that says most against a rewrite; None where there is none."""
    return min(verdicts, key=lambda each: (each.ok, not each.is_rounded, -each.meaning_error), default=None)


def _spread(firsts: Sequence[int], count: int) -> list[int]:
    """Return the numbers of the calls to run: `firsts`, and while there is room the last one and one in the middle."""
    even = (step * (count - 1) // (_CALLS - 1) for step in reversed(range(_CALLS)))
    return list(dict.fromkeys((*firsts, *even)))[: max(_CALLS, len(firsts))]


class _Maker:
    """Take the samples of one reference."""

    def __init__(self, runs: Runs, brief: bool, sizes: Sizes) -> None:
        self.runs, self.brief, self.sizes = runs, brief, sizes
        self.smaller = sizes is not Sizes.RECORDED
        self.module, self.state = runs.harness.module, runs.harness.state
        self.few: Arguments = ((), {})
        self.one: Arguments = ((), {})
        self.epsilon = 0.0
        self._natives: dict[int, Outcome] = {}
        self._recorded: list[Arguments] = []
        self._types = (torch.float64, torch.float32, None)[runs.wide is not torch.float64 :]

    def make(self, calls: Sequence[Arguments]) -> Reference:
        runs, state = self.runs, self.state
        samples = self._samples(calls, self._firsts(calls)) if calls else []
        is_thorough = bool(samples) and not self.brief
        served = self._served(samples[0], calls[0]) if is_thorough else ()
        return Reference(
            original=runs,
            conditions=runs.conditions,
            state={name: tensor.detach() for name, tensor in state.items()},
            plain=frozenset(runs.harness.plain),
            samples=tuple(samples),
            native_epsilon=self.epsilon,
            called=frozenset(runs.called),
            stream=runs.stream(calls[0], state) if runs.conditions.random else None,
            served=served,
            used=tuple(taken_uses(runs, self.one, state)) if is_thorough else (),
        )

    def _firsts(self, calls: Sequence[Arguments]) -> list[int]:
        """Return the number of the first call of each graph that the calls run in the mode asked for."""
        module = self.module
        capture = capture_of(module)
        if capture is None or len(capture.specializations) < 2:
            return [0]
        with self._in_mode():
            selected = [select(module, *call) for call in calls]
        graphs = [None if found is None else found[0].graph for found in selected]
        return [graphs.index(graph) for graph in dict.fromkeys(graphs)]

    def _in_mode(self) -> AbstractContextManager[None]:
        """Set the mode, in which guards are asked."""
        return self.runs.harness.playing({}, training=self.runs.conditions.training)

    def _samples(self, all_calls: Sequence[Arguments], firsts: Sequence[int]) -> list[Sample]:
        self.runs.set(several=len(firsts) > 1)
        chosen = [all_calls[number] for number in _spread(firsts, len(all_calls))]
        calls = [self._reduced(call) for call in chosen]
        if self.sizes is Sizes.SMALLER_AND_RECORDED:
            self._recorded = [call for call, run in zip(chosen, calls, strict=True) if call is not run]
        self.epsilon = coarsest_epsilon(calls[0], self.state)
        recorded = [self._sample(Data.RECORDED, calls[0], self.state, self._widest(calls[0]))]
        for call in calls[1:]:
            with suppress(GuardMiss):  # no graph is for this call: the module's own forward runs, rewritten or not
                recorded.append(self._sample(Data.RECORDED, call, self.state, self.runs.exact(call, self.state)))
        self.few = recorded[0].arguments
        if self.brief:
            return recorded
        noisy = [self._noisy(sample) for sample in recorded[: len(firsts)]]
        derived = self._derived(recorded[0], all_calls[0])
        return [*recorded, *itertools.chain.from_iterable(noisy), *derived]

    def _reduced(self, call: Arguments) -> Arguments:
        """Return the smallest call that runs the same graph, where calls are to be small."""
        for smaller_one in smaller(call) if self.smaller else ():
            with suppress(Exception):  # the module need not take other sizes
                if self._runs_same(smaller_one, call):
                    self._natives[id(smaller_one)] = self.runs.native(smaller_one, self.state)
                    return smaller_one
        return call

    def _widest(self, arguments: Arguments) -> Outcome:
        """Run in the widest type that works, and stay with it; gradients of inputs are given up last."""
        failure: Exception | None = None
        for of_inputs in (True, False):
            for wide in self._types:
                self.runs.set(of_inputs=of_inputs, wide=wide)
                try:
                    return self.runs.exact(arguments, self.state)
                except Exception as error:  # the module's own code may raise anything; the first reason is told
                    failure = failure or error
        raise InputError(raised_by(type(self.module).__name__, failure)) from failure

    def _sample(self, data: Data, arguments: Arguments, state: Mapping[str, Tensor], exact: Outcome) -> Sample:
        known = None if self.runs.conditions.random or state is not self.state else self._natives.get(id(arguments))
        is_plain = self.runs.census is not None and not self.runs.census.promoted  # no cast inside was left out
        is_float32 = self._types[0] is self.runs.wide is torch.float32
        is_native = is_plain and is_float32 and self.epsilon <= torch.finfo(torch.float32).eps
        return Sample(
            data, arguments, state, exact, known or (exact if is_native else self.runs.native(arguments, state))
        )

    def _noisy(self, first: Sample) -> list[Sample]:
        """Run a call again with noise: on a few rows, which are cheaper; where the module does not take it,
        with less of it, or not at all.
        """
        state = perturbed_state(self.state, self.runs.conditions.seed)
        for arguments in (*(() if self.smaller else smaller(first.arguments)), first.arguments):
            for inputs in (perturbed_inputs(arguments, self.runs.conditions.seed + 1), arguments):
                run = self._attempt(inputs, state, first.exact) if self._runs_same(inputs, first.arguments) else None
                if run is not None and run.structure == first.exact.structure:
                    self.few = arguments if self.few is first.arguments else self.few
                    return [self._sample(Data.NOISY, inputs, state, run)]
        return []

    def _derived(self, first: Sample, example: Arguments) -> list[Sample]:
        """Run calls that are derived from one, each the farthest from it that the module takes."""
        tables, seed = first.exact.tables, self.runs.conditions.seed + 2
        far = [*other_rows(self.few, tables, seed), perturbed_inputs(self.few, seed)]
        far.insert(0, other_strides(far[0]))
        rows = self._first_taken(Data.ROWS, far, first)
        one = self._first_taken(Data.ONE_ROW, one_row(self.few, tables, seed), first)
        small = [one.arguments] if one else []
        self.one = one.arguments if one else self.few
        zero = self._first_taken(Data.ZEROS, map(zeros, (*small, self.few)), first, Outcome.is_finite_in_value)
        many = () if self.smaller else larger(self.few, example, seed)
        padded = self._first_taken(Data.NOTHING, nothing(self.one), first, Outcome.is_finite_in_value)
        other = self._first_taken(Data.UNEVEN, uneven(self.few), first)
        found = (rows, one and self._second(one), zero, padded, other, self._first_taken(Data.LARGER, many, first))
        return [sample for sample in (*found, *self._routed(first)) if sample is not None]

    def _routed(self, first: Sample) -> list[Sample | None]:
        """Run what picks by data anew: all rows the same way, so that experts are full and empty, and turned round."""
        if not picks_by_data(self.module):
            return []
        calls = (*alike(self.few), permuted(first.arguments))
        return [self._first_taken(Data.ALIKE, [call], first) for call in calls]

    def _first_taken(
        self, data: Data, derived: Iterable[Arguments], first: Sample, test: _Test = Outcome.is_finite
    ) -> Sample | None:
        for arguments in derived:
            if not self._runs_same(arguments, first.arguments):
                continue
            if not self.runs.conditions.gradients and are_same(arguments, first.arguments):
                return None
            run = self._attempt(arguments, self.state, first.exact, test)
            if run is not None and run.structure == first.exact.structure:
                return Sample(data, arguments, self.state, run)
        return None

    def _second(self, sample: Sample) -> Sample:
        """Return the sample with second derivatives, where the module has any."""
        given = self.runs.conditions
        if not given.gradients or not given.of_inputs or given.wide is None:
            return sample
        run = self._attempt(sample.arguments, sample.state, sample.exact, second=True)
        return sample if run is None or run.is_zero() else Sample(Data.SECOND, sample.arguments, sample.state, run)

    def _runs_same(self, arguments: Arguments, recorded: Arguments) -> bool:
        """Say whether a derived call runs the graph of the recorded one, where the module has graphs."""
        if arguments is recorded or capture_of(self.module) is None:
            return True
        with self._in_mode(), suppress(Exception):
            one, other = (select(self.module, *call) for call in (arguments, recorded))
            return one is not None and other is not None and one[0] is other[0]
        return False  # a guard may read what such a call does not have

    def _served(self, first: Sample, example: Arguments) -> tuple[tuple[ServedCall, Outcome], ...]:
        """Make calls in a row, those that the module takes; the same ones again where it did not take all."""
        large = {Sizes.RECORDED: Asked.SAME, Sizes.SMALLER_AND_RECORDED: Asked.BITS}.get(self.sizes)
        given = self.runs.conditions
        thought_of = served_calls(
            self.few, example, first.exact.tables, given.seed, large=large,
            training=self.module.training if given.training is None else given.training,
            weight=sum(tensor.numel() for tensor in self.state.values()),
        )  # fmt: skip
        calls = [call for call in thought_of if self._runs_same(call.arguments, first.arguments)]
        calls = [*(ServedCall(call, Asked.BITS) for call in self._recorded), *calls]
        for _ in range(2):
            untaken = set[int]()
            with suppress(Exception):  # it may not run without gradients: then nobody asks for that
                runs = self.runs.served([call.arguments for call in calls], self.state, untaken)
                untaken |= set[int]() if untaken else _telling_nothing(calls, runs)
                if not untaken:
                    return tuple(zip((self._with_exact(call, first) for call in calls), runs, strict=True))
            calls = [call for number, call in enumerate(calls) if number not in untaken]
        return ()

    def _with_exact(self, call: ServedCall, first: Sample) -> ServedCall:
        if call.asked is not Asked.NEAR_ZERO or self.runs.wide is None:
            return call
        return replace(call, exact=self._attempt(call.arguments, self.state, first.exact))

    def _attempt(
        self, arguments: Arguments, state: Mapping[str, Tensor], usual: Outcome, test: _Test = Outcome.is_finite,
        *, second: bool = False,
    ) -> Outcome | None:  # fmt: skip
        """Return the run, or None where noise led out of the module's domain: an error, or new infinities."""
        try:
            run = self.runs.exact(arguments, state, second=second)
        except Exception:  # noise may break any assumption of the module's code; the sample is then not taken
            return None
        return run if test(run) or not test(usual) else None


def _telling_nothing(calls: Sequence[ServedCall], runs: Sequence[Outcome]) -> set[int]:
    """Return the numbers of calls on NaN that no graph is for, or whose results are not finite on ordinary ones."""
    is_usual = bool(runs) and runs[0].is_finite_in_value()
    spoilt = (number for number, call in enumerate(calls) if call.asked is Asked.NOT_FINITE)
    return {number for number in spoilt if runs[number].missed or not is_usual}
