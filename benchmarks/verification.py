"""Count how many wrong rewrites verification catches, and how many honest ones it lets pass.

    python benchmarks/verification.py [--count 100] [--seeds 0] [--json FILE]

Small models in float32 and bfloat16, in training or evaluation, are optimized by a pass that rewrites one place, drawn
from the seed. What verification finds wrong must be undone, and the model be as it was. The wrong rewrites are those
that passes get wrong: swapped operands, a wrong dimension, a user dropped, a stale buffer, a lost gradient, an epsilon
of 1.1e-6 for 1e-6, members in the wrong order. The honest ones compute the same in another way.
"""

from __future__ import annotations

import argparse
import copy
import json
import operator
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fxopt
from fxopt.passes.base import Goal, Pass, Phase, Site
from fxopt.passes.edit import Edit
from fxopt.passes.tree import flatten
from fxopt.tracing.program import Program, capture_program

EPSILON = 1e-6

# -- models ------------------------------------------------------------------------------------------------------------


class Ensemble(nn.Module):
    """Members in a list, their outputs concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(x) for head in self.heads], -1)


class WeightedEnsemble(nn.Module):
    """Members weighted by a softmax over the members."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))
        self.logits = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        stacked = torch.stack([head(x) for head in self.heads])
        weights = torch.softmax(self.logits, 0)
        return (weights[:, None, None] * stacked).sum(0)


class Attention(nn.Module):
    """One head of attention, and a residual connection around it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6, eps=EPSILON)
        self.query, self.key, self.value = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        scores = torch.matmul(self.query(y), self.key(y).transpose(-2, -1)) / 6**0.5
        return x + torch.matmul(torch.softmax(scores, dim=-1), self.value(y))


class Convolutional(nn.Module):
    """Convolutions with batch norms; the mean over space goes into a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4, eps=EPSILON)
        self.second, self.other = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, eps=EPSILON)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.first(x)))
        z = y + self.other(self.second(y))
        return self.last(z.mean(dim=(2, 3)))


class Root(nn.Module):
    """A residual block with root mean square norms."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.RMSNorm(6, eps=EPSILON), nn.RMSNorm(6, eps=EPSILON)
        self.gate, self.up, self.down = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        return self.after(x + self.down(F.silu(self.gate(y)) * self.up(y)))


class Standardize(nn.Module):
    """Subtract running means and divide by running deviations, kept by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("scale", torch.ones(6))
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=0)
        self.mean.mul_(0.9).add_(0.1 * mean.detach())
        self.scale.mul_(0.9).add_(0.1 * (x - mean).exp().mean(dim=0).detach())
        return self.linear((x - self.mean) / (self.scale + 0.1))


class Variational(nn.Module):
    """The two terms of a variational bound."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread = nn.Linear(6, 4), nn.Linear(6, 4)
        self.decode = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mean, spread = self.mean(x), self.spread(x)
        divergence = (mean * mean + spread.exp() - spread - 1).sum(dim=-1) / 2
        error = F.softplus(x - self.decode(mean)).square().sum(dim=-1)
        return {"bound": error + divergence, "mean": mean}


class Experts(nn.Module):
    """Every expert on every token, weighted by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(dim=-1)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=1)
        return (weights.unsqueeze(-1) * outputs).sum(dim=1)


class Distances(nn.Module):
    """Kernel values between points and learned centres."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(5, 6))
        self.width = nn.Parameter(torch.ones(5))
        self.mix = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        squares = F.softplus(x[:, None] - self.centres).square().sum(dim=-1)
        kernel = torch.exp(-squares / (self.width * self.width + 1))
        return self.mix(kernel / kernel.sum(dim=-1, keepdim=True))


class Embedded(nn.Module):
    """Token and position embeddings, averaged, in two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, 6), nn.Embedding(7, 6)
        self.norm = nn.LayerNorm(6, eps=EPSILON)
        self.left, self.right = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(self.tokens(ids) + self.positions.weight)
        pooled = x.mean(dim=1)
        return self.left(pooled) - self.right(pooled), torch.tanh(x).sum(dim=1)


