"""A call that no graph fits: the original forward answers, nothing is patched, it is warned of, and counted."""

from __future__ import annotations

import copy
import math
import operator
import pickle
import threading
import types
import warnings

import pytest
import torch
from support.concurrency import run_in_threads
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import fxopt
from fxopt.runtime.graphs import capture_of, misses_in

X = torch.randn(5, 6)


class Branches(nn.Module):
    """Branches by an argument, by a shape and by the mode; draws, and updates buffers."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.scale = 2.0
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, flag=False, times=1):
        self.calls += 1
        y = self.drop(self.norm(self.linear(x)))
        if flag:
            y = F.dropout(y, 0.3, self.training) + self.calls
        if x.shape[0] > 10:
            y = y * 3
        return y * self.scale * times


def run(model: nn.Module, *args: object, **kwargs: object) -> list[object]:
    """Return the output, all gradients and buffers, and the next random number."""
    torch.manual_seed(3)
    model.zero_grad()
    output = model(*args, **kwargs)
    output.sum().backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [output, *gradients, *(b.clone() for b in model.buffers()), torch.rand(2)]


def assert_as_eager(fast: nn.Module, plain: nn.Module, *args: object, **kwargs: object) -> None:
    for given, expected in zip(run(fast, *args, **kwargs), run(plain, *args, **kwargs), strict=True):
        torch.testing.assert_close(given, expected, rtol=0, atol=0)


def captured(model: nn.Module, *args: object) -> nn.Module:
    return fxopt.capture(model, args).model


def graphs(model: nn.Module) -> int:
    return len(capture_of(model).specializations)


@pytest.fixture(params=["train", "eval"])
def pair(request) -> tuple[nn.Module, nn.Module]:
    plain = Branches().train(request.param == "train")
    return captured(plain, X), plain


def test_the_original_forward_answers_each_time(pair):
    fast, plain = pair
    for _ in range(3):
        assert_as_eager(fast, plain, X, True)
        assert_as_eager(fast, plain, torch.randn(12, 6))
        assert_as_eager(fast, plain, X, times=3)
        assert_as_eager(fast, plain, X)
    assert graphs(fast) == 1
    assert [miss.calls for miss in misses_in(fast.modules())] == [3, 3, 3]


def test_the_first_such_call_warns_and_says_what_to_do():
    fast = captured(Branches(), X)
    with pytest.warns(fxopt.GuardWarning) as warned:
        fast(X, True, times=2)
    (message,) = [str(each.message) for each in warned]
    assert message.startswith(
        "module '(root)' (Branches) used its original forward: its graphs are for calls in which flag"
    )
    assert "in which flag is False. The result is right, but the module gains nothing there." in message
    assert "Add this call to example_inputs, or record it with fxopt.recording: (Tensor[5, 6], True, 2)" in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast(X, True)
    with pytest.warns(fxopt.GuardWarning, match="x.shape"):
        fast(torch.randn(12, 6))


def test_the_warning_of_an_inner_module_says_each_reason_once_and_asks_for_a_call_of_the_model():
    fast = fxopt.capture(nn.Sequential(Branches()), [(X,), (torch.randn(12, 6),)]).model
    with pytest.warns(fxopt.GuardWarning) as warned:
        fast[0](X, True)
    (message,) = [str(each.message) for each in warned]
    assert message.count("flag is False") == 1
    assert "Add a call of the model that leads to this one to example_inputs, or record it" in message


def test_modules_that_miss_for_one_reason_warn_once():
    fast = captured(Outer(), X)
    fast.blocks[0].register_forward_pre_hook(lambda module, args: (args[0], True))
    fast.blocks[2].register_forward_pre_hook(lambda module, args: (args[0], True))
    with pytest.warns(fxopt.GuardWarning) as warned:
        fast(X), fast(X)
    (message,) = [str(each.message) for each in warned]
    assert message.startswith("module 'blocks.0' (Inner) used its original forward")
    assert [(miss.module, miss.calls) for miss in misses_in(fast.modules())] == [("blocks.0", 2), ("blocks.2", 2)]


def test_a_call_that_was_given_beforehand_runs_a_graph():
    plain = Branches()
    fast = fxopt.capture(plain, [(X,), (X, True), (torch.randn(12, 6),)]).model
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for args in ((X,), (X, True), (torch.randn(13, 6),)):
            assert_as_eager(fast, plain, *args)
    assert misses_in(fast.modules()) == []


class ChecksLate(nn.Module):
    """What it decides by is known in the middle of its forward."""

    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(6, 6), nn.Dropout(0.5)

    def forward(self, x, more):
        y = self.drop(self.linear(x))
        rows = torch.cat([y, more]).shape[0]
        return y * 2 if rows > 8 else y + 1


@pytest.mark.parametrize("training", [True, False])
def test_after_a_check_on_the_way_the_next_graph_is_tried(training):
    plain = ChecksLate().train(training)
    calls = [(X, torch.zeros(rows, 6)) for rows in (2, 5)]
    fast = fxopt.capture(plain, calls).model
    assert graphs(fast) == 2
    for rows in (1, 2, 3, 4, 9):
        assert_as_eager(fast, plain, X, torch.zeros(rows, 6))
    assert misses_in(fast.modules()) == []
    assert_as_eager(captured(plain, *calls[0]), plain, *calls[1])


def test_hooks_run_once_a_call(pair):
    fast, _ = pair
    seen: list[str] = []
    fast.linear.register_forward_hook(lambda *_: seen.append("child"))
    fast.register_forward_hook(lambda *_: seen.append("self"))
    fast(X, True)
    assert seen == ["child", "self"]


def test_a_gradient_through_the_answer_is_not_disturbed():
    class ReadsBuffer(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("gain", torch.full((6,), 2.0))

        def forward(self, x, flag=False):
            return x * self.gain * 2 if flag else x * self.gain

    fast = captured(ReadsBuffer(), X)
    x = X.clone().requires_grad_()
    fast(x, True).sum().backward()  # it needs the buffer as it was when the graph was made
    assert torch.equal(x.grad, torch.full_like(x, 4.0))


def test_inference_mode_and_autocast(pair):
    fast, plain = pair
    with torch.inference_mode():
        plain.eval(), fast.eval()
        for _ in range(2):
            assert torch.equal(fast(X, True), plain(X, True))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        for _ in range(2):
            given, expected = fast(torch.ones(11, 6), True), plain(torch.ones(11, 6), True)
            assert given.dtype == expected.dtype
            assert torch.equal(given, expected)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x, flag=False):
        x.exp()  # dead code, for a pass to remove
        return torch.relu(self.linear(x)) if flag else self.linear(x)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Inner() for _ in range(3))

    def forward(self, x, flag=False):
        x.exp()  # here too
        for block in self.blocks:
            x = block(x, flag) + 1
        return x


def test_children_that_miss_inside_a_miss_are_counted_too():
    plain = Outer()
    fast = captured(plain, X)
    for _ in range(2):
        assert_as_eager(fast, plain, X, True)
    assert [miss.module for miss in misses_in(fast.modules())] == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert all(miss.calls == 2 for miss in misses_in(fast.modules()))


def test_a_sequential_that_grew():
    plain = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    fast = captured(plain, X)
    for model in (plain, fast):
        model.append(nn.ReLU())
    for _ in range(2):
        assert_as_eager(fast, plain, X)


def test_setting_an_attribute_drops_the_graph(pair):
    fast, plain = pair
    plain.scale = fast.scale = 5.0
    assert graphs(fast) == 0
    with pytest.warns(fxopt.GuardWarning, match="attribute 'scale' was set after capture.*Set it before"):
        assert_as_eager(fast, plain, X)
    assert_as_eager(fast, plain, X)
    assert type(fast).forward is Branches.forward
    (miss,) = misses_in(fast.modules())
    assert (miss.guard, miss.calls) == ("attribute 'scale' was set after capture", 1)


def test_a_forward_without_graphs_is_the_modules_own_again():
    """As the layers of transformers that know how to checkpoint themselves ask."""

    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.double = False

        def forward(self, x):
            if self.double and type(self).forward is Asks.forward and float(x.sum()) < 1e9:
                return x * 2
            return x

    fast = captured(Asks(), X)
    fast.double = True
    for _ in range(3):
        assert torch.equal(fast(X), X * 2)


class Config:
    """What many models keep their settings in."""

    def __init__(self):
        self.scale, self.act, self.inner = 2.0, "relu", types.SimpleNamespace(shift=1)
        self.steps = [1, 2]

    @property
    def doubled(self):
        return self.scale * 2


class Configured(nn.Module):
    def __init__(self):
        super().__init__()
        self.config, self.sizes, self.linear = Config(), [2, 3], nn.Linear(6, 6)

    def forward(self, x):
        y = self.linear(x) * self.config.doubled + self.config.inner.shift
        y = torch.relu(y) if self.config.act == "relu" else y
        return y * self.sizes[0] + len(self.config.steps)


def change_scale(model: nn.Module) -> None:
    model.config.scale = 5.0


def change_act(model: nn.Module) -> None:
    model.config.act = "none"


def change_inner(model: nn.Module) -> None:
    model.config.inner.shift = 7


def change_inner_whole(model: nn.Module) -> None:
    model.config.inner = types.SimpleNamespace(shift=8)


def change_steps(model: nn.Module) -> None:
    model.config.steps.append(3)


def change_sizes(model: nn.Module) -> None:
    model.sizes[0] = 9


def change_config(model: nn.Module) -> None:
    model.config = Config()
    model.config.act = "none"


@pytest.mark.parametrize(
    "change", [change_scale, change_act, change_inner, change_inner_whole, change_steps, change_sizes, change_config]
)
def test_what_a_configuration_holds_may_change(change):
    plain = Configured()
    fast = captured(plain, X)
    for model in (plain, fast):
        change(model)
    for _ in range(2):
        assert_as_eager(fast, plain, X)
    assert len(misses_in(fast.modules())) == 1
    assert type(fast.config) is Config


def test_a_configuration_is_left_as_it_is():
    model = Configured()
    fast = captured(model, X)
    assert type(model.config) is Config
    assert vars(fast.config).keys() == vars(model.config).keys()
    assert "self.config.scale is 2.0" in [g.reason for g in capture_of(fast).specializations[0].guards]


def test_copies_and_pickles_go_on_counting(pair):
    fast, plain = pair
    fast(X, True), plain(X, True)
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        reference = copy.deepcopy(plain)
        for _ in range(2):
            assert_as_eager(other, reference, X, True)
            assert_as_eager(other, reference, torch.randn(12, 6))
        assert [miss.calls for miss in misses_in(other.modules())] == [3, 2]
    assert [miss.calls for miss in misses_in(fast.modules())] == [1]


def test_threads_get_the_eager_answer():
    plain = Outer().eval()
    fast = captured(plain, X)
    inputs = [torch.randn(5, 6) for _ in range(8)]
    expected = [plain(x, True) for x in inputs]
    failures: list[str] = []

    def work(number: int) -> None:
        for _ in range(20):
            with torch.no_grad():
                if not torch.equal(fast(inputs[number], True), expected[number]):
                    failures.append("differs")

    def guarded(number: int) -> None:
        try:
            work(number)
        except Exception as error:
            failures.append(repr(error))

    run_in_threads(guarded, range(8))
    assert failures == []
    assert [graphs(module) for module in (fast, *fast.blocks)] == [1, 1, 1, 1]


def patchable() -> list[object]:
    """Return everything that capture patches while it runs, and the code of it."""
    found = [*vars(nn.Module).values(), *vars(torch).values(), *vars(torch.Tensor).values(), *vars(math).values()]
    codes = [value.__code__ for value in found if isinstance(value, types.FunctionType)]
    return [*found, *codes, *(value.__kwdefaults__ for value in found if isinstance(value, types.FunctionType))]


def are_same(some: list[object], others: list[object]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def test_capture_does_patch_what_is_looked_at_below():
    seen: list[bool] = []

    class Looks(nn.Module):
        def forward(self, x):
            seen.append(are_same(before, patchable()))
            return x * 2

    before = patchable()
    captured(Looks(), X)
    assert False in seen
    assert are_same(before, patchable())


@pytest.mark.parametrize("missed", [(X, True), (torch.randn(12, 6),)], ids=["guard", "shape"])
def test_no_thread_sees_torch_patched_by_a_call_that_misses(missed):
    """One thread looks at torch in the middle of another's missed call, from the forward itself."""
    inside, looked = threading.Event(), threading.Event()

    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Branches()

        def forward(self, x, flag=False):
            return self.inner(x, flag) + 1

    plain = Holds().eval()
    fast = captured(plain, X)

    def wait(*_: object) -> None:
        inside.set()
        assert looked.wait(10)

    fast.inner.linear.register_forward_pre_hook(wait)
    before = patchable()
    answers: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: answers.append(fast(*missed)))
    thread.start()
    assert inside.wait(10)
    during = patchable()
    other = Inner()(X, True)
    looked.set()
    thread.join()
    after = patchable()
    assert are_same(before, during)
    assert are_same(before, after)
    assert other.shape == X.shape
    torch.testing.assert_close(answers[0], plain(*missed), rtol=0, atol=0)
    assert misses_in(fast.modules())


