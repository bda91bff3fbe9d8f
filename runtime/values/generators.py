"""The states of random generators: all of them at once, or what a graph needs to take back the draws before a check.

To note the states of Python's and numpy's generators takes longer than most modules run, and only forwards and
functions called whole draw from them. So a graph that might have to take such draws back subscribes to them
(`generators_now`), and what may draw says so before it does (`announce`).
"""

from __future__ import annotations

import random
import sys
import threading
import weakref
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = ["ANNOUNCES", "RandomState", "announce", "generators_now", "take_back"]

ANNOUNCES = "_fxopt_announces"
"""What a class has whose forward was generated from graphs: what draws within it is announced."""

_cpu = torch.default_generator
_TorchState: TypeAlias = "tuple[Tensor, list[Tensor] | None]"


class RandomState:
    """Hold the state of every random generator that a forward may draw from."""

    def __init__(self) -> None:
        self._torch = _torch_state()
        self._host = _host_state()

    def restore(self) -> None:
        """Put every generator back."""
        _restore_torch(self._torch)
        _restore_host(self._host)

    def has_drawn(self) -> bool:
        """Say whether a generator of torch has drawn since."""
        (cpu, cuda), (cpu_now, cuda_now) = self._torch, _torch_state()
        pairs = zip((cpu, *(cuda or ())), (cpu_now, *(cuda_now or ())), strict=False)
        return not all(torch.equal(state, now) for state, now in pairs)


class _HostDraws:
    """Hold the state of the generators outside torch before the first announced draw; None while there was none."""

    __slots__ = ("__weakref__", "state")

    def __init__(self) -> None:
        self.state: Any = None


class _Subscription(threading.local):
    """Know what the forwards of this thread hold that subscribe to the next announcement; else nothing."""

    draws: weakref.ref[_HostDraws] | None = None


_subscription = _Subscription()


def generators_now(*, host: bool) -> tuple[_TorchState, _HostDraws | None] | None:
    """Return what `take_back` needs to take back later draws; None in compiled code."""
    if torch.compiler.is_compiling():
        return None
    state = _cpu.get_state(), _cuda_states() if torch.cuda.is_initialized() else None
    return state, _next_announced() if host else None


def take_back(noted: tuple[_TorchState, _HostDraws | None] | None) -> None:
    """Put the generators back to where they were when `generators_now` gave `noted`."""
    if noted is None:
        return
    torch_state, draws = noted
    _restore_torch(torch_state)
    if draws is not None and draws.state is not None:
        _restore_host(draws.state)


def announce() -> None:
    """Say that Python's generator or numpy's may be drawn from, for the forwards that subscribe."""
    if torch.compiler.is_compiling() or _subscription.draws is None:
        return
    draws, _subscription.draws = _subscription.draws(), None
    if draws is not None:
        draws.state = _host_state()


def _next_announced() -> _HostDraws:
    """Return what the next announcement fills, the same for all subscribers until then."""
    draws = None if _subscription.draws is None else _subscription.draws()
    if draws is None:
        draws = _HostDraws()
        _subscription.draws = weakref.ref(draws)
    return draws


def _torch_state() -> _TorchState:
    return _cpu.get_state(), _cuda_states()


def _cuda_states() -> list[Tensor] | None:
    if not (torch.cuda.is_initialized() and torch.cuda.is_available()):
        return None
    # While a graph of kernels is recorded, the state cannot be had; nor do the kernels run.
    return None if torch.cuda.is_current_stream_capturing() else torch.cuda.get_rng_state_all()


def _restore_torch(state: _TorchState) -> None:
    cpu, cuda = state
    _cpu.set_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)


def _host_state() -> tuple[Any, Any]:
    """Return the state of Python's generator and, where it is loaded, of numpy's."""
    numpy_random = sys.modules.get("numpy.random")
    return random.getstate(), None if numpy_random is None else numpy_random.get_state()


def _restore_host(state: tuple[Any, Any]) -> None:
    python, numpy = state
    random.setstate(python)
    if numpy is not None:
        sys.modules["numpy.random"].set_state(numpy)
