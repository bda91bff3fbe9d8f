"""What no graph can say is left to the module's own forward, with its line and its reason."""

from __future__ import annotations

import inspect
import math
from math import sqrt

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import BaseTorchFunctionMode

from fxopt.errors import CaptureError, InputError
from fxopt.tracing.program import Opaque, capture_program
from fxopt.tracing.rules import trace_leaf

X = (torch.randn(4, 6, generator=torch.Generator().manual_seed(0)),)
X2 = (torch.randn(7, 6, generator=torch.Generator().manual_seed(1)),)
CONSTANT = torch.ones(6)


def data_number(self, x):
    y = self.inner(x)
    return y * int(y.sum())  # HERE


def data_of_parameter(self, x):
    if float(self.inner[0].weight.detach().sum()) < 1e9:  # HERE
        return self.inner(x)
    return x


def item(self, x):
    y = self.inner(x)
    return y * [1, 2][int(y.sum().item()) % 2]  # HERE


def swallowed(self, x):
    y = self.inner(x)
    try:
        y = y + int(y.max())  # HERE
    except Exception:
        y = y - 1
    return y


def boolean_shape(self, x):
    y = self.inner(x)
    kept = y[y > 0]
    for i in range(kept.shape[0]):  # HERE
        y = y + i
    return y


def loop_over_data(self, x):
    y = self.inner(x)
    for i in y.argmax(1).tolist():  # HERE
        y = y + i
    return y


def chooses_kernels(self, x):
    with sdpa_kernel(SDPBackend.MATH):  # HERE
        return F.scaled_dot_product_attention(x, x, self.inner(x))


def changes_setting(self, x):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # HERE
    y = self.inner(x)
    torch.set_default_dtype(before)
    return y


def enters_mode(self, x):
    with torch.device("cpu"):  # HERE
        return self.inner(x)


def enters_own_mode(self, x):
    with BaseTorchFunctionMode():  # HERE
        return self.inner(x)


def hooks_saved_tensors(self, x):
    with torch.autograd.graph.save_on_cpu():  # HERE
        return self.inner(x)


def hooks_always(self, x):
    y = self.inner(x)
    y.register_hook(lambda gradient: gradient)  # HERE
    return y


def autocast_by_hand(self, x):
    torch.set_autocast_enabled("cpu", False)  # HERE
    return self.inner(x)


def assigns(self, x):
    self.last = [x]  # HERE
    return self.inner(x)


def foreign_tensor(self, x):
    return self.inner(x) * CONSTANT  # HERE


def numpy(self, x):
    return self.inner(x) * math.fsum(x.detach().numpy()[0])  # HERE


def seeds(self, x):
    torch.manual_seed(0)  # HERE
    return self.inner(x)


def sets_attribute(self, x):
    y = self.inner(x)
    y.extra = 1  # HERE
    return y


def calls_itself(self, x):
    if x.shape[0] > 1:
        return self(x[:1])  # HERE
    return self.inner(x)


def unregistered(self, x):
    return self.hidden[0](self.inner(x))  # HERE


CASES = {
    data_number: "control flow depends on the data in a tensor",
    data_of_parameter: "control flow depends on the data in a tensor",
    item: "control flow depends on the data in a tensor",
    swallowed: "control flow depends on the data in a tensor",
    boolean_shape: "control flow depends on the data in a tensor",
    loop_over_data: "control flow depends on the data in a tensor",
    chooses_kernels: "it chooses the kernels of attention",
    changes_setting: "it changes a setting of torch",
    enters_mode: "enters a device, or another value, as a context",
    enters_own_mode: "it enters a torch function mode",
    hooks_saved_tensors: "it sets hooks on the tensors that autograd saves",
    hooks_always: "calls .register_hook on a value",
    autocast_by_hand: "it switches autocast by hand",
    assigns: "assigns self.last",
    foreign_tensor: "not a parameter, buffer or attribute",
    numpy: "numpy",
    seeds: "random seed",
    sets_attribute: "sets the attribute 'extra'",
    calls_itself: "calls itself",
    unregistered: "not registered",
}


def make(forward):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
            self.hidden = [nn.Linear(6, 6)]

    Model.forward = forward
    return Model()


def line_of(forward):
    lines, start = inspect.getsourcelines(forward)
    return start + next(i for i, line in enumerate(lines) if "# HERE" in line)


@pytest.mark.parametrize("forward", CASES, ids=lambda f: f.__name__)
def test_opaque_with_line_and_reason(forward, agree):
    model = make(forward)
    program = agree(model, X, X2, opaque=True)
    assert set(program.opaque) == {""}
    assert CASES[forward] in program.opaque[""].reason
    assert program.opaque[""].location == f"test_opaque.py:{line_of(forward)}"
    assert set(program.captures) == {"inner"}, "the children are captured all the same"
    assert type(program.model) is type(model)


def test_opaque_reads_well():
    assert str(Opaque("a.b", "net.py:3", "it calls itself")) == "a.b (net.py:3): it calls itself"
    assert str(Opaque("", "", "it calls itself")) == "(root): it calls itself"


def test_coverage_counts_and_explains():
    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.good, self.bad, self.unused = make(lambda self, x: self.inner(x)), make(data_number), make(data_number)

        def forward(self, x):
            return self.good(x) + self.bad(x)

    coverage = capture_program(Parent(), X).coverage()
    assert set(coverage.captured) == {"", "good", "good.inner", "bad.inner"}
    assert [o.name for o in coverage.opaque] == ["bad", "unused", "unused.inner"][: len(coverage.opaque)]
    assert 0 < coverage.share < 1
    assert "bad (test_opaque.py:" in coverage.text
    assert "the example inputs never call it" in coverage.text


