"""Calls that no graph fits, of modules whose members are fused: the members run one by one, on shared slices."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.concurrency import run_in_threads
from torch import Tensor, nn
from torch.nn import functional as F

import fxopt
from fxopt.runtime.graphs import capture_of, misses_in
from fxopt.runtime.record import record_of
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
    if record := record_of(model):
        gradients = record.state_map.backward(gradients)
    return [output, x.grad, *(gradients[name] for name in sorted(gradients))]


def assert_same(fast: nn.Module, plain: nn.Module, *args: Any, **kwargs: Any) -> None:
    for given, expected in zip(results(fast, *args, **kwargs), results(plain, *args, **kwargs), strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [False, True])
def test_the_answer_is_that_of_the_original_forward(kind: type[nn.Module], training: bool) -> None:
    plain = kind().train(training)
    fast = optimized(plain)
    names, before = list(fast.state_dict()), len(capture_of(fast).specializations)
    for _ in range(2):
        for call in ((X, MASK), (X, None, True), (X, MASK, True), (X,)):
            assert_same(fast, plain, *call)
    assert misses_in(fast.modules())
    assert len(capture_of(fast).specializations) == before
    assert list(fast.state_dict()) == names
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(dict(fxopt.restore(fast).named_buffers())[name], buffer)


def test_a_call_that_was_given_beforehand_runs_a_fused_graph() -> None:
    plain = Heads()
    with fxopt.recording(plain) as calls:
        plain(X)
        plain(X, MASK)
        plain(X[:2], mask=MASK)
    assert len(calls) == 3
    fast = fxopt.optimize(plain, FuseEnsembles(Lowering.BMM), example_inputs=calls, measure=False)
    assert "heads_fused.0.weight" in str(fxopt.graphs(fast)["#1"])
    for call in ((X,), (X, MASK)):
        assert_same(fast, plain, *call)
    assert misses_in(fast.modules()) == []


def test_every_lowering() -> None:
    for lowering in ("wide", "bmm", "grouped_conv", "vmap", "mlp"):
        plain = Heads()
        fast = optimized(plain, lowering)
        parameters = list(fast.parameters())
        for _ in range(2):
            assert_same(fast, plain, X, MASK)
            assert_same(fast, plain, X, None, True)
        assert all(one is other for one, other in zip(fast.parameters(), parameters, strict=True))


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies(clone: Callable[[nn.Module], nn.Module]) -> None:
    plain = Heads()
    fast = optimized(plain)
    assert_same(fast, plain, X, MASK)
    again = clone(fast)
    for model in (again, fast):
        assert_same(model, plain, X, MASK)
        assert_same(model, plain, X, None, True)
        assert list(fxopt.restore(model).state_dict()) == list(plain.state_dict())


def test_checkpoints_and_training() -> None:
    plain = Heads()
    fast = optimized(plain)
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


def test_under_contexts_of_the_caller() -> None:
    plain = Heads().eval()
    fast = optimized(plain)
    with torch.inference_mode():
        for _ in range(2):
            torch.testing.assert_close(fast(X, MASK), plain(X, MASK))
    assert_same(fast, plain, X, MASK)
    narrow, wide = Heads().float().eval(), X.float()
    fast = fxopt.optimize(narrow, FuseEnsembles(Lowering.BMM), example_inputs=(wide,), measure=False)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        for _ in range(2):
            given, expected = fast(wide, MASK.float()), narrow(wide, MASK.float())
            assert given.dtype == expected.dtype
            torch.testing.assert_close(given, expected, rtol=0.05, atol=0.05)


def test_threads_share_no_call() -> None:
    plain = Heads()
    fast = optimized(plain)
    failures: list[str] = []

    def work(number: int) -> None:
        for step in range(10):
            with torch.set_grad_enabled((step + number) % 2 == 0):
                given, expected = fast(X * number, MASK), plain(X * number, MASK)
            if not torch.allclose(given, expected):
                failures.append(f"{number} differs")
            if given.requires_grad:
                tensor = fast.heads_fused.get_parameter("0.weight")
                (gradient,) = torch.autograd.grad(given.sum(), tensor)
                expected = torch.autograd.grad(expected.sum(), [head[0].weight for head in plain.heads])
                if not torch.allclose(gradient, torch.stack(expected)):
                    failures.append(f"{number} has another gradient")

    run_in_threads(work, range(6))
    assert failures == []


def kept_slices(model: nn.Module) -> list[Any]:
    caches = [vars(module)["_fxopt_slices"] for module in model.modules() if "_fxopt_slices" in vars(module)]
    return [made for cache in caches for _, made in vars(cache)["_kept"].values()]


@pytest.mark.parametrize("gradients", [False, True])
def test_slices_are_kept_from_call_to_call(one_by_one: tuple[nn.Module, nn.Module], gradients: bool) -> None:
    _, fast = one_by_one
    fast.zero_grad()
    with torch.set_grad_enabled(gradients):
        fast(X, MASK)
        kept = kept_slices(fast)
        fast(X, MASK)
        again = kept_slices(fast)
    assert kept and all(one is other for one, other in zip(kept, again, strict=True))


@pytest.fixture
def one_by_one() -> tuple[nn.Module, nn.Module]:
    """Return a model, and it fused so that unforeseen calls run the members one by one."""
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
    assert len(capture_of(fast).specializations) == 1


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
def test_members_that_run_one_by_one_have_their_gradients() -> None:

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
    assert names.count("UnbindBackward0") == len(list(fast.heads_fused.parameters()))
    assert "SelectBackward0" not in names


def test_contexts_inside_a_call_of_members() -> None:

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
    assert len(capture_of(fast).specializations) == 1


def test_members_that_a_call_changes() -> None:

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
        assert kept_slices(fast)
        for clone in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
            assert not kept_slices(clone)
            clone.heads_fused.get_parameter("0.weight").zero_()
            assert not torch.equal(clone(X, MASK), fast(X, MASK))
    assert_same(fast, plain, X, MASK)
