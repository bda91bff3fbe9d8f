"""The layer: a router, experts with stacked parameters, and shared experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, cast, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...compat import autocast_dtype
from ...errors import UsageError, positive_integer
from .dealt import ExpertPlacement, dealt_mixture
from .dispatch import mixture
from .lowerings import Linear, Projection
from .router import GATES, Gate, Router, RouterOutput

__all__ = ["MixtureOfExperts"]

Activation = Callable[[Tensor], Tensor]
_ACTIVATIONS: Mapping[str, Activation] = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}


class MixtureOfExperts(nn.Module):
    r"""Send each token to `top_k` of `num_experts` feed-forward networks, and add up what they give, weighted.

    An expert is `down(activation(gate(x)) * up(x))` (SwiGLU with the default activation) or, with `gated=False`,
    `down(activation(up(x)))`. No token is dropped unless `capacity_factor` is given. Which products compute it depends
    on the number of tokens; the results differ by rounding only.

    Each projection of all experts is one parameter, laid out as `transformers` does: `gate_up_proj`
    [num_experts, 2 * hidden, dim], gates first (`up_proj` [num_experts, hidden, dim] where `gated` is off), and
    `down_proj` [num_experts, dim, hidden]. An expert that no token chose has a gradient of zero, not None: optimizers
    with a state (Adam, momentum, weight decay) move idle experts, too, as they do not with separate modules.

    Args:
        dim: features of tokens, in and out.
        hidden: features between the two projections of an expert.
        num_experts: experts to choose from.
        top_k: experts that each token gets.
        gate: `"softmax"`, `"sigmoid"` or `"noisy_topk"`, see `Router`.
        activation: `"silu"`, `"gelu"`, `"relu"` or a function of tensors, element by element.
        gated: experts have a gate.
        normalize: the weights of a token sum to one. By default where `top_k` is more than 1: one weight would always
            be 1, and nothing but the losses would train the router.
        capacity_factor: each expert serves at most `ceil(capacity_factor * tokens * top_k / num_experts)` tokens of a
            call, as in Switch Transformers. What comes later counts zero for that expert: first choices come
            before second ones, then earlier tokens before later ones. It holds in evaluation, too.
        shared_experts: experts that serve all tokens with weight one, beside the chosen ones (DeepSeekMoE, 2024).
        bias: the projections have biases.

    Shape:
        - input: [..., dim], floating point; output: the same, in the input's dtype.

    A token whose logits are NaN gives NaN, and no other token does.

    >>> layer = MixtureOfExperts(16, 32, num_experts=8, top_k=2)
    >>> layer(torch.randn(4, 10, 16)).shape
    torch.Size([4, 10, 16])
    """

    _fxopt_is_operation: ClassVar[bool] = True

    placement: ExpertPlacement | None = None
    """To which processes the experts are dealt, if they are."""

    down_proj: nn.Parameter
    down_proj_bias: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        hidden: int,
        num_experts: int,
        top_k: int,
        *,
        gate: Gate = "softmax",
        activation: str | Activation = "silu",
        gated: bool = True,
        normalize: bool | None = None,
        capacity_factor: float | None = None,
        shared_experts: int = 0,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_sizes(dim=dim, hidden=hidden, num_experts=num_experts, top_k=top_k, shared_experts=shared_experts)
        _check_choices(gate, activation, capacity_factor)
        _check_switches(gated=gated, bias=bias, normalize=top_k > 1 if normalize is None else normalize)
        self.dim, self.hidden, self.num_experts, self.gated = dim, hidden, num_experts, gated
        self.activation = _ACTIVATIONS[activation] if isinstance(activation, str) else activation
        self.first = "gate_up_proj" if gated else "up_proj"
        made: Any = {"device": device, "dtype": dtype}
        normalize = top_k > 1 if normalize is None else normalize
        self.router = Router(
            dim, num_experts, top_k, gate, normalize=normalize, capacity_factor=capacity_factor, **made
        )
        for name, shape in self._shapes(hidden).items():
            self.register_parameter(name, nn.Parameter(torch.empty(num_experts, *shape, **made)))
            biases = nn.Parameter(torch.empty(num_experts, shape[0], **made)) if bias else None
            self.register_parameter(f"{name}_bias", biases)
        shared = self._shapes(hidden * shared_experts) if shared_experts else {}
        self.shared = nn.ModuleDict(
            {name: nn.Linear(inside, outside, bias, **made) for name, (outside, inside) in shared.items()}
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw each expert and the router as `nn.Linear` does: weights and biases uniform within 1 / sqrt(in)."""
        self.router.reset_parameters()
        for name in (self.first, "down_proj"):
            weight, bias = getattr(self, name), getattr(self, f"{name}_bias")
            bound = weight.shape[2] ** -0.5
            for tensor in (weight, bias):
                if tensor is not None:
                    nn.init.uniform_(tensor, -bound, bound)
        for linear in self.shared.values():
            cast("nn.Linear", linear).reset_parameters()

    @overload
    def forward(self, x: Tensor, return_router: Literal[False] = False) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, return_router: Literal[True]) -> tuple[Tensor, RouterOutput]: ...
    def forward(self, x: Tensor, return_router: bool = False) -> Tensor | tuple[Tensor, RouterOutput]:
        """Return the output [..., dim]; with `return_router` also what the router decided, and its losses."""
        self._check_input(x)
        tokens = x.reshape(-1, self.dim)
        logits, indices, weights = self.router(tokens)
        if self.placement is None:
            output = mixture(tokens, indices, weights, self._projections(), self._expert)
        else:
            output = dealt_mixture(self.placement, tokens, indices, weights, self._projections(), self._expert)
        if self.shared:
            linears = [cast("nn.Linear", linear) for linear in self.shared.values()]
            output = output + self._expert(tokens, linears)
        output = output.reshape(x.shape)
        return (output, self.router.output(logits, indices, weights)) if return_router else output

    def _projections(self) -> list[Projection]:
        names = (self.first, "down_proj")
        return [Projection(getattr(self, name), getattr(self, f"{name}_bias")) for name in names]

    def _expert(self, rows: Tensor, linears: Sequence[Linear]) -> Tensor:
        first, down = linears
        hidden = first(rows)
        if not self.gated:
            return down(self.activation(hidden))
        gate, up = hidden.chunk(2, -1)
        return down(self.activation(gate) * up)

    def _shapes(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Return the names of both projections, and how many features each gives and takes."""
        return {self.first: (hidden * (1 + self.gated), self.dim), "down_proj": (self.dim, hidden)}

    def _check_input(self, x: Tensor) -> None:
        if not x.dim() or x.shape[-1] != self.dim:
            raise UsageError(f"a MixtureOfExperts of dim={self.dim} was given {list(x.shape)}; give [..., {self.dim}]")
        dtype = self.down_proj.dtype
        is_cast = x.is_floating_point() and autocast_dtype(x) == autocast_dtype(self.down_proj)
        if x.dtype != dtype and not is_cast:
            raise UsageError(f"a MixtureOfExperts in {dtype} was given {x.dtype}; give {dtype}")

    def extra_repr(self) -> str:
        """Return what `repr` shows between the brackets."""
        name = getattr(self.activation, "__name__", type(self.activation).__name__)
        bias = self.down_proj_bias is not None
        sizes = f"{self.dim}, hidden={self.hidden}, num_experts={self.num_experts}"
        return f"{sizes}, activation={name}, gated={self.gated}, bias={bias}"


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        positive_integer(size, f"{name} of a MixtureOfExperts", 0 if name == "shared_experts" else 1)
    if sizes["top_k"] > sizes["num_experts"]:
        raise UsageError(f"top_k={sizes['top_k']} of {sizes['num_experts']} experts; give at most num_experts")


def _check_choices(gate: object, activation: object, factor: object) -> None:
    if gate not in GATES:
        raise UsageError(f"unknown gate {gate!r}; give one of {', '.join(GATES)}")
    if not callable(activation) and (not isinstance(activation, str) or activation not in _ACTIVATIONS):
        raise UsageError(f"unknown activation {activation!r}; give one of {', '.join(_ACTIVATIONS)}, or a function")
    if isinstance(factor, bool) or not (
        factor is None or (isinstance(factor, (int, float)) and 0 < factor < float("inf"))
    ):
        raise UsageError(
            f"capacity_factor={factor!r} of a MixtureOfExperts; give a factor over 0, such as 1.25, or None"
        )


def _check_switches(**switches: object) -> None:
    for name, switch in switches.items():
        if not isinstance(switch, bool):
            raise UsageError(f"{name}={switch!r} of a MixtureOfExperts; give True or False")