class NewModules(nn.Module):
    def forward(self, x):
        return nn.Softmax(dim=-1)(x) * sqrt(x.shape[1]) + math.floor(x.shape[0] / 2)


def test_modules_made_in_the_forward_are_traced_through(agree, misses):
    assert misses(agree(NewModules(), X, X2)) == 0


def test_replaced_forwards_and_scripts_are_left_alone(agree):
    replaced = nn.Sequential(make(lambda self, x: self.inner(x)))
    replaced[0].forward = lambda x: x * 3
    program = capture_program(replaced, X)
    assert "replaced on the instance" in program.opaque["0"].reason
    assert torch.equal(program.model(*X), X[0] * 3)


def test_arguments_of_unknown_kinds(agree):
    class Box:
        def __init__(self, x):
            self.x = x

    class Inner(nn.Module):
        def forward(self, box):
            return box.x * 2

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return self.inner(Box(x)) + 1

    program = agree(Outer(), X, X2, opaque=True)
    assert "passes on a Box" in program.opaque[""].reason
    assert "inner" in program.captures


def test_structures_that_differ_between_modes_are_not_assumed(agree):
    class Auxiliary(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x):
            y = self.norm(x)
            return y, (y * 2 if self.training else None)

    class Uses(nn.Module):
        def __init__(self):
            super().__init__()
            self.aux = Auxiliary()

        def forward(self, x):
            y, extra = self.aux(x)
            return y if extra is None else y + extra

    for training in (True, False):
        agree(Uses().train(training), X, X2, opaque=True)


def test_no_example_inputs():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(6, 6), nn.ReLU())

        def forward(self, x, mask=None, scale=2.0, *, bias=None):
            n, d = x.shape
            y = self.inner(x) * scale
            if mask is not None:
                y = y + mask
            return y.view(n, d, 1) + torch.zeros(n, d, 1)

    model = Plain()
    expected = model(*X), model(*X2)
    program = capture_program(model)
    assert not program.opaque
    assert torch.equal(model(*X), expected[0])
    assert torch.equal(model(*X2), expected[1])
    assert not program.captures[""].misses
    model(X[0], X[0])
    assert sum(program.captures[""].misses.values()) == 1
    with pytest.raises(InputError, match="needs example_inputs"):
        program.recording()
    decides = capture_program(make(data_number))
    assert "only example inputs can give" in decides.opaque[""].reason


def test_lazy_modules_must_be_initialised():
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(InputError, match=r"module '0' \(LazyLinear\) has lazy parameters"):
        capture_program(model, X)
    model(*X)
    assert not capture_program(model, X).opaque


def test_models_on_the_meta_device(agree):
    with torch.device("meta"):
        model = make(lambda self, x: self.inner(x).view(x.shape[0], -1) * 2)
    program = capture_program(model, X)
    assert not program.opaque
    node = next(n for n in program.graphs[""].nodes if n.op == "call_module")
    assert node.meta["val"].device.type == "meta"
    assert node.meta["val"].shape == (4, 6)
    model.to_empty(device="cpu")
    assert model(*X2).shape == (7, 6)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Linear(6, 3), ["input", "weight", "bias", "linear"]),
        (nn.Linear(6, 3, bias=False), ["input", "weight", "linear"]),
        (nn.Tanh(), ["input", "tanh"]),
        (nn.GELU(), ["input", "gelu"]),
        (nn.Dropout(0.5), ["input", "training", "dropout"]),
        (nn.LayerNorm(6), ["input", "weight", "bias", "layer_norm"]),
    ],
    ids=str,
)
def test_leaves_can_be_expanded(module, expected):
    graph = trace_leaf(module)
    names = [getattr(n.target, "__name__", n.target) for n in graph.nodes if n.op != "output"]
    assert names == expected
    run = torch.fx.GraphModule(module, graph)
    torch.manual_seed(0)
    given = run(*X)
    torch.manual_seed(0)
    assert torch.equal(given, module(*X))


@pytest.mark.parametrize("module", [nn.BatchNorm1d(6), nn.LSTM(6, 6), nn.MultiheadAttention(6, 2)], ids=str)
def test_leaves_that_decide_cannot_be_expanded(module):
    with pytest.raises(CaptureError, match="cannot be traced"):
        trace_leaf(module)


class HiddenDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = [nn.Dropout(0.5)]

    def forward(self, x):
        return self.hidden[0](x)


def test_the_mode_of_an_unregistered_module_is_not_burned_in(agree):
    program = agree(HiddenDropout(), X, X2, opaque=True)
    assert "reads the mode of a module" in program.opaque[""].reason


class FreshDropout(nn.Module):
    def forward(self, x):
        return nn.Dropout(0.5)(x)


def test_modules_made_in_the_forward_have_their_own_mode(agree, misses):
    assert misses(agree(FreshDropout(), X, X2)) == 0


def test_copying_values_is_refused(agree):
    import copy

    class Copies(nn.Module):
        def forward(self, x):
            return copy.deepcopy(x) + copy.copy(x)

    program = capture_program(Copies(), X)
    assert set(program.opaque) == {""}
    assert torch.equal(program.model(*X), X[0] * 2)
