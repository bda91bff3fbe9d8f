"""Where torch registers what a fused member has: names of tensors that are elsewhere, and children that must stay."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ..errors import FusedMemberError

__all__ = ["Children", "Register"]


class Register(dict[str, Any]):
    """Keep the names of slices in their order in `register`, without a value, and refuse tensors under these names.
    `torch.func.functional_call` puts its tensors here: under the name of a slice, nothing would read them.
    """

    def __init__(self, register: Mapping[str, Any], slices: Collection[str]) -> None:
        super().__init__({name: None if name in slices else tensor for name, tensor in register.items()})
        self.slices = frozenset(slices)

    def __setitem__(self, name: str, value: Any) -> None:
        self._check(name, value)
        super().__setitem__(name, value)

    def _check(self, name: str, value: Any) -> None:
        if value is not None and name in self.slices:
            raise FusedMemberError(
                f"'{name}' is a slice of a stacked parameter, and nothing reads another tensor in its place. Give "
                "torch.func.functional_call what fxopt.translate_state(state, model) makes of the state, or the names "
                "that model.named_parameters() lists"
            )

    def update(self, *given: Any, **named: Any) -> None:
        """Write all or nothing: a refused name leaves the others as they are."""
        values = dict[str, Any](*given, **named)
        for name, value in values.items():
            self._check(name, value)
        super().update(values)

    def __ior__(self, other: Any) -> Register:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.update(other)
        return self

    def pop(self, name: str, *default: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._check_stays(name)
        return super().pop(name, *default)

    def __delitem__(self, name: str) -> None:
        self._check_stays(name)
        super().__delitem__(name)

    def _check_stays(self, name: str) -> None:
        if name in self.slices:
            raise FusedMemberError(f"'{name}' is a slice of a stacked parameter and cannot be taken away")

    def __reduce__(self) -> tuple[Any, ...]:
        return Register, (dict(self), self.slices)


class Children(dict[str, Any]):
    """Keep the children `held` that a graph computes with; only `update` may put others in their places."""

    def __init__(self, register: Mapping[str, Any], held: Collection[str]) -> None:
        super().__init__(register)
        self.held = frozenset(held)

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self.held and self.get(name) is not value:
            raise FusedMemberError(
                f"'{name}' is computed together with other members, and another module in its place would not be "
                "called. fxopt.restore(model) gives the original structure back, with the current weights"
            )
        super().__setitem__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return Children, (dict(self), self.held)
