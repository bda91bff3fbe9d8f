"""One run of a module on one call, under conditions that repeat."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...compat import version_of
from ...compat.checkpoint import reentrant_checkpoints_off
from ...runtime.values import Arguments, flatten, map_tensors, requires_grad, structure
from ...tracing.isolation import ParameterData
from .float64 import Float64Mode, double_defaults, widened
from .inputs import named_tensors
from .interpret import graph_forward, own_forward
from .module_harness import ModuleHarness, random_state_kept
from .outcome import Outcome, differentiable, is_expanded, shared_memory
from .tape import Tape

__all__ = ["Conditions", "Execution", "StandIns", "leaves_tensors", "own_tensors", "written_parameter"]


StandIns = dict[tuple[int, torch.dtype], tuple[Tensor, int]]
"""Tensors in the place of a module's own, by the id of the own one and the type, and how often each was written to."""

_AWAY = 0x5EED
"""Random draws begin at no seed that code is likely to set."""


@dataclass(frozen=True)
class Conditions:
    """What a module is run under, before a rewrite and after it."""

    training: bool | None  # the mode; None leaves every flag as it is
    gradients: bool  # whether gradients are wanted
    seed: int  # of noise, upstream gradients and random draws
    # the type of exact runs; None where there are runs in the module's own types only
    wide: torch.dtype | None = torch.float64
    # whether gradients of float arguments are wanted too; some modules take none that require them
    of_inputs: bool = True
    keyed: bool = True  # name random draws by the node they happen in, where the module has a graph
    random: bool = False  # whether random operators run; their draws then come from a tape
    several: bool = False  # whether calls run several graphs, so that the first run does not tell what the others take
    # run a model as it is handed over: its own forward, whatever it is, on the random draws that it is served
    whole: bool = False
    # modules inside, by name, each of whose only graph is interpreted in exact runs, whatever its guards say
    inner: Sequence[str] = ()
    # called before each run, and each operation of exact ones; raises to end them all
    in_time: Callable[[], object] = lambda: None


