"""Every private or version-dependent API of torch's distributed package that fxopt uses, in alphabetical order."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, distributed, nn
from torch.nn.modules._functions import SyncBatchNorm as _SyncBatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "BatchNorm", "added_up", "after_backward", "after_forward", "before_forward", "broadcast_together", "exchanged",
    "gathered_in_order", "give_memory", "handed_to_all", "hold_group_of", "is_of_a_collective", "local_part",
    "shard_again", "shared_store", "sync_batch_norm", "with_memory",
]  # fmt: skip


_MESSAGE_BYTES = 250 * 2**20


class BatchNorm(_BatchNorm):
    """What the batch norms of torch have in common."""


def added_up(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum over the processes of a mesh; the gradient of the sum, which all have, is that of each part."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    parts: Any = DTensor.from_local(tensor, mesh, [Partial()], run_check=False)
    return parts.redistribute(placements=[Replicate()]).to_local()


def after_backward(call: Callable[[], None]) -> None:
    """Call a function once the backward that is under way is done; to be called during one."""
    cast("Any", torch.autograd.Variable)._execution_engine.queue_callback(call)


def after_forward(reducer: DistributedDataParallel, output: Any) -> Any:
    """Prepare torch's reducer for the backward of what a forward gave; return what to give instead."""
    return cast("Any", reducer)._post_forward(output)


def before_forward(
    reducer: DistributedDataParallel, args: tuple[Any, ...], kwargs: dict[str, Any], *, syncs: bool
) -> tuple[Any, Any]:
    """Prepare torch's reducer for a forward, whose gradients it averages or not; return the arguments to use."""
    reducer.require_backward_grad_sync = syncs
    return cast("Any", reducer)._pre_forward(*args, **kwargs)


def broadcast_together(tensors: Sequence[Tensor]) -> None:
    """Give tensors the values that they have in process 0, many in one message."""
    if tensors:
        detached = [tensor.detach() for tensor in tensors]
        cast("Any", distributed)._broadcast_coalesced(distributed.group.WORLD, detached, _MESSAGE_BYTES, 0)


def exchanged(
    tensor: Tensor, mesh: DeviceMesh, sent: list[int] | None = None, received: list[int] | None = None
) -> Tensor:
    """Send rows to each process of a mesh, and return theirs: so many each; by default as many to all. Gradients go
    back the same way.
    """
    from torch.distributed import _functional_collectives

    collectives: Any = _functional_collectives
    is_trained = tensor.is_floating_point()
    send = collectives.all_to_all_single_autograd if is_trained else collectives.all_to_all_single
    return collectives.wait_tensor(send(tensor.contiguous(), received, sent, mesh.get_group()))


def gathered_in_order(tensor: Tensor, mesh: DeviceMesh, dim: int = 0, size: int | None = None) -> Tensor:
    """Return the parts of all processes of a mesh, side by side along `dim`: by default all as large, else `size`
    together, in which DTensors are divided. The gradient, which all have, is cut.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    place = dim % tensor.ndim
    shape = [*tensor.shape]
    shape[place] = tensor.shape[place] * mesh.size() if size is None else size
    stride = torch.empty(shape, device="meta").stride()
    parts: Any = DTensor.from_local(
        tensor.contiguous(), mesh, [Shard(place)], run_check=False, shape=torch.Size(shape), stride=stride
    )
    return parts.redistribute(placements=[Replicate()]).to_local().contiguous()


def give_memory(model: nn.Module, device: torch.device, made: dict[int, Tensor]) -> None:
    """Give memory to what is on the meta device: what is `made` already, by the id of the old tensor, or new one.
    Parameters stay the same objects.
    """
    if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return  # swapping would forbid backward passes of what has run already
    given: dict[int, tuple[Tensor, Tensor]] = {}  # with the old tensor, whose id would be free otherwise

    def on_device(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        if id(tensor) not in given:
            given[id(tensor)] = tensor, made[id(tensor)] if id(tensor) in made else with_memory(tensor, device)
        return given[id(tensor)][1]

    future: Any = torch.__future__
    before = future.get_swap_module_params_on_conversion()
    future.set_swap_module_params_on_conversion(True)
    try:
        cast("Any", model)._apply(on_device)
    finally:
        future.set_swap_module_params_on_conversion(before)


def handed_to_all(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a tensor that all processes of a mesh have; its gradient is the sum of those of all of them."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    whole: Any = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])


def hold_group_of(reducer: DistributedDataParallel) -> None:
    """Keep the process group of torch's reducer until the reducer is gone.

    Torch ends a group without Python's lock where Python lets go of it last, but with the lock where the reducer does,
    and then waits for threads of gloo, which may wait for the lock: for ever.
    """
    owner: Any = reducer
    for part in (owner.reducer, owner.logger):  # both hold the reducer
        weakref.finalize(part, _let_go, owner.process_group).atexit = False


def _let_go(group: Any) -> None:
    """Do nothing: the finalizer has held the group until now."""


def is_of_a_collective(error: BaseException) -> bool:
    """Say whether torch raised an error because another rank took no part in an operation; gloo's have no type."""
    return isinstance(error, distributed.DistError) or (type(error) is RuntimeError and "gloo" in str(error))


def local_part(tensor: Tensor) -> tuple[tuple[int, ...], Tensor]:
    """Return where this rank's part of a tensor begins, and the part in its own memory; both of a plain one, too."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim, tensor.detach()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(start), tensor.to_local().detach()


def shard_again(module: nn.Module) -> None:
    """Let FSDP2 free what it gathered of a module's own tensors for a forward, as it does before it saves them."""
    for hook in module.__dict__["_state_dict_pre_hooks"].values():
        if getattr(hook, "__module__", "").startswith("torch.distributed.fsdp"):
            hook()


def shared_store(prefix: str) -> Any:
    """Return the store through which the ranks of the default process group found each other, below a prefix."""
    from torch.distributed import distributed_c10d as c10d

    return c10d.PrefixStore(prefix, c10d._get_default_store())  # pyright: ignore[reportPrivateUsage]


def sync_batch_norm(
    x: Tensor,
    affine: tuple[Tensor | None, Tensor | None],
    running: tuple[Tensor | None, Tensor | None],
    eps: float,
    momentum: float,
) -> Tensor:
    """Normalize by the statistics of all ranks with the kernels of `nn.SyncBatchNorm`, which no CPU has."""
    apply: Any = cast("Any", _SyncBatchNorm).apply
    return apply(x, *affine, *running, eps, momentum, distributed.group.WORLD, distributed.get_world_size())


def with_memory(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor like one on the meta device, without values: on a device, or of a split one on its mesh."""
    mesh: Any = getattr(tensor, "device_mesh", None)
    where = device if mesh is None or mesh.device_type == device.type else mesh.device_type
    return torch.empty_like(tensor, device=where)