class Namesake(nn.Module):
    """Calls a child that is called `self`, as BERT's attention does, and decides by its result."""

    def __init__(self):
        super().__init__()
        self.add_module("self", Pairs())
        self.linear = nn.Linear(6, 6)

    def forward(self, x, more=False):
        first, *rest = self.self(x, more)
        return self.linear(first) + len(rest) + self.training


class Pairs(nn.Module):
    def forward(self, x, more=False):
        return (x, x, x) if more else (x, x)


def test_a_child_called_self_does_not_hide_its_parent():
    plain = Namesake()
    fast = captured(plain, X)
    getattr(plain, "self").forward = getattr(fast, "self").forward = lambda x, _: (x * 2, x, x)  # noqa: B009
    for _ in range(2):
        assert_as_eager(fast, plain, X)


def test_transforms_and_export():
    fast = captured(Inner().eval(), X)
    batched = torch.func.vmap(lambda row: fast(row, True))(X)
    assert torch.allclose(batched, torch.relu(fast.linear(X)), atol=1e-6)
    assert graphs(fast) == 1
    assert torch.export.export(fast, (X, True)).module()(X, True).shape == X.shape
    assert graphs(fast) == 1


def test_the_generated_forward_checks_no_more_than_before():
    import inspect

    class Plain(nn.Module):
        def forward(self, x):
            return x + 1

    text = inspect.getsource(type(captured(Plain(), X)).forward)
    assert [line.strip() for line in text.splitlines()][:2] == ["def forward(self, x):", "if not (x is not None):"]


