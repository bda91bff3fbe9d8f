"""What a region runs under so that its backward computes it again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts  # pyright: ignore[reportUnknownVariableType]

from ...compat import REGISTERS, DispatchMode, all_modules, is_transformed, own_buffers
from ...compat.checkpoint import checkpoint
from ...layers.distributed import BATCH_NORMS
from ...runtime.values import is_sharded, map_tensors

__all__ = ["PRODUCTS", "Recomputation", "counts"]

_aten = torch.ops.aten
PRODUCTS = frozenset(
    {
        _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.convolution.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default, _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default, _aten._scaled_dot_product_cudnn_attention.default,
    }
)  # fmt: skip
"""Matrix products, convolutions and attention: what selective recomputation keeps."""

_NORMS = (*BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


@dataclass(frozen=True)
class Recomputation:
    """Run a region again for its backward: same random numbers, same autocast, running statistics left alone."""

    changes_results: ClassVar[bool] = False  # where the region is left out, the same is computed in more memory
    selective: bool = False  # keep matrix products and convolutions, and compute the rest again
    counting: bool = False  # the region has running statistics

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        # In evaluation, without gradients and under torch.func it just runs.
        region = cast("nn.Module", getattr(function, "__self__"))  # noqa: B009  a bound method's, untyped
        transformed = not torch.compiler.is_compiling() and is_transformed()  # torch's checkpoint has no rule for that
        if not (region.training and torch.is_grad_enabled()) or transformed:
            return function(*args)
        return checkpoint(function, args, self._settings(region))

    def _settings(self, region: nn.Module) -> dict[str, Any]:
        if torch.compiler.is_compiling():  # a compiled region updates its statistics once of itself
            keep = partial(create_selective_checkpoint_contexts, [*PRODUCTS])
            return {"context_fn": keep} if self.selective else {}
        return {"context_fn": partial(self._contexts, region)}

    def _contexts(self, region: nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return what the first run and the later ones happen under."""
        kept: _Kept = defaultdict(list)
        keep = _Keep(kept) if self.selective else nullcontext()
        reuse = _Reuse(kept) if self.selective else nullcontext()
        return keep, _AsItWas(region, _Again(region, reuse) if self.counting else reuse)

    def __str__(self) -> str:
        return "recomputation of all but matrix products" if self.selective else "recomputation"


_Kept = defaultdict[Any, list[Any]]


def counts(module: nn.Module) -> bool:
    """Say whether a module keeps running statistics, which do not change what it computes in training."""
    return isinstance(module, _NORMS) and bool(module.track_running_stats)


def is_another(held: object, now: object) -> bool:
    """Say whether a tensor was put in the place of one; what FSDP gathers and shards again is its own affair."""
    return held is not now and not (is_sharded(held) or is_sharded(now))


class _AsItWas:
    """Let a region run again in its mode and with its tensors: `eval()` or `functional_call` may have changed them."""

    def __init__(self, region: nn.Module, inside: AbstractContextManager[Any]) -> None:
        self._inside, modules = inside, all_modules(region)
        self._modes = [(module, module.training) for module in modules]
        registers = (cast("dict[str, Any]", vars(module)[name]) for module in modules for name in REGISTERS)
        self._held = [(register, dict(register)) for register in registers if register]
        self._flipped: list[nn.Module] = []
        self._replaced: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def __enter__(self) -> None:
        self._flipped = [module for module, training in self._modes if module.training is not training]
        self._flip()
        for register, held in self._held:
            now = {name: register[name] for name in held if name in register and is_another(held[name], register[name])}
            self._replaced.append((register, now))
            register.update({name: held[name] for name in now})
        self._inside.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._inside.__exit__(*exception)
        for register, now in self._replaced:
            register.update(now)
        self._replaced.clear()
        self._flip()

    def _flip(self) -> None:
        for module in self._flipped:
            module.training = not module.training


class _Again:
    """Let running statistics be copies while a region runs again; second derivatives run it more than once."""

    def __init__(self, region: nn.Module, reuse: AbstractContextManager[Any]) -> None:
        self._region, self._reuse = region, reuse
        self._originals: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]] = []

    def __enter__(self) -> None:
        registers = [own_buffers(module) for module in all_modules(self._region) if counts(module)]
        self._originals = [(register, dict(register)) for register in registers]
        for register, held in self._originals:
            register.update({name: None if buffer is None else buffer.clone() for name, buffer in held.items()})
        self._reuse.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._reuse.__exit__(*exception)
        for register, held in self._originals:
            register.update(held)
        self._originals.clear()


class _Keep(DispatchMode):
    """Keep the results of products, in their order."""

    def __init__(self, kept: _Kept) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            self._kept[func].append(map_tensors(Tensor.detach, result))
        return result


class _Reuse(DispatchMode):
    """Give the results that were kept; unlike torch's own, as often as a backward is asked for."""

    def __init__(self, kept: _Kept) -> None:
        super().__init__()
        self._kept = kept
        self._used: dict[Any, int] = defaultdict(int)

    def __enter__(self) -> Any:
        self._used.clear()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in PRODUCTS:
            return func(*args, **(kwargs or {}))
        self._used[func] += 1
        return map_tensors(Tensor.detach, self._kept[func][self._used[func] - 1])
