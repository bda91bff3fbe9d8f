"""What runs on the user's batches, or on the example inputs, say of weights: gradients, and norms of inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...errors import UsageError
from ...passes.rewriting import holds_inputs_first
from ...runtime.values import flatten, qualified, requires_grad, tensors_by_name
from ...tracing.isolation import copied_module, in_phase, preserved
from ...tracing.program import Program
from ...tracing.recording import calls_intercepted, copy_inputs
from .options import Options

__all__ = ["gradients_of_batches", "input_norms", "is_fed_plainly", "run_batches"]

_DRAWS, _DRAWS_OF_BATCH = 16, 4
"""So often the results of an example call, or of a batch, are summed with random signs, where there is no loss."""


def gradients_of_batches(program: Program, wanted: Options) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Yield for each batch, by name, the parameters and their gradients, in evaluation mode."""
    model = copied_module(program.model).requires_grad_(True).eval()
    tensors, found = tensors_by_name(model), False
    # cuDNN computes no gradients of recurrent layers in evaluation.
    with torch.random.fork_rng(), torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
        torch.manual_seed(wanted.seed)
        for number, result in enumerate(_results(model, program, wanted)):
            for loss in _losses(result, wanted, number):
                model.zero_grad()
                loss.backward(retain_graph=True)
                batch = {name: (each.detach(), each.grad) for name, each in tensors.items() if each.grad is not None}
                found = found or bool(batch)
                yield batch
    if not found:
        raise UsageError(
            f"criterion={wanted.criterion}: no gradient reached any parameter; give loss=, or example inputs"
        )


def run_batches(model: nn.Module, wanted: Options) -> None:
    """Run a model on each of the user's batches; raise as `_of_batches`."""
    for _ in _of_batches(model, wanted):
        pass


def _of_batches(model: nn.Module, wanted: Options) -> Iterator[Any]:
    """Yield what the user's function gives for a model and each batch; UsageError: there is none, or it raises."""
    number, loss = -1, cast("Any", wanted.loss)
    for number, batch in enumerate(wanted.data or ()):
        try:
            found = loss(model, batch)
        except Exception as error:  # whatever the user's code raises
            raised = f"{type(error).__name__}: {error}"
            raise UsageError(f"pass 'prune': loss= raises for batch {number} of data=: {raised}") from error
        yield found
    if number < 0:
        raise UsageError("pass 'prune': data= gives no batch; give a list, or a loader that is not used up")


def _results(model: nn.Module, program: Program, wanted: Options) -> Iterable[Any]:
    """Yield what the user's function gives for batches, or for example calls; without one, what the calls give."""
    loss: Any = wanted.loss
    if wanted.data is not None:
        return _of_batches(model, wanted)
    if not program.whole_calls:
        raise UsageError(f"criterion={wanted.criterion} needs example_inputs, or data= with loss=")
    results = (model(*call.args, **call.kwargs) for call in program.whole_calls)
    return results if loss is None else (loss(each) for each in results)


def _losses(result: Any, wanted: Options, number: int) -> Iterator[Tensor]:
    """Yield a loss, or sums of results with random signs.

    Their squares are, in the mean over signs, by how much the results change (Hutchinson, 1990).
    """
    where = f"criterion={wanted.criterion}, batch {number}"
    leaves = [leaf for leaf in flatten(result).values() if requires_grad(leaf)]
    if not leaves:
        raise UsageError(f"{where}: loss= must give one number, or results, with a gradient")
    real = [torch.view_as_real(leaf) if leaf.is_complex() else leaf for leaf in leaves]
    if not all(bool(leaf.detach().isfinite().all()) for leaf in real):
        said = f"the loss is {real[0].item()}" if real[0].numel() == 1 else "the results are not finite"
        raise UsageError(f"{where}: {said}; look for NaN or infinity in the data")
    if wanted.loss is not None and isinstance(result, Tensor) and result.numel() == 1:
        yield result.sum()
        return
    for _ in range(_DRAWS if wanted.data is None else _DRAWS_OF_BATCH):
        yield torch.stack([(leaf * (torch.randint_like(leaf, 2) * 2 - 1)).sum() for leaf in real]).sum()


def input_norms(program: Program, wanted: Options) -> dict[str, Tensor]:
    """Return, by the name of a weight, the norm of what each of its elements meets; shaped to multiply the weight."""
    squares: dict[nn.Module, Tensor] = {}

    def watch(original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        if args and isinstance(args[0], Tensor) and is_fed_plainly(module):
            x = args[0].detach().float()
            channels = 1 if isinstance(module, _Convolution) and x.dim() == len(module.kernel_size) + 2 else -1
            found = x.movedim(channels, -1).reshape(-1, x.shape[channels]).square().sum(0)
            squares[module] = squares[module] + found if module in squares else found
        return original(module, *args, **kwargs)

    with preserved(program.model), in_phase(program.model, False), torch.no_grad(), calls_intercepted(watch):
        _run(program, wanted)
    found = {program.names.name(module): (module, each) for module, each in squares.items() if module in program.names}
    return {qualified(name, "weight"): _as_weight(module, each.sqrt()) for name, (module, each) in found.items()}


_Convolution = nn.modules.conv._ConvNd  # pyright: ignore[reportPrivateUsage]


def is_fed_plainly(module: nn.Module) -> bool:
    """Say whether a layer multiplies its one weight with what it is called with."""
    return isinstance(module, (nn.Linear, _Convolution)) or holds_inputs_first(module)


def _as_weight(module: nn.Module, norms: Tensor) -> Tensor:
    """Return the norm of each input where the weight has it; the places of a kernel meet the same in the mean."""
    if not isinstance(module, _Convolution):
        return norms[:, None] if holds_inputs_first(module) else norms
    kernel = (1,) * len(module.kernel_size)
    if module.transposed:
        return norms.reshape(-1, 1, *kernel)
    by_group = norms.reshape(module.groups, -1).repeat_interleave(module.out_channels // module.groups, 0)
    return by_group.reshape(*by_group.shape, *kernel)


def _run(program: Program, wanted: Options) -> None:
    if wanted.data is not None:
        run_batches(program.model, wanted)
        return
    if not program.whole_calls:
        raise UsageError(f"criterion={wanted.criterion} needs example_inputs, or data= with loss=")
    for call in program.whole_calls:
        copy_inputs(call).run(program.model)
