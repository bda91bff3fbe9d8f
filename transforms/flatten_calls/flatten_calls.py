"""The pass: one function for a module tree whose calls cost more than its work."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from ...compat import REGISTERS
from ...errors import MatchFailure
from ...passes.contract import Pass
from ...passes.rewriting import Edit
from ...passes.sites import Goal, Numerics, Phase, Refusal, Site
from ...passes.timing import forward_seconds
from ...runtime.graphs import required_capture, usual
from ...runtime.values import keep, qualified
from ...tracing.program import Program, outermost
from .write import Flat, flattened, is_written_out

__all__ = ["FlattenCalls"]

_SAVED = 5e-5
"""Seconds that writing out a call saves at most; 35 microseconds were measured, in models of transformers."""

_LEAST = 1.05
"""What a model is to gain by that. Checking and timing the whole of it takes as long as some dozens of forwards."""

_RUNS = 3
"""So many calls are made at most, where the decision hangs on it: the quickest counts, of the capture's check, too."""

_COLD = 10
"""A first call takes less than so many times as long as the next."""

_PLAIN = (torch.Tensor, nn.Parameter, type(None))


@dataclass(frozen=True)
class FlattenCalls(Pass):
    """Write out what modules call in the graph of the outermost one, and read their parameters directly.

    Before: y = child(x), where child calls linear and relu    After: y = relu(linear(x, child.0.weight, child.0.bias))
    Refuses: modules with hooks, parametrizations or a `__call__` of their own; they stay calls.
    """

    numerics: ClassVar[Numerics] = Numerics.EXACT
    goal: ClassVar[Goal] = Goal.SPEED
    phase: ClassVar[Phase] = Phase.BOTH

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        found = list(_found(program))
        calls = sum(count for _, count in found)
        reason = _too_little(program, calls) if calls else ""
        yield from (each for each, count in found if not (reason and count))
        if reason:
            yield Refusal(reason, "(root)")

    def rewrite(self, site: Site, edit: Edit) -> None:
        before = list(required_capture(edit.owner).specializations)
        flat = _flattened(edit.program, site.owner)
        if not flat:
            raise MatchFailure("no call is left to write out")
        edit.trainable = True  # in the other mode
        # Behind them stay the graphs as they were: for other modes, and where modules are no longer what they were.
        edit.set_specializations(
            [*(each.specialization for _, each in flat), *before],
            [*(number for number, _ in flat), *range(len(before))],
        )


def _found(program: Program) -> Iterator[tuple[Site | Refusal, int]]:
    """Yield the outermost modules in which calls can be written out, and how many; and what stays as it is."""
    phase = Phase.TRAIN if program.training else Phase.EVAL
    opened: set[str] = set()
    for owner in outermost(program, opened):
        reason = _reason_against(program, program.module(owner))
        flat = [] if reason else [each for _, each in _flattened(program, owner)]
        if reason:
            yield Refusal(reason, owner), 0
        elif any(each.specialization.graph.find_nodes(op="call_function", target=keep) for each in flat):
            yield Refusal("it writes into what it is given, such as a cache", owner), 0
        elif flat:
            calls = sum(each.calls for each in flat)
            yield Site(program, owner, {}, phase=phase, detail=f"{calls} call{'s' * (calls != 1)} written out"), calls
            closed = {path: why for each in flat for path, why in each.closed.items() if why}
            yield from ((Refusal(why, qualified(owner, path)), 0) for path, why in closed.items())
            opened |= {qualified(owner, path) for each in flat for path in each.opened}


def _too_little(program: Program, calls: int) -> str:
    """Return why it does not pay to look at a model whose forward takes long beside its calls; "" where it may."""
    if not program.measuring or program.replaying or not program.whole_calls:
        return ""
    saved = calls * _SAVED
    enough = saved / (1 - 1 / _LEAST)
    taken = program.forward_seconds or math.inf
    for _ in range(_RUNS):  # the first waits for memory and packed weights, and any for a busy machine
        taken = min(taken, forward_seconds(program.model, program.whole_calls[:1], training=False))
        if not enough <= taken < _COLD * enough:
            break
    if taken < enough:
        return ""
    counted = f"{calls} call{'s' * (calls != 1)} in {taken * 1e3:.3g} ms"
    return f"{counted}: it would gain {taken / (taken - saved):.3g}x at most"


def _flattened(program: Program, owner: str) -> list[tuple[int, Flat]]:
    """Return those of a module's graphs in which calls can be written out, with their numbers, once that is done."""
    module = program.module(owner)
    found = [
        (number, flattened(program, owner, each))
        for number, each in usual(required_capture(module).specializations)
        if each.runs_in_mode(module) and not any(map(is_written_out, each.guards))
    ]
    return [(number, flat) for number, flat in found if flat.calls]


def _reason_against(program: Program, module: nn.Module) -> str:
    """Return why a module stays as it is, whatever it calls, or ""."""
    if any(isinstance(each, torch.jit.ScriptModule) for each in module.modules()):
        return "it holds a module that TorchScript compiled"
    # Of other tensors no copies can be compared bit by bit.
    held = (vars(each)[register] for each in program.model.modules() for register in REGISTERS)
    plain = all(type(tensor) in _PLAIN for tensors in held for tensor in dict(tensors).values())
    return "" if plain else "the model holds tensors that are no plain ones"
