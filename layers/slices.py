"""Slices of stacked tensors, as code that reaches for a member's parameter gets them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor, nn

from ..compat import own_tensor, storage_id
from ..errors import FusedMemberError
from ..runtime.values import is_sharded

__all__ = ["ADVICE", "MEMBERS", "Slice", "View", "by_member", "check_plain", "frozen_alone", "slices_in"]

ADVICE = "fxopt.restore(model) gives the original structure back, with the current weights"

MEMBERS = "_fxopt_members"
"""In the `__dict__` of a module: of how many members its tensors hold vectors behind one another, by name."""


def by_member(store: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Return a tensor with the members along dimension 0: `name` of `store`, its gradient, or another like it."""
    count: int | None = store.__dict__.get(MEMBERS, {}).get(name)
    return tensor if count is None else tensor.view(count, tensor.numel() // count)


class View(NamedTuple):
    """Slice `position` of the parameter or buffer `name` of `store`."""

    store: nn.Module
    name: str
    position: int

    @property
    def stacked(self) -> Tensor:
        stacked = own_tensor(self.store, self.name)
        return getattr(self.store, self.name) if stacked is None else stacked

    @property
    def members(self) -> int:
        """Return how many members there are."""
        return self.store.__dict__.get(MEMBERS, {}).get(self.name) or self.stacked.shape[0]

    @property
    def is_buffer(self) -> bool:
        return self.name in self.store._buffers  # pyright: ignore[reportPrivateUsage]

    def of(self, whole: Tensor) -> Tensor:
        """Return the member's part of the stacked tensor, or of one like it: its gradient, say."""
        return by_member(self.store, self.name, whole)[self.position]

    def _cut(self) -> Tensor:
        stacked = self.stacked
        _refuse_sharded(stacked, self.name)
        return self.of(stacked)

    def read(self) -> Tensor:
        """Return the slice, attached to the stacked tensor."""
        member = self._cut()
        if torch.compiler.is_compiling() or type(member) is not Tensor:
            return member
        found = member.as_subclass(Slice)
        found._fxopt_view = self  # pyright: ignore[reportPrivateUsage]
        return found

    def write(self, value: Tensor, what: str) -> None:
        """Copy a tensor of the same shape into the slice, or raise a FusedMemberError."""
        member = self._cut()
        _check_like(member, value, what, ("shape",))
        with torch.no_grad():
            member.copy_(_apart(value, member, what))

    def replace(self, value: Tensor, what: str) -> None:
        """Let the slice have the values of a tensor of its shape, type and device, or raise a FusedMemberError."""
        _check_like(self._cut(), value, what)
        self.write(value, what)

    @property
    def gradient(self) -> Tensor | None:
        """The slice of the stacked parameter's gradient; writing to it writes there."""
        stacked = self.stacked
        _refuse_sharded(stacked, self.name)
        return self.of(stacked.grad) if stacked.is_leaf and stacked.grad is not None else None

    def set_gradient(self, value: Tensor | None) -> None:
        """Set the slice of the gradient, zero for none where others have one, or raise a FusedMemberError."""
        stacked = self.stacked
        if value is not None:
            _check_like(self._cut(), value, "this gradient")
            if stacked.grad is None:
                stacked.grad = torch.zeros_like(stacked)
        if stacked.grad is not None:
            slice_ = self.of(stacked.grad.detach())
            slice_.copy_(torch.zeros(()) if value is None else _apart(value.detach(), slice_, "this gradient"))


@dataclass(frozen=True)
class _MemberHook:
    """A hook on a stacked parameter that acts for one member: which, and what the user registered there."""

    of_all: Callable[[Tensor], Tensor | None]
    of_member: tuple[int, Callable[..., Any]]

    def __call__(self, tensor: Tensor) -> Tensor | None:
        return self.of_all(tensor)


class Slice(Tensor):
    """A slice of a stacked parameter: data, gradient and hooks are that one's; what is computed from it is plain."""

    __torch_function__ = cast("Any", nn.Parameter.__torch_function__)
    _fxopt_view: View

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        self._fxopt_view.replace(value, "this tensor")

    @property
    def grad(self) -> Tensor | None:
        return self._fxopt_view.gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._fxopt_view.set_gradient(value)

    @property
    def requires_grad(self) -> bool:
        return cast("Any", Tensor.requires_grad).__get__(self)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if value != self.requires_grad:
            frozen_alone("this tensor")

    def requires_grad_(  # pyright: ignore[reportIncompatibleMethodOverride]  it is declared with another name
        self, requires_grad: bool = True
    ) -> Any:
        """Accept what the stacked parameter does already; one member cannot differ from the others."""
        self.requires_grad = requires_grad
        return self

    @property
    def retains_grad(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Refuse: optimizers ask for it before they say that they take no slice of a parameter."""
        raise FusedMemberError(
            "this tensor is a slice of a stacked parameter, which no optimizer can train by itself: build the "
            "optimizer on the parameters of the model or of all members (model.heads.parameters())"
        )

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Register a hook on the gradient of the slice, wherever it comes from."""
        view = self._fxopt_view

        def of_all(gradient: Tensor) -> Tensor | None:
            changed = hook(view.of(gradient))
            if changed is None:
                return None
            whole = gradient.clone()
            view.of(whole).copy_(changed)
            return whole

        return cast("Any", view.stacked).register_hook(_MemberHook(of_all, (view.position, hook)))

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        """Register a hook that is given the slice, once it has its gradient."""
        view = self._fxopt_view

        def of_all(_: Tensor) -> None:
            hook(view.read())

        of_member = _MemberHook(of_all, (view.position, hook))
        return cast("Any", view.stacked).register_post_accumulate_grad_hook(of_member)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return an independent parameter of the same numbers."""
        memo[id(self)] = copied = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return cast("Any", self.detach().clone()).__reduce_ex__(protocol)


def slices_in(tensors: Iterable[Tensor]) -> list[Slice]:
    """Return the slices among some tensors."""
    return [tensor for tensor in tensors if isinstance(tensor, Slice)]


def frozen_alone(what: str) -> NoReturn:
    """Raise a FusedMemberError: one member's parameters cannot want gradients where the others' do not."""
    raise FusedMemberError(
        f"{what} is part of a fused member, and one member cannot be frozen by itself: freeze all of them "
        "(model.heads.requires_grad_(False)), freeze this one before optimizing, or keep its gradient zero "
        f"(weight.register_hook(torch.zeros_like)). {ADVICE}"
    )


def check_plain(value: Tensor, what: str) -> None:
    """Raise a FusedMemberError for a tensor that is more than numbers in memory, as quantized ones are."""
    if type(value) not in (Tensor, nn.Parameter, Slice):
        raise FusedMemberError(
            f"{what} is a slice of a stacked parameter and cannot become of type {type(value).__name__}; "
            f"quantize the model first, then optimize it. {ADVICE}"
        )


def _check_like(
    member: Tensor, value: Tensor, what: str, kinds: tuple[str, ...] = ("shape", "dtype", "device")
) -> None:
    check_plain(value, what)
    for kind in kinds:
        mine, given = getattr(member, kind), getattr(value, kind)
        if mine != given:
            mine, given = (list(size) if kind == "shape" else size for size in (mine, given))
            raise FusedMemberError(
                f"{what} is a slice of a stacked parameter and keeps its {kind} {mine}; a tensor of {kind} {given} "
                f"cannot take its place. {ADVICE}"
            )


def _apart(value: Tensor, member: Tensor, what: str) -> Tensor:
    """Return what to copy into a slice, apart from it; a FusedMemberError for another member's memory."""
    if value.layout is not torch.strided or storage_id(value) != storage_id(member):
        return value
    if value.storage_offset() != member.storage_offset():
        raise FusedMemberError(
            f"{what} is a slice of a stacked parameter and cannot share the memory of another member; give it a copy "
            f"(tensor.clone()), or tie the members before optimizing. {ADVICE}"
        )
    return value.clone()


def _refuse_sharded(stacked: Tensor, name: str) -> None:
    """Raise a FusedMemberError for a sharded tensor: a slice of it is a copy, and writes to it are lost."""
    if is_sharded(stacked):
        raise FusedMemberError(
            f"the stacked parameter '{name}' is sharded, so its members cannot be read or written one by one; "
            "fxopt.state_dict(model) gathers them, fxopt.load_state_dict(model, state) writes them"
        )
