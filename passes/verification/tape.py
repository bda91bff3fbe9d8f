"""Random draws that do not depend on the order of execution, so that a rewrite can be compared with its original."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from ...compat import DispatchMode, draws_randomly

__all__ = ["SteadyDraws", "Tape"]

Key = str | tuple[str, ...]
"""Where a draw happens: the name of a node, or the names of all the nodes that a fused node stands for."""


_FIRST_PLACE = 2**62
"""The seed of the generator where a tape begins: the seeds from here on are places on it."""


class Tape(DispatchMode):
    """Serve random operators from draws named (seed, key, count), in float64; `at(key)` precedes each node, and what is
    not keyed counts all draws. The draws of a tuple of keys, for members, are stacked on the dimension that they fit. A
    checkpoint that puts back the seed of the CPU generator is served the same draws again.
    """

    def __init__(self, seed: int, *, keyed: bool = True) -> None:
        super().__init__()
        self.seed, self.keyed = seed, keyed
        self._places: list[tuple[Key, Counter[str]]] = [("", Counter())]
        self._entered = 0
        self.rewind()
        self._outside = self._inside

    def __enter__(self) -> Self:
        if not self._entered:
            self._outside = torch.get_rng_state()
            torch.set_rng_state(self._inside)
        self._entered += 1
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._entered -= 1
        if not self._entered:
            self._inside = torch.get_rng_state()
            torch.set_rng_state(self._outside)

    def rewind(self) -> None:
        """Begin anew, outside of the tape."""
        self._inside = torch.Generator().manual_seed(_FIRST_PLACE).get_state()

    def at(self, key: Key) -> None:
        """Let the draws that follow belong to `key`."""
        if self.keyed:
            self._move(key, self._place()[1])

    def _place(self) -> tuple[Key, Counter[str]]:
        """Return whose draws are served now, and how many each name has had."""
        seed = torch.initial_seed()
        if 0 <= seed - _FIRST_PLACE < len(self._places):
            return self._places[seed - _FIRST_PLACE]
        return f"seed {seed}", Counter()  # the code has set a seed of its own

    def _move(self, key: Key, counts: Counter[str]) -> None:
        torch.default_generator.manual_seed(_FIRST_PLACE + len(self._places))
        self._places.append((key, counts))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not draws_randomly(func, args, kwargs) or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        rule = _RULES.get(str(func))
        if rule is None:
            with self:  # in inference mode, what is made of other operators arrives whole
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        key, before = self._place()
        members = (key,) if isinstance(key, str) else key
        counts = tuple(before[member] for member in members)
        self._move(key, before + Counter(members))
        if rule is None:
            return self._seeded(str(key), counts[0], func, args, kwargs)
        return rule(_Draws(self.seed, key, counts), args, kwargs)

    def _seeded(self, key: str, count: int, func: Any, args: Any, kwargs: Any) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(_digest(self.seed, key, count))
            return func(*args, **kwargs)


class SteadyDraws(DispatchMode):
    """Serve every random operator one and the same number: members that run as one still draw what they drew alone.
    `has_drawn` says whether any ran, `is_sure` whether only such ran that draw the same in any order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_sure, self.has_drawn = True, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not draws_randomly(func, args, kwargs) or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        self.has_drawn = True
        rule = _RULES.get(str(func))
        if rule is not None and rule is not _integers:
            return rule(_SteadyNumbers(), args, kwargs)
        self.is_sure = False
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return func(*args, **kwargs)


class _Numbers(Protocol):
    """The random numbers of one operator: uniform in [0, 1) or standard normal, of any shape."""

    def uniform(self, shape: Sequence[int], device: torch.device) -> Tensor: ...
    def normal(self, shape: Sequence[int], device: torch.device) -> Tensor: ...


