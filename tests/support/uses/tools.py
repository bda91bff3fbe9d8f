"""Tools around a model: compilers, exports, functional calls, replicas, threads."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
from collections.abc import Iterator
from typing import Any

import torch
from support.concurrency import group_of_one_process, run_in_threads
from support.outcomes import Outcome, attempt, kept, loss
from support.samples import Subject, quiet
from support.using import use
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

import fxopt


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Log nothing: compilers tell at length what they cannot do."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _compiled(subject: Subject, backend: str) -> Outcome:
    model = subject.new()
    torch._dynamo.reset()
    with quiet(), silent():
        compiled = torch.compile(model, backend=backend)
        found = {"result": attempt(lambda: compiled(*subject.arguments()))}
        with torch.no_grad():
            found["no grad"] = attempt(lambda: compiled(*subject.arguments(seed=1)))
        found["backward"] = attempt(lambda: loss(compiled(*subject.arguments())).backward())
    return {**found, **kept(subject.gradients(model))}


@use(slow=True)
def compiled_eagerly(subject: Subject) -> Outcome:
    """`torch.compile(backend="eager")`."""
    return _compiled(subject, "eager")


@use(slow=True)
def compiled_ahead(subject: Subject) -> Outcome:
    """`torch.compile(backend="aot_eager")`."""
    return _compiled(subject, "aot_eager")


@use(slow=True)
def exported(subject: Subject) -> Outcome:
    """`torch.export.export`."""
    model = subject.new().eval()

    def run() -> Any:
        with quiet(), silent(), torch.no_grad():
            return torch.export.export(model, subject.arguments()).module()(*subject.arguments(seed=1))

    return {"result": attempt(run)}


@use(writes=True)
def functional_calls(subject: Subject) -> Outcome:
    """`functional_call` with other weights under the original names; the model keeps its own."""
    model = subject.new()
    state = {name: each.detach().clone().requires_grad_() for name, each in subject.build(3).named_parameters()}

    def call() -> Tensor:
        given = fxopt.translate_state(state, model) if subject.fast else state
        value = loss(functional_call(model, given, subject.arguments()))
        value.backward()
        return value

    found: dict[str, Any] = {"call": attempt(call), "own": attempt(lambda: model(*subject.arguments()))}
    if not subject.sample.zeros:
        found.update({f"gradient of {name}": kept(each.grad) for name, each in state.items()})
    return {**found, "names": attempt(lambda: [name for name, _ in model.named_modules()] and None)}


@use(writes=True)
def functional_calls_with_original_names(subject: Subject) -> Outcome:
    """`functional_call` with a state dict as it was before."""
    model = subject.new()
    state = {name: each.detach().clone() for name, each in subject.build(3).named_parameters()}
    with torch.no_grad():
        found = {"call": attempt(lambda: functional_call(model, state, subject.arguments()))}
        return {**found, "own": attempt(lambda: model(*subject.arguments()))}


@use()
def stacked_models(subject: Subject) -> Outcome:
    """`stack_module_state` of two models, and `vmap` over them."""
    models = [subject.new(), subject.new()]

    def run() -> Any:
        parameters, buffers = stack_module_state(models)

        def call(own: Any, held: Any) -> Any:
            return functional_call(models[0], (own, held), subject.arguments())

        return vmap(call)(parameters, buffers)

    return {"result": attempt(run)}


def replicas(model: nn.Module, count: int) -> list[nn.Module]:
    """Return copies as `DataParallel` makes them: shallow ones, whose parameters are plain tensors with a history."""
    modules = list(model.modules())
    numbers = {module: number for number, module in enumerate(modules)}
    made = []
    for _ in range(count):
        copied = [module._replicate_for_data_parallel() for module in modules]
        for module, replica in zip(modules, copied, strict=True):
            for key, child in module._modules.items():
                if child is None:
                    replica._modules[key] = None
                else:
                    setattr(replica, key, copied[numbers[child]])
            for key, parameter in module._parameters.items():
                setattr(replica, key, None if parameter is None else parameter * 1)
            for key, buffer in module._buffers.items():
                setattr(replica, key, None if buffer is None else buffer.clone())
        made.append(copied[0])
    return made


@use()
def replicas_in_threads(subject: Subject) -> Outcome:
    """Replicas as `DataParallel` makes them, called in threads, with a backward through both."""
    model = subject.new()
    results: dict[int, Any] = {}

    def step() -> Any:
        pair = replicas(model, 2)

        def call(turn: int) -> None:
            results[turn] = _unkept(lambda: pair[turn](*subject.arguments(seed=turn)))

        run_in_threads(call, range(2))
        for error in results.values():
            if isinstance(error, Exception):
                raise error
        value = loss([results[0], results[1]])
        value.backward()
        return results[0], results[1], value

    return {"step": attempt(step), **kept(subject.gradients(model))}


@use(writes=True)
def distributed_data_parallel(subject: Subject) -> Outcome:
    """Two steps in `DistributedDataParallel`, the first of two batches, in a group of one process."""
    model = subject.new()

    def steps() -> list[Tensor]:
        with group_of_one_process(), quiet():
            losses = _parallel_steps(model, subject)  # what has a reducer is gone before its group is
            gc.collect()
        return losses

    return {"steps": attempt(steps), "after": attempt(lambda: loss(model(*subject.arguments(seed=3))))}


def _parallel_steps(model: nn.Module, subject: Subject) -> list[Tensor]:
    parallel = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer, losses = torch.optim.SGD(parallel.parameters(), lr=0.1), list[Tensor]()
    for seeds in ((0, 1), (2,)):
        for turn, seed in enumerate(seeds, start=1):
            with parallel.no_sync() if turn < len(seeds) else contextlib.nullcontext():
                value = loss(parallel(*subject.arguments(seed=seed)))
                value.backward()
            losses.append(value.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _unkept(function: Any) -> Any:
    try:
        return function()
    except Exception as error:  # carried over to the thread that waits
        return error


@use(writes=True)
def threads(subject: Subject) -> Outcome:
    """One thread calls while another one writes weights; afterwards the last ones count."""
    model = subject.new()
    states = [subject.build(seed).state_dict() for seed in (5, 6)]
    errors: list[Exception] = []
    stop = threading.Event()

    def call() -> None:
        with torch.no_grad():
            while not stop.is_set():
                error = _unkept(lambda: model(*subject.arguments()))
                if isinstance(error, Exception):
                    errors.append(error)
                    return

    thread = threading.Thread(target=call)
    thread.start()
    loading = attempt(lambda: [model.load_state_dict(states[turn % 2]) for turn in range(6)] and None)
    stop.set()
    thread.join()

    def reraise() -> None:
        for error in errors:
            raise error

    with torch.no_grad():
        return {"load": loading, "errors": attempt(reraise), "result": attempt(lambda: model(*subject.arguments()))}


USES = (
    compiled_eagerly, compiled_ahead, exported, functional_calls, functional_calls_with_original_names,
    stacked_models, replicas_in_threads, distributed_data_parallel, threads,
)  # fmt: skip
