"""A model of which every process has a replica: gradients are averaged over all of them while they are computed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast
from weakref import WeakMethod

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from ...compat import tensor_hooks
from ...compat.distributed import after_backward, after_forward, before_forward, broadcast_together, hold_group_of
from ...errors import StateError
from ...runtime.graphs import rank_local, trial_step

__all__ = ["REPLICA", "Replica", "is_replicated", "no_sync", "replicate"]

REPLICA = "_fxopt_replica"
"""The entry of a model's `__dict__` that holds its replica."""


class Replica:
    """What one process does so that its copy of a model stays like those of the others; copies of it are no replicas.
    The first synchronized backward shows which parameters get gradients, in which order; torch's reducer averages them
    in such buckets. `state` starts as in process 0, `buffers` in each training forward; `search` finds unused
    parameters. After `local_after` synchronized steps nothing is sent. `delayed`: averages arrive in the next step.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]] = (),
        state: Sequence[Tensor] = (),
        buffers: Sequence[Tensor] = (),
        *,
        search: bool = False,
        bucket_cap_mb: float | None = None,
        local_after: int | None = None,
        delayed: bool = False,
    ) -> None:
        self.syncs = True
        self._search, self._bucket_cap_mb = search, bucket_cap_mb
        self._local_after, self._delayed, self._steps = local_after, delayed, 0
        self._names = {parameter: name for name, parameter in named}
        self._state, self._buffers = state, buffers
        self._arrived: dict[nn.Parameter, None] = {}
        self._reduces = self._waits = self._tries = False
        self._reducer: DistributedDataParallel | None = None
        # torch's collector does not look into such hooks: one that held the replica would keep its parameters for good.
        on_gradient = partial(_notify, WeakMethod(self._on_gradient))
        self._handles = {p: p.register_post_accumulate_grad_hook(on_gradient) for p in self._names}

    def __deepcopy__(self, memo: Any) -> Replica:
        return Replica()

    def __reduce__(self) -> Any:
        return Replica, ()

    # -- around a forward ------------------------------------------------------------------------------------------

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the model like that of process 0, and start the reducer; a hook before the forward."""
        if not self._takes_part:
            return None
        self._reduces, self._waits, self._tries = self._sends, False, bool(trial_step)
        if self._tries:
            return None
        if self._reduces and module.training:
            broadcast_together(self._state or self._buffers)
            self._state = ()
            self._steps += 1
        if self._reducer is None:
            return None
        return before_forward(self._reducer, args, kwargs, syncs=self._reduces)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Show the reducer what came out; a hook after the forward."""
        return after_forward(self._reducer, output) if self._reducer is not None and self._takes_part else None

    @property
    def _sends(self) -> bool:
        """Say whether the gradients of a forward that begins now are averaged."""
        return self.syncs and (self._local_after is None or self._steps < self._local_after)

    @property
    def _takes_part(self) -> bool:
        return bool(self._names) and torch.is_grad_enabled() and (bool(trial_step) or not rank_local)

    # -- the first backward ----------------------------------------------------------------------------------------

    def _on_gradient(self, parameter: Tensor) -> None:
        """Note that a gradient has come; the first one of a backward has its end waited for."""
        if rank_local and not self._tries:
            return
        if self._reducer is not None:
            name = self._names[cast("nn.Parameter", parameter)]
            raise StateError(
                f"'{name}' got no gradient in the first synchronized backward, and gets one now, which ddp would not "
                "average; use ddp{find_unused_parameters=true}"
            )
        self._arrived[cast("nn.Parameter", parameter)] = None
        if self._reduces and not self._waits:
            self._waits = True
            after_backward(self._finish_first)

    @torch.no_grad()
    def _finish_first(self) -> None:
        """Average what the first synchronized backward left, and hand over to the reducer, unless it was on trial."""
        self._waits = False
        everything = list(self._names)
        flags = torch.tensor([float(p.grad is not None) for p in everything], device=everything[0].device)
        distributed.all_reduce(flags)
        used = [parameter for parameter, flag in zip(everything, flags, strict=True) if flag]
        for parameter in used:
            _average(parameter)
        if self._tries:
            self._tries = False
            self._arrived.clear()
            return
        self._start_reducer(self._in_order(everything if self._search else used))

    def _in_order(self, used: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return parameters in the order of a forward in process 0: gradients come the other way round."""
        numbers = {parameter: number for number, parameter in enumerate(self._arrived)}
        keys = torch.tensor([numbers.get(parameter, len(numbers)) for parameter in used], device=used[0].device)
        distributed.broadcast(keys, 0)
        return [used[int(number)] for number in keys.argsort(stable=True).flip(0)]

    def _start_reducer(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            self._handles.pop(parameter).remove()
        self._reducer = DistributedDataParallel(
            nn.ParameterList(parameters), init_sync=False, gradient_as_bucket_view=True,
            find_unused_parameters=self._search, bucket_cap_mb=self._bucket_cap_mb,
        )  # fmt: skip
        hold_group_of(self._reducer)
        if self._delayed:
            # Torch compares annotations with its own types, and finds text where they are postponed: it is given none.
            hook: Callable[[DelayedAverages, Any], Any] = lambda averages, bucket: averages.exchange(bucket)  # noqa: E731
            cast("Any", self._reducer).register_comm_hook(DelayedAverages(), hook)
        self._arrived.clear()


class DelayedAverages:
    """What torch's reducer does with a bucket: its average is sent, and that of the step before comes in its place.
    Torch divides its buckets again after a step, so averages are kept by parameter.
    """

    def __init__(self) -> None:
        self._sent: dict[nn.Parameter, tuple[Any, Tensor]] = {}

    def exchange(self, bucket: Any) -> Any:
        """Send a bucket, and return the averages that arrived since the last step: at first zeros."""
        parameters, sizes = bucket.parameters(), [gradient.numel() for gradient in bucket.gradients()]
        sent, arrived = bucket.buffer() / distributed.get_world_size(), torch.zeros_like(bucket.buffer())
        work = cast("Any", distributed).all_reduce(sent, async_op=True)
        for parameter, own, place in zip(
            parameters, torch.split(sent, sizes), torch.split(arrived, sizes), strict=True
        ):
            earlier = self._sent.get(parameter)
            if earlier is not None:
                sending, average = earlier
                sending.wait()
                place.copy_(average)
            self._sent[parameter] = (work, own)
        done = cast("Any", torch.futures.Future)()
        done.set_result(arrived)
        return done


def replicate(model: nn.Module, replica: Replica) -> None:
    """Let a model be a replica: by hooks, so that its class and all names stay."""
    vars(model)[REPLICA] = replica
    model.register_forward_pre_hook(replica.before, with_kwargs=True)
    model.register_forward_hook(replica.after)


def is_replicated(parameter: Tensor) -> bool:
    """Say whether a replica averages the gradient of a parameter over all processes."""
    return any(getattr(hook, "func", None) is _notify for _, hook in tensor_hooks(parameter))


def _notify(listener: WeakMethod[Callable[[Tensor], None]], parameter: Tensor) -> None:
    """Tell a replica, while there is one, that a gradient has come."""
    on_gradient = listener()
    if on_gradient is not None:
        on_gradient(parameter)


def _average(parameter: nn.Parameter) -> None:
    """Average a gradient over all processes; one that has none adds zeros."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    parameter.grad.div_(distributed.get_world_size())
    distributed.all_reduce(parameter.grad)


@contextmanager
def no_sync(model: nn.Module) -> Generator[None]:
    """Accumulate gradients in each process by itself: nothing is sent in backward passes whose forward runs in here.

    For all batches but the last before an optimizer step; of a model that is neither replicated nor sharded, it does
    nothing.
    """
    replica: Replica | None = vars(model).get(REPLICA)
    sharded: Any = getattr(model, "set_requires_gradient_sync", None)
    synced = replica.syncs if replica is not None else True
    _set_sync(replica, sharded, False)
    try:
        yield
    finally:
        _set_sync(replica, sharded, synced)


def _set_sync(replica: Replica | None, sharded: Any, syncs: bool) -> None:
    if replica is not None:
        replica.syncs = syncs
    if sharded is not None:
        sharded(syncs)