class _SteadyNumbers:
    def uniform(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return almost zero: a dropout keeps what it is given, and scales it."""
        return torch.full(tuple(shape), 1e-3, dtype=torch.float64, device=device)

    def normal(self, shape: Sequence[int], device: torch.device) -> Tensor:
        return torch.full(tuple(shape), 0.7, dtype=torch.float64, device=device)


class _Draws:
    """Numbers named (seed, key, count), each from a generator of its own."""

    def __init__(self, seed: int, key: Key, counts: tuple[int, ...]) -> None:
        self.seed, self.key, self.counts = seed, key, counts

    def uniform(self, shape: Sequence[int], device: torch.device) -> Tensor:
        return self._of(torch.rand, tuple(shape)).to(device)

    def normal(self, shape: Sequence[int], device: torch.device) -> Tensor:
        return self._of(torch.randn, tuple(shape)).to(device)

    def _of(self, draw: Callable[..., Tensor], shape: tuple[int, ...]) -> Tensor:
        if isinstance(self.key, str):
            return self._one(draw, self.key, self.counts[0], shape)
        part, join = _layout(shape, len(self.key))
        draws = zip(self.key, self.counts, strict=True)
        return join([self._one(draw, member, count, part) for member, count in draws])

    def _one(self, draw: Callable[..., Tensor], member: str, count: int, shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(_digest(self.seed, member, count))
        return draw(shape, generator=generator, dtype=torch.float64)


def _layout(shape: tuple[int, ...], members: int) -> tuple[tuple[int, ...], Callable[[list[Tensor]], Tensor]]:
    """Return the shape of one member's draw, and how the members' draws make up `shape`."""
    for dim, size in enumerate(shape):
        if size == members:
            return shape[:dim] + shape[dim + 1 :], partial(torch.stack, dim=dim)
    for dim, size in enumerate(shape):
        if size % members == 0:
            return (*shape[:dim], size // members, *shape[dim + 1 :]), partial(torch.cat, dim=dim)
    return shape, lambda parts: parts[0]


def _digest(seed: int, key: str, count: int) -> int:
    text = f"{seed}/{key}/{count}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")


def _option(args: Any, kwargs: Any, position: int, name: str, usual: Any) -> Any:
    """Return what an operator was given at a position or by name, or what is usual."""
    return args[position] if len(args) > position else kwargs.get(name, usual)


def _kind(like: Tensor | None, kwargs: Any, usual: torch.dtype | None = None) -> tuple[torch.dtype, torch.device]:
    """Return the dtype and the device of what an operator makes."""
    dtype = (usual or torch.get_default_dtype()) if like is None else like.dtype
    device = torch.device("cpu") if like is None else like.device
    return kwargs.get("dtype") or dtype, kwargs.get("device") or device


def _uniform(draws: _Numbers, args: Any, kwargs: Any) -> Tensor:
    return _made(draws.uniform, args[0], kwargs)


def _standard_normal(draws: _Numbers, args: Any, kwargs: Any) -> Tensor:
    return _made(draws.normal, args[0], kwargs)


def _made(draw: Callable[[Sequence[int], torch.device], Tensor], shape: Any, kwargs: Any) -> Tensor:
    like = shape if isinstance(shape, Tensor) else None
    size: Sequence[int] = shape.shape if isinstance(shape, Tensor) else shape
    dtype, device = _kind(like, kwargs)
    return draw(size, device).to(dtype)


def _bernoulli(draws: _Numbers, args: Any, kwargs: Any) -> Tensor:
    source = args[0]
    return (draws.uniform(source.shape, source.device) < _option(args, kwargs, 1, "p", source)).to(source.dtype)


def _bernoulli_in_place(draws: _Numbers, args: Any, kwargs: Any) -> Tensor:
    target = args[0]
    return target.copy_(draws.uniform(target.shape, target.device) < _option(args, kwargs, 1, "p", 0.5))


def _uniform_in_place(draws: _Numbers, args: Any, kwargs: Any) -> Tensor:
    target, low, high = args[0], _option(args, kwargs, 1, "from", 0.0), _option(args, kwargs, 2, "to", 1.0)
    return target.copy_(low + (high - low) * draws.uniform(target.shape, target.device))


def _normal_in_place(draws: _Numbers, args: Any, kwargs: Any) -> Tensor:
    target, mean, std = args[0], _option(args, kwargs, 1, "mean", 0.0), _option(args, kwargs, 2, "std", 1.0)
    return target.copy_(mean + std * draws.normal(target.shape, target.device))


def _normal(draws: _Numbers, args: Any, kwargs: Any) -> Tensor:
    mean, std = args[0], _option(args, kwargs, 1, "std", 1.0)
    like = mean if isinstance(mean, Tensor) else std
    return (mean + std * draws.normal(like.shape, like.device)).to(like.dtype)


def _exponential_in_place(draws: _Numbers, args: Any, kwargs: Any) -> Tensor:
    target, rate = args[0], _option(args, kwargs, 1, "lambd", 1.0)
    return target.copy_(-torch.log1p(-draws.uniform(target.shape, target.device)) / rate)


def _integers(draws: _Numbers, args: Any, kwargs: Any) -> Tensor:
    bounds = [arg for arg in args if isinstance(arg, int)]
    low, high = (0, bounds[0]) if len(bounds) == 1 else bounds
    like = args[0] if isinstance(args[0], Tensor) else None
    shape: Sequence[int] = like.shape if like is not None else args[len(bounds)]
    dtype, device = _kind(like, kwargs, torch.int64)
    return (low + torch.floor((high - low) * draws.uniform(shape, device))).to(dtype)


def _native_dropout(draws: _Numbers, args: Any, _: Any) -> tuple[Tensor, Tensor]:
    source, chance, train = args[0], args[1], args[2]
    if train is False:
        return source.clone(), torch.ones_like(source, dtype=torch.bool)
    mask = draws.uniform(source.shape, source.device) < 1 - chance
    return source * mask * (0.0 if chance == 1 else 1 / (1 - chance)), mask


_RULES: dict[str, Callable[[_Numbers, Any, Any], Any]] = {
    "aten.bernoulli.default": _bernoulli,
    "aten.bernoulli.p": _bernoulli,
    "aten.bernoulli_.Tensor": _bernoulli_in_place,
    "aten.bernoulli_.float": _bernoulli_in_place,
    "aten.exponential_.default": _exponential_in_place,
    "aten.native_dropout.default": _native_dropout,
    "aten.normal.Tensor_Tensor": _normal,
    "aten.normal.Tensor_float": _normal,
    "aten.normal.float_Tensor": _normal,
    "aten.normal_.default": _normal_in_place,
    "aten.rand.default": _uniform,
    "aten.rand_like.default": _uniform,
    "aten.randint.default": _integers,
    "aten.randint.low": _integers,
    "aten.randint_like.default": _integers,
    "aten.randint_like.low_dtype": _integers,
    "aten.randn.default": _standard_normal,
    "aten.randn_like.default": _standard_normal,
    "aten.uniform_.default": _uniform_in_place,
}
