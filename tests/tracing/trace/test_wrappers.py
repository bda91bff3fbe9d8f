"""Contexts that a forward opens are kept: what runs under one is a region of its own."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import pickle
import sys
import types
from typing import cast

import pytest
import torch
from torch import nn

import fxopt
from fxopt.compat import all_modules, own_children
from fxopt.runtime.graphs import ContextRegion, capture_of, misses_in, uninstall
from fxopt.tracing.isolation import ModelState
from fxopt.tracing.program import capture_program

X = (torch.randn(3, 6, generator=torch.Generator().manual_seed(0)),)
X2 = (torch.randn(5, 6, generator=torch.Generator().manual_seed(1)),)


class Net(nn.Module):
    """What the forwards below have at hand."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6)
        self.heads = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.drop = nn.Dropout(0.5)
        self.scale = nn.Parameter(torch.rand(6))
        self.register_buffer("seen", torch.zeros(6))


def make(forward):
    return type("Model", (Net,), {"forward": forward})()


@torch.no_grad()
def frozen(module, x):
    return module(x) * 2


def no_grad(self, x):
    with torch.no_grad():
        y = self.linear(x) * self.scale
    return y * self.scale, y


def everything(self, x):
    with torch.no_grad():
        return {"y": self.linear(x), "n": x.shape[0]}


def autocast(self, x):
    y = self.linear(x)
    with torch.autocast(device_type=x.device.type, dtype=torch.bfloat16):
        z = y @ self.heads[0](y).T
    return z, z.float() + 1


def disabled(self, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = self.linear(x)
        with torch.autocast(device_type="cpu", enabled=False):
            z = y.float() @ self.linear.weight
        return self.heads[0](z), z


def nested(self, x):
    with torch.no_grad():
        y = self.linear(x)
        with torch.enable_grad():
            z = self.heads[0](y) * self.scale
        w = self.heads[1](z)
    return z, w, self.heads[2](w)


def set_grad_enabled(self, x):
    with torch.set_grad_enabled(not self.training):
        y = self.linear(x)
    return y + self.scale


def inference(self, x):
    with torch.inference_mode():
        y = self.linear(x).sum()
    return x.sum() * self.scale, y


def decorated_function(self, x):
    return frozen(self.linear, x) + frozen(self.heads[0], self.linear(x))


@torch.no_grad()
def decorated(self, x):
    return self.linear(x) * self.scale


@torch.autocast("cpu", dtype=torch.bfloat16)
def decorated_with_autocast(self, x):
    return self.linear(x) @ self.scale


def loop(self, x):
    for head in self.heads:
        with torch.no_grad():
            gate = head(x).sigmoid()
        x = self.linear(x) * gate
    return x


def early_return(self, x):
    with torch.no_grad():
        y = self.linear(x)
        if not self.training:
            return y
        y = y + 1
    return y * self.scale


def in_place(self, x):
    y = self.linear(x)
    with torch.no_grad():
        self.seen.mul_(0.9).add_(y.mean(0))
        self.seen += 1
    return y + self.seen


def dropout(self, x):
    with torch.no_grad():
        y = self.drop(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return self.drop(self.linear(y))


def sizes(self, x):
    with torch.no_grad():
        count, width = self.linear(x).shape
    return x.reshape(count * width) * width


def asks(self, x):
    with torch.no_grad():
        y = self.linear(x) if torch.is_grad_enabled() else x
        with torch.inference_mode():
            if torch.is_inference_mode_enabled() and not torch.is_grad_enabled():
                y = y + 1
        with torch.enable_grad():
            return y + (self.scale if torch.is_grad_enabled() else 0)


def asks_for_autocast(self, x):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.training):
        return self.linear(x) if torch.is_autocast_enabled("cpu") else x


def reads_parameters(self, x):
    with torch.no_grad():
        y = self.linear(x)
    return y.to(next(self.parameters()).dtype)


FORWARDS = [
    no_grad, everything, autocast, disabled, nested, set_grad_enabled, inference, decorated_function, decorated,
    decorated_with_autocast, loop, early_return, in_place, dropout, sizes, asks, asks_for_autocast, reads_parameters,
]  # fmt: skip


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda f: f.__name__)
def test_equal_in_values_types_and_gradients(forward, agree, misses):
    assert misses(agree(make(forward), X, X2)) == 0


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda f: f.__name__)
def test_leaves_no_trace_when_it_is_taken_away(forward):
    model = make(forward)
    program = fxopt.capture(model, X)
    captured = program.model
    assert any(isinstance(module, ContextRegion) for module in all_modules(captured))
    assert list(captured.state_dict()) == list(model.state_dict())
    assert [n for n, _ in captured.named_parameters()] == [n for n, _ in model.named_parameters()]
    for module in list(captured.modules()):
        uninstall(module)
    assert [n for n, _ in captured.named_modules()] == [n for n, _ in model.named_modules()]
    assert type(captured) is type(model)


