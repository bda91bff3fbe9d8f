"""One optimization from the user's model to the optimized one: copy, capture, run the passes, record."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...collection import collection_of_the_new, collection_paused
from ...compat import all_modules
from ...errors import InputError, UsageError
from ...runtime.graphs import (
    EVAL_ONLY,
    attach,
    capture_of,
    compile_postponed,
    deactivate_again,
    detach,
    postponing,
    rank_local,
)
from ...runtime.record import Plan, Record, record_of, view_of
from ...runtime.state import RECORD_KEY, InParts, StateMap
from ...runtime.values import ModelNames, RandomState, all_tensors, is_scripted, is_sharded, tensors_in
from ...settings import Measure
from ...tracing.isolation import (
    copied_module,
    eagerly,
    in_phase,
    outside_inference_mode,
    plain_registries,
    rewrite_lock,
    skeleton_of,
)
from ...tracing.program import Program, call_forms, captured_on, deactivate, is_on_meta
from ..cache import Entry
from ..contract import check_option_types
from ..pipeline import Asked, Ranks, as_in_twin, check_alike, check_behind, on_all_ranks, optimized_on_all, ranks
from ..sites import Phase
from ..timing import TimeBudget, budget_clock, forward_seconds
from .context import Request, RunContext
from .history import Rewrite
from .manager import Manager
from .recall import KeptDecisions, looked_up, recalled
from .root import forbid_lost_forwards, make_root
from .whole_model import finished, measured_memory, memory_figures

__all__ = ["check_kind", "copied", "run_session"]


def run_session(model: nn.Module, request: Request) -> nn.Module:
    """Return an optimized copy of `model`, with its record; `model` is only read, and no random state changes.

    Raises InputError if the model cannot be copied or refuses its example inputs, PassError if a pass fails.
    """
    finishes = any(pass_.finishes for pass_ in request.passes)
    others = ranks() if request.plan is None or finishes else None
    names = on_all_ranks(others, lambda: _checked(model, request))
    with contextlib.ExitStack() as around:
        around.enter_context(rewrite_lock())
        around.callback(RandomState().restore)
        around.enter_context(rank_local())
        around.enter_context(outside_inference_mode())
        around.enter_context(eagerly(model))
        if not (request.verify or request.measure):
            # Python's collector is for what runs of the model leave behind; what rewriting makes mostly lives on.
            around.enter_context(collection_paused())
        around.enter_context(collection_of_the_new())
        with postponing():
            fast = _on_all_ranks(model, names, request, others)
        compile_postponed(all_modules(fast))
        forget_copies(fast)
        if not finishes:
            return fast
        inputs = [call for call in request.inputs if request.verify and call.is_of_model]
        return finished(fast, vars(fast)[RECORD_KEY], request.passes, inputs=inputs, ranks=others)


def forget_copies(fast: nn.Module) -> None:
    """Let go of what was derived from the copies that the model was compared with."""
    captures = [capture for module in all_modules(fast) if (capture := capture_of(module)) is not None]
    for _ in range(2):  # what is derived from something derived goes after it
        for capture in captures:
            capture.forget_gone()


def _checked(model: nn.Module, request: Request) -> ModelNames:
    """Return the names in a model, once it and all passes have had the chance to refuse."""
    names = check_model(model)
    if request.twin is not None:
        _check_twin(model, request.twin)
    for pass_ in request.passes:
        _ = pass_.error_budget
        check_option_types(pass_)
        pass_.check(model)
    record = record_of(model)
    if record is not None and record.finished_by:
        raise UsageError(
            f"the model has been through {record.finished_by[-1]!r}, which comes last, and a copy would lose that; "
            "list all passes in one call, on the model as it was before"
        )
    if record is not None:
        check_behind(record.plan.decisions, request.passes)
    return names


def _check_twin(model: nn.Module, twin: nn.Module) -> None:
    """Raise UsageError where a twin says nothing of the model: it has no data, the model has, or the classes differ."""
    check_model(twin)
    if not is_on_meta(model):
        raise UsageError("verify_twin= is for a model on the meta device; this one has data, and is verified itself")
    if is_on_meta(twin):
        raise UsageError("verify_twin= is on the meta device itself; give a small model with data")
    if type(twin) is not type(model):
        raise UsageError(
            f"verify_twin= is a {type(twin).__name__}, the model a {type(model).__name__}; "
            "build both from one class, the twin with fewer layers or smaller ones"
        )


def _on_all_ranks(model: nn.Module, names: ModelNames, request: Request, others: Ranks | None) -> nn.Module:
    """Optimize; under `torch.distributed` as rank 0 decides, unless there is a plan already."""
    if others is None or request.plan is not None:
        return _optimized(model, names, request)
    check_alike(others, model, request.passes, _asked(model, request))
    return optimized_on_all(
        others,
        decide=lambda: _with_plan(_optimized(model, names, request), request),
        follow=lambda plan: _with_plan(
            _optimized(model, names, dataclasses.replace(request, plan=plan, checks_plan=True)), request
        ),
    )  # fmt: skip


def _asked(model: nn.Module, request: Request) -> Asked:
    """Return what ranks have to ask for alike, and the form of the first example."""
    trains = model.training if request.phase is None else request.phase.covers_training
    mode, moves = "training" if trains else "evaluation", "an" if request.trains else "no"
    words = f"optimizes for {mode}", f"gives {moves} optimizer"
    return Asked(words, [[*tensor.shape] for call in request.inputs[:1] for tensor in tensors_in([*call])])


def _with_plan(fast: nn.Module, request: Request) -> tuple[nn.Module, Plan]:
    """Return an optimized model with the decisions of this run alone."""
    whole = vars(fast)[RECORD_KEY].plan
    return fast, whole.last(len(request.passes))


def _optimized(model: nn.Module, names: ModelNames, request: Request) -> nn.Module:
    if request.twin is None or request.plan is not None:
        return _optimized_once(model, names, request)
    # What a twin's verification undoes must not have landed here: the rest is repeated.
    without_twin = dataclasses.replace(request, twin=None, measure=Measure.NO, cache=None)
    twin = _optimized_once(request.twin, check_model(request.twin), without_twin)
    plans = (_with_plan(each, request)[1] for each in (_optimized_once(model, names, request), twin))
    return _optimized_once(model, names, dataclasses.replace(request, plan=as_in_twin(*plans), checks_plan=True))


def _optimized_once(model: nn.Module, names: ModelNames, request: Request, *, recalls: bool = True) -> nn.Module:
    """Optimize a copy of the model; as was decided on an equal one earlier, where it `recalls` that."""
    with collection_paused():
        parameters = names.parameters()
        fast = copied(model)
    with plain_registries(fast):
        with collection_paused():
            start = _captured(model, fast, names, request, recalls=recalls)
        kept, entry = start.kept, start.entry
        if entry is None:
            manager = _decided(model, start, request)
            if kept is not None:
                kept.write(manager, request)
        else:
            start.program.trust(entry.forward)
            again = dataclasses.replace(request, plan=entry.plan, on_failure=None)
            manager = recalled(_manager(start, again), again, model, entry)
            if kept is not None and manager is not None:
                kept.note_comparison(manager, entry)
        if manager is not None:
            return _handed_over(model, parameters, start, manager, request, entry)
    return _optimized_once(model, names, request, recalls=False)


@dataclass(frozen=True)
class _Start:
    """A copy of the user's model with its graphs, and what is known of it."""

    program: Program
    earlier: Record
    remark: str
    trained: Collection[nn.Module]  # the modules that the user gave in training mode
    kept: KeptDecisions | None
    entry: Entry | None  # what was decided on an equal model earlier; graphs are compared where there is nothing
    seconds: float  # that the capture took