class Mixing(nn.Module):
    """Square matrices multiplied in an order that matters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(6, 6) / 3), nn.Parameter(torch.randn(6, 6) / 3)
        self.norm = nn.LayerNorm(6, eps=EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.matmul(torch.matmul(self.a, self.b), x)
        return self.norm(mixed - x) / (1 + mixed.abs())


class Network(nn.Module):
    """A plain network, its blocks user-written and residual."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(6, eps=EPSILON), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return x + F.gelu(self.linear(self.norm(x)))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Network.Block() for _ in range(2))
        self.head = nn.Sequential(nn.LayerNorm(6, eps=EPSILON), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


ROWS = [
    Ensemble, WeightedEnsemble, Root, Standardize, Variational, Experts, Distances, Network,
]  # fmt: skip
MODELS: dict[type[nn.Module], Callable[[], Tensor]] = {
    **dict.fromkeys(ROWS, lambda: torch.randn(8, 6)),
    Attention: lambda: torch.randn(2, 6, 6),
    Convolutional: lambda: torch.randn(4, 2, 5, 5),
    Embedded: lambda: torch.randint(0, 11, (3, 7)),
    Mixing: lambda: torch.randn(6, 6),
}

# -- rewrites ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A node in the graph of one module of a captured model."""

    program: Program
    home: str
    node: fx.Node
    edit: Edit | None = None

    @property
    def graph(self) -> fx.Graph:
        return self.node.graph

    @property
    def module(self) -> nn.Module:
        """Return the module that the node calls."""
        return self.program.module(self.home).get_submodule(str(self.node.target))

    def is_call(self, *names: str) -> bool:
        """Say whether the node calls a function or method of one of these names."""
        if self.node.op == "call_method":
            return self.node.target in names
        return self.node.op == "call_function" and getattr(self.node.target, "__name__", "") in names

    def calls(self, *kinds: type[nn.Module]) -> bool:
        return self.node.op == "call_module" and isinstance(self.module, kinds)

    def replace(self, make: Callable[..., Any], *args: Any) -> None:
        """Replace the node by a call of `make`."""
        with self.graph.inserting_before(self.node):
            new = self.graph.call_function(make, args or self.node.args, {} if args else self.node.kwargs)
        self.node.replace_all_uses_with(new)
        self.graph.erase_node(self.node)

    def set(self, name: str, value: object) -> None:
        """Set an attribute of the module that the node calls."""
        module, before = self.module, getattr(self.module, name)
        setattr(module, name, value)
        if self.edit is not None:
            self.edit.on_undo(lambda: setattr(module, name, before))

    def parameters(self, *names: str) -> list[fx.Node]:
        with self.graph.inserting_before(self.node):
            return [self.graph.get_attr(f"{self.node.target}.{name}") for name in names]


Apply = Callable[[], None]
Rewrite = Callable[[Place, random.Random], Apply | None]


def nodes_of(place: Place) -> list[fx.Node]:
    return [argument for argument in place.node.args if isinstance(argument, fx.Node)]


# -- wrong ones


def swapped_operands(place: Place, _: random.Random) -> Apply | None:
    if not place.is_call("sub", "truediv", "matmul") or len(place.node.args) != 2:
        return None
    first, second = place.node.args
    return lambda: setattr(place.node, "args", (second, first))


def wrong_dimension(place: Place, _: random.Random) -> Apply | None:
    if not place.is_call("softmax", "sum", "mean", "cat", "stack"):
        return None
    position = len(place.node.args) - 1
    if "dim" in place.node.kwargs:
        dim = place.node.kwargs["dim"]
        return lambda: place.node.update_kwarg("dim", another_dimension(dim))
    if position == 1:
        return lambda: place.node.update_arg(1, another_dimension(place.node.args[1]))
    return None


def another_dimension(dim: Any) -> Any:
    if isinstance(dim, int):
        return {0: 1, 1: 0, -1: -2, -2: -1}.get(dim, 0)
    return tuple(another_dimension(d) for d in dim)


def dropped_user(place: Place, chance: random.Random) -> Apply | None:
    if not place.is_call("add", "sub", "mul") or len(nodes_of(place)) < 2:
        return None
    kept = chance.choice(nodes_of(place))
    return lambda: place.node.replace_all_uses_with(kept)


def stale_buffer(place: Place, _: random.Random) -> Apply | None:
    if place.calls(nn.BatchNorm1d, nn.BatchNorm2d) and place.module.training:
        return lambda: place.set("momentum", 0.0)
    if place.is_call("add_"):
        return lambda: setattr(place.node, "target", "add")
    return None


def lost_gradient(place: Place, chance: random.Random) -> Apply | None:
    if place.node.op not in ("call_function", "call_module", "call_method") or not nodes_of(place):
        return None
    if place.is_call("getattr", "size", "getitem", "add_", "mul_", "detach") or place.calls(nn.Embedding):
        return None
    sources = [node for node in nodes_of(place) if receives_gradients(node, place)]
    if not passes_gradients(place.node) or not sources:
        return None
    source = chance.choice(sources)

    def apply() -> None:
        with place.graph.inserting_before(place.node):
            place.node.replace_input_with(source, place.graph.call_method("detach", (source,)))

    return apply


def passes_gradients(node: fx.Node) -> bool:
    """Say whether the output hangs on `node` by a path that is not detached anyway."""
    users = (user for user in node.users if user.target != "detach")
    return any(user.op == "output" or passes_gradients(user) for user in users)


def receives_gradients(node: fx.Node, place: Place) -> bool:
    """Say whether anything behind `node` wants a gradient."""
    if node.op == "get_attr":
        return str(node.target) in dict(place.program.module(place.home).named_parameters())
    is_source = node.op in ("placeholder", "call_module")
    return node.target != "detach" and (is_source or any(receives_gradients(n, place) for n in node.all_input_nodes))


def wrong_epsilon(place: Place, _: random.Random) -> Apply | None:
    if place.calls(nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.RMSNorm):
        return lambda: place.set("eps", 1.1e-6)
    return None


def wrong_order(place: Place, chance: random.Random) -> Apply | None:
    """Let two members of one list change places."""
    if place.node.op != "call_module" or not str(place.node.target).rpartition(".")[2].isdigit():
        return None
    container = str(place.node.target).rpartition(".")[0]
    members = [
        node
        for node in place.graph.find_nodes(op="call_module")
        if str(node.target).rpartition(".")[0] == container and node is not place.node
    ]
    if not members or isinstance(place.program.module(place.home), nn.Sequential):
        return None
    other = chance.choice(members)
    targets = place.node.target, other.target

    def apply() -> None:
        other.target, place.node.target = targets

    return apply


WRONG: dict[str, Rewrite] = {
    "swapped operands": swapped_operands,
    "wrong dimension": wrong_dimension,
    "dropped user": dropped_user,
    "stale buffer": stale_buffer,
    "lost gradient": lost_gradient,
    "epsilon 1.1e-6": wrong_epsilon,
    "members in the wrong order": wrong_order,
}

# -- honest ones


def function_rewrite(name: str, make: Callable[..., Any]) -> Rewrite:
    """Return a rewrite of calls of `name` into calls of `make`, with the same arguments."""

    def rewrite(place: Place, _: random.Random) -> Apply | None:
        return (lambda: place.replace(make)) if place.is_call(*name.split()) else None

    return rewrite


def add_with_alpha(a: Any, b: Any) -> Any:
    return b + a


def subtract_by_adding(a: Any, b: Any) -> Any:
    return a + (-b)


def divide_by_multiplying(a: Any, b: Any) -> Any:
    return a * (1 / b)


def softmax_by_hand(x: Tensor, dim: int = -1) -> Tensor:
    powers = (x - x.amax(dim, keepdim=True).detach()).exp()
    return powers / powers.sum(dim, keepdim=True)


def sum_in_halves(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    if not isinstance(dim, int) or x.shape[dim] < 2:
        return x.sum(dim, keepdim)
    left, right = x.tensor_split(2, dim)
    return left.sum(dim, keepdim) + right.sum(dim, keepdim)


def mean_by_sum(x: Tensor, dim: Any) -> Tensor:
    dims = (dim,) if isinstance(dim, int) else dim
    return x.sum(dim) / torch.tensor([x.shape[d] for d in dims]).prod().item()


def cat_by_padding(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return torch.stack([part for tensor in tensors for part in tensor.unbind(dim)], dim)


def stack_by_cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return torch.cat([tensor.unsqueeze(dim) for tensor in tensors], dim)


def matmul_transposed(a: Tensor, b: Tensor) -> Tensor:
    return (b.mT @ a.mT).mT


def gelu_by_hand(x: Tensor, **_: object) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / 2**0.5))


def silu_by_hand(x: Tensor, **_: object) -> Tensor:
    return x / (1 + (-x).exp())


def square_by_product(x: Tensor) -> Tensor:
    return x * x


def exchanged_factors(a: Any, b: Any) -> Any:
    return b * a


def linear_by_hand(place: Place, _: random.Random) -> Apply | None:
    if not place.calls(nn.Linear):
        return None
    return lambda: place.replace(affine, *place.node.args, *place.parameters("weight", "bias"))


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x @ weight.T + bias


def norm_by_hand(place: Place, _: random.Random) -> Apply | None:
    if place.calls(nn.LayerNorm):
        return lambda: place.replace(
            layer_norm_by_hand, *place.node.args, *place.parameters("weight", "bias"), place.module.eps
        )
    if place.calls(nn.RMSNorm):
        return lambda: place.replace(rms_norm_by_hand, *place.node.args, *place.parameters("weight"), place.module.eps)
    return None


def layer_norm_by_hand(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    wide = x.float() if x.dtype is torch.bfloat16 else x
    centred = wide - wide.mean(-1, keepdim=True)
    normal = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    return (normal * weight + bias).to(x.dtype)


def rms_norm_by_hand(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float() if x.dtype is torch.bfloat16 else x
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype) * weight


def batch_norm_by_hand(place: Place, _: random.Random) -> Apply | None:
    if not place.calls(nn.BatchNorm1d, nn.BatchNorm2d) or place.module.training:
        return None
    names = ("running_mean", "running_var", "weight", "bias")
    return lambda: place.replace(batch_norm_from_statistics, *place.node.args, *place.parameters(*names), EPSILON)


def batch_norm_from_statistics(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    wide = x.float() if x.dtype is torch.bfloat16 else x
    scale = weight.to(wide.dtype) * (variance.to(wide.dtype) + eps).rsqrt()
    shape = (1, -1, *(1 for _ in x.shape[2:]))
    return (wide * scale.view(shape) + (bias - mean * scale).view(shape)).to(x.dtype)


def members_at_once(place: Place, _: random.Random) -> Apply | None:
    """Run all linear members of a list as one batched product."""
    if not place.is_call("stack", "cat") or not isinstance(place.node.args[0], list | tuple):
        return None
    members = [node for node in place.node.args[0] if node.op == "call_module"]
    program = Place(place.program, place.home, members[0]) if len(members) == len(place.node.args[0]) > 1 else None
    if program is None or not program.calls(nn.Linear):
        return None

    def apply() -> None:
        parameters = [Place(place.program, place.home, node).parameters("weight", "bias") for node in members]
        with place.graph.inserting_before(place.node):
            weights, biases = zip(*parameters, strict=True)
            fused = place.graph.call_function(batched_members, (members[0].args[0], list(weights), list(biases)))
            parts = [place.graph.call_function(operator.getitem, (fused, i)) for i in range(len(members))]
        for node, part in zip(members, parts, strict=True):
            node.replace_all_uses_with(part)

    return apply


def batched_members(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    stacked = torch.stack(list(weights))
    return torch.baddbmm(torch.stack(list(biases))[:, None], x.expand(len(stacked), *x.shape), stacked.mT)


HONEST: dict[str, Rewrite] = {
    "a + b as b + a": function_rewrite("add", add_with_alpha),
    "a * b as b * a": function_rewrite("mul", exchanged_factors),
    "a - b as a + -b": function_rewrite("sub", subtract_by_adding),
    "a / b as a * (1 / b)": function_rewrite("truediv", divide_by_multiplying),
    "softmax by hand": function_rewrite("softmax", softmax_by_hand),
    "sum in halves": function_rewrite("sum", sum_in_halves),
    "mean as sum / n": function_rewrite("mean", mean_by_sum),
    "cat as stack": function_rewrite("cat", cat_by_padding),
    "stack as cat": function_rewrite("stack", stack_by_cat),
    "matmul transposed": function_rewrite("matmul", matmul_transposed),
    "gelu by hand": function_rewrite("gelu", gelu_by_hand),
    "silu by hand": function_rewrite("silu", silu_by_hand),
    "square as a product": function_rewrite("square", square_by_product),
    "linear as matmul + add": linear_by_hand,
    "norm by hand": norm_by_hand,
    "batch norm from its statistics": batch_norm_by_hand,
    "members as one bmm": members_at_once,
}

# -- trials ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """One rewrite and what became of it; `is_intact` says that a model whose rewrite was undone is as it was."""

    kind: str
    model: str
    dtype: str
    training: bool
    home: str
    node: str
    ok: bool
    reason: str
    meaning_error: float
    is_intact: bool


@dataclass(frozen=True)
class OneRewrite(Pass):
    """Apply one of the rewrites at one place.

    Before: a node        After: what the rewrite makes of it
    Refuses: nothing; it is for verification to object.
    """

    kind: str
    home: str
    node: str
    seed: int

    goal: ClassVar[Goal] = Goal.SIZE

    def find(self, program: Program) -> Iterator[Site]:
        only_in_evaluation = self.kind == "batch norm from its statistics"
        yield Site(program, self.home, {"node": self.node}, phase=Phase.EVAL if only_in_evaluation else None)

    def rewrite(self, site: Site, edit: Edit) -> None:
        place = Place(site.program, site.home, edit.graph_node("node"), edit)
        apply = {**WRONG, **HONEST}[self.kind](place, random.Random(self.seed))
        if apply is None:
            raise RuntimeError(f"{self.kind} no longer fits {self.node}")
        apply()


def places(program: Program) -> Iterator[Place]:
    for home, capture in program.captures.items():
        for node in capture.variants[0].graph.nodes:
            yield Place(program, home, node)


def attempt(kind: str, rewrite: Rewrite, chance: random.Random) -> Outcome | None:
    """Optimize a random model by one rewrite at a random place; None if it applies nowhere there."""
    architecture = chance.choice(list(MODELS))
    dtype = chance.choice([torch.float32, torch.bfloat16])
    training = chance.random() < 0.5
    torch.manual_seed(chance.randrange(2**31))
    model = architecture().to(dtype).train(training)
    x = MODELS[architecture]()
    x = x.to(dtype) if x.is_floating_point() else x
    program = capture_program(copy.deepcopy(model), (x,))
    seed = chance.randrange(2**31)
    fitting = [place for place in places(program) if rewrite(place, random.Random(seed)) is not None]
    if not fitting:
        return None
    place = chance.choice(fitting)
    one = OneRewrite(kind, place.home, place.node.name, seed)
    return outcome_of(one, model, x, measured_seed=chance.randrange(2**31))


def outcome_of(one: OneRewrite, model: nn.Module, x: Tensor, measured_seed: int) -> Outcome:
    fast = fxopt.optimize(model, passes=[one], example_inputs=(x,), measure=False, seed=measured_seed)
    (decision,) = fxopt.plan(fast).decisions
    return Outcome(
        kind=one.kind,
        model=type(model).__name__,
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        training=model.training,
        home=one.home or "(root)",
        node=one.node,
        ok=decision.status == "applied",
        reason=decision.reason,
        meaning_error=float(decision.figures.get("meaning_error") or 0.0),
        is_intact=decision.status == "applied" or same_outputs(fast, model, x),
    )


def same_outputs(fast: nn.Module, model: nn.Module, x: Tensor) -> bool:
    """Say whether two models give bitwise the same."""
    with torch.no_grad():
        pairs = zip(flatten(fast.eval()(x)).values(), flatten(model.eval()(x)).values(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def trials(rewrites: dict[str, Rewrite], count: int, seed: int) -> list[Outcome]:
    """Return the outcomes of `count` rewrites, the kinds taking turns."""
    chance = random.Random(seed)
    kinds = list(rewrites)
    outcomes: list[Outcome] = []
    while len(outcomes) < count:
        kind = kinds[len(outcomes) % len(kinds)]
        outcome = attempt(kind, rewrites[kind], chance)
        if outcome is not None:
            outcomes.append(outcome)
    return outcomes


def table(title: str, outcomes: Sequence[Outcome], good: bool) -> str:
    """Return a line per kind: how many were judged rightly, of how many."""
    total, right = Counter(o.kind for o in outcomes), Counter(o.kind for o in outcomes if o.ok is good)
    lines = [f"{title}: {sum(right.values())} of {len(outcomes)}"]
    lines += [f"  {kind:32} {right[kind]:3} of {total[kind]}" for kind in total]
    lines += [f"  missed: {o}" for o in outcomes if o.ok is not good]
    return "\n".join(lines)


def counts(outcomes: Sequence[Outcome], good: bool) -> dict[str, Any]:
    """Return how many were judged rightly, in all and by kind, and everything that was not."""
    total, right = Counter(o.kind for o in outcomes), Counter(o.kind for o in outcomes if o.ok is good)
    return {
        "judged rightly": sum(right.values()),
        "of": len(outcomes),
        "by kind": {kind: f"{right[kind]} of {total[kind]}" for kind in total},
        "missed": [asdict(o) for o in outcomes if o.ok is not good],
        "undone without a trace": all(o.is_intact for o in outcomes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    wrong = [outcome for seed in options.seeds for outcome in trials(WRONG, options.count, seed)]
    honest = [outcome for seed in options.seeds for outcome in trials(HONEST, options.count, seed)]
    print(table("wrong rewrites caught", wrong, good=False))
    print(table("honest rewrites let pass", honest, good=True))
    if options.json is not None:
        result = {
            "seeds": options.seeds,
            "torch": torch.__version__,
            "wrong": counts(wrong, good=False),
            "honest": counts(honest, good=True),
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