def test_text_of_the_graphs():
    graphs = fxopt.capture(make(nested), X).graphs
    assert [line.strip() for line in str(graphs[""]).splitlines()] == [
        "graph():",
        "%x : [num_users=1] = placeholder[target=x]",
        "%scale : [num_users=1] = get_attr[target=scale]",
        "%no_grad_0 : [num_users=2] = call_module[target=no_grad_0](args = (%x, %scale), kwargs = {})",
        "%getitem : [num_users=1] = call_function[target=operator.getitem](args = (%no_grad_0, 0), kwargs = {})",
        "%getitem_1 : [num_users=2] = call_function[target=operator.getitem](args = (%no_grad_0, 1), kwargs = {})",
        "%heads_2 : [num_users=1] = call_module[target=heads.2](args = (%getitem_1,), kwargs = {})",
        "return (getitem, getitem_1, heads_2)",
    ]
    assert [line.strip() for line in str(graphs["no_grad_0"]).splitlines()] == [
        "graph():",
        "%x : [num_users=1] = placeholder[target=x]",
        "%scale : [num_users=1] = placeholder[target=scale]",
        "%linear : [num_users=1] = call_module[target=linear](args = (%x,), kwargs = {})",
        "%enable_grad_0 : [num_users=2] = call_module[target=enable_grad_0](args = (%linear, %scale), kwargs = {})",
        "%heads_1 : [num_users=1] = call_module[target=heads.1](args = (%enable_grad_0,), kwargs = {})",
        "return (enable_grad_0, heads_1)",
    ]
    captured = fxopt.capture(make(nested), X).model
    assert repr(captured) == repr(make(nested))
    assert repr(captured.get_submodule("no_grad_0")) == "ContextRegion(no_grad())"


def test_a_context_made_outside_keeps_its_settings():
    program = fxopt.capture(make(decorated_with_autocast), X)
    region = program.module("autocast_0")
    assert region.context.settings["dtype"] is torch.bfloat16
    assert program.graph("autocast_0").find_nodes(op="call_module")[0].meta["val"].dtype is torch.bfloat16


@pytest.mark.parametrize("forward", [nested, autocast, in_place, loop], ids=lambda f: f.__name__)
def test_copies_and_pickles(forward, monkeypatch):
    Kept = type("Kept", (Net,), {"forward": forward, "__module__": __name__})
    monkeypatch.setitem(sys.modules, __name__, types.SimpleNamespace(Kept=Kept))
    captured = fxopt.capture(Kept(), X).model.eval()
    expected = Kept().eval()(*X)
    for copied in (copy.deepcopy(captured), pickle.loads(pickle.dumps(captured))):
        torch.testing.assert_close(copied(*X), expected, rtol=0, atol=0)
        regions = [m for m in all_modules(copied) if isinstance(m, ContextRegion)]
        assert regions and all(own_children(region) is own_children(copied) for region in regions)
        assert not any(m._fxopt_capture.misses for m in copied.modules() if hasattr(m, "_fxopt_capture"))


def test_moves_and_modes():
    model = make(nested)
    captured = fxopt.capture(model, X).model
    captured.double().eval()
    assert all(not m.training for m in captured.modules())
    given, expected = captured(X[0].double()), model.double()(X[0].double())
    torch.testing.assert_close(given, expected, rtol=0, atol=0)


def test_checkpoints_know_nothing_of_regions():
    captured, other = fxopt.capture(make(nested), X).model, make(nested)
    with torch.no_grad():
        other.linear.weight.mul_(3)
    captured.load_state_dict(other.state_dict())
    torch.testing.assert_close(captured(*X), other(*X), rtol=0, atol=0)
    other.load_state_dict(captured.state_dict())


def test_a_child_replaced_after_capture_is_called():
    model = make(loop)
    captured = fxopt.capture(model, X).model
    model.heads[1] = captured.heads[1] = nn.Linear(6, 6)
    torch.testing.assert_close(captured(*X), model(*X), rtol=0, atol=0)
    assert not misses_in(all_modules(captured))


def test_who_lists_modules_does_not_come_across_regions():
    captured, model = fxopt.capture(make(nested), X).model, make(nested)
    assert [n for n, _ in captured.named_modules(remove_duplicate=False)] == [n for n, _ in model.named_modules()]
    assert [n for n, _ in captured.named_children()] == [n for n, _ in model.named_children()]
    before, given = list(captured.parameters()), {n: p * 2 for n, p in model.named_parameters()}
    outputs = (torch.func.functional_call(each, given, X) for each in (captured, model))
    torch.testing.assert_close(*outputs, rtol=0, atol=0)
    assert all(now is then for now, then in zip(captured.parameters(), before, strict=True))


def test_equal_blocks_have_regions_of_their_own(agree):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(make(no_grad) for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)[0]
            return x

    twice = Twice()
    twice.blocks[1].load_state_dict({k: v + 1 for k, v in twice.blocks[1].state_dict().items()})
    blocks = agree(twice, X, X2).model.blocks
    assert blocks[0].no_grad_0 is not blocks[1].no_grad_0
    assert blocks[1].no_grad_0.linear is blocks[1].linear


