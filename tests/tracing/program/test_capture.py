"""Models of plain style: captured whole, equal to themselves, no size burned in."""

from __future__ import annotations

import functools
import inspect
import math
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxopt

X = (torch.randn(4, 6, generator=torch.Generator().manual_seed(0)),)
X2 = (torch.randn(7, 6, generator=torch.Generator().manual_seed(1)),)


class MultiHead(nn.Module):
    def __init__(self, style: str):
        super().__init__()
        self.style = style
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)) for _ in range(3))

    def forward(self, x):
        if self.style == "comprehension":
            return torch.cat([head(x) for head in self.heads], dim=1)
        if self.style == "list":
            return [head(x) for head in self.heads]
        outputs = []
        for i, head in enumerate(self.heads):
            outputs.append(head(x) * (i + 1))
        if self.style == "stack":
            return torch.stack(outputs).mean(0)
        return sum(outputs) / len(self.heads)


@pytest.mark.parametrize("style", ["comprehension", "list", "stack", "sum"])
def test_heads(agree, misses, style):
    program = agree(MultiHead(style), X, X2)
    assert program.coverage().share == 1
    assert misses(program) == 0
    assert sum(node.op == "call_module" for node in program.graphs[""].nodes) == 3


def test_equal_sequentials_share_one_capture_and_own_splits_them(agree):
    from fxopt.runtime.graphs import capture_of, own, recompile

    program = agree(MultiHead("list"), X)
    first, second = program.module("heads.0"), program.module("heads.1")
    assert capture_of(first) is capture_of(second)
    before = [node.name for node in capture_of(first).specializations[0].graph.nodes]
    mine = own(first)
    assert mine is own(first) is capture_of(first) is not capture_of(second)
    assert [node.name for node in mine.specializations[0].graph.nodes] == before
    assert [n.meta for n in mine.specializations[0].graph.nodes] == [n.meta for n in program.graph("heads.1").nodes]
    graph = mine.specializations[0].graph
    output = graph.output_node()
    with graph.inserting_before(output):
        output.args = (graph.call_function(torch.neg, (output.args[0],)),)
    x = X[0]
    kept = second(x)
    value = first(x)
    recompile(first)
    assert torch.equal(first(x), -value)
    assert torch.equal(second(x), kept)


class ShapeArithmetic(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(6, 12)
        self.out = nn.Linear(12, 6)
        self.heads = 3

    def forward(self, x):
        batch, length, _ = x.shape
        q = self.project(x).view(batch, length, self.heads, -1).transpose(1, 2)
        scores = q @ q.transpose(-2, -1) / math.sqrt(q.size(-1))
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        y = (scores.softmax(-1) @ q).transpose(1, 2).reshape(batch, length, -1)
        return self.out(y) + torch.arange(length, device=x.device)[None, :, None] + x.shape[0] // 2


def test_shapes_stay_symbolic(agree, misses):
    program = agree(ShapeArithmetic(), (torch.randn(2, 5, 6),), (torch.randn(3, 7, 6),), (torch.randn(1, 1, 6),))
    assert misses(program) == 0


class Factories(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 1, 6))

    def forward(self, x):
        n = x.shape[0]
        token = self.weight.expand(n, -1, -1)
        noise = torch.zeros(n, 6) + torch.full((n, 1), 2.0) + torch.zeros_like(x) + x.new_ones(n, 6)
        eye = torch.eye(n) @ x
        steps = torch.linspace(0, 1, n).unsqueeze(1)
        return token.squeeze(1) + noise + eye + steps + torch.tensor(3.0) + torch.empty(n, 6).fill_(0.5)


def test_factories_are_nodes(agree, misses):
    program = agree(Factories(), X, X2)
    assert misses(program) == 0
    targets = {node.target for node in program.graphs[""].nodes}
    assert {torch.zeros, torch.full, torch.eye, torch.linspace, torch.tensor} <= targets


class RandomFactory(nn.Module):
    def forward(self, x):
        return x + torch.randn(x.shape[0], 6) * torch.rand(())


def test_random_factories_draw_every_time(agree):
    program = agree(RandomFactory(), X, X2)
    a, b = program.model(*X), program.model(*X)
    assert not torch.equal(a, b)


Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Result:
    hidden: torch.Tensor
    extra: torch.Tensor | None = None