def _captured(model: nn.Module, fast: nn.Module, names: ModelNames, request: Request, *, recalls: bool) -> _Start:
    """Capture a copy of the user's model, and look for what was decided on an equal one."""
    clock = budget_clock()
    attach(fast)
    earlier = record_of(fast) or _first_record(model, fast, names, len(names.parameters()))
    training = fast.training if request.phase is None else request.phase is Phase.TRAIN
    # Where nothing is verified, nothing else would compare the graphs with the model.
    checked = request.cache is None or not (request.verify and recalls)
    program, remark = captured_on(fast, request.inputs, training=training, checked=checked)
    trained = {module for module in program.names.distinct if module.training}
    kept, entry = looked_up(program, request, recalls=recalls)
    return _Start(program, earlier, remark, trained, kept, entry, clock())


def _manager(start: _Start, request: Request) -> Manager:
    program = start.program
    program.measuring, program.replaying = request.measure, request.plan is not None
    return Manager(RunContext.of(program, request, _budget(program, request, start.seconds), start.trained))


def _decided(model: nn.Module, start: _Start, request: Request) -> Manager:
    """Run the passes on a copy of the user's model, or repeat a plan, and compare it with the model."""
    program = start.program
    with in_phase(program.model, program.training):
        manager = _manager(start, request)
        measured = measured_memory(program, request.passes) if request.decides else None
        if request.plan is None:
            manager.run(request.passes)
        else:
            manager.repeat(request.passes, request.plan, verified=request.checks_plan)
    manager.compare(model)
    manager.settle()
    for step, pass_ in enumerate(request.passes if request.decides else ()):
        pass_.check_decisions([decision for decision in manager.decisions if decision.step == step])
    if measured is not None:
        manager.memory = memory_figures(measured, program, request.passes, manager.decisions)
    manager.finish(request.passes, request.plan)
    return manager


