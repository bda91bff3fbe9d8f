"""The pass: put regions under autocast where 16 bits are enough and pay."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ...compat import own_children
from ...errors import UsageError, one_line
from ...layers.autocast import KeptCasts, ReturningAutocast, in_autocast
from ...operators import operator_info
from ...passes.contract import Pass, check_named
from ...passes.rewriting import Edit
from ...passes.sites import Goal, Numerics, OwnForward, Phase, Refusal, Site
from ...tracing.analyses import HashLevel, StructuralHash
from ...tracing.program import Program
from .find import Part, Repeated, Search, repeated_around
from .lists import FLOAT32, FOLLOWING, LOWER

__all__ = ["Autocast"]


@dataclass(frozen=True)
class Autocast(Pass):
    """Compute matrix products, convolutions and attention in 16 bits, and what reads only from them.

    Before: y = softmax(linear(x))        After: y = softmax(autocast_0(x)), whose result is in float32 again
    Refuses: what a user's own autocast is around, what has hooks, values that are not in float32.

    Losses, exponentials, logarithms and sums stay in float32; softmax, norms and powers do so but for what is bfloat16
    already, where torch's autocast decides. In training the error of torch's autocast is allowed beside the budget.

    Options:
        dtype: what to compute in, bfloat16 or float16.
        device: the type of the devices to do it on (`cuda`); `auto` is that of the model.
        keep: what stays in float32: names of modules, which may hold `*`, their classes, or operators (`gelu`).
        budget: the error that is allowed, relative to the scale of each tensor.
    """

    dtype: torch.dtype = torch.bfloat16
    device: str = "auto"
    keep: tuple[str, ...] = ()
    budget: float = 0.05

    numerics: ClassVar[Numerics] = Numerics.APPROXIMATE
    goal: ClassVar[Goal] = Goal.SPEED
    phase: ClassVar[Phase] = Phase.BOTH
    own_forward: ClassVar[OwnForward | None] = OwnForward.ACCEPTABLE

    @classmethod
    def searched(cls, phase: Phase, goals: Collection[Goal]) -> Mapping[str, Sequence[Any]] | None:
        return {} if phase is Phase.TRAIN else None

    def check(self, model: nn.Module) -> None:
        for device in sorted({tensor.device.type for tensor in (*model.parameters(), *model.buffers())} or {"cpu"}):
            if self.device in ("auto", device):
                _check_dtype(self.dtype, device)
                break
        else:
            raise UsageError(f"pass '{self.name}': device={self.device}, but nothing of the model is on such a device")
        if self.keep:
            known = LOWER | FLOAT32 | FOLLOWING
            others = [word for word in self.keep if word not in known and not operator_info(word).name]
            check_named("autocast", "keep", others, model)

    def peer(self, model: nn.Module) -> AbstractContextManager[object] | None:
        device = next((parameter.device.type for parameter in model.parameters()), "cpu")
        return torch.autocast(device, self.dtype) if self.device in ("auto", device) else None

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        blocks, likeness = dict[Repeated | str, list[Part]](), StructuralHash(HashLevel.TIMED)
        for each in Search(program, self.keep, self.device, self.dtype).found():
            if isinstance(each, Part):
                block = repeated_around(program, each.owner) or _block(program, each.owner, likeness)
                blocks.setdefault(block, []).append(each)
            else:
                yield each
        # The largest first: what one time budget allows is spent where the most is gained.
        largest_first = sorted(blocks.items(), key=lambda block: -sum(part.size for part in block[1]))
        yield from (_site(program, block, parts) for block, parts in largest_first)

    def rewrite(self, site: Site, edit: Edit) -> None:
        if site.data.get("regions") == 0:
            edit.replace_module("", in_autocast(edit.owner, self.dtype, self.device))
            return
        for place in site.places:
            with edit.at(place):
                nodes = [place[label] for label in place.nodes]
                if place.data.get("casts"):
                    edit.outline(nodes, name="casts", context=KeptCasts())
                else:
                    edit.outline(nodes, name="autocast", context=ReturningAutocast(self.dtype, self.device))


def _block(program: Program, owner: str, likeness: StructuralHash) -> str:
    """Return the outermost block around a module that others are like, or the module: they are decided on as one."""
    names = owner.split(".")
    for count in range(1, len(names) + 1):
        path, around = ".".join(names[:count]), program.module(".".join(names[: count - 1]))
        siblings = own_children(around).values() if isinstance(around, _HOLDERS) else ()
        block = likeness.of(program.module(path))
        if sum(likeness.of(each) == block for each in siblings if each is not None) > 1:
            return path
    return owner


_HOLDERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def _site(program: Program, block: Repeated | str, parts: Sequence[Part]) -> Site:
    """Return one site for the parts of a block, in all graphs of its modules, and for the calls of a repeated one."""
    gaining = dict.fromkeys(node.name for part in parts for node in part.gaining)
    detail = ", ".join(list(gaining)[:4]) + (f" and {len(gaining) - 4} more" if len(gaining) > 4 else "")
    if len(parts) == 1 and isinstance(block, str):
        return _place(program, parts[0], detail=detail, data={"regions": 1})
    places = [_place(program, part, f"part_{number}_") for number, part in enumerate(parts)]
    if isinstance(block, Repeated):
        nodes = {f"call_{number}": name for number, name in enumerate(block.nodes)}
        places.append(Site(program, block.owner, nodes, block.specialization, data={"casts": 1}))
    return Site.over(program, *places, detail=detail)


def _place(program: Program, part: Part, prefix: str = "", **options: Any) -> Site:
    nodes = {f"{prefix}node_{number}": node.name for number, node in enumerate(part.nodes)}
    return Site(program, part.owner, nodes, part.specialization, **options)


def _check_dtype(dtype: torch.dtype, device: str) -> None:
    """Raise `UsageError` unless devices of a type can autocast to a dtype, a product and its gradient."""
    if dtype not in (torch.bfloat16, torch.float16):
        raise UsageError(f"pass 'autocast': dtype={str(dtype).removeprefix('torch.')}; use bfloat16 or float16")
    if device == "meta":
        return
    reason = f"PyTorch has no autocast for {device}"
    if torch.amp.is_autocast_available(device):
        reason = _failure(dtype, device)
    if reason:
        other = "float16" if dtype is torch.bfloat16 else "bfloat16"
        named = str(dtype).removeprefix("torch.")
        raise UsageError(f"pass 'autocast': {device} does not compute in {named} ({reason}); try dtype={other}")


def _failure(dtype: torch.dtype, device: str) -> str:
    """Return why a device does not compute in a dtype, or ""."""
    try:
        with warnings.catch_warnings(record=True) as said, torch.autocast(device, dtype=dtype), torch.enable_grad():
            x = torch.ones(2, 2, device=device, requires_grad=True)
            product = x @ x
            product.sum().backward()
    except (RuntimeError, NotImplementedError) as error:
        return one_line(error)
    return "" if product.dtype is dtype else next((str(each.message) for each in said), "autocast is off")