def test_reports_name_module_guard_and_counts():
    fast = fxopt.optimize(Outer().eval(), "eliminate_dead_code", example_inputs=(X,))
    fast(X, True)
    fast.blocks[1](X, flag=3)
    report = fxopt.report(fast)
    assert "missed       blocks.1: 2 calls used the original forward: flag is False" in str(report)
    missed = report.to_json()["missed"]
    assert [(m["module"], m["calls"], m["refused"]) for m in missed][:2] == [("", 1, False), ("blocks.0", 1, False)]
    assert "flag is False" in missed[0]["guard"]


def test_coverage_tells_of_misses():
    program = fxopt.capture(Outer(), (X,))
    program.model(X, True)
    assert "missed: (root): 1 call used the original forward: flag is False" in str(program.coverage())


# -- lengths ---------------------------------------------------------------------------------------------------------


class CellLoop(nn.Module):
    """A Python loop over time: how often it goes round is decided by the length."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 4)
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        state = x.new_zeros(x.size(0), 4)
        for step in range(x.size(1)):
            state = self.cell(x[:, step], state)
        return self.out(state)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = kind(3, 4, batch_first=True, num_layers=2)

    def forward(self, x):
        output, _ = self.layer(x)
        return output[:, -1] * x.size(1)


class Packed(nn.Module):
    """Sequences of unequal length, padded; their lengths are an argument."""

    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(3, 4, batch_first=True)
        self.out = nn.Linear(4, 2)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        output, (hidden, _) = self.layer(packed)
        unpacked, _ = pad_packed_sequence(output, batch_first=True)
        return self.out(hidden[-1]) + unpacked.sum()


@pytest.mark.parametrize("training", [True, False])
def test_a_loop_over_time_is_right_at_every_length(training):
    plain = CellLoop().train(training)
    fast = captured(plain, torch.randn(2, 5, 3))
    for length in (5, 3, 9, 1, 3, 9, 12, 2, 4, 6, 7, 8, 10, 5):
        for batch in (2, 4):
            assert_as_eager(fast, plain, torch.randn(batch, length, 3))
    assert sum(miss.calls for miss in misses_in(fast.modules())) > 0


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize("training", [True, False])
def test_recurrent_layers_have_one_graph_for_all_lengths(kind, training):
    plain = Recurrent(kind).train(training)
    fast = captured(plain, torch.randn(2, 5, 3))
    for length in (5, 3, 9, 1, 12):
        assert_as_eager(fast, plain, torch.randn(3, length, 3))
    assert graphs(fast) == 1
    assert misses_in(fast.modules()) == []


@pytest.mark.parametrize("training", [True, False])
def test_packed_sequences_inside_a_forward(training):
    plain = Packed().train(training)
    fast = captured(plain, torch.randn(2, 5, 3), torch.tensor([5, 2]))
    for lengths in ([5, 2], [3, 3], [1, 4, 2], [7], [2, 9]):
        assert_as_eager(fast, plain, torch.randn(len(lengths), max(lengths), 3), torch.tensor(lengths))


def test_lengths_as_a_list_of_integers():
    plain = Packed()
    fast = captured(plain, torch.randn(2, 5, 3), [5, 2])
    for lengths in ([5, 2], [3, 3], [1, 4, 2], [7], [2, 9], [4, 4]):
        assert_as_eager(fast, plain, torch.randn(len(lengths), max(lengths), 3), lengths)