@dataclass
class Execution:
    """One way of running a module."""

    harness: ModuleHarness  # the module, ready to take stand-ins
    conditions: Conditions  # what it is run under
    wide: torch.dtype | None = None  # the type that floats are promoted to; None runs in the module's own types
    promotion: Float64Mode | None = None  # promotes what the code casts or creates on its way, where that is needed
    tape: Tape | None = None  # serves the random draws; None leaves them to the generator
    # interpret the module's graph, where it has one, and the inner ones, instead of running its code
    by_node: bool = False
    # take second derivatives: how the gradients of float arguments depend on these and on parameters
    second: bool = False
    frozen: bool = False  # let no parameter want a gradient
    defaults: bool = True  # make `wide` the default type, too
    called: set[str] = field(default_factory=set[str])  # the names of those inner modules that ran
    # stand-ins of the module's own tensors that earlier runs left unchanged: what code derives from tensors, and
    # keeps while these are the same, is then made once
    kept: StandIns = field(default_factory=StandIns)

    def run(self, arguments: Arguments, state: Mapping[str, Tensor], like: Arguments | None = None) -> Outcome:
        """Run once; `state` gives every parameter and buffer by name, and stays unchanged. The graph to
        interpret is the one that a call with `like` runs, by default one with `arguments`.
        """
        self.conditions.in_time()
        with self._on_stage(state) as stand_ins:
            self._interpret(like or arguments)
            return self._run(arguments, stand_ins)

    def serve(
        self, calls: Sequence[Arguments], state: Mapping[str, Tensor], untaken: set[int] | None = None
    ) -> list[Outcome]:
        """Make several calls one after another without gradients, all but the first in inference mode. The
        numbers of those that raise are noted in `untaken`, if that is given.
        """
        runs: list[Outcome] = []
        with self._on_stage(state) as stand_ins:
            for number, arguments in enumerate(calls):
                self.conditions.in_time()
                try:
                    with torch.inference_mode(bool(runs)), torch.no_grad():
                        self._interpret(arguments)
                        self._rewind()
                        runs.append(self._run(arguments, stand_ins))
                except Exception:  # the module's code may raise anything
                    if untaken is None:
                        raise
                    untaken.add(number)
        return runs

    def step(
        self, calls: tuple[Arguments, Arguments], state: Mapping[str, Tensor], after: Mapping[str, Tensor]
    ) -> Outcome:
        """Run once, write another call's values into the arguments and `after` into the state, and run again."""
        copies = {id(tensor): tensor.detach().clone() for tensor in state.values()}
        with self._on_stage({name: copies[id(tensor)] for name, tensor in state.items()}) as stand_ins, torch.no_grad():
            leaves, others = (self._arguments(call)[1] for call in calls)
            self._interpret(calls[0])
            self._run(leaves, stand_ins, as_is=True)
            for leaf, value in zip(flatten(leaves).values(), flatten(others).values(), strict=True):
                if isinstance(leaf, Tensor) and isinstance(value, Tensor) and not torch.equal(leaf, value):
                    leaf.copy_(value)
            for name, tensor in after.items():
                if not torch.equal(tensor, state[name]):
                    stand_ins[name].copy_(tensor)
            torch.clear_autocast_cache()  # autocast around the module would go on with casts of what was there
            self._rewind()
            return self._run(leaves, stand_ins, as_is=True)

    def _rewind(self) -> None:
        if self.tape is not None:
            self.tape.rewind()

    @contextmanager
    def _on_stage(self, state: Mapping[str, Tensor]) -> Generator[dict[str, Tensor]]:
        """Put the module under the conditions, stand-ins in the places of its tensors."""
        given, made = self.conditions, dict[int, Tensor]()
        for name, original in self.harness.state.items():
            if id(original) not in made:
                made[id(original)] = self._proxy(state[name], original)
        stand_ins = {name: made[id(original)] for name, original in self.harness.state.items()}
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(given.gradients))
            stack.enter_context(reentrant_checkpoints_off())
            stack.enter_context(random_state_kept(given.seed + _AWAY))
            usual = self.wide if self.wide and self.defaults else torch.get_default_dtype()
            stack.enter_context(double_defaults(usual))
            stack.enter_context(self.harness.playing(stand_ins, self._convert, training=given.training))
            # Where types are kept, the stand-ins of parameters share memory with them.
            parameters = [tensor for tensor in stand_ins.values() if isinstance(tensor, nn.Parameter)]
            stack.enter_context(ParameterData(parameters).preserved())
            yield stand_ins

    def _interpret(self, arguments: Arguments) -> None:
        if not self.by_node:
            return
        module, inner = self.harness.module, self.conditions.inner
        forward = graph_forward(module, arguments, self.tape)
        if forward is not None:
            module.__dict__["forward"] = forward
            for region, is_part in self.harness.regions(inner).items():  # others draw as calls of their modules
                region.__dict__["forward"] = own_forward(region, self.tape if is_part else None)
        for name in inner:
            inside = module.get_submodule(name)
            inside.__dict__["forward"] = own_forward(inside, self.tape, partial(self.called.add, name))

    def _convert(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self._type(tensor), copy=True)

    def _type(self, tensor: Tensor) -> torch.dtype:
        return tensor.dtype if self.wide is None else widened(tensor.dtype, self.wide)

    def _proxy(self, value: Tensor, original: Tensor) -> Tensor:
        """Return what stands for a tensor in this trial; of its own value, what an earlier trial left as it was."""
        wanted = self._type(value)
        known, version = self.kept.get((id(original), wanted), (None, 0)) if value is original else (None, 0)
        is_free = original.requires_grad and not (self.frozen and isinstance(original, nn.Parameter))
        is_same = known is not None and _version(known) == version and known.requires_grad == is_free
        if known is not None and is_same and isinstance(original, nn.Parameter):
            return known  # whatever is written to it is taken back after each trial
        if isinstance(original, nn.Parameter):
            made: Tensor = nn.Parameter(value.detach().to(wanted), is_free)
        else:
            made = self._convert(value)
            if known is not None and is_same and torch.equal(known, made):
                return known
        if value is original:
            self.kept[id(original), wanted] = made, _version(made)
        return made

    def _run(self, arguments: Arguments, stand_ins: Mapping[str, Tensor], *, as_is: bool = False) -> Outcome:
        leaves, (args, kwargs) = ({}, arguments) if as_is else self._arguments(arguments)
        given = named_tensors((args, kwargs))
        before = {name: (tensor, _version(given[name])) for name, tensor in named_tensors(arguments).items()}
        held = {name: (tensor, _version(tensor)) for name, tensor in self.harness.plain.items()}
        usual = torch.get_default_dtype(), torch.is_grad_enabled()
        with ExitStack() as stack:
            stack.enter_context(self.promotion or nullcontext())
            stack.enter_context(self.tape or nullcontext())
            result = self.harness.module(*args, **kwargs)
        random_state = torch.get_rng_state()
        left = _switches_left(usual)
        outputs = flatten(result, "output")
        gradients = self._gradients(outputs, leaves, stand_ins)
        shared = shared_memory(outputs, given, (*stand_ins.values(), *(tensor for tensor, _ in held.values())))
        lent = {name for name, _ in shared}  # later trials may write into memory of stand-ins that are kept
        return Outcome(
            structure=structure(result),
            outputs={name: _taken(value) if name in lent else _detached(value) for name, value in outputs.items()},
            attached=frozenset(name for name, value in outputs.items() if requires_grad(value)),
            inputs={name: _detached(given[name]) for name, was in before.items() if _is_written(given[name], *was)},
            input_gradients={name: gradients.get(id(leaf)) for name, leaf in leaves.items()},
            parameter_gradients={name: gradients.get(id(stand_ins[name])) for name in self.harness.parameters},
            buffers={name: _taken(tensor) for name, tensor in self.harness.buffers_now.items()},
            shared=shared,
            rewritten=frozenset(name for name, (tensor, at) in held.items() if _version(tensor) != at),
            random_state=random_state,
            expanded=frozenset(name for name, v in outputs.items() if isinstance(v, Tensor) and is_expanded(v)),
            missed=self.harness.has_missed,
            left=left,
            tables={} if self.promotion is None else self.promotion.tables_of(given),
        )

    def _arguments(self, arguments: Arguments) -> tuple[dict[str, Tensor], Arguments]:
        wanted = self.conditions.gradients and self.conditions.of_inputs

        def leaf_of(tensor: Tensor) -> Tensor:
            return _placed_alike(self._convert(tensor), tensor).requires_grad_(wanted and differentiable(tensor))

        leaves = map_tensors(leaf_of, arguments)
        if not wanted:
            return {}, leaves
        named = {name: leaf for name, leaf in named_tensors(leaves).items() if differentiable(leaf)}
        return named, map_tensors(torch.clone, leaves)

    def _gradients(
        self, outputs: Mapping[str, Any], leaves: Mapping[str, Tensor], stand_ins: Mapping[str, Tensor]
    ) -> dict[int, Tensor]:
        if not self.conditions.gradients:
            return {}  # a parameter that is returned as it is requires them even then
        losses = [self._loss(value, index) for index, value in enumerate(outputs.values()) if requires_grad(value)]
        by_id = {id(tensor): tensor for tensor in (*leaves.values(), *stand_ins.values()) if tensor.requires_grad}
        if not losses or not by_id:
            return {}
        wanted, found = list(by_id.values()), cast("Sequence[Tensor | None]", ())
        if self.second:
            first = self._backward(losses, list(leaves.values()), create_graph=True)
            losses = [self._loss(value, at) for at, value in enumerate(first) if requires_grad(value)]
        if losses:
            found = self._backward(losses, wanted, materialize_grads=self.second)
        return {key: gradient for key, gradient in zip(by_id, found, strict=False) if gradient is not None}

    def _backward(self, losses: Sequence[Tensor], wanted: Sequence[Tensor], **options: bool) -> Sequence[Tensor | None]:
        """Return gradients; what is computed again on the way runs as it ran before."""
        with ExitStack() as stack:
            stack.enter_context(self.promotion if self.promotion and self.promotion.promoted else nullcontext())
            stack.enter_context(self.tape or nullcontext())
            return cast("Any", torch.autograd.grad)(losses, wanted, allow_unused=True, **options)

    def _loss(self, output: Tensor, index: int) -> Tensor:
        """Return a scalar that sends the same random gradient into `output`, whatever its type."""
        generator = torch.Generator().manual_seed(self.conditions.seed + index)
        noise = torch.randn(output.shape, generator=generator, dtype=torch.float64)
        exact_in_every_type = noise.to(torch.bfloat16).to(device=output.device, dtype=output.dtype)
        loss = (output * exact_in_every_type).sum()
        return loss.real if loss.is_complex() else loss


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)  # those of inference mode have none


