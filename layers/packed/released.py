"""Weights whose numbers are held in packed form alone, for models that only serve."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...compat import all_modules
from ...errors import StateError
from ...operators import Derived
from .weights import Packed

__all__ = ["ReleasedWeight", "refuse_checkpoints", "release_weight"]

_ASKING = frozenset(
    "__hash__ __len__ dim element_size is_complex is_conj is_contiguous is_floating_point is_inference is_neg nelement "
    "numel requires_grad_ size stride".split()
)
_GIVES_NUMBERS = frozenset((Tensor.data, Tensor.T, Tensor.H, Tensor.mT, Tensor.mH, Tensor.real, Tensor.imag))
"""Properties that give a tensor's numbers; all others only describe it."""

_MOVES = frozenset("bfloat16 cpu cuda double float half to type".split())

_SETTING = {"_has_compatible_shallow_copy_type": True, "__set__": None}
"""What `.to()` of a module does with a weight and with what it was moved to, and gets where these are the same."""


def _refusal(name: str, wanted: str) -> StateError:
    return StateError(
        f"'{name}' was released after it was packed, and {wanted} wants its numbers; load the checkpoint into a fresh "
        "model for that, or optimize it without the pass 'release'"
    )


def _wanted(func: Any, what: str) -> str:
    """Return in words what wants numbers, where that is known."""
    if what in ("__get__", "__set__"):
        return f"'.{func.__self__.__name__}'" if hasattr(getattr(func, "__self__", None), "__name__") else "something"
    return "something" if what.startswith("_") else f"'{what}'"


class ReleasedWeight(nn.Parameter):
    """Stand for the parameter `name` that was packed and then freed: shape and dtype, on the meta device.
    Whatever wants its numbers raises StateError: `state_dict()`, `.to()`, copies, pickles, other forwards, gradients.
    """

    name: str = ""
    requires_grad = False  # this and the shape are read at each call: as torch has them they take microseconds
    _sizes: torch.Size

    @property
    def shape(self) -> torch.Size:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the shape of the weight."""
        return self._sizes

    @staticmethod
    def of(weight: Tensor, name: str) -> ReleasedWeight:
        """Return what stands for a weight."""
        released = ReleasedWeight(torch.empty_like(weight, device="meta"), requires_grad=False)
        released.name, released._sizes = name, weight.shape
        return released

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        what = getattr(func, "__name__", str(func))
        describes = what == "__get__" and getattr(func, "__self__", None) not in _GIVES_NUMBERS
        if describes or what in _ASKING:
            return cast("Any", super()).__torch_function__(func, types, args, kwargs or {})
        given = (*args, *(kwargs or {}).values())
        own = next((each for each in given if isinstance(each, ReleasedWeight)), None)
        if own is None:
            raise _refusal("a weight", _wanted(func, what))
        if what in _MOVES and own is args[0] and own._stays(func, args[1:], kwargs or {}):
            return own
        if len(args) == 2 and args[0] is args[1] and what in _SETTING:
            return _SETTING[what]
        raise _refusal(own.name, _wanted(func, what))

    def _stays(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Say whether a move would leave a weight on the CPU of this type as it is."""
        stand_in = torch.empty((0,) * len(self._sizes), dtype=self.dtype)
        return func(stand_in, *args, **kwargs) is stand_in

    def __deepcopy__(self, memo: object) -> ReleasedWeight:
        raise _refusal(self.name, "a copy")

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        raise _refusal(self.name, "a pickle")

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Print it as other parameters on the meta device are."""
        return f"Parameter containing:\n{torch.empty(self._sizes, dtype=self.dtype, device='meta')!r}"

    def __format__(self, spec: str) -> str:
        """Print it as other parameters on the meta device are."""
        return format(repr(self), spec)


def refuse_checkpoints(model: nn.Module) -> None:
    """Let modules with released weights refuse `state_dict()`, and what would load or convert only a part of them."""
    for module in all_modules(model):
        if _released_in(module):
            module.__dict__["_apply"] = partial(_apply_after_asking, module)
            module.register_state_dict_pre_hook(_refuse_state_dict)
            module.register_load_state_dict_pre_hook(_refuse_to_copy)


def _released_in(module: nn.Module, *, recurse: bool = True) -> dict[str, ReleasedWeight]:
    of_module = module.named_parameters(recurse=recurse)
    return {name: each for name, each in of_module if isinstance(each, ReleasedWeight)}


def _apply_after_asking(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Convert or move tensors (`.half()`, `.to()`) as torch does, if that needs no numbers of released weights."""
    for weight in _released_in(module, recurse=recurse).values():
        fn(weight)
    return cast("Any", type(module))._apply(module, fn, recurse)


def _refuse_state_dict(module: nn.Module, *_: Any) -> None:
    for weight in _released_in(module).values():
        raise _refusal(weight.name, "'state_dict'")


def _refuse_to_copy(
    module: nn.Module, state_dict: Mapping[str, Any], prefix: str, local_metadata: Mapping[str, Any], *_: Any
) -> None:
    """Refuse before anything is copied; where it is assigned, real weights take the places of those released."""
    if local_metadata.get("assign_to_params_buffers"):
        return
    for name, weight in _released_in(module).items():
        if prefix + name in state_dict:
            raise StateError(
                f"'{weight.name}' was released after it was packed, and nothing can be copied into it; nothing was "
                "loaded: give load_state_dict assign=True, or load the checkpoint into a fresh model"
            )


class _MadeBefore(Derived):
    """Give what was made of weights that were released, and of others as before."""

    def __init__(self, before: Derived) -> None:
        super().__init__(before.function)
        self._before = before
        self._held: dict[int, tuple[Tensor, Any]] = {}

    def hold(self, weight: Tensor, released: Tensor) -> None:
        """Keep what is made of a weight for what stands in its place."""
        if id(released) in self._held:
            return
        self._held[id(released)] = released, self._before(weight)
        self._before.forget_all()  # what is noted of a weight holds its memory

    def __call__(self, *originals: Tensor) -> Any:
        held = self._held.get(id(originals[0]))
        return self._before(*originals) if held is None else held[1]

    def forget(self, key: Hashable = None) -> None:
        self._before.forget(key)

    def forget_all(self) -> None:
        self._before.forget_all()


def release_weight(module: nn.Module, own_name: str, name: str, layers: Sequence[Packed]) -> None:
    """Put what stands for a weight in its place, of which these packed layers, all that use it, hold what they made."""
    weight = module.get_parameter(own_name)
    released = ReleasedWeight.of(weight, name)
    made: dict[int, _MadeBefore] = {}  # several layers may share what they make
    for layer in layers:
        before = layer.weights
        held = before if isinstance(before, _MadeBefore) else made.setdefault(id(before), _MadeBefore(before))
        held.hold(weight, released)
        layer.weights = held
    setattr(module, own_name, released)