class Outputs(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        y = x + 1
        match self.kind:
            case "tuple":
                return x, (y, None)
            case "dict":
                return {"x": x, "deep": {"y": y, "n": x.shape[0]}}
            case "namedtuple":
                return Pair(x, [y, y])
            case "input":
                return x
            case "none":
                return None
            case "constant":
                return {"loss": 0.0, "x": x}
        return Result(y)


@pytest.mark.parametrize("kind", ["tuple", "dict", "namedtuple", "input", "none", "constant", "dataclass"])
def test_output_structures(agree, kind):
    agree(Outputs(kind), X, X2)


class NestedOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Outputs(kind) for kind in ("tuple", "dict", "namedtuple", "dataclass"))

    def forward(self, x):
        a, (b, none) = self.parts[0](x)
        assert none is None
        c = self.parts[1](x)
        d = self.parts[2](b)
        e = self.parts[3](a)
        assert e.extra is None
        assert isinstance(e, Result)
        return a + b + c["deep"]["y"] + d.first + sum(d.second) + e.hidden + c["deep"]["n"]


def test_structured_results_of_children(agree, misses):
    program = agree(NestedOutputs(), X, X2)
    assert misses(program) == 0


class NestedInputs(nn.Module):
    def forward(self, batch, pair=(1.0, 2.0), *, scale=None):
        x = batch["x"] + batch["more"][0] * pair[0] - batch["more"][1] * pair[1]
        if scale is not None:
            x = x * scale
        return x


def test_nested_inputs(agree):
    from fxopt.tracing.examples import Inputs

    def batch(n):
        return {"x": torch.randn(n, 3), "more": [torch.randn(n, 3), torch.randn(n, 3)]}

    program = agree(
        NestedInputs(),
        [Inputs(batch(2)), Inputs(batch(2), scale=torch.tensor(2.0))],
        (batch(5),),
        Inputs(batch(4), pair=(3.0, 2.0)),
        Inputs(batch(4), scale=torch.tensor(3.0)),
    )
    names = [node.name for node in program.graphs[""].nodes if node.op == "placeholder"]
    assert names == ["batch_x", "batch_more_0", "batch_more_1"]
    assert len(program.captures[""].specializations) == 2
    assert sum(program.captures[""].misses.values()) == 2  # pair=(3, 2), in training and in evaluation


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.register_buffer("offset", torch.randn(6))

    def forward(self, x):
        y = F.linear(x, self.weight * 2, self.offset)
        y = F.gelu(y) + torch.relu(y) + y.sigmoid().pow(2) - (-y) ** 2 / 3 + abs(y) + 2 ** (y / 10)
        values, indices = y.topk(3, dim=-1)
        top = torch.max(y, dim=1)
        parts = y.chunk(2, dim=-1)
        a, b = y.split(3, dim=-1)
        return values.sum() + y + top.values.unsqueeze(1) + torch.cat([b, a, *parts], dim=1)[:, 3:9] + indices.sum()


def test_functional_style(agree, misses):
    assert misses(agree(Functional(), X, X2)) == 0


class Keywords(nn.Module):
    def forward(self, x, *rest, factor=2.0, **named):
        for item in rest:
            x = x + item
        for item in named.values():
            x = x - item
        return x * factor


def test_variadic_forwards(agree):
    from fxopt.tracing.examples import Inputs

    x = X[0]
    agree(Keywords(), Inputs(x, x * 2, x, factor=3.0, bias=x), Inputs(x, x * 2, x, factor=3.0, bias=x + 1), (x,))
    agree(Keywords(), X, Inputs(x, x), X2)


class Defaults(nn.Module):
    def forward(self, x, mask=None, flag=False, n=3, mode="sum"):
        y = x * n
        if mask is not None:
            y = y * mask
        if flag:
            y = y + 1
        return y.sum() if mode == "sum" else y


def test_bound_arguments_are_guarded(agree, misses):
    from fxopt.tracing.examples import Inputs

    x = X[0]
    calls = [
        Inputs(x, x),
        Inputs(x, flag=True),
        Inputs(x, n=4),
        Inputs(x, n=3.0),
        Inputs(x, mode="mean"),
        Inputs(x, n=True),
    ]
    program = agree(Defaults(), X, X2, *calls)
    assert misses(program) == 2 * len(calls)
    everything = agree(Defaults(), [*(c for c in [Inputs(x), *calls])], X2)
    assert misses(everything) == 0
    assert len(everything.captures[""].specializations) == 1 + len(calls)


class Decides(nn.Module):
    def forward(self, x):
        if x.shape[0] % 2 == 0:
            return x * 2
        if x.dim() == 2 and x.dtype == torch.float32:
            return x - 1
        return x


def test_deciding_shapes_are_guarded(agree, misses):
    program = agree(Decides(), X, (torch.randn(6, 2),))
    assert misses(program) == 0
    program = agree(Decides(), X, (torch.randn(5, 2),), (torch.randn(5, 2).double(),))
    assert misses(program) == 4


class DecidesInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        y = self.linear(x).repeat(2, 1)
        for _ in range(y.shape[0] - 6):
            y = y + 1
        return y