def _handed_over(
    model: nn.Module, parameters: dict[str, nn.Parameter], start: _Start, manager: Manager, request: Request,
    known: Entry | None = None,
) -> nn.Module:  # fmt: skip
    """Return the rewritten copy with its record; `known` is what an earlier run decided."""
    program, fast = start.program, start.program.model
    deactivate(program.names.distinct)
    record = _record(manager, request, start, "" if known is None else known.made)
    record.remember(model, parameters)
    if manager.rewrites or record_of(fast) is not None:
        make_root(fast, record)
    else:
        vars(fast)[RECORD_KEY] = record  # the root stays of the user's very class
    forbid_lost_forwards(fast, manager.rewrites, record)
    detach(program.names)
    _limit_to_evaluation(fast, manager.rewrites, record)
    # The old tensors go now, and not when Python's collector finds that nobody needs them.
    for rewrite in manager.rewrites:
        rewrite.edit.settle()
    program.touch()
    return fast


def _limit_to_evaluation(fast: nn.Module, rewrites: Iterable[Rewrite], record: Record) -> None:
    """Let neither the model nor the modules be trained whose rewrites hold in evaluation only."""
    limited = [rewrite for rewrite in rewrites if rewrite.phase is Phase.EVAL]
    if record.eval_only:
        _limit(fast, record.eval_only)
    for rewrite in limited:
        for module in () if rewrite.edit.trainable else _rewritten_by(rewrite, fast):
            known: tuple[str, ...] = vars(module).get(EVAL_ONLY, ())
            _limit(module, tuple(dict.fromkeys((*known, rewrite.pass_.name))))


def _limit(module: nn.Module, passes: tuple[str, ...]) -> None:
    vars(module)[EVAL_ONLY] = passes
    deactivate_again(module)  # of a class that refuses to be trained


def _rewritten_by(rewrite: Rewrite, fast: nn.Module) -> Iterable[nn.Module]:
    """Yield the module that a rewrite changed, and those inside it, with graphs, whose tensors it took."""
    owner = rewrite.edit.holder.name
    yield fast.get_submodule(owner)
    tensors = [name for step in rewrite.edit.state_map_of_model().steps for name in step.sources]
    inside = {name[:end] for name in tensors for end in range(len(owner) + 1, len(name)) if name[end] == "."}
    for module in map(fast.get_submodule, sorted(inside)):
        if capture_of(module) is not None:
            yield module