def test_state_put_back_leaves_regions():
    model = make(no_grad)
    state = ModelState(model)
    capture_program(model, X)
    state.restore()
    model(*X)
    assert isinstance(model.no_grad_0, ContextRegion)


def test_a_free_name_is_taken():
    model = make(no_grad)
    model.no_grad_0 = nn.Linear(1, 1)
    captured = fxopt.capture(model, X).model
    assert isinstance(captured.no_grad_0, nn.Linear)
    assert isinstance(captured.no_grad_1, ContextRegion)


def test_what_decides_in_a_region_starts_the_module_over(agree):
    def forward(self, x):
        with torch.no_grad():
            y = torch.cat([x, x])
            y = self.linear(y) if y.shape[0] == 6 else y
        return y + self.scale

    captured = agree(make(forward), X, X2).model
    assert capture_of(captured).misses


class Rotary(nn.Module):
    """As `transformers` write theirs: autocast is switched off only where it is on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", torch.arange(4.0) / 3)

    @torch.no_grad()
    def forward(self, x, positions):
        device = x.device.type if isinstance(x.device.type, str) and x.device.type != "mps" else "cpu"
        with off_where_on(device):
            angles = self.frequencies[None, :, None].float().expand(len(positions), -1, 1) @ positions[:, None].float()
            return angles.transpose(1, 2).cos().to(x.dtype)


def off_where_on(device):
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def test_a_context_that_is_opened_only_within_another(misses):
    inputs = (torch.randn(2, 7, 4), torch.arange(7)[None].expand(2, -1) / 3)
    model = Rotary()
    program = fxopt.capture(model, inputs)
    assert sorted(program.graphs) == ["", "#1", "no_grad_0", "no_grad_1", "no_grad_1.autocast_0"]
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            assert torch.equal(program.model(*inputs), model(*inputs))
    assert misses(program) == 0


def test_compile_and_export():
    model = make(nested)
    captured = fxopt.capture(model, X).model
    expected = model(*X)
    compiled = torch.compile(captured, backend="eager", fullgraph=True)(*X)
    exported = torch.export.export(captured, X).module()(*X)
    for given in (compiled, exported):
        torch.testing.assert_close(given, expected)
        assert [t.requires_grad for t in given] == [t.requires_grad for t in expected]


# -- what stays opaque -------------------------------------------------------------------------------------------------


def left_on(self, x):
    torch.set_grad_enabled(False)  # HERE
    return self.linear(x)


def put_back_by_hand(self, x):
    torch.set_grad_enabled(False)
    y = self.linear(x)
    torch.set_grad_enabled(True)  # HERE
    return y + x


def other_order(self, x):
    outer, inner = torch.no_grad(), torch.autocast("cpu")
    outer.__enter__()
    inner.__enter__()
    y = self.linear(x)
    outer.__exit__(None, None, None)  # HERE
    inner.__exit__(None, None, None)
    return y


def caught(self, x):
    try:
        with torch.no_grad():  # HERE
            y = self.linear(x)
            raise ValueError
    except ValueError:
        return y + self.scale


def suppressed(self, x):
    with contextlib.suppress(ValueError), torch.no_grad():  # HERE
        raise ValueError
    return self.linear(x)


def walks(self, x):
    with torch.no_grad():
        y = self.linear(x)
    return [child(y) for child in self.children() if isinstance(child, nn.Linear)]


CASES = {
    left_on: "leaves set_grad_enabled switched on",
    put_back_by_hand: "leaves set_grad_enabled switched on",
    other_order: "order in which it opened them",
    caught: "an exception leaves no_grad",
    suppressed: "an exception leaves no_grad",
}


@pytest.mark.parametrize("forward", CASES, ids=lambda f: f.__name__)
def test_opaque_with_the_reason(forward, agree):
    before = torch.is_grad_enabled()
    nesting = torch.autocast_increment_nesting()
    try:
        if forward in (left_on, put_back_by_hand):
            program = fxopt.capture(make(forward), X)
        else:
            program = agree(make(forward), X, X2, opaque=True)
    finally:
        torch.set_grad_enabled(before)
        assert torch.autocast_decrement_nesting() == nesting - 1
    assert not torch.is_autocast_enabled("cpu")
    opaque = program.opaque[""]
    assert CASES[forward] in opaque.reason
    lines, start = inspect.getsourcelines(forward)
    line = start + next(i for i, text in enumerate(lines) if "# HERE" in text)
    assert opaque.location == f"test_wrappers.py:{line}"


def test_a_forward_that_goes_through_its_children_does_not_come_across_its_region(agree):
    agree(make(walks), X, X2)


def test_a_sequential_does_not_come_across_its_region(agree):
    class Frozen(nn.Sequential):
        def forward(self, x):
            with torch.no_grad():
                for layer in self:
                    x = layer(x)
            return x

    program = agree(Frozen(nn.Linear(6, 6), nn.ReLU()), X)
    assert len(cast("nn.Sequential", program.model)) == 2


def test_partial_of_a_decorated_function(agree):
    def forward(self, x):
        return functools.partial(frozen, self.linear)(x) + self.scale

    agree(make(forward), X, X2)