def test_deciding_intermediate_shapes_start_over(agree, misses):
    program = agree(DecidesInside(), X, X2)
    assert misses(program) == 2
    assert "require" in str(program.graphs[""])


class Unrolled(nn.Module):
    def forward(self, x):
        return sum(row * i for i, row in enumerate(x))


def test_loops_over_a_tensor_are_guarded(agree, misses):
    assert misses(agree(Unrolled(), X, (torch.randn(4, 3),))) == 0
    assert misses(agree(Unrolled(), X, X2)) == 2


def test_zero_sized_batches(agree):
    agree(MultiHead("sum"), X, (torch.randn(0, 6),))
    agree(MultiHead("sum"), (torch.randn(0, 6),), X)


class InputsMayBeNone(nn.Module):
    def forward(self, x, y):
        return x if y is None else x + y


def test_a_tensor_argument_that_turns_none_is_noticed(agree, misses):
    program = agree(InputsMayBeNone(), (X[0], X[0]), (X[0], None))
    assert misses(program) == 2


def test_isinstance_and_numbers(agree):
    class Checks(nn.Module):
        def forward(self, x):
            assert isinstance(x, torch.Tensor)
            assert isinstance(x.shape[0], int)
            assert isinstance(x.shape, torch.Size)
            assert hasattr(x, "dim") and not hasattr(x, "nonsense")
            half = round(x.shape[1] / 2)
            table = {6: 1.0, 7: 2.0}
            return x[:, :half] * table[x.shape[1]] * max(x.shape[1], 3)

    agree(Checks(), X, X2, (torch.randn(2, 7),))


class LoopsOverChildren(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.scales = nn.ParameterList(nn.Parameter(torch.randn(6)) for _ in range(2))

    def forward(self, x):
        for child in self.children():
            if not isinstance(child, nn.ParameterList):
                x = child(x)
        for scale in self.scales:
            x = x * scale
        return x + sum(p.sum() for p in self.parameters())


def test_loops_over_children_notice_additions(agree):
    for change in (
        lambda m: m.add_module("third", nn.Linear(6, 6)),
        lambda m: m.scales.append(nn.Parameter(torch.ones(6) * 3)),
    ):
        program = agree(LoopsOverChildren(), X, X2)
        model = program.model.eval()
        change(model)
        plain = LoopsOverChildren().eval()
        change(plain)
        plain.load_state_dict(model.state_dict())
        assert torch.equal(model(*X), plain(*X))
        assert program.captures[""].misses.total() == 1


class AwkwardNames(nn.Module):
    def forward(self, x, module=None, reason=None, self_=None, **kwargs):
        return x if module is None else x + module + kwargs.get("args", 0)


def test_awkward_argument_names(agree):
    from fxopt.tracing.examples import Inputs

    x = X[0]
    agree(AwkwardNames(), Inputs(x, module=x), Inputs(x, module=x, reason=x), Inputs(x), Inputs(x, module=x, args=3))


class ReshapesArgument(nn.Module):
    def forward(self, x):
        x = x.unsqueeze_(0)
        return x * 2 if x.shape[0] == 1 else x


def test_decisions_after_reshaping_an_argument_in_place(agree):
    program = agree(ReshapesArgument(), X, X2, opaque=True)
    assert "cannot be undone" in program.opaque[""].reason


class Autocast(nn.Module):
    """Opaque itself; its child is called with other dtypes than its parameters'."""

    def __init__(self):
        super().__init__()
        self.inner = Mixed()

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(x)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        y = F.linear(self.linear(x), self.weight)
        return y * 2 if y.dtype == torch.bfloat16 else y


def test_children_called_under_autocast(agree, misses):
    program = agree(Autocast(), X, X2)
    assert set(program.captures) == {"", "autocast_0", "inner"}
    node = next(n for n in program.graph("inner").nodes if n.target is torch._C._nn.linear)
    assert node.meta["val"].dtype == torch.bfloat16
    assert misses(program) == 0


class Decorated(nn.Module):
    @staticmethod
    def optional(forward):
        import functools

        @functools.wraps(forward)
        def wrapper(self, *args, **kwargs):
            doubled = "flag" in kwargs
            kwargs["extra"] = 1.0
            return forward(self, *args, **kwargs) * (2 if doubled else 1)

        return wrapper


def _decorated(forward):
    return Decorated.optional(forward)


class UsesDecorator(nn.Module):
    @_decorated
    def forward(self, x, flag=None, extra=None):
        return x + extra if flag is None else x - extra


def test_decorated_forwards_see_what_was_given(agree):
    from fxopt.tracing.examples import Inputs

    x = X[0]
    program = agree(UsesDecorator(), Inputs(x), Inputs(x=x), Inputs(x, flag=None), Inputs(x=x, flag=True), X2)
    assert sum(program.captures[""].misses.values()) == 4
    assert str(inspect.signature(program.model.forward)) == "(x, flag=None, extra=None)"


def _dispatched(forward):
    """Wrap a forward as an interface that calls an implementation by position, whatever its parameters are called."""

    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        implementation = forward if self.implementation is None else self.implementation
        return implementation(self, *args, **kwargs)

    return wrapper


def _subtract(self, first, second, *, scale=1):
    return self.linear(first - second) * scale


class Dispatches(nn.Module):
    def __init__(self, implementation):
        super().__init__()
        self.implementation = implementation
        self.linear = nn.Linear(6, 3)

    @_dispatched
    def forward(self, left, right=None, scale=1):
        return self.linear(left + right) * scale


class Dispatcher(nn.Module):
    def __init__(self, **given):
        super().__init__()
        self.inner = Dispatches(_subtract)
        self.given = given

    def forward(self, x):
        return self.inner(x, x.flip(0), **self.given)


@pytest.mark.parametrize("given", [{}, {"scale": 3}], ids=["", "keyword"])
def test_a_decorator_may_call_a_function_with_other_names(agree, misses, given):
    program = agree(Dispatcher(**given), X, X2)
    assert misses(program) == 0
    assert str(inspect.signature(program.module("inner").forward)) == "(left, right=None, scale=1)"
    program.model.inner.implementation = None
    x = X[0]
    expected = program.model.inner.linear(x + x.flip(0)) * given.get("scale", 1)
    assert torch.equal(program.model(x), expected)


class MadeFromShapes(nn.Module):
    """Values made from shapes alone may decide; the data of an argument may not."""

    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1]).tril()
        if (mask[0] == 0).all():
            return x
        return x @ mask