def check_kind(model: object) -> nn.Module:
    """Return a model; UsageError for what is no module, InputError for what TorchScript compiled."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if is_scripted(model):
        raise InputError(
            f"this model is a {type(model).__name__}: TorchScript compiled it, and left no forward to capture; "
            "give the module that it was made from"
        )
    return model


def check_model(model: object) -> ModelNames:
    """Return the names in a model; raise UsageError or InputError for what cannot be optimized at all."""
    names = ModelNames(check_kind(model))
    if isinstance(model, InParts):
        raise InputError("the model is in parts on several ranks already; give optimize all passes at once")
    if any(map(nn.parameter.is_lazy, {type(tensor): tensor for tensor in all_tensors(names.distinct)}.values())):
        name = next(name for name, tensor in names.registered().items() if nn.parameter.is_lazy(tensor))
        raise InputError(f"'{name}' is lazy: its shape is not known yet; call the model once, then optimize it")
    for name, tensor in names.parameters().items():
        if is_sharded(tensor):
            raise InputError(f"'{name}' is sharded already; optimize the model first, then shard it (fully_shard)")
    return names


def copied(model: nn.Module) -> nn.Module:
    """Return a deep copy of the model, or raise InputError."""
    try:
        return copied_module(model)
    except Exception as error:
        raise InputError(
            f"the model cannot be copied ({type(error).__name__}: {error}); make it copyable by copy.deepcopy"
        ) from error


def _budget(program: Program, request: Request, captured_in: float) -> TimeBudget:
    """Return the time for what follows the capture, which begins now; where nothing is run there is no limit."""
    if not request.decides or not program.inputs or is_on_meta(program.model):
        return TimeBudget(clock=budget_clock())
    on_gpu = any(tensor.is_cuda for tensor in all_tensors(program.names.distinct))
    clock = time.perf_counter if on_gpu else budget_clock()
    begun = clock()
    known = 0.0 if on_gpu or program.training else program.forward_seconds
    forward = known or forward_seconds(program.model, program.whole_calls, program.training, clock)
    return TimeBudget.granted(request.time_budget, forward, clock).counting_from(begun, captured_in)


def _first_record(model: nn.Module, fast: nn.Module, names: ModelNames, count: int) -> Record:
    """Return the record of a model, of so many parameters, that nothing has been done to; `fast` is a copy of it."""
    first: dict[int, str] = {}
    known: dict[str, Any] | None = names.state()
    state: dict[str, Any] = fast.state_dict(keep_vars=True) if known is None else known
    tied = [(name, first.setdefault(id(value), name)) for name, value in state.items()]
    return Record(
        plan=Plan((), "eval", ()),
        state_map=StateMap().ordered(state, [(name, same) for name, same in tied if name != same]),
        graph_versions={},
        graphs_after={},
        coverage="",
        parameters_before=count,
        parameters_after=count,
        skeleton=skeleton_of(model),
    )


def _spent(budget: TimeBudget) -> dict[str, Any] | None:
    """Return what the run took, what it might have taken, and what was compared otherwise for that."""
    if not budget.forward:
        return None
    return {
        "seconds": budget.spent, "budget_s": budget.seconds, "forward_ms": budget.forward * 1e3,
        "capture_s": budget.captured_in, "stages": dict(budget.stages), "otherwise": list(budget.concessions),
    }  # fmt: skip


def _memory(earlier: Mapping[str, int] | None, now: Mapping[str, int] | None) -> Mapping[str, int] | None:
    """Return what a training step took before the first call that measured it, and takes since the last one."""
    if earlier is None or now is None:
        return now or earlier
    return {name: (earlier if name.endswith("_before") else now)[name] for name in now}


def _record(manager: Manager, request: Request, start: _Start, cached: str) -> Record:
    program, earlier = start.program, start.earlier
    graphs, first = program.graphs, len(earlier.plan.pipeline)
    versions = {name: list(known) for name, known in earlier.graph_versions.items()}
    for name, later in manager.history.graph_versions(first).items():
        versions.setdefault(name, []).extend(later)
    of_phase = (rewrite for rewrite in manager.rewrites if rewrite.phase is Phase.EVAL)
    applied = {decision.step for decision in manager.decisions if decision.status == "applied"}
    limited = [rewrite.pass_.name for rewrite in of_phase if not rewrite.edit.trainable]
    return Record(
        plan=earlier.plan.extended(manager.plan(request.passes)),
        earlier_passes=first,
        state_map=earlier.state_map.compose(manager.history.state_map()),
        graph_versions=versions,
        graphs_after={name: view_of(graphs[name]) for name in versions if name in graphs},
        coverage=str(program.coverage()),
        parameters_before=earlier.parameters_before,
        parameters_after=len(program.names.parameters()),
        timings=manager.timings,
        memory=_memory(earlier.memory, manager.memory),
        spent=_spent(manager.context.budget),
        checked=manager.history.checked(earlier),
        eval_only=tuple(dict.fromkeys([*earlier.eval_only, *limited])),
        finished_by=tuple(p.name for step, p in enumerate(request.passes) if p.finishes and step in applied),
        traces=(*earlier.traces, *manager.traces),
        skeleton=earlier.skeleton,
        opaque=tuple((o.name, o.location or "", o.reason) for o in program.opaque.values()),
        remark=start.remark,
        cached=cached,
        calls=call_forms(request.inputs) or earlier.calls,
        attributes=earlier.attributes.union(*(rewrite.edit.attributes for rewrite in manager.rewrites)),
    )
