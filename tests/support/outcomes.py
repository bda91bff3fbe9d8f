"""What a use gives, and whether two outcomes are the same, one is a refusal, or they differ."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from across_ranks import whole
from support.samples import NotForThis
from torch import Tensor
from torch.utils import _pytree as pytree

from fxopt import FxoptError

ROUNDING = {torch.float64: 1e-9, torch.float32: 5e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""How far results may be apart, of the largest number in them."""

FOLLOWING = ("gradient", "input", "state", "count", "after", "frozen", "last", "slow", "result of half")
"""How labels begin of what only follows from the pieces before, and says nothing where one of these raised."""
DOING = ("load", "write", "change", "hook", "tie", "meta", "conversion", "half", "set", "frozen", "shared")
"""How labels begin of what changes the model: where it is refused, the pieces behind it are about another model."""
OF_GRADIENTS = (
    "backward",
    "step",
    "after a step",
    "gradient",
    "input",
    "loss",
    "state of no",
    "resume",
    "result of step",
)
"""How labels begin of what needs gradients."""

WHOLE = "use"
"""The label of an error that ends a use."""

Outcome = Mapping[str, Any]
Bounds = tuple[float, int]
"""The largest number of the whole outcome, and how often what noise moves is allowed."""


@dataclass(frozen=True)
class Raised:
    """An error in the place of a value."""

    error: Exception

    @property
    def refusal(self) -> bool:
        return isinstance(self.error, FxoptError) and len(str(self.error).splitlines()) == 1

    def __str__(self) -> str:
        text = " ".join(str(self.error).split())[:160]
        frames = [frame for frame in traceback.extract_tb(self.error.__traceback__) if "support" not in frame.filename]
        place = f" ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno})" if frames else ""
        return f"{type(self.error).__name__}: {text}{place}"


@dataclass(frozen=True)
class Difference:
    """One piece of two outcomes that is not the same: refused in one line, or silent."""

    label: str
    refused: bool
    text: str


@dataclass(frozen=True)
class Judge:
    """How alike two outcomes have to be."""

    near: float = 0.0
    form: bool = False
    adds: bool = False
    """What the plain model has is asked of state dicts, and nothing of what else is in them."""

    serves: bool = False
    """The model is for inference only: gradients are not compared."""

    def compare(
        self, plain: Outcome, fast: Outcome, noise: Outcome | None = None, *, slack: int = 64
    ) -> list[Difference]:
        """Return how the second outcome differs.

        Args:
            plain: what the plain model gave.
            fast: what the rewritten one gave.
            noise: what the plain model gave with a little noise on its weights and inputs.
            slack: so many times what this noise moves is allowed.
        """
        if WHOLE in fast:
            return [Difference(WHOLE, fast[WHOLE].refusal, f"raises {fast[WHOLE]}")]
        found: list[Difference] = []
        scale = max([_scale(value) for value in plain.values()], default=0.0)
        undone: set[str] = set()
        raised = {_prefix(label) for label in plain if _one_raises(plain[label], fast.get(label))}
        for label in [*plain, *(label for label in fast if label not in plain)]:
            if _prefix(label) in undone or (self.serves and _tail(label).startswith(OF_GRADIENTS)):
                continue
            if _prefix(label) in raised and (label not in fast or _tail(label).startswith(FOLLOWING)):
                continue
            if _tail(label).startswith(DOING) and _one_raises(plain.get(label), fast.get(label)):
                undone.add(_prefix(label))
            if label not in plain or label not in fast:
                found.append(Difference(label, False, "is there on one side only"))
                continue
            text = self._piece(label, plain[label], fast[label], (noise or {}).get(label), (scale, slack))
            if text:
                refused = isinstance(fast[label], Raised) and fast[label].refusal
                found.append(Difference(label, refused, text))
        return found

    def _piece(self, label: str, plain: Any, fast: Any, noise: Any, bounds: Bounds) -> str:
        if isinstance(plain, Raised):
            return _other_error(label, plain, fast)
        if isinstance(fast, Raised):
            return f"raises {fast}"
        fast = _without_additions(plain, fast) if self.adds else fast
        (values, form), (others, other_form) = pytree.tree_flatten(plain), pytree.tree_flatten(fast)
        if form != other_form:
            return f"another structure: {other_form}, not {form}"
        moved = pytree.tree_flatten(noise)[0] if noise is not None and not isinstance(noise, Raised) else []
        moved = moved if len(moved) == len(values) else values
        pieces = (self._value(*each, bounds) for each in zip(values, others, moved, strict=True))
        return next((text for text in pieces if text), "")

    def _value(self, plain: Any, fast: Any, moved: Any, bounds: Bounds) -> str:
        if isinstance(plain, float) and isinstance(fast, float):
            plain, fast, moved = (torch.tensor(each, dtype=torch.float32) for each in (plain, fast, moved))
        if not isinstance(plain, Tensor) or not isinstance(fast, Tensor):
            return "" if self.form or plain == fast else f"{fast!r:.80}, not {plain!r:.80}"
        if plain.shape != fast.shape or plain.dtype != fast.dtype:
            return f"{fast.dtype}{list(fast.shape)}, not {plain.dtype}{list(plain.shape)}"
        if self.form or plain.is_meta:
            return ""
        if not plain.dtype.is_floating_point:
            return "" if self.near or torch.equal(plain, fast) else "other numbers"
        return self._numbers(plain, fast, moved, bounds)

    def _numbers(self, plain: Tensor, fast: Tensor, moved: Tensor, bounds: Bounds) -> str:
        (scale, slack), wide, other = bounds, plain.double(), fast.double()
        finite = wide.isfinite()
        if not torch.equal(finite, other.isfinite()):
            return f"{int((~other.isfinite()).sum())} numbers are not finite, not {int((~finite).sum())}"
        if not finite.any():
            return ""
        gap = float((wide - other)[finite].abs().max())
        moves = _gap(wide, moved.double()) if moved.shape == plain.shape else 0.0
        largest = max(float(wide[finite].abs().max()), max(1e-3, self.near / 4) * scale)  # some are zero in theory
        allowed = (ROUNDING[plain.dtype] + self.near) * largest + slack * moves + 1e-30
        return "" if gap <= allowed else f"off by {gap:.2e} where the largest is {largest:.2e}"