def test_values_made_from_shapes_may_decide(agree, misses):
    program = agree(MadeFromShapes(), X, X2)
    assert misses(program) == 0


def test_equal_modules_are_traced_once_and_unequal_ones_are_not_mixed_up(agree):
    class Head(nn.Module):
        def __init__(self, power, tied=False):
            super().__init__()
            self.power = power
            self.a = nn.Parameter(torch.randn(6))
            self.b = self.a if tied else nn.Parameter(torch.randn(6))

        def forward(self, x):
            for p in self._parameters.values():
                x = x * p
            return x**self.power

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleList([Head(2), Head(2), Head(3), Head(2, tied=True)])

        def forward(self, x):
            return [head(x) for head in self.heads]

    program = agree(Heads(), X, X2)
    captures = [program.captures[f"heads.{i}"] for i in range(4)]
    assert captures[0] is captures[1]
    assert len(set(map(id, captures))) == 3


class Positions(nn.Module):
    def forward(self, shape, start: int, half: int = 0):
        batch, length = shape
        return torch.arange(start, start + length).expand(batch, length) + half


class PassesSizes(nn.Module):
    def __init__(self):
        super().__init__()
        self.positions = Positions()

    def forward(self, x):
        return x + self.positions(x.shape, 2) + self.positions(x.size(), start=x.shape[0], half=x.shape[1] // 2)


def test_sizes_that_a_parent_computes_stay_symbolic_in_the_child(agree, misses):
    program = agree(PassesSizes(), X, X2)
    assert misses(program) == 0
    first, second = program.captures["positions"].specializations
    assert [n.name for n in first.graph.nodes if n.op == "placeholder"] == ["shape"]
    assert [n.name for n in second.graph.nodes if n.op == "placeholder"] == ["shape", "start", "half"]


class AsksForKinds(nn.Module):
    def forward(self, x, scale):
        if isinstance(scale, torch.Tensor):
            return x * scale + 1
        return x * scale


def test_the_kind_of_an_argument_is_guarded(agree, misses):
    program = agree(AsksForKinds(), (X[0], X[0]), (X[0], 2.0), (X2[0], X2[0]))
    assert misses(program) == 2


class Twice(nn.Module):
    def forward(self, x):
        return x + 1, x * 2


class Unpacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.twice = Twice()

    def forward(self, x):
        a, b = self.twice(x)
        return a + b


@pytest.mark.parametrize("inputs", [None, X])
def test_a_childs_tuple_that_is_unpacked_is_measured_before_its_length_is_checked(inputs):
    program = fxopt.capture(Unpacked(), inputs)
    program.graphs[""].lint()
    assert torch.equal(program.model(*X2), Unpacked()(*X2))
    assert torch.equal(fxopt.optimize(Unpacked(), "fuse_ensembles", example_inputs=inputs)(*X2), Unpacked()(*X2))