def _is_written(given: Tensor, original: Tensor, version: int) -> bool:
    """Say whether a call wrote into an argument: by its version or, where the write goes round that, its values."""
    if _version(given) != version or given.layout is not torch.strided:
        return _version(given) != version
    return not given.isnan().any() and not torch.equal(given, original.to(given.dtype))


def _placed_alike(copy: Tensor, tensor: Tensor) -> Tensor:
    """Return a copy that lies behind as many elements of its memory as the other tensor."""
    if tensor.layout is not torch.strided or not tensor.storage_offset() or copy.stride() != tensor.stride():
        return copy
    place = copy.new_empty(tensor.storage_offset() + copy.untyped_storage().nbytes() // copy.itemsize)
    return place.as_strided(copy.shape, copy.stride(), tensor.storage_offset()).copy_(copy)


def _switches_left(usual: tuple[torch.dtype, bool]) -> frozenset[str]:
    """Return the names of the switches that are not as usual."""
    now = torch.get_default_dtype(), torch.is_grad_enabled()
    names = "the default dtype", "whether gradients are recorded"
    return frozenset(name for name, old, new in zip(names, usual, now, strict=True) if old != new)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _taken(value: Any) -> Any:
    """Return a tensor as it is now, whatever is written into it later."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def leaves_tensors(harness: ModuleHarness, kept: StandIns, after: Iterable[Mapping[str, Tensor]]) -> bool:
    """Say whether runs of a model on stand-ins left its parameters and buffers as they were; unknown of sparse ones."""
    if any(version_of(made) != version for made, version in kept.values() if isinstance(made, nn.Parameter)):
        return False
    pairs = [(buffer, run.get(name)) for run in after for name, buffer in harness.buffers.items()]
    return all(
        left is not None and buffer.layout is torch.strided and torch.equal(buffer, left) for buffer, left in pairs
    )


@contextmanager
def own_tensors(harness: ModuleHarness) -> Generator[StandIns]:
    """Yield a model's own tensors as stand-ins, for runs without gradients that write to none; buffers are put back."""
    tensors = {id(tensor): tensor for tensor in harness.state.values() if not tensor.is_inference()}
    kept = {(number, tensor.dtype): (tensor, version_of(tensor)) for number, tensor in tensors.items()}
    buffers = [each for each in harness.buffers.values() if id(each) in tensors]
    before = [(buffer, version_of(buffer), buffer.detach().clone()) for buffer in buffers]
    try:
        yield kept
    finally:
        with torch.no_grad():
            for buffer, version, copy in before:
                if version_of(buffer) != version:
                    buffer.copy_(copy)


def written_parameter(harness: ModuleHarness, kept: StandIns) -> str:
    """Return the name of a parameter that runs on a model's own tensors wrote to, or ""."""
    for name, tensor in harness.parameters.items():
        known = kept.get((id(tensor), tensor.dtype))
        if known is not None and known[0] is tensor and version_of(tensor) != known[1]:
            return name
    return ""
