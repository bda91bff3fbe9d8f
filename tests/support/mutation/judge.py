"""Judge an optimized model as a user would: run it, train it, save it, load it, restore it, beside the original.

Nothing here stands on fxopt's own verification: plain torch, and the public functions.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxopt

from .zoo import Entry

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.25}
"""How far tensors may be apart, as a part of their scale."""

DRAWS = 300
SIGMAS = 7.0


class Wrong(Exception):
    """What a user would complain about."""


def complaint(entry: Entry, model: nn.Module, fast: nn.Module) -> str:
    """Return what is wrong with `fast`, which was made of `model`, or ""."""
    try:
        for check in (runs, overwrites, trains, switches, loads, restores):
            with torch.random.fork_rng(devices=[]):
                check(entry, copy.deepcopy(model), copy.deepcopy(fast))
    except Wrong as wrong:
        return f"{check.__name__}: {wrong}"
    except Exception as error:  # a mutant may raise anything; for a user it is as good as wrong
        return f"{check.__name__}: {type(error).__name__}: {str(error)[:200]}"
    return ""


# -- what a user does ----------------------------------------------------------------------------------------------


def runs(entry: Entry, model: nn.Module, fast: nn.Module) -> None:
    """Run on the example and on more rows, with the random stream apart."""
    for seed, more in ((1, 0), (2, 0), (3, 1)):
        compare_calls(entry, model, fast, entry.inputs(seed, more))
    compare_states(entry, model, fast)


def overwrites(entry: Entry, model: nn.Module, fast: nn.Module) -> None:
    """Write into what a call gave: nothing else may change by it."""
    if is_random(entry, model):
        return
    x = entry.inputs(4)
    with torch.no_grad():
        mine, theirs = tensors_of(fast(x)), tensors_of(model(x))
        for number in range(len(theirs)):
            for result in (mine, theirs):
                if result[number].is_floating_point():
                    result[number].mul_(2).add_(1)
            compare(entry, mine, theirs, f"after writing into output {number}")
    compare_calls(entry, model, fast, x)


def trains(entry: Entry, model: nn.Module, fast: nn.Module) -> None:
    """Take a few steps of gradient descent, on all outputs and on one of them alone."""
    if not can_train(model.train(), fast):
        return
    if is_random(entry, model):
        return
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.05, weight_decay=0.1) for m in (fast, model))
    first = tensors_of(model(entry.inputs(5)))
    compare(entry, tensors_of(fast(entry.inputs(5))), first, "in training")
    chosen: list[int | None] = [None, None, *(range(len(first)) if 1 < len(first) < 9 else ())]
    for step, only in enumerate(chosen):
        x = entry.inputs(5 + step)
        gradients = [descend(m, o, x, only) for m, o in ((fast, ours), (model, theirs))]
        compare(entry, *gradients, f"gradient of the input in step {step}")
        compare_states(entry, model, fast, f" after step {step} on output {only}")


def switches(entry: Entry, model: nn.Module, fast: nn.Module) -> None:
    """Run in the other mode, and in the first one again."""
    for mode in (not entry.training, entry.training):
        if mode and not can_train(model.train(mode), fast):
            return
        fast.train(mode), model.train(mode)
        compare_calls(entry, model, fast, entry.inputs(6))
        compare_states(entry, model, fast)


def loads(entry: Entry, model: nn.Module, fast: nn.Module) -> None:
    """Load a checkpoint of the original model."""
    generator = torch.Generator().manual_seed(11)
    state = {
        name: tensor + 0.3 * torch.rand(tensor.shape, generator=generator).to(tensor)
        if tensor.is_floating_point()
        else tensor + 1
        for name, tensor in model.state_dict().items()
    }
    state = copy.deepcopy(state)
    for alias, name in aliases(model):
        state[alias] = state[name]
    fxopt.load_state_dict(fast, state)
    model.load_state_dict(state)
    compare_states(entry, model, fast, " after loading")
    compare_calls(entry, model, fast, entry.inputs(7))


def restores(entry: Entry, model: nn.Module, fast: nn.Module) -> None:
    """Get the original structure back, with the current weights, and train that."""
    original = fxopt.restore(fast)
    if type(original) is not type(model):
        raise Wrong(f"restored a {type(original).__name__}")
    for one, other in zip(original.modules(), model.modules(), strict=True):
        if type(one) is not type(other) or one.training is not other.training:
            raise Wrong(f"restored {type(one).__name__} (training={one.training}) for {type(other).__name__}")
    wanted = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    if wanted != {name: parameter.requires_grad for name, parameter in original.named_parameters()}:
        raise Wrong("requires_grad differs once restored")
    compare_named(entry, original.state_dict(), model.state_dict(), "restored ")
    compare_calls(entry, model, original, entry.inputs(8))


# -- comparing -----------------------------------------------------------------------------------------------------


def compare_calls(entry: Entry, model: nn.Module, fast: nn.Module, x: Tensor) -> None:
    """Compare what two models give, what they do to their input, and whether gradients flow from it."""
    if is_random(entry, model):
        compare_distributions(model, fast, x)
        return
    given = x.clone(), x.clone()
    mine, theirs = fast(given[0]), model(given[1])
    if pytree.tree_structure(mine) != pytree.tree_structure(theirs):
        raise Wrong("another structure")
    compare(entry, tensors_of(mine), tensors_of(theirs), "output")
    compare(entry, [given[0]], [given[1]], "input after the call")
    for one, other in zip(tensors_of(mine), tensors_of(theirs), strict=True):
        if one.requires_grad is not other.requires_grad:
            raise Wrong(f"an output requires_grad={one.requires_grad}")


def compare_states(entry: Entry, model: nn.Module, fast: nn.Module, when: str = "") -> None:
    compare_named(entry, fxopt.state_dict(fast), model.state_dict(), f"state{when}: ")


def compare_named(entry: Entry, mine: dict[str, Tensor], theirs: dict[str, Tensor], what: str) -> None:
    if list(mine) != list(theirs):
        raise Wrong(f"{what}names are {sorted(mine.keys() ^ theirs.keys()) or 'in another order'}")
    for name, tensor in theirs.items():
        compare(entry, [mine[name]], [tensor], f"{what}{name}")


def compare(entry: Entry, mine: list[Tensor], theirs: list[Tensor], what: str) -> None:
    """Compare tensors, each on its own scale."""
    for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        if one.shape != other.shape or one.dtype != other.dtype:
            form = f"{list(one.shape)} {one.dtype}, not {list(other.shape)} {other.dtype}"
            raise Wrong(f"{what} {number} is {form}")
        one, other = one.detach().double(), other.detach().double()
        finite = other.isfinite()
        if not torch.equal(finite, one.isfinite()) or not torch.equal(
            one[~finite].nan_to_num(), other[~finite].nan_to_num()
        ):
            raise Wrong(f"{what} {number} is infinite elsewhere")
        gap, scale = ((t[finite].abs().max().item() if finite.any() else 0.0) for t in (one - other, other))
        if gap > TOLERANCE[entry.dtype] * max(scale, 1e-3):
            raise Wrong(f"{what} {number} is off by {gap:.1e} at a scale of {scale:.1e}")


def compare_distributions(model: nn.Module, fast: nn.Module, x: Tensor) -> None:
    """Compare means and products of all pairs of outputs over many draws."""
    with torch.no_grad():
        mine, theirs = (moments(m, x, seed) for seed, m in enumerate((fast, model)))
    if mine[0].shape != theirs[0].shape:
        raise Wrong("another shape")
    noise = ((mine[1] + theirs[1]) / DRAWS).sqrt() + 1e-6
    if bool(((mine[0] - theirs[0]).abs() > SIGMAS * noise).any()):
        raise Wrong("another distribution")


def moments(model: nn.Module, x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return the averages of outputs and of their products, and the variances of these over draws."""
    torch.manual_seed(seed)
    draws = [torch.cat([t.flatten() for t in tensors_of(model(x.clone()))])[:48].double() for _ in range(DRAWS)]
    rows = torch.stack(draws)
    values = torch.cat([rows, (rows.unsqueeze(1) * rows.unsqueeze(2)).flatten(1)], 1)
    return values.mean(0), values.var(0)


# -- small things --------------------------------------------------------------------------------------------------


def tensors_of(result: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def is_random(entry: Entry, model: nn.Module) -> bool:
    return entry.draws and model.training


def can_train(model: nn.Module, fast: nn.Module) -> bool:
    """Put a model into training mode; say no where it refuses that in the documented way."""
    try:
        fast.train()
    except fxopt.ModeError:
        return False
    return model.training


def descend(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, only: int | None) -> list[Tensor]:
    """Take one step; return the gradient of the input."""
    optimizer.zero_grad()
    leaf = x.clone().requires_grad_(x.is_floating_point())
    outputs = tensors_of(model(leaf * 1))
    generator = torch.Generator().manual_seed(9)
    losses = [(out * torch.rand(out.shape, generator=generator, dtype=torch.float64).to(out)).sum() for out in outputs]
    wanted = [loss for number, loss in enumerate(losses) if only in (None, number) and loss.requires_grad]
    if wanted:
        torch.stack(wanted).sum().backward()
        optimizer.step()
    return [leaf.grad] if leaf.grad is not None else []


def aliases(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield pairs of names of one tensor, the later name first."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            yield name, known
