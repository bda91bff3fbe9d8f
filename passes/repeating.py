"""Rewrites of a module, repeated on a graph that is captured for it once it is in its user's hands."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..compat import modules_by_name, own_children, submodule
from ..errors import MatchFailure
from ..settings import Settings
from ..tracing.ambient import outside_autocast
from ..tracing.captured import Variant, capture_of
from ..tracing.fallback import Repeating, fallback_of
from ..tracing.generators import RandomState
from ..tracing.guards import Guard, Truth
from ..tracing.inputs import Inputs
from ..tracing.names import tensors_by_name
from ..tracing.program import Program
from ..tracing.record import Call
from ..tracing.regions import Region
from ..tracing.selection import call_names
from ..tracing.sources import SELF, Attribute
from ..tracing.structure import copied
from . import measure
from .admission import admitted
from .base import Goal, Pass, Phase, Refusal, Site
from .comparison import Comparison
from .copying import twin
from .groups import Group, with_lowering
from .scratch import as_before, refuse_own_forwards
from .tuner import Tuner

if TYPE_CHECKING:
    from .history import Rewrite
    from .session import Request
    from .state_map import StateStep

__all__ = ["Repetition", "let_repeat"]

_IN_EVALUATION = Guard(Attribute(SELF, "training"), Truth(False), "the members are fused for evaluation only")


@dataclass(frozen=True)
class _Part:
    """What was rewritten as one site: the tensors that it took, the lowering that they got, and when that is valid."""

    tensors: frozenset[str]
    choice: str | None
    phase: Phase | None


@dataclass(frozen=True)
class _Done:
    """What one pass did to a module at once, and what that did to its tensors."""

    pass_: Pass
    parts: tuple[_Part, ...]
    steps: tuple[StateStep, ...]


@dataclass(frozen=True)
class Repetition:
    """Do to a further graph of a module what was done to its first ones, if that is right and pays there too.

    All happens on a copy of the module, with its members as they were. The graph is taken over only if the copy comes
    to hold the very tensors that the module has.

    Attributes:
        done: the rewrites, in the order in which they landed.
        obstacle: why they cannot be repeated; empty if they perhaps can.
        verify, measure, seed: as the model was optimized with.
    """

    done: tuple[_Done, ...] = ()
    obstacle: str = ""
    verify: bool = True
    measure: bool = True
    seed: int = 0

    def __call__(self, module: nn.Module, variant: Variant, call: Call) -> tuple[Variant, Mapping[str, nn.Module]]:
        """Return the rewritten graph, and the children by name that the module has to have for it.

        Raises:
            MatchFailure: if the graph must stay as it is.
            Exception: whatever goes wrong in the user's code or in a pass.
        """
        if self.obstacle:
            raise MatchFailure(self.obstacle)
        with _undisturbed():
            copy = as_before(module, variant, call, [(done.pass_, done.steps) for done in self.done])
            present = frozenset(own_children(copy))
            args, kwargs = copied(call.plain_arguments)
            call = Call(args, kwargs, None)
            program = Program(copy, (Inputs(*call.args, **call.kwargs),), training=copy.training)
            refuse_own_forwards(program)
            tuner = Tuner(
                program, check=self.verify, time=self.measure, seed=self.seed, settings=Settings(pass_timeout=0.0)
            )
            phases = [self._repeat(done, tuner, call) for done in self.done]
            stores = {target.partition(".")[0] for done in self.done for step in done.steps for target in step.targets}
            _check_tensors(module, copy, stores)
            added = own_children(copy).items()
            children = {name: child for name, child in added if child is not None and name not in present | stores}
            variant = _fitting(copy, call)
            if Phase.EVAL in phases:
                variant = dataclasses.replace(variant, guards=(*variant.guards, _IN_EVALUATION))
            return _renamed(variant, _free_names(module, children))

    def _repeat(self, done: _Done, tuner: Tuner, call: Call) -> Phase | None:
        """Rewrite the copy as the module was; return the phase that the rewrite is limited to.

        Raises:
            MatchFailure: if that is not possible, not right, no faster, or leaves other tensors.
        """
        group, calls = _found_again(done, tuner), (Inputs(*call.args, **call.kwargs),)
        comparison = Comparison(tuner.program, done.pass_, group, calls, check=self.verify, timed=False, seed=self.seed)
        before = twin(tuner.program.model)
        edit = tuner.apply(done.pass_, group)
        verdict = comparison.verdict(edit)
        if verdict is not None and not verdict.ok:
            raise MatchFailure(verdict.reason)
        if edit.state_map().steps != done.steps:
            raise MatchFailure("its members would be stored otherwise")
        if self.measure and done.pass_.goal is Goal.SPEED and not group.required:
            training = tuner.program.training and (group.phase or done.pass_.phase).covers_training
            runs = {"before": before, "after": twin(tuner.program.model)}
            timings = measure.time_candidates({n: measure.runner(m, calls, training=training) for n, m in runs.items()})
            if timings.ratio("before", "after").low <= 1.0:
                raise MatchFailure("no faster")
        return group.phase


@contextlib.contextmanager
def _undisturbed() -> Generator[None]:
    """Leave the contexts that the user's call runs under, and the random state as it is."""
    generators = RandomState()
    with torch.inference_mode(False), outside_autocast():
        try:
            yield
        finally:
            generators.restore()


# -- rewriting -----------------------------------------------------------------------------------------------------