def _without_additions(plain: Any, fast: Any) -> Any:
    if isinstance(plain, dict) and isinstance(fast, dict):
        return type(plain)((key, each) for key, each in fast.items() if key in plain)
    if isinstance(plain, list) and all(isinstance(each, str) for each in plain):
        return [each for each in fast if each in plain]
    return fast


def _prefix(label: str) -> str:
    """Return the name of the child that a piece of an outcome is about, if it is about one."""
    return label.rpartition("': ")[0]


def _one_raises(plain: Any, fast: Any) -> bool:
    return isinstance(fast, Raised) is not isinstance(plain, Raised)


def _tail(label: str) -> str:
    return label.rpartition("': ")[2]


def _other_error(label: str, plain: Raised, fast: Any) -> str:
    """Return what is wrong where the plain model raises: which error it is, and that others run, is no matter."""
    return f"does not raise {plain}" if label.startswith("wrong") and not isinstance(fast, Raised) else ""


def _gap(one: Tensor, other: Tensor) -> float:
    gaps = (one - other).abs()
    gaps = gaps[gaps.isfinite()]
    return float(gaps.max()) if gaps.numel() else 0.0


def _scale(value: Any) -> float:
    tensors = [each for each in pytree.tree_leaves(value) if isinstance(each, Tensor) and each.is_floating_point()]
    finite = [each.double()[each.isfinite()] for each in tensors if not each.is_meta]
    return max([float(each.abs().max()) for each in finite if each.numel()], default=0.0)


def kept(value: Any) -> Any:
    """Return a value whose tensors nobody writes to later; of those that are split over processes, all of them."""
    return pytree.tree_map_only(Tensor, lambda each: whole(each.detach()).clone(), value)


def attempt(function: Callable[[], Any]) -> Any:
    """Return what a function gives, or the error that it raises."""
    try:
        return kept(function())
    except NotForThis:
        raise
    except Exception as error:
        return Raised(error)


def loss(value: Any) -> Tensor:
    """Return one number of all results, in which each number of each result counts differently."""
    tensors = [each for each in pytree.tree_leaves(value) if isinstance(each, Tensor) and each.is_floating_point()]
    parts = []
    for each in tensors:
        flat = each.flatten()
        weights = torch.linspace(0.5, 1.5, max(flat.numel(), 1), dtype=each.dtype)[: flat.numel()]
        parts.append((flat * weights).square().sum() / max(flat.numel(), 1) + (flat * weights.flip(0)).sum() * 0.1)
    return torch.stack([part.to(parts[0].dtype) for part in parts]).sum()
