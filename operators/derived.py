"""Tensors made from a model's own and kept until one of these changes: inference-only rewrites compute with them.
The originals stay; the derived tensors are in no module. A graph reads the originals and calls a `Derived` with them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.autograd import Function

from ..compat import dispatch_modes_off, is_plainly_eager, wants_gradients
from ..errors import FusedMemberError
from .cache import Cache, Unchanged, why_unseen

__all__ = ["Derived", "Keeping", "derived"]


class Keeping:
    """A function in graphs that keeps what it made of tensors as long as these are the same."""

    operator: ClassVar[str]  # what the table of operators calls it

    def _caches(self) -> Iterator[Cache]:
        """Yield what it keeps what it made in: attributes, or items of one."""
        for value in vars(self).values():
            held: Iterable[object] = cast("Any", value) if isinstance(value, (tuple, list)) else (value,)
            yield from (each for each in held if isinstance(each, Cache))

    def kept(self) -> list[Any]:
        """Return everything that was made and is kept."""
        return [made for each in self._caches() for made in each.kept()]

    def forget_all(self) -> None:
        """Let everything be made anew."""
        for each in self._caches():
            each.forget_all()

    def forget_gone(self) -> None:
        """Let go of what was made of tensors that nobody holds any more."""
        for each in self._caches():
            each.forget_gone()


class Derived(Cache, Keeping):
    """Call a function of tensors, and give what it made before as long as these are the same, unchanged.
    After a backward, `train()`, `eval()` and `.to()` all is made anew; in compiled, exported and transformed code, and
    of unusual tensors, each time. Functions are pure, picklable, and equal where they compute the same; gradients flow.
    """

    operator: ClassVar[str] = "derived"
    count: ClassVar[int] = 0

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        # What torch.fx prints of a function.
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.__module__ = getattr(function, "__module__", type(function).__module__)

    def __call__(self, *originals: Tensor) -> Any:
        """Return what the function makes of the originals, of shapes that are the function's own."""
        raise NotImplementedError  # written out for each number of originals

    def _make(self, *given: Tensor | None) -> Any:
        """Return the result where the one that is kept will not do, or none is."""
        originals = [each for each in given if each is not None]
        if len(originals) < len(given):
            raise FusedMemberError(
                f"a parameter or buffer that was folded ({self.__name__}) is None now; make it a tensor again, or "
                "set it to None in fxopt.restore(model) and optimize that"
            )
        if torch.compiler.is_dynamo_compiling() or not is_plainly_eager() or any(map(why_unseen, originals)):
            return self.function(*originals)
        made = self.made(originals)
        return self._attached(made, originals) if wants_gradients(*originals) else made

    def made(self, originals: Sequence[Tensor]) -> Any:
        """Return what the function makes of the originals as they are, and keep it for calls with the same."""
        with dispatch_modes_off(), torch.inference_mode(False), torch.no_grad():
            if any(map(why_unseen, originals)):
                return self.function(*originals)
            return self.of(self.function, *originals, key=id(originals[0]))  # copies of a model may share a graph

    def _keep(self, key: Hashable, noted: Unchanged, tensors: Sequence[Tensor | None], made: Any) -> None:
        results: Sequence[Tensor] = (made,) if isinstance(made, Tensor) else made
        if all(type(result) is Tensor for result in results) and _is_finished(results):
            self.forget_gone()
            super()._keep(key, noted, tensors, made)

    def _attached(self, made: Any, originals: Sequence[Tensor]) -> Any:
        """Return the result as one that gradients flow through to the originals."""
        if not is_plainly_eager():  # torch.func takes no such autograd function
            return self.function(*originals)
        single = isinstance(made, Tensor)
        result: Any = cast("Any", _Attached).apply(self, (made,) if single else made, *originals)
        return result[0] if single else result

    def for_members(self, stacked: Sequence[bool]) -> Derived:
        """Return the same for N members at once; where `stacked`, an original is [N, ...], and so are all results."""
        return derived(_ForMembers(self.function, tuple(stacked)), self.count)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Derived) and self.function == other.function

    def __hash__(self) -> int:
        return hash(self.function)

    def __repr__(self) -> str:
        return f"Derived({self.function!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return derived, (self.function, self.count)


def derived(function: Callable[..., Any], count: int) -> Derived:
    """Return a `Derived` for a function of so many tensors."""
    return _class_of(count)(function)


@cache
def _class_of(count: int) -> type[Derived]:
    """Return the class whose calls take so many originals, written out: `*originals` takes half as long again."""
    given = ", ".join(f"x{i}" for i in range(count))
    text = f"""
def __call__(self, {given}):
    kept = None if is_compiling() else self._kept.get(id(x0))
    if kept is None or not kept[0].same({given}):
        return self._make({given})
    if is_grad_enabled() and ({" or ".join(f"x{i}.requires_grad" for i in range(count))}):
        return self._attached(kept[1], ({given},))
    return kept[1]
"""
    names: dict[str, Any] = {
        "is_compiling": torch.compiler.is_dynamo_compiling, "is_grad_enabled": torch.is_grad_enabled,
    }  # fmt: skip
    exec(text, names)  # noqa: S102  made of numbers and names of this file
    return type("Derived", (Derived,), {"__call__": names["__call__"], "__module__": __name__, "count": count})


@dataclass(frozen=True)
class _ForMembers:
    """Compute a function for N members at once."""

    function: Callable[..., Any]
    stacked: tuple[bool, ...]

    def __call__(self, *tensors: Tensor) -> Any:
        return torch.vmap(self.function, tuple(0 if stacked else None for stacked in self.stacked))(*tensors)


class _Attached(Function):
    """Give what a function made of tensors before; backward computes it anew, and then nothing is kept."""

    @staticmethod
    def forward(ctx: Any, derived: Derived, made: Sequence[Tensor], *originals: Tensor) -> Any:
        ctx.derived = derived
        ctx.save_for_backward(*originals)
        return tuple(tensor.detach() for tensor in made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        originals: Sequence[Tensor] = ctx.saved_tensors
        ctx.derived.forget(id(originals[0]))
        create = torch.is_grad_enabled()
        with torch.enable_grad():
            # One tensor may stand for two originals, and each takes a share of its gradient.
            apart = [original.view_as(original) for original in originals]
            made = ctx.derived.function(*apart)
        outputs = (made,) if isinstance(made, Tensor) else made
        pairs = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if output.requires_grad]
        found = iter(
            torch.autograd.grad(
                [output for output, _ in pairs],
                [each for each in apart if each.requires_grad],
                [grad for _, grad in pairs],
                create_graph=create,
                allow_unused=True,
            )
        )
        return None, None, *(next(found) if original.requires_grad else None for original in originals)


def _is_finished(tensors: Sequence[Tensor]) -> bool:
    """Wait until tensors are there, for another stream may read them next; False where that cannot be waited for."""
    if any(tensor.is_cuda for tensor in tensors):
        if torch.cuda.is_current_stream_capturing():
            return False
        torch.cuda.current_stream().synchronize()
    return True
