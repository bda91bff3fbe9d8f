"""What a forward decides by the data in a tensor is checked in its graph; other data run the module's own forward."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import fxopt
from fxopt.runtime.graphs import detach, misses_in, required_capture
from fxopt.runtime.values import ModelNames
from fxopt.tracing.program import capture_program

X = torch.arange(1.0, 13.0).reshape(3, 4)


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop, self.norm = nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)
        self.calls = 0


def model_of(forward):
    model = type("Model", (Base,), {"forward": forward})()
    return model.eval()


def decides(self, x):
    y = self.linear(x)
    return y if (x > 0).all() else -y


def asserts(self, x):
    assert x.max().item() <= 12, "too large"
    return self.linear(x)


def decides_by_a_shape(self, x):
    kept = x[x > 0]
    return self.linear(x) * 2 if kept.shape[0] > 3 else self.linear(x)


def decides_after_drawing(self, x):
    y = self.drop(self.linear(x)) + torch.rand(3, 4)
    return y if (x > 0).all() else self.drop(-y)


def decides_in_no_grad(self, x):
    with torch.no_grad():
        scale = 2 if (x > 0).all() else 3
    return self.linear(x) * scale


def asks_twice(self, x):
    y = x * 1
    first = bool((y > 0).all())
    y.mul_(-1)
    second = bool((y > 0).all())
    return self.linear(x) * (1 if first else 2) * (3 if second else 5)


def asks_for_itself_twice(self, x):
    y = x.sum()
    first = 1 if y > 0 else 2
    flag = y > 0
    result = 3 if flag else 5
    flag.logical_not_()
    return self.linear(x) * first * result * (7 if flag else 11)


FOUND = (
    decides, asserts, decides_by_a_shape, decides_after_drawing, decides_in_no_grad, asks_twice, asks_for_itself_twice,
)  # fmt: skip


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("forward", FOUND, ids=lambda f: f.__name__)
def test_other_data_run_the_own_forward(forward, training, agree, misses):
    program = agree(model_of(forward).train(training), (X,), (-X,), (X[:, :] * 0.5,))
    assert misses(program) == (0 if forward is asserts else 2), "one in each mode"


def test_a_failing_assertion_is_the_users_own():
    program = capture_program(model_of(asserts), (X,))
    with pytest.raises(AssertionError, match="too large"):
        program.model(X * 9)


def test_random_numbers_go_on_where_they_would(misses):
    model = model_of(decides_after_drawing).train()
    captured = copy.deepcopy(model)
    program = capture_program(captured, (X,))
    for x in (X, -X, X):
        torch.manual_seed(3)
        expected = model(x), torch.rand(2)
        torch.manual_seed(3)
        given = captured(x), torch.rand(2)
        assert all(map(torch.equal, given, expected))
    assert misses(program) == 1


def writes_first(self, x):
    x.mul_(2)
    return self.linear(x) if x.sum() > 0 else x  # HERE


def counts_first(self, x):
    y = self.norm(x)
    return self.linear(y) if y.sum() > 1e9 else y  # HERE


def loops(self, x):
    while x.abs().max() > 1e-4:  # HERE
        x = x / 2
    return self.linear(x)


def takes_the_number(self, x):
    return self.linear(x) * sum(range(int(x.max())))  # HERE


def takes_the_text(self, x):
    return self.linear(x) * len(f"{x.sum():.3f}")  # HERE


def takes_the_text_of_a_check(self, x):
    text = f"{x.sum()}"  # HERE
    torch._check((x > 0).any().item(), lambda: text)
    return self.linear(x) * len(text)


REFUSED = {
    writes_first: "after a change that cannot be undone",
    counts_first: "after a change that cannot be undone",
    loops: "more than 8 times",
    takes_the_number: "control flow depends on the data in a tensor",
    takes_the_text: "control flow depends on the data in a tensor",
    takes_the_text_of_a_check: "control flow depends on the data in a tensor",
}


@pytest.mark.parametrize("forward", REFUSED, ids=lambda f: f.__name__)
def test_refused(forward, agree):
    program = agree(model_of(forward), (X,), (X * 3,), opaque=True)
    assert REFUSED[forward] in program.opaque[""].reason


def test_without_examples_nothing_is_decided():
    program = capture_program(model_of(decides))
    assert "only example inputs can give" in program.opaque[""].reason


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


class AfterCounting(nn.Module):
    def __init__(self):
        super().__init__()
        self.counting = Counting()

    def forward(self, x):
        y = self.counting(x)
        return y if x.sum() > 0 else -y


def test_children_that_set_attributes_are_not_called_twice(agree):
    model = AfterCounting()
    program = agree(model, (X,), (-X,))
    assert program.model.counting.calls == model.counting.calls == 4


class AfterListing(AfterCounting):
    def __init__(self):
        super().__init__()
        self.counting = Listing()


class Listing(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(len(self.seen))
        return x * len(self.seen)


def test_children_that_fill_lists_are_not_called_twice(agree):
    program = agree(AfterListing(), (X,), (-X,), opaque=True)
    assert "cannot be undone" in program.opaque[""].reason


def checks(self, x):
    y = self.linear(x)
    torch._check((x > 0).any().item(), lambda: f"nothing of {x.shape[0]} rows")
    return y


def checks_with_text(self, x):
    return self.linear(x) * length_of((x > 0).any(), f"nothing of {x.shape[0]} rows with {x.sum()}")


def length_of(condition, text):
    return len(text)


def test_checks_decide_by_their_condition(agree, misses):
    assert misses(agree(model_of(checks), (X,), (X[:2],))) == 0
    with pytest.raises(RuntimeError, match="nothing of 3 rows"):
        capture_program(model_of(checks), (X,)).model(-X)


def test_texts_for_other_functions_are_decisions():
    program = capture_program(model_of(checks_with_text), (X,))
    assert "data in a tensor" in program.opaque[""].reason


def test_unpacking_a_shape_that_hangs_on_data_decides_nothing(agree, misses):
    def forward(self, x):
        kept = x[x[:, 0] > 2]
        n, width = kept.shape
        return self.linear(kept).view(n, 2, width // 2)

    assert misses(agree(model_of(forward), (X,), (X[:2],), (X + 9,), (X[:0],))) == 0


def test_lengths_of_tensors_are_values(agree, misses):
    def forward(self, x):
        y = self.linear(x)
        _, order = y.sort(dim=0)
        return y * len(y) + torch.arange(len(order))[:, None]

    assert misses(agree(model_of(forward), (X,), (X[:2],))) == 0


def test_where_most_calls_miss_the_graph_is_dropped():
    model = model_of(decides)
    fast = capture_program(copy.deepcopy(model), (X,)).model
    detach(ModelNames(fast))
    for _ in range(40):
        assert torch.equal(fast(-X), model(-X))
    assert torch.equal(fast(X), model(X))
    (miss,) = misses_in(fast.modules())
    assert miss.calls == 16
    assert "dropped" in miss.note


def test_where_few_calls_miss_the_graph_stays():
    model = model_of(decides)
    fast = capture_program(copy.deepcopy(model), (X,)).model
    detach(ModelNames(fast))
    for number in range(100):
        x = X if number % 3 else -X
        assert torch.equal(fast(x), model(x))
    (miss,) = misses_in(fast.modules())
    assert (miss.calls, miss.note) == (34, "")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_check_too(copied):
    model = AllPositive()
    fast = copied(capture_program(copy.deepcopy(model), (X,)).model)
    for x in (X, -X):
        assert torch.equal(fast(x), model(x))


class AllPositive(nn.Module):
    def forward(self, x):
        return x * 2 if (x > 0).all() else x * 3


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).tanh() if (x > 0).all() else self.linear(x)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return self.inner(x) * 2


def test_a_rewritten_graph_is_dropped_that_most_calls_pass_on_to_the_graph_behind_it():
    model = Outer().eval()
    fast = fxopt.optimize(model, "flatten_calls", example_inputs=X, measure=False)
    assert len(required_capture(fast).specializations) == 2
    with torch.no_grad():
        for _ in range(60):
            assert torch.equal(fast(-X), model(-X))
        assert torch.equal(fast(X), model(X))
    assert len(required_capture(fast).specializations) == 1
    assert "calls went on to another graph" in str(fxopt.report(fast))


def test_graphs_for_different_data_stay_whatever_data_come():
    model = Outer().eval()
    fast = fxopt.optimize(model, "flatten_calls", example_inputs=[X, -X], measure=False)
    graphs = len(required_capture(fast).specializations)
    with torch.no_grad():
        for x in (*[X] * 60, *[-X] * 60):
            assert torch.equal(fast(x), model(x))
    assert len(required_capture(fast).specializations) == graphs
    assert "another graph" not in str(fxopt.report(fast))
