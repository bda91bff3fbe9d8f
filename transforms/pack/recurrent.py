"""LSTMs on packed weights: where they are, whether they gain, and how they are written."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from ...compat import own_parameters
from ...layers.packed import PackedLSTM, Recurrence, why_not_packed
from ...passes.kinds import Judgement, beyond_rounding, error_of
from ...passes.rewriting import Edit, reason_against_module, shape_of
from ...passes.sites import Cause, Reason, Refusal, Site
from ...runtime.graphs import Region
from ...runtime.values import qualified
from ...tracing.program import Program
from .checking import off_by
from .find import IN_TRAINING
from .layers import graphs_in
from .timing import Calls
from .write import seal_modules

__all__ = ["LABEL", "recurrent_in", "write_recurrent"]

LABEL = "recurrent"
"""What sites call the call of an LSTM."""


@dataclass(frozen=True)
class _FoundLSTM:
    """A call of an LSTM in a graph, and why it stays as it is, or ""."""

    owner: str
    number: int
    node: fx.Node
    module: nn.LSTM
    reason: str

    @property
    def name(self) -> str:
        return qualified(self.owner, str(self.node.target))

    @property
    def kind(self) -> Hashable:
        return _given(self.node), settings_of(self.module)


def recurrent_in(program: Program, dtype: torch.dtype, budget: float) -> Iterator[Site | Refusal]:
    """Yield a site for each call of an LSTM, and those that stay as they are; see `found_in`."""
    if program.training:
        yield from (Refusal(IN_TRAINING, "(root)", Cause.IN_TRAINING) for _ in itertools.islice(_calls(program), 1))
        return
    gains, allowed = dict[Hashable, Judgement](), None if dtype is torch.float32 else budget
    for found in _calls(program):
        if found.reason:
            yield Refusal(found.reason, found.name)
            continue
        tensors, kind = _tensors(found.module), found.kind
        shape = _given(found.node)
        if shape is not None and math.prod(shape) and not tensors[0].is_meta and kind not in gains:
            calls = _as_calls(found, shape, dtype)
            gains[kind] = calls.judged(allowed)
            if gains[kind].reason is None and program.measuring:
                gains[kind] = replace(gains[kind], figures=calls.figures(cold=program.measuring.is_cold))
        known = gains.get(kind, Judgement())
        if refusal := known.refusal(found.name):
            yield refusal
        else:
            speeds = [round(known.figures["speedup"], 3)] if known.figures else []
            detail = "1 LSTM" + (f", {speeds[0]:.3g}x by itself" if speeds else "")
            yield Site(
                program, found.owner, {LABEL: found.node.name}, found.number, detail=detail, kind=kind,
                data={"speeds": speeds}, found=known.error,
            )  # fmt: skip


def settings_of(lstm: nn.LSTM) -> Recurrence:
    """Return the settings of an LSTM."""
    sizes = lstm.input_size, lstm.hidden_size, lstm.num_layers
    return Recurrence(*sizes, bool(lstm.bias), lstm.batch_first, lstm.bidirectional)


def write_recurrent(site: Site, edit: Edit, dtype: torch.dtype) -> bool:
    """Write the call of an LSTM; say whether it was still there."""
    edit.trainable = True  # where gradients are wanted, it computes as the LSTM does
    found = _found(edit.program, site.owner, site.specialization, edit.graph_node(LABEL))
    operands = None if found is None or found.reason else _operands(found.node)
    if found is None or operands is None:
        return False
    its, name = settings_of(found.module), str(found.node.target)
    if found.module.dropout and its.num_layers > 1:
        edit.hold_in_evaluation([name])
    tensors = [edit.get_attr(f"{name}.{each}", before=found.node) for each in its.names]
    for each in tensors:
        each.meta["parameter"] = True
    packed = edit.call(PackedLSTM(its, dtype), *operands, *tensors, before=found.node)
    packed.meta["source"] = found.node.meta.get("source")
    edit.replace(found.node, packed)
    seal_modules([name], edit)
    return True


def _calls(program: Program) -> Iterator[_FoundLSTM]:
    for owner, number, graph in graphs_in(program):
        for node in graph.find_nodes(op="call_module"):
            found = _found(program, owner, number, node)
            if found is not None:
                yield found


def _found(program: Program, owner: str, number: int, node: fx.Node) -> _FoundLSTM | None:
    module = program.callee(owner, node) if node.op == "call_module" else None
    if not isinstance(module, nn.LSTM):
        return None
    return _FoundLSTM(owner, number, node, module, _reason_against(program, owner, module, node))


def _reason_against(program: Program, owner: str, module: nn.LSTM, node: fx.Node) -> str:
    reason = reason_against_module(module, nn.LSTM)
    if reason:
        return reason
    if module.proj_size:
        return "its hidden state is projected, for which there is no kernel"
    if isinstance(program.module(owner), Region):
        return "it is called in a region that does not own it"
    if _operands(node) is None:
        return "it is called with other arguments than an input and two states"
    own = own_parameters(module)
    tensors = [own.get(name) for name in settings_of(module).names]
    if any(tensor is None for tensor in tensors):
        return "its weights are no parameters of its own"
    return next(filter(None, (why_not_packed(cast("Tensor", tensor)) for tensor in tensors)), "")


def _operands(node: fx.Node) -> tuple[Any, Any] | None:
    """Return input and states of a call; None where it has something else."""
    given = dict(zip(("input", "hx"), node.args, strict=False)) | dict(node.kwargs)
    if not isinstance(given.get("input"), fx.Node) or len(given) > 2 or not set(given) <= {"input", "hx"}:
        return None
    return given["input"], given.get("hx")


def _given(node: fx.Node) -> tuple[int, ...] | None:
    """Return the shape of what a call is given, where that is known and has a batch."""
    operands = _operands(node)
    shape = None if operands is None else shape_of(operands[0])
    return shape if shape is not None and len(shape) == 3 else None


def _tensors(lstm: nn.LSTM) -> list[Tensor]:
    own = own_parameters(lstm)
    return [cast("Tensor", own[name]) for name in settings_of(lstm).names]


def _as_calls(found: _FoundLSTM, shape: tuple[int, ...], dtype: torch.dtype) -> Calls:
    packed, tensors = PackedLSTM(settings_of(found.module), dtype), _tensors(found.module)

    def before(x: Tensor, *tensors: Tensor) -> object:
        return packed.plainly(x, None, *tensors)

    def after(x: Tensor, *tensors: Tensor) -> object:
        return packed(x, None, *tensors)

    return Calls(shape, before, after, [tuple(tensors)], _Check(packed, tensors))


@dataclass(frozen=True)
class _Check:
    """Whether a packed LSTM computes what the LSTM does: both are compared with what it gives in float64."""

    packed: PackedLSTM
    tensors: Sequence[Tensor]

    def reason_against(self, x: Tensor, laid: Tensor) -> Reason | None:
        """Return how far off the packed LSTM is; None where that is rounding."""
        with torch.no_grad():
            exact = self.packed.plainly(x.double(), None, *(each.double() for each in self.tensors))[0]
            own, found = self.packed.plainly(x, None, *self.tensors)[0], self.packed(laid, None, *self.tensors)[0]
            errors = beyond_rounding(own, found, exact)
        return None if errors is None else off_by(*errors)

    def error(self, x: Tensor, laid: Tensor) -> float:
        """Return how far off the packed LSTM is from the LSTM itself, relative to the scale of its outputs."""
        with torch.no_grad():
            own, found = self.packed.plainly(x, None, *self.tensors)[0], self.packed(laid, None, *self.tensors)[0]
            return error_of(own, found)
