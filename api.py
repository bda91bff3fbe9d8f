"""The public functions on models in memory: plain orchestration over the layers below."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from .collection import collection_paused
from .compat import all_modules
from .deploy import reproducer
from .deploy.checkpoints import load_sharded as load_parts
from .errors import StateError, StateWarning, expect
from .layers.delegated import refresh as refresh_regions
from .passes.driver import (
    Request,
    check_kind,
    check_optimizer,
    copied,
    hand_over,
    move_optimizer,
    restored,
    run_session,
)
from .passes.pipeline import PassInfo, PassLike, asked_for, available, chosen_passes, heard_by_others, refuse_unfit
from .passes.sites import Phase
from .passes.timing import BudgetRequest
from .reporting import in_words
from .reporting.notes import notes, warn_of
from .reporting.picture import profiles_of
from .reporting.progress import progress_line
from .reporting.report import Report
from .runtime.graphs import attach, detach, misses_in, rank_local
from .runtime.record import Plan, needed_record, record_of, state_map_of
from .runtime.state import (
    StateMap,
    element_wise,
    functional_state,
    gathered,
    refuse_sharded,
    sharded_state,
    whole_state,
)
from .settings import Measure, current
from .storage import as_path
from .tracing.examples import normalize_inputs
from .tracing.isolation import eagerly, outside_inference_mode, plain_registries, rewrite_lock
from .tracing.program import Program, capture_program

__all__ = [
    "capture", "element_wise", "graphs", "list_passes", "load_sharded", "load_state_dict", "optimize", "plan",
    "refresh", "report", "restore", "state_dict", "translate_optimizer", "translate_state",
]  # fmt: skip

M = TypeVar("M", bound=nn.Module)
OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


def optimize(
    model: M,
    passes: PassLike | Iterable[PassLike] | None = None,
    *,
    example_inputs: object = None,
    phase: str | Phase | None = None,
    optimizer: Optimizer | None = None,
    verify: bool | None = None,
    measure: bool | Literal["cold"] | None = None,
    time_budget: float | str | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    inplace: bool = False,
    seed: int = 0,
    verify_twin: nn.Module | None = None,
) -> M:
    """Return the model, rewritten by `passes` where that is right and, for passes made for speed, where it pays.

    An equal model that was optimized before on this machine is rewritten as was decided then, and compared once;
    no rewrite is timed. `FXOPT_CACHE=0` decides anew.

    Where a process group of `torch.distributed` is initialized, all ranks call this: rank 0 decides, the others follow.

    Args:
        model: any module. It is left untouched unless `inplace`.
        passes: pass names, pipeline strings (`"fuse_ensembles{lowering=bmm}"`), pass values, functions from GraphModule
            to GraphModule, or a preset (`"inference"`, `"training"`, `"distributed"`); one of these or several, run in
            this order. By default those of the plan, if there is one, else `"inference"`.
        example_inputs: a tuple (positional), a dict (keywords), `Inputs` (both), a tensor or a graph of torch-geometric
            (the one argument), a list of these (several calls), or a `DataLoader`, whose first two batches are taken,
            without what the forward does not take (labels). Without any, nothing is verified or timed: rules decide.
        phase: `"train"` or `"eval"`: whether backward counts; by default what `model.training` says.
        optimizer: over the model's parameters: it stays the same object, and trains those of the result from then on,
            with its groups, state, schedulers and gradients; new parameters join. What else it trains, it keeps.
            Its steps are `fused` or `foreach` from then on where that is faster, unless these flags are set already.
        verify: check each rewrite against float64 and undo what differs; by default yes, or what FXOPT_VERIFY says.
        measure: time rewrites made for speed, undo what is not faster; "cold": with caches emptied, as by other work.
        time_budget: seconds from the capture to the result, `"10 s"`, or `"100 forwards"`; by default 40 forwards, at
            least 2 s. Where passes run once more because what one took has gone (decision 040), that run has as much
            time again.
        plan: a `Plan`, or the path of a saved one: repeat its decisions without verifying or timing anything.
        inplace: rewrite `model` itself (its modules keep their identity) instead of a copy; no pass that shards it may
            be among the passes.
        seed: of the random inputs and gradients that verification draws.
        verify_twin: for a model on the meta device: a small one of its class, with data, that is verified in its place.

    Returns:
        A module of the same class, in the same mode, with the same attributes, methods and names.

    Warns:
        NothingDoneWarning: a pass or preset that was asked for changed nothing.
        UnverifiedWarning: rewrites stand that nothing was compared for.

    Raises:
        UsageError: a wrong pass, option, order, or argument.
        InputError: the model cannot be copied, has lazy parameters, or refuses its inputs (its error is chained).
        PassError: a pass raised, hung or returned nonsense; the model is untouched, and a reproducer was written.
        PlanError: the plan does not fit this model.
        StateError: the optimizer trains nothing of the model, or cannot move (see `translate_optimizer`), or one that
            the model holds, or a list of its parameters; nothing is changed.
    """
    with heard_by_others(listening=plan is None):
        expect(inplace, bool, "inplace", "True or False")
        expect(verify, (bool, type(None)), "verify", "True or False")
        expect(seed, int, "seed", "a whole number")
        if optimizer is not None:
            check_optimizer(optimizer, model)
        decided = plan if plan is None or isinstance(plan, Plan) else Plan.load(as_path(plan, "plan"))
        passes = list(cast("Iterator[PassLike]", passes)) if isinstance(passes, Iterator) else passes
        pipeline = chosen_passes(passes, decided)
        refuse_unfit(pipeline, inplace=inplace, trains=optimizer is not None)
        settings = current()
        measuring = settings.measure if measure is None else Measure.of(measure)
        inputs = normalize_inputs(example_inputs, model)
        meant = Phase.meant(phase)
        budget = BudgetRequest.of(settings.time_budget if time_budget is None else time_budget)
    request = Request(
        in_words, passes=pipeline, inputs=inputs, phase=meant, plan=decided, seed=seed, settings=settings,
        cache=settings.cache, verify=settings.verify if verify is None else verify, twin=verify_twin, measure=measuring,
        time_budget=budget, trains=optimizer is not None,
        on_failure=lambda error: reproducer.write(model, pipeline, error, list(inputs) or None, phase, seed, settings),
    )  # fmt: skip
    with progress_line() as show:
        fast = run_session(model, dataclasses.replace(request, on_progress=show))
    if request.plan is None:
        warn_of(needed_record(fast), asked_for(passes))
    return cast(M, hand_over(model, fast, request, optimizer, inplace=inplace))


def capture(model: nn.Module, example_inputs: object = None) -> Program:
    """Return the model's `Program`: `.model` runs the graphs, `.graphs` are they, `.coverage()` says what was captured.

    Modules that check exact types run the original forward, and so do the modules inside them.

    Args:
        model: any module; it is copied, not changed.
        example_inputs: as for `optimize`.

    Raises:
        UsageError: `model` is no module.
        InputError: the model cannot be copied, or refuses its example inputs.
    """
    check_kind(model)
    with rewrite_lock(), rank_local(), outside_inference_mode(), collection_paused(), eagerly(model):
        fresh = copied(model)
        with plain_registries(fresh):
            attach(fresh)
            program = capture_program(fresh, example_inputs)
            detach(program.names)
        program.touch()  # the user may change the model, and its modules what they hold
    return program


def report(model: nn.Module, example_inputs: object = None) -> Report:
    """Return what was done to an optimized model, and what was not and why.

    Args:
        model: an optimized model.
        example_inputs: as for `optimize`. With them each node of the original and of the optimized graphs is run and
            timed on the first call, for the page of `to_html` and the data of `picture`.

    Raises:
        StateError: the model was not optimized.
        InputError: the model refuses its example inputs.
    """
    record = needed_record(model)
    profiles = None
    if example_inputs is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StateWarning)  # what is gone is zero in it: that is meant
            original = capture(restore(model), example_inputs)
        for call in original.whole_calls[:1]:
            profiles = profiles_of(original.model, model, call)
    return Report(record, misses_in(all_modules(model)), notes(record, model), model, profiles)


def graphs(model: nn.Module) -> dict[str, fx.Graph]:
    """Return the graphs that an optimized model runs, by qualified module name; `StateError` for others."""
    needed_record(model)
    return Program(model).graphs


def plan(model: nn.Module) -> Plan:
    """Return the decisions behind an optimized model, which `optimize(..., plan=...)` repeats; or `StateError`."""
    return needed_record(model).plan


def state_dict(model: nn.Module, *, gather: bool = True) -> dict[str, Tensor]:
    """Return the state dict of an optimized model under the original names: what the unoptimized model would save.

    `model.state_dict()` has these names too, but for sharded tensors (FSDP2) and other ranks' stages.
    With these, every rank calls this.

    Args:
        model: an optimized model.
        gather: give every rank whole tensors. Otherwise each has its part, as `torch.distributed.checkpoint` saves and
            loads it; tensors that passes merged are whole.

    Raises:
        StateError: the model was not optimized.
    """
    state_map = _state_map(model)  # the map first: it says what is no model
    return gathered(whole_state(model) if gather else model.state_dict(), state_map, whole=gather)


def load_state_dict(model: nn.Module, state: Mapping[str, Tensor], strict: bool = True, assign: bool = False) -> Any:
    """Load a checkpoint with original or new names into an optimized model; like `nn.Module.load_state_dict`.

    Whole tensors are distributed to a sharded model (FSDP2); every rank gives all of them then.

    Raises:
        StateError: the model was not optimized, tied tensors differ in `state`, or parts of a sharded one are missing.
        RuntimeError: names or shapes do not fit, as `nn.Module.load_state_dict` raises it.
    """
    state_map = _state_map(model)
    expect(state, Mapping, "state", "a state dict")
    return model.load_state_dict(sharded_state(model, state_map, state), strict=strict, assign=assign)


def load_sharded(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    key: str | None = None,
    device: str | torch.device | None = None,
    init: Callable[[nn.Module], object] | None = None,
    strict: bool = True,
) -> None:
    """Load a checkpoint of the unoptimized model from a folder; each process reads the part that it holds.

    What is on the meta device gets its memory here. All names, shapes and dtypes are compared first, and all is read
    before anything is changed. The ranks do not wait for each other.

    Args:
        model: an optimized model, sharded, split, in stages, or whole.
        path: a folder of safetensors files with an index, as `save_pretrained` writes it, that index, or a single file;
            or a folder of `torch.distributed.checkpoint`, of its own files or those of its `HuggingFaceStorageWriter`.
        key: under which the model's state was saved among others: "model" for `checkpoint.save({"model": state}, ...)`.
        device: where to; by default the GPU of the process where the process group works on GPUs, else the CPU. What
            has data already stays where it is.
        init: computes the tensors of a module that no checkpoint has (buffers that are not persistent), where these are
            on the meta device. It is called with each module that has such tensors; others of the module stay.
        strict: refuse tensors that the model has not; otherwise they are passed over.

    Raises:
        ArchiveError: a file is missing or damaged, or the metadata of a checkpoint holds what torch does not write.
        StateError: the model was not optimized; the checkpoint is of another model, or in a dtype that is not
            converted; tied tensors differ in it; tensors that no checkpoint has, without `init`.
        UsageError: the folder holds several checkpoints, or there is no such device.
    """
    record = needed_record(model)
    expect(key, (str, type(None)), "key", "a name, or leave it out")
    expect(device, (str, torch.device, type(None)), "device", "a device such as 'cuda'")
    expect(strict, bool, "strict", "True or False")
    load_parts(model, as_path(path), record=record, key=key, device=device, init=init, strict=strict)


def restore(model: nn.Module, *, optimizer: Optimizer | None = None) -> nn.Module:
    """Return the original structure and class with the current weights, buffers and attributes.

    The optimized model is left as it is; the result shares no tensors with it.

    Args:
        model: the optimized model.
        optimizer: over its parameters: it stays the same object, and trains those of the result from then on.

    Raises:
        StateError: the model was not optimized, or is sharded; or the optimizer cannot move, and is left as it was.
    """
    record = needed_record(model)
    refuse_sharded(
        model, "restoring needs whole tensors", "load fxopt.state_dict(model) into the original model instead"
    )
    return restored(model, record, optimizer)


def refresh(model: nn.Module) -> None:
    """Let engines take the parameters and buffers of a model as they are now, after a change of them.

    Without this call a region computes by the model's own operations until these have taken as long as a conversion.
    A model without regions of `delegate` is left as it is.

    Raises:
        StateError: the model was not optimized.
        RuntimeError: an engine does not take the new numbers (NaN, another type); the model's own operations run.
    """
    needed_record(model)
    refresh_regions(model)


def translate_optimizer(optimizer: OptimizerT, model: nn.Module) -> OptimizerT:
    """Move an optimizer of the unoptimized model's parameters to those of the optimized one, state and all, in place.

    Learning-rate schedulers stay attached, since the optimizer object stays the same.

    Args:
        optimizer: over the parameters of the model that was given to `optimize` (in this process), or one built
            with named parameters.
        model: the optimized model.

    Raises:
        UsageError: it is no optimizer.
        StateError: an optimizer that does not work element by element, or members in different groups or at unequal
            steps; nothing is changed then.
    """
    if record_of(model) is None:
        raise StateError(
            f"this {type(model).__name__} was not optimized by fxopt; to go back to the original model, give the "
            "optimizer to fxopt.restore(fast, optimizer=optimizer)"
        )
    return move_optimizer(optimizer, model, needed_record(model))


def translate_state(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return a state with original names as `torch.func.functional_call(model, ...)` takes it; gradients flow through.

    Args:
        state: parameters and buffers by original name, all of them or some. What is given of merged ones is completed
            with the model's own numbers.
        model: the optimized model.

    Raises:
        StateError: the model was not optimized, or is sharded; a name that it does not have, or a wrong shape.
    """
    expect(state, Mapping, "state", "a state dict, or a part of one")
    return functional_state(state, needed_record(model).state_map, model)


def list_passes() -> dict[str, PassInfo]:
    """Return every pass by name: what it does, its options and its contract; other packages' passes too."""
    return available()


def _state_map(model: nn.Module) -> StateMap:
    return state_map_of(model) or needed_record(model).state_map
