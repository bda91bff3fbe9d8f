"""How an operator of fxopt is made: one call of `define` registers everything that torch wants to know of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..compat import is_transformed
from ..compat.operators import answer_instead, is_recorded, register_promotion
from ..errors import UsageError
from ..operators import OpInfo, register_operator
from .gpu import on_gpu

__all__ = [
    "NAMESPACE", "BatchingRule", "Differentiated", "Kernel", "by_reference", "define", "defined", "describe",
    "elementwise", "keep_inputs", "looped", "times", "written_out",
]  # fmt: skip


NAMESPACE = "fxopt"
Function: TypeAlias = Callable[..., Any]
BatchingRule: TypeAlias = Callable[[Function], Function]
"""From an operator to what `torch.library.register_vmap` takes."""

_NAMES: list[str] = []
_PLAIN: dict[Any, Function] = {}
"""Operator -> what computes it by operations of torch."""


def elementwise(operator: Function) -> Function:
    """Batch an operator whose operands broadcast: the members' dimension comes first, and aligns."""

    def batched(_info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
        pairs = list(zip(args, in_dims, strict=True))
        rank = max(arg.dim() - (place is not None) for arg, place in pairs if isinstance(arg, Tensor))
        result = operator(*(arg if place is None else _aligned(arg, place, rank) for arg, place in pairs))
        return result, _first(result)

    return batched


def _aligned(operand: Tensor, place: int, rank: int) -> Tensor:
    """Return an operand with its members first, and ones up to the rank that members' results have."""
    moved = operand.movedim(place, 0)
    return moved.reshape(moved.shape[0], *[1] * (rank - moved.dim() + 1), *moved.shape[1:])


def looped(operator: Function) -> Function:
    """Batch any operator: one call for each member."""

    def batched(info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        pairs = list(zip(args, in_dims, strict=True))
        members = [operator(*(_member(arg, place, i) for arg, place in pairs)) for i in range(info.batch_size)]
        if isinstance(members[0], Tensor):
            return torch.stack(members), 0
        results = [torch.stack(each) for each in zip(*members, strict=True)]
        results = results if isinstance(members[0], list) else tuple(results)
        return results, _first(results)

    return batched


def _member(arg: Any, place: Any, index: int) -> Any:
    """Return what one member reads; of a list, `place` is one, too."""
    if isinstance(place, list):
        return [_member(*pair, index) for pair in zip(arg, cast("list[Any]", place), strict=True)]
    return arg if place is None else arg.select(place, index)


def _first(results: Any) -> Any:
    """Return where the members' dimension of results is: it comes first."""
    return 0 if isinstance(results, Tensor) else type(results)([0] * len(results))


def define(
    name: str,
    reference: Function,
    *,
    check: Function,
    fake: Function | None = None,
    kernel: str | None = None,
    setup: Function | None = None,
    backward: Function | None = None,
    batching: BatchingRule | None = looped,
    plain: Function | None = None,
    autocast: torch.dtype | None = None,
    schema: str | None = None,
    **known: Any,
) -> Function:
    """Register an operator `fxopt::NAME`, and return what calls it.

    Args:
        name: without the namespace.
        reference: computes it by operations of torch, new and contiguous; its schema is read from here.
        check: takes the same arguments, and raises a `UsageError` where they do not fit.
        fake: gives empty results; by default the reference, if it runs on fake tensors.
        kernel: the function that computes it on GPUs, as `"module:function"` below `cuda_ops`; imported when called.
        setup: keeps what `backward` needs, as `torch.library.register_autograd` says.
        backward: computes the gradients of the arguments; without it, asking for them is an error.
        batching: what `torch.func.vmap` does.
        plain: computes it by operations without writes in place, for transforms of `torch.func` and tangents.
        autocast: the dtype that operands are cast to under autocast; by default the widest of theirs.
        schema: without the name, where the reference is written for any arguments.
        known: further fields of its row in the operator table, as `OpInfo` has them.
    """
    schema = schema or torch.library.infer_schema(reference, mutates_args=())
    made = torch.library.custom_op(f"{NAMESPACE}::{name}", _checked(check, reference), mutates_args=(), schema=schema)
    made.register_fake(_checked(check, fake or reference))
    if kernel is not None:
        made.register_kernel("cuda")(_checked(check, on_gpu(kernel, name, reference)))
    call = cast("Function", getattr(getattr(torch.ops, NAMESPACE), name).default)
    made.register_autograd(backward or _without_gradient(name), setup_context=setup)
    if backward is not None:
        # What `custom_op` makes drops tangents silently, and the transforms of torch.func refuse it.
        answer_instead(made, _checked(check, plain or reference), is_transformed)
    if batching is not None:
        made.register_vmap(batching(call))
    for device in ("cpu", "cuda"):
        if autocast is None:
            register_promotion(made, device)
        else:
            made.register_autocast(device, autocast)
    describe(name, batching, **known)
    _PLAIN[call] = _checked(check, plain or reference)
    return call


def keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001 - torch passes it
    """Save all inputs for the backward: tensors (or None) as such, anything else as `ctx.settings`."""
    is_tensor = [each is None or isinstance(each, Tensor) for each in inputs]
    ctx.save_for_backward(*(each for each, is_one in zip(inputs, is_tensor, strict=True) if is_one))
    ctx.settings = tuple(each for each, is_one in zip(inputs, is_tensor, strict=True) if not is_one)


class Differentiated(TypedDict):
    """How the gradient of an operator is computed, as `define` takes it."""

    setup: Function
    backward: Function
    plain: Function


def by_reference(reference: Function) -> Differentiated:
    """Take gradients through a reference of plain operations, computed once more: of a backward, second derivatives."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001 - torch passes it
        flat = _flat([each if _is_of_tensors(each) else [each] for each in inputs])
        ctx.save_for_backward(*(each if isinstance(each, Tensor) else None for each in flat))
        ctx.plain = [None if isinstance(each, Tensor) else each for each in flat]
        ctx.form = [len(each) if _is_of_tensors(each) else None for each in inputs]

    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        deeper = torch.is_grad_enabled()
        needs = _flat(ctx.needs_input_grad)
        given = [plain if kept is None else kept for kept, plain in zip(ctx.saved_tensors, ctx.plain, strict=True)]
        with torch.enable_grad():
            pairs = zip(given, needs, strict=True)
            given = [_leaf(e, deeper, w) if isinstance(e, Tensor) else e for e, w in pairs]
            results = reference(*_formed(given, ctx.form))
            results = (results,) if isinstance(results, Tensor) else results
            pairs = zip(results, _flat(grads), strict=True)
            reached = [(r, g) for r, g in pairs if g is not None and r.requires_grad]
            wanted = [place for place, needed in enumerate(needs) if needed]
            found = torch.autograd.grad(
                [r for r, _ in reached], [given[place] for place in wanted], [g for _, g in reached],
                create_graph=deeper, allow_unused=True,
            )  # fmt: skip
        of = dict(zip(wanted, found, strict=True))
        return tuple(_formed([of.get(place) for place in range(len(given))], ctx.form))

    return {"setup": setup, "backward": backward, "plain": reference}


def _leaf(tensor: Tensor, deeper: bool, wanted: bool) -> Tensor:
    """Return an argument of its own to differentiate by: one tensor may have been given as several."""
    return tensor.view_as(tensor) if deeper else tensor.detach().requires_grad_(wanted)


def _is_of_tensors(value: Any) -> bool:
    """Say whether autograd looks into an argument: a list of tensors."""
    return isinstance(value, list) and all(isinstance(each, Tensor) for each in cast("list[Any]", value))


def _flat(values: Sequence[Any]) -> list[Any]:
    """Return values with the elements of lists in their place."""
    return [each for value in values for each in (cast("list[Any]", value) if isinstance(value, list) else [value])]


def _formed(flat: Sequence[Any], form: Sequence[int | None]) -> list[Any]:
    """Return arguments that `_flat` flattened; `form` says how many each list has, None of what is no list."""
    values = iter(flat)
    return [next(values) if count is None else [next(values) for _ in range(count)] for count in form]


def times(own: Tensor, other: Tensor) -> Tensor:
    """Return a product, in the memory of the first factor unless gradients may be asked for."""
    return own * other if is_transformed() or is_recorded() else own.mul_(other)


def describe(name: str, batching: BatchingRule | None, **known: Any) -> None:
    """Write the row of an operator into the operator table."""
    known = {"elementwise": batching is elementwise, "vectorizable": batching is not None, **known}
    register_operator(OpInfo(f"{NAMESPACE}::{name}", **known))
    _NAMES.append(f"{NAMESPACE}::{name}")


class _WrittenOut(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answering: Any = _PLAIN.get(func, func)
        return answering(*args, **(kwargs or {}))


def written_out() -> AbstractContextManager[object]:
    """Let operators of fxopt compute by operations of torch alone, for tracers that hand their graphs to others."""
    return _WrittenOut()


def defined() -> tuple[str, ...]:
    """Return the qualified names of the operators that are made by now."""
    return tuple(_NAMES)


def _without_gradient(name: str) -> Function:
    def refuse(*_: Any) -> Any:
        raise UsageError(f"{name} has no gradient; for second derivatives, write the operation with those of torch")

    return refuse


def _checked(check: Function, compute: Function) -> Function:
    @functools.wraps(compute)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return compute(*args, **kwargs)

    return checked


@dataclass(frozen=True)
class Kernel:
    """An operator, and what is written in its place.

    Attributes:
        name: what the option `kernels` of `swap_kernels` calls it.
        compute: calls the operator; it takes what decompositions find, by name, and decides nothing by tensors.
        decompositions: functions that compute the same in operations of torch. A parameter annotated `Tensor` stands
            for any tensor, other types for a plain value; one with a default is not looked for, but handed to
            `compute`. Casts between floating dtypes are looked through.
        into: a kernel whose operand `x` is what the decompositions compute. The operator takes its other operands, too,
            and returns its result and what that is computed of, which others may read.
    """

    name: str
    compute: Callable[..., Any]
    decompositions: tuple[Callable[..., Any], ...]
    into: Kernel | None = None
