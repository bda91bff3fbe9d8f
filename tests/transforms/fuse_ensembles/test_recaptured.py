"""Calls that were not foreseen, of modules whose members are fused: the graph made for them is fused, too."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxopt
from fxopt.testing import assert_equivalent
from fxopt.tracing.captured import capture_of
from fxopt.tracing.fallback import fallback_of, misses_in
from fxopt.transforms.fuse_ensembles import FuseEnsembles, Lowering

N = 4
X = torch.linspace(-1, 1, 40, dtype=torch.float64).reshape(5, 8)
MASK = torch.linspace(0, 1, 8, dtype=torch.float64)


class Heads(nn.Module):
    """Call members in several ways."""

    def __init__(self, member: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(8, 8)
        self.heads = nn.ModuleList((member or self.member)() for _ in range(N))
        self.double()

    @staticmethod
    def member() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: Tensor, mask: Tensor | None = None, flag: bool = False, scale: float = 1.0) -> Tensor:
        x = self.trunk(x)
        if mask is not None:
            x = x * mask
        if flag:
            x = x.relu()
        return self.joined([head(x) for head in self.heads], flag) * scale

    def joined(self, values: list[Tensor], flag: bool) -> Tensor:
        return torch.cat(values, -1)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.first(x)
        return self.last(torch.tanh(y if mask is None else y * mask))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Masked()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.inner(x, mask) + 1


class GivesMask(Heads):
    member = staticmethod(Masked)

    def forward(self, x: Tensor, mask: Tensor | None = None, flag: bool = False) -> Tensor:
        return torch.stack([head(x.relu() if flag else x, mask) for head in self.heads])


class GivesMaskDeep(GivesMask):
    member = staticmethod(Inner)


class ReadsTensors(Heads):
    def forward(self, x: Tensor, mask: Tensor | None = None, flag: bool = False) -> Tensor:
        x = x.relu() if flag else x
        x = x if mask is None else x * mask
        return torch.cat([F.linear(x, head[0].weight, head[0].bias) for head in self.heads], -1)


class Convolutions(Heads):
    @staticmethod
    def member() -> nn.Module:
        return nn.Sequential(nn.Conv1d(8, 6, 3, padding=1), nn.BatchNorm1d(6), nn.ReLU(), nn.Conv1d(6, 3, 1))

    def forward(self, x: Tensor, mask: Tensor | None = None, flag: bool = False) -> Tensor:
        x = (x if mask is None else x * mask).unsqueeze(-1).repeat(1, 1, 4)
        return torch.cat([head(x.relu() if flag else x) for head in self.heads], 1)


class Recurrent(Heads):
    @staticmethod
    def member() -> nn.Module:
        return nn.GRU(8, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None, flag: bool = False) -> Tensor:
        x = x if mask is None else x * mask
        return torch.cat([head(x.relu() if flag else x)[0] for head in self.heads], -1)


class TwoEnsembles(Heads):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.ModuleList(nn.Linear(8, 2) for _ in range(N)).double()

    def forward(self, x: Tensor, mask: Tensor | None = None, flag: bool = False) -> Tensor:
        x = x if mask is None else x * mask
        x = x.relu() if flag else x
        return torch.cat([*(head(x) for head in self.heads), *(more(x).tanh() for more in self.more)], -1)


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = Heads(), Heads(), nn.Linear(6 * N, 2).double()

    def forward(self, x: Tensor, mask: Tensor | None = None, flag: bool = False) -> Tensor:
        return self.out(torch.cat([self.one(x, mask, flag), self.two(x, mask, flag)], -1))


KINDS = (Heads, GivesMask, GivesMaskDeep, ReadsTensors, Convolutions, Recurrent, TwoEnsembles, Inside)


def optimized(model: nn.Module, lowering: str = "bmm", **options: Any) -> nn.Module:
    passes = FuseEnsembles(Lowering(lowering))
    return fxopt.optimize(model, passes, example_inputs=(X,), **{"measure": False, **options})


def results(model: nn.Module, *args: Any, **kwargs: Any) -> list[Tensor | None]:
    """Return the output, the gradient of the input, and those of all parameters by their original names."""
    x, *others = args
    x = x.clone().requires_grad_()
    model.zero_grad()
    output = model(x, *others, **kwargs)
    output.sin().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    if hasattr(model, "_fxopt_record"):
        gradients = model._fxopt_record.state_map.backward(gradients)
    return [output, x.grad, *(gradients[name] for name in sorted(gradients))]


def assert_same(fast: nn.Module, plain: nn.Module, *args: Any, **kwargs: Any) -> None:
    for given, expected in zip(results(fast, *args, **kwargs), results(plain, *args, **kwargs), strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-11, atol=1e-12)


def rewritten(fast: nn.Module) -> list[int]:
    return [miss.rewritten for miss in misses_in(fast.modules())]


def reasons(fast: nn.Module) -> list[str]:
    return [miss.failure for miss in misses_in(fast.modules()) if miss.failure]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("verify", [False, True])
def test_the_next_such_call_runs_a_fused_graph(kind: type[nn.Module], training: bool, verify: bool) -> None:
    plain = kind().train(training)
    fast = optimized(plain, verify=verify)
    names = list(fast.state_dict())
    for _ in range(3):
        for call in ((X, MASK), (X, None, True), (X, MASK, True), (X,)):
            assert_same(fast, plain, *call)
    assert set(rewritten(fast)) == {1}
    assert not reasons(fast)
    assert list(fast.state_dict()) == names
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(dict(fxopt.restore(fast).named_buffers())[name], buffer)


def test_the_graph_computes_with_the_stacked_tensors() -> None:
    fast = optimized(Heads())
    fast(X, MASK)
    further = str(fxopt.graphs(fast)["#1"])
    assert "fused_heads.weight_0" in further
    assert "heads.0" not in further
    assert_equivalent(Heads(), fast, fxopt.Inputs(X, MASK))


def test_every_lowering_and_its_modules() -> None:
    for lowering in ("wide", "bmm", "grouped_conv", "vmap"):
        plain = Heads()
        fast = optimized(plain, lowering)
        names, parameters = list(fast.state_dict()), list(fast.parameters())
        for _ in range(2):
            assert_same(fast, plain, X, MASK)
            assert_same(fast, plain, X, None, True)
        assert rewritten(fast) == [1, 1]
        assert list(fast.state_dict()) == names
        assert all(one is other for one, other in zip(fast.parameters(), parameters, strict=True))


def test_what_is_measured_is_kept_only_where_it_pays() -> None:
    plain = Heads()
    fast = fxopt.optimize(plain, "fuse_ensembles", example_inputs=(X[:1],))
    if fxopt.plan(fast).decisions[0].status == "applied":
        assert_same(fast, plain, X[:1], MASK)
        assert rewritten(fast) == [1] or "no faster" in reasons(fast)[0]
    assert_same(fast, plain, X[:1], MASK)


def test_without_example_inputs() -> None:
    plain = Heads()
    fast = fxopt.optimize(plain, FuseEnsembles(Lowering.BMM))
    assert_same(fast, plain, X, MASK)
    assert_same(fast, plain, X, MASK)
    assert rewritten(fast) == [1]


class CallsSome(Heads):
    def forward(self, x: Tensor, mask: Tensor | None = None, flag: bool = False) -> Tensor:
        return torch.cat([head(x) for head in (self.heads[:2] if flag else self.heads)], -1)


class Backwards(Heads):
    def forward(self, x: Tensor, mask: Tensor | None = None, flag: bool = False) -> Tensor:
        members = list(self.heads)
        return torch.cat([head(x) for head in (reversed(members) if flag else members)], -1)


class Loud(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Loud.calls += 1
        return x * 2 if x.detach().numpy().max() < 100 else x  # no graph can say that


class WithLoud(Heads):
    def __init__(self) -> None:
        super().__init__()
        self.loud = Loud()

    def forward(self, x: Tensor, mask: Tensor | None = None, flag: bool = False) -> Tensor:
        x = self.loud(x.relu() if flag else x)
        return torch.cat([head(x) for head in self.heads], -1)


class WithSlope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.slope = nn.Linear(8, 3), 0.3

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.linear(x)
        return y if mask is None else F.leaky_relu(y, self.slope)


class ReadsMore(GivesMask):
    member = staticmethod(WithSlope)


@pytest.mark.parametrize(
    ("kind", "call", "reason"),
    [
        (CallsSome, (X, None, True), "not computed alike"),
        (Backwards, (X, None, True), "stored otherwise"),
        (WithLoud, (X, None, True), "'loud' runs code that is no graph"),
        (ReadsMore, (X, MASK), "rely on more of 'heads.0'"),
    ],
)
def test_what_cannot_be_repeated_runs_the_members(kind: type[Heads], call: tuple[Any, ...], reason: str) -> None:
    plain = kind().eval()
    fast = optimized(plain).eval()
    Loud.calls = 0
    with torch.no_grad():
        for count in range(1, 4):
            given = fast(*call)
            assert Loud.calls in (0, count)
        assert torch.equal(given, plain(*call))
    assert rewritten(fast) == [0]
    assert reason in reasons(fast)[0]
    assert reason in str(fxopt.report(fast))


def test_members_that_reach_different_outputs_are_fused_in_evaluation_only() -> None:
    class Apart(Heads):
        def forward(self, x: Tensor, flag: bool = False) -> Any:
            values = [head(x) for head in self.heads]
            return tuple(values) if flag else torch.cat(values, -1)

    plain = Apart()
    fast = optimized(plain)
    for _ in range(2):
        fast.zero_grad()
        fast(X, True)[0].sum().backward()
    assert "different outputs" in reasons(fast)[0]
    plain, fast = plain.eval(), optimized(plain).eval()
    for _ in range(3):
        for given, expected in zip(fast(X, True), plain(X, True), strict=True):
            torch.testing.assert_close(given, expected)
    assert rewritten(fast) == [1]
    plain.train(), fast.train()
    for _ in range(3):
        for model in (plain, fast):
            model.zero_grad()
            model(X, True)[0].sum().backward()
    gradients = fast._fxopt_record.state_map.backward({n: p.grad for n, p in fast.named_parameters()})
    torch.testing.assert_close(gradients["heads.0.0.weight"], plain.heads[0][0].weight.grad)
    assert any("different outputs" in reason for reason in reasons(fast))


def test_a_pass_that_fails_leaves_the_graph_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Heads()
    fast = optimized(plain)

    def fail(*_: object) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr(FuseEnsembles, "rewrite", fail)
    monkeypatch.setattr(FuseEnsembles, "rewrite_group", fail)
    for _ in range(2):
        assert_same(fast, plain, X, MASK)
    assert rewritten(fast) == [0]
    assert "no luck" in reasons(fast)[0]
    assert [miss.fallbacks for miss in misses_in(fast.modules())] == [2]


def test_a_wrong_rewrite_is_not_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Heads()
    fast = optimized(plain)
    right = FuseEnsembles.rewrite

    def wrong(self: FuseEnsembles, site: Any, edit: Any) -> None:
        right(self, site, edit)
        output = edit.graph.output_node()
        edit.replace(output.args[0], edit.call(torch.mul, output.args[0], 1.001, before=output))

    monkeypatch.setattr(FuseEnsembles, "rewrite", wrong)
    for _ in range(2):
        assert_same(fast, plain, X, MASK)
    assert rewritten(fast) == [0]
    assert reasons(fast)


def test_folded_and_fused_computes_the_same_in_other_calls() -> None:
    class Both(Heads):
        member = staticmethod(Masked)

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8).double()

        def forward(self, x: Tensor, mask: Tensor | None = None, flag: bool = False) -> Tensor:
            x = self.norm(self.trunk(x.relu() if flag else x))
            return torch.cat([head(x, mask) for head in self.heads], -1)

    plain = Both().eval()
    fast = fxopt.optimize(plain, ["fold_batchnorm", FuseEnsembles(Lowering.BMM)], example_inputs=(X,), measure=False)
    for _ in range(3):
        torch.testing.assert_close(fast(X, MASK, True), plain(X, MASK, True))


def test_no_more_graphs_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXOPT_MAX_GRAPHS", "2")
    plain = Heads()
    fast = optimized(plain)
    for _ in range(2):
        assert_same(fast, plain, X, MASK)
        assert_same(fast, plain, X, None, True)
        assert_same(fast, plain, X, MASK, True)
    assert len(capture_of(fast).variants) == 2
    assert sum(rewritten(fast)) == 1


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("lowering", ["bmm", "vmap"])
def test_copies_have_the_graphs_and_make_more(clone: Callable[[nn.Module], nn.Module], lowering: str) -> None:
    plain = Heads()
    fast = optimized(plain, lowering)
    assert_same(fast, plain, X, MASK)
    again = clone(fast)
    for model in (again, fast):
        assert_same(model, plain, X, MASK)
        assert_same(model, plain, X, None, True)
        assert_same(model, plain, X, None, True)
        assert rewritten(model) == [1, 1]
        assert list(fxopt.restore(model).state_dict()) == list(plain.state_dict())


def test_checkpoints_and_training() -> None:
    plain = Heads()
    fast = optimized(plain)
    fast(X, MASK)
    assert_same(fast, plain, X, MASK)
    pairs = [(model, torch.optim.Adam(model.parameters(), 0.01)) for model in (plain, fast)]
    for _ in range(5):
        for model, optimizer in pairs:
            optimizer.zero_grad()
            model(X, MASK).square().mean().backward()
            optimizer.step()
    for name, tensor in fxopt.state_dict(fast).items():
        torch.testing.assert_close(tensor, plain.state_dict()[name], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(fxopt.restore(fast)(X, MASK), plain(X, MASK), rtol=1e-9, atol=1e-9)
    other = Heads()
    fast.load_state_dict(other.state_dict())
    assert_same(fast, other, X, MASK)


def test_inplace_and_optimized_again() -> None:
    plain, fast = Heads(), Heads()
    assert optimized(fast, inplace=True) is fast
    again = optimized(fast)
    for model in (fast, again):
        for _ in range(2):
            assert_same(model, plain, X, MASK)
        assert rewritten(model) == [1]


def test_under_contexts_of_the_caller() -> None:
    plain = Heads().eval()
    fast = optimized(plain)
    with torch.inference_mode():
        for _ in range(2):
            torch.testing.assert_close(fast(X, MASK), plain(X, MASK))
    assert rewritten(fast) == [1]
    assert_same(fast, plain, X, MASK)
    narrow, wide = Heads().float().eval(), X.float()
    fast = fxopt.optimize(narrow, FuseEnsembles(Lowering.BMM), example_inputs=(wide,), measure=False)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        for _ in range(2):
            given, expected = fast(wide, MASK.float()), narrow(wide, MASK.float())
            assert given.dtype == expected.dtype
            torch.testing.assert_close(given, expected, rtol=0.05, atol=0.05)
    assert rewritten(fast) == [1]


def test_random_numbers_and_buffers_are_left_alone() -> None:
    class Random(Heads):
        @staticmethod
        def member() -> nn.Module:
            return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))

    plain = Random()
    fast = optimized(plain)
    torch.manual_seed(1)
    plain(X, MASK)
    expected = torch.rand(2)
    torch.manual_seed(1)
    fast(X, MASK)
    assert torch.equal(torch.rand(2), expected)
    assert rewritten(fast) == [1]
    for name, tensor in fxopt.restore(fast).named_buffers():
        torch.testing.assert_close(tensor, dict(plain.named_buffers())[name])


def test_hooks_of_the_module_run_once_a_call() -> None:
    fast, seen = optimized(Heads()), list[str]()
    fast.register_forward_pre_hook(lambda *_: seen.append("before"))
    fast.register_forward_hook(lambda *_: seen.append("after"))
    fast(X, MASK)
    fast(X, MASK)
    assert seen == ["before", "after"] * 2
    assert rewritten(fast) == [1]


def test_folded_modules_are_not_repeated() -> None:
    model = nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2))

    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = model

        def forward(self, x: Tensor, flag: bool = False) -> Tensor:
            return self.body[1](self.body[0](x.relu() if flag else x))

    plain, x = Folded().eval(), torch.randn(2, 2, 3)
    fast = fxopt.optimize(plain, "fold_batchnorm", example_inputs=(x,), measure=False)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fast(x, True), plain(x, True))
    assert rewritten(fast) == [0]
    assert [miss.captured for miss in misses_in(fast.modules())] == [1]


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, nn.Module]:
    """Return a model, and it fused so that unforeseen calls run the members one by one."""
    monkeypatch.setenv("FXOPT_MAX_GRAPHS", "1")
    plain = Heads()
    fast = optimized(plain)
    assert_same(fast, plain, X, MASK)
    return plain, fast


def test_members_that_run_one_by_one_follow_every_change(one_by_one: tuple[nn.Module, nn.Module]) -> None:
    plain, fast = one_by_one

    def change_in_place(model: nn.Module) -> None:
        with torch.no_grad():
            model.heads[1][0].weight.mul_(2)

    def change_data(model: nn.Module) -> None:
        model.heads[1][0].bias.data.add_(1)

    def load(model: nn.Module) -> None:
        model.load_state_dict({name: tensor + 0.1 for name, tensor in fxopt_state(model).items()})

    def convert(model: nn.Module) -> None:
        model.float().double()

    for change in (change_in_place, change_data, load, convert, change_in_place):
        fast.zero_grad()
        for gradients in (False, True, False):
            with torch.set_grad_enabled(gradients):
                torch.testing.assert_close(fast(X, MASK), plain(X, MASK))
        for model in (plain, fast):
            change(model)
        with torch.no_grad():
            torch.testing.assert_close(fast(X, MASK), plain(X, MASK))
        assert_same(fast, plain, X, MASK)
    assert len(capture_of(fast).variants) == 1


def fxopt_state(model: nn.Module) -> dict[str, Tensor]:
    return fxopt.state_dict(model) if hasattr(model, "_fxopt_record") else model.state_dict()


def test_members_that_run_one_by_one_train(one_by_one: tuple[nn.Module, nn.Module]) -> None:
    plain, fast = one_by_one
    pairs = [(model, torch.optim.SGD(model.parameters(), 0.1)) for model in (plain, fast)]
    for number in range(6):
        for model, optimizer in pairs:
            if number % 3 == 0:
                optimizer.zero_grad()
            loss = model(X, MASK).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
    for name, tensor in fxopt.state_dict(fast).items():
        torch.testing.assert_close(tensor, plain.state_dict()[name], rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_members_that_run_one_by_one_have_their_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXOPT_MAX_GRAPHS", "1")

    class ReadsGradients(Heads):
        def forward(self, x: Tensor, flag: bool = False) -> Any:
            if not flag:
                return torch.cat([head(x) for head in self.heads], -1)
            gradients = [head[0].weight.grad for head in self.heads]
            return [torch.zeros(()) if gradient is None else gradient.clone() for gradient in gradients]

    plain = ReadsGradients()
    fast = optimized(plain)
    for number in range(6):
        for model in (plain, fast):
            if number % 3 == 0:
                model.zero_grad()
            elif number % 3 == 1:
                (model(X) * number).sum().backward()
        for gradients in (False, True, False):
            with torch.set_grad_enabled(gradients):
                for given, expected in zip(fast(X, True), plain(X, True), strict=True):
                    torch.testing.assert_close(given, expected)


def test_autograd_gets_one_node_for_all_slices(one_by_one: tuple[nn.Module, nn.Module]) -> None:
    _, fast = one_by_one
    seen: set[object] = set()
    pending = [fast(X, MASK).grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending += [following for following, _ in node.next_functions]
    names = [type(node).__name__ for node in seen]
    assert names.count("UnbindBackward0") == len(list(fast.fused_heads.parameters()))
    assert "SelectBackward0" not in names


def test_contexts_inside_a_call_of_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXOPT_MAX_GRAPHS", "1")

    class Contexts(Heads):
        def forward(self, x: Tensor, flag: bool = False) -> Tensor:
            if not flag:
                return torch.cat([head(x) for head in self.heads], -1)
            with torch.no_grad():
                known = torch.cat([head(x) for head in self.heads], -1)
            return torch.cat([head(x) for head in self.heads], -1) * known

    plain = Contexts()
    fast = optimized(plain)
    for _ in range(2):
        assert_same(fast, plain, X, True)
    with torch.inference_mode():
        torch.testing.assert_close(fast(X, True), plain(X, True))
    assert_same(fast, plain, X, True)
    assert len(capture_of(fast).variants) == 1


def test_members_that_a_call_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXOPT_MAX_GRAPHS", "1")

    class Changes(Heads):
        def forward(self, x: Tensor, flag: bool = False) -> Tensor:
            first = torch.cat([head(x) for head in self.heads], -1)
            if not flag:
                return first
            with torch.no_grad():
                self.heads[1][0].weight.mul_(1.5)
            return torch.cat([head(x) for head in self.heads], -1) + first.detach()

    plain = Changes()
    fast = optimized(plain)
    for _ in range(3):
        assert_same(fast, plain, X, True)


def test_members_in_place_of_which_others_are_called(one_by_one: tuple[nn.Module, nn.Module]) -> None:
    plain, fast = one_by_one
    tensors = {name: torch.ones_like(tensor).requires_grad_() for name, tensor in fast.named_parameters()}
    others = {name: torch.ones_like(tensor) for name, tensor in plain.named_parameters()}
    with torch.no_grad():
        fast(X, MASK)
    for _ in range(2):
        given = torch.func.functional_call(fast, tensors, (X, MASK))
        torch.testing.assert_close(given, torch.func.functional_call(plain, others, (X, MASK)))
    given.sum().backward()
    assert all(tensor.grad is not None for tensor in tensors.values())
    assert_same(fast, plain, X, MASK)


def test_copies_of_what_runs_one_by_one(one_by_one: tuple[nn.Module, nn.Module]) -> None:
    plain, fast = one_by_one
    fast.zero_grad()
    with torch.no_grad():
        fast(X, MASK)
        assert any(vars(fallback_of(fast).slices).values())
        for clone in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
            assert not any(vars(fallback_of(clone).slices).values())
            clone.fused_heads.weight_0.zero_()
            assert not torch.equal(clone(X, MASK), fast(X, MASK))
    assert_same(fast, plain, X, MASK)


def test_floats_that_changed_are_values() -> None:
    plain = Heads()
    fast = optimized(plain)
    for scale in (2.0, 0.5, -3.0, 1.0, float("inf"), 7):
        torch.testing.assert_close(fast(X, scale=scale), plain(X, scale=scale))
    assert len(capture_of(fast).variants) == 2
    assert [(miss.calls, miss.rewritten) for miss in misses_in(fast.modules())] == [(1, 1)]