def _found_again(done: _Done, tuner: Tuner) -> Group:
    """Return the sites of the new graph that are those of a rewrite, as one."""
    program = tuner.program
    items = tuner.supervised(done.pass_, lambda: "find", lambda: list(done.pass_.find(program)))
    found = [admitted(program, item) for item in items]
    sites = {item.tensors: item for item in found if isinstance(item, Site) and not item.home}
    parts: list[Site] = []
    for part in done.parts:
        site = sites.get(part.tensors)
        if site is None:
            refusals = dict.fromkeys(item.reason for item in found if isinstance(item, Refusal))
            raise MatchFailure("; ".join(refusals) or "its members are not computed alike in this graph")
        if site.phase not in (part.phase, Phase.EVAL):
            raise MatchFailure("the rewrite would not be valid in the same modes")
        parts.append(with_lowering(site, part.choice))
    if any(part.phase is Phase.EVAL for part in parts):
        parts = [dataclasses.replace(part, phase=Phase.EVAL) for part in parts]
    if len({(part.variant, part.required) for part in parts}) > 1:
        raise MatchFailure("its members are not computed in one graph")
    return Group(tuple(parts))


# -- taking over ---------------------------------------------------------------------------------------------------


def _check_tensors(module: nn.Module, copy: nn.Module, stores: Iterable[str]) -> None:
    """Make sure that the copy holds what the module does, and closes no more of the modules inside it.

    Raises:
        MatchFailure: if not.
    """
    mine, others = tensors_by_name(module), tensors_by_name(copy)
    if mine.keys() != others.keys():
        raise MatchFailure("it would have tensors of its own")
    prefixes = tuple(f"{name}." for name in stores)
    for name in (name for name in mine if name.startswith(prefixes)):
        if not _equal(mine[name], others[name]):
            raise MatchFailure(f"'{name}' would hold other values")
    for path, inner in modules_by_name(copy).items():
        same = submodule(module, path)
        marks = {} if same is None else vars(same)
        for key, value in vars(inner).items():
            if key.startswith("_fxopt_") and isinstance(value, frozenset) and not value <= marks.get(key, frozenset()):
                raise MatchFailure(f"it would rely on more of '{path}' than the first graphs do")


def _equal(one: Tensor, other: Tensor) -> bool:
    alike = one.shape == other.shape and one.dtype is other.dtype and one.device == other.device
    if not alike or one.requires_grad is not other.requires_grad or type(one) is not type(other):
        return False
    return one.is_meta or bool(((one == other) | (one.isnan() & other.isnan())).all())


def _fitting(copy: nn.Module, call: Call) -> Variant:
    """Return the rewritten graph that the call runs: where the mode matters there may be two."""
    capture = capture_of(copy)
    variants = [] if capture is None else capture.variants
    for variant in variants:
        names = call_names(copy, capture, call.args, call.kwargs) if capture is not None else {}
        if variant.fits(names):
            return variant
    raise MatchFailure("its graph would not hold for the same call")


def _free_names(module: nn.Module, children: Mapping[str, nn.Module]) -> dict[str, tuple[str, nn.Module]]:
    """Return name -> a name that is free in the module, and the child."""
    taken = {*own_children(module), *children}
    free: dict[str, tuple[str, nn.Module]] = {}
    for name, child in children.items():
        other, number = name, 0
        while hasattr(module, other) or (number and other in taken):
            number += 1
            other = f"{name}_{number}"
        taken.add(other)
        free[name] = other, child
    return free


def _renamed(
    variant: Variant, children: Mapping[str, tuple[str, nn.Module]]
) -> tuple[Variant, Mapping[str, nn.Module]]:
    for node in variant.graph.nodes:
        if node.op in ("call_module", "get_attr"):
            first, dot, rest = str(node.target).partition(".")
            if first in children:
                node.target = children[first][0] + dot + rest
    return variant, dict(children.values())


# -- handing over --------------------------------------------------------------------------------------------------


def let_repeat(rewrites: Sequence[Rewrite], request: Request, earlier: Mapping[nn.Module, Repeating]) -> None:
    """Let the rewritten modules of a model that was handed over have their rewrites repeated on further graphs.

    Args:
        rewrites: the rewrites that stand.
        request: what the model was optimized with.
        earlier: what was repeated on those of each module before.
    """
    repetitions = {module: known for module, known in earlier.items() if isinstance(known, Repetition)}
    first = Repetition(verify=request.verify, measure=request.measure, seed=request.seed)
    for rewrite in rewrites:
        steps = rewrite.edit.state_map().steps
        if not steps:
            continue  # it left the graphs cleaner; that the further ones have to do without
        module = rewrite.edit.owner.module
        known = repetitions.get(module, first)
        repetitions[module] = _extended(known, rewrite, steps, module)
    for module, repetition in repetitions.items():
        fallback = fallback_of(module)
        if fallback is not None and repetition.done:
            fallback.repeating = repetition


def _extended(known: Repetition, rewrite: Rewrite, steps: tuple[StateStep, ...], module: nn.Module) -> Repetition:
    if type(rewrite.pass_).revert is Pass.revert:
        return dataclasses.replace(known, obstacle=f"pass '{rewrite.pass_.name}' cannot be repeated")
    parts = tuple(_Part(part.tensors, part.choice, part.phase) for part in rewrite.group.sites)
    done = (*known.done, _Done(rewrite.pass_, parts, steps))
    if rewrite.edit.home is not module or isinstance(module, Region):
        return dataclasses.replace(known, done=done, obstacle="what it runs under a context was rewritten")
    return dataclasses.replace(known, done=done)
