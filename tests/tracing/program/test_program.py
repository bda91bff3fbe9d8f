"""What passes may ask a program, and how call arguments are matched to graphs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fxopt.errors import CaptureError, InputError, UsageError
from fxopt.runtime.graphs import capture_of, install, own, recompile, select, uninstall
from fxopt.runtime.values import TensorMeta, meta_of, user_class
from fxopt.tracing.examples import Inputs
from fxopt.tracing.program import Program, capture_program
from fxopt.tracing.trace import ModuleTracer

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(6, 6)
        self.tail = nn.Sequential(nn.Linear(6, 6), nn.ReLU())

    def forward(self, x, skip=None, *, scale=1.0):
        y = self.tail(self.mix(x)) * scale
        return y if skip is None else y + skip


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.shared = nn.Sequential(nn.Linear(6, 6))
        self.alias = self.shared

    def forward(self, x):
        y = self.blocks[0](x)
        z = self.blocks[1](y, scale=2.0, skip=x)
        return self.shared(z) + self.alias(y)


@pytest.fixture
def program():
    return capture_program(Net(), (X,))


def test_names_graphs_and_callees(program):
    assert list(program.captures) == ["", "blocks.0", "blocks.0.tail", "blocks.1", "blocks.1.tail", "shared"]
    assert set(program.graphs) == set(program.captures)
    assert program.graph("") is program.graphs[""]
    node = program.node("", "blocks_1")
    assert program.callee("", node) is program.model.blocks[1] is program.module("blocks.1")
    assert program.name_of(program.model.alias) == "shared"
    assert program.callee("blocks.0", program.node("blocks.0", "mix")) is program.module("blocks.0.mix")
    calls = [n.target for n in program.graph("").nodes if n.op == "call_module"]
    assert calls == ["blocks.0", "blocks.1", "shared", "shared"]


def test_lookups_that_fail_help(program):
    with pytest.raises(CaptureError, match="no node 'blocks_2'; did you mean 'blocks_1' or 'blocks_0'"):
        program.node("", "blocks_2")
    with pytest.raises(CaptureError, match=r"no module 'blocks\.5'; did you mean"):
        program.module("blocks.5")
    with pytest.raises(CaptureError, match="has no graph"):
        program.graph("blocks.0.mix")
    with pytest.raises(CaptureError, match="calls no module"):
        program.callee("", program.node("", "add"))
    with pytest.raises(CaptureError, match="not in the model"):
        program.name_of(nn.Linear(1, 1))


def test_nodes_are_found_after_edits(program):
    assert program.node("", "add").name == "add"
    graph = own(program.model).specializations[0].graph
    with graph.inserting_after(program.node("", "blocks_0")):
        graph.call_function(torch.neg, (program.node("", "blocks_0"),), name="fresh")
    assert program.node("", "fresh").target is torch.neg
    graph.erase_node(program.node("", "fresh"))
    with pytest.raises(CaptureError):
        program.node("", "fresh")


def test_analyses_are_kept_until_touched(program):
    class Count:
        calls = 0

        @classmethod
        def compute(cls, program: Program) -> int:
            cls.calls += 1
            return len(program.graph("").nodes)

    assert program.analyses[Count] == program.analyses[Count]
    assert Count.calls == 1
    version = program.version
    program.touch()
    assert program.version == version + 1
    program.analyses[Count]
    assert Count.calls == 2


def test_patterns_find(program):
    class Everything:
        def find(self, program):
            return [program.model]

    assert program.matches(Everything()) == [program.model]


def test_nodes_know_their_line_and_shape(program):
    node = program.node("", "blocks_1")
    assert node.meta["val"] == TensorMeta((4, 6), torch.float32, torch.device("cpu"))
    assert node.meta["source"].startswith("test_program.py:")
    assert str(node.meta["val"]) == "float32[4, 6]"
    meta = meta_of({"a": (X, [1, None, "s"])})
    assert meta["a"][1] == [1, None, "s"]
    assert not any(
        isinstance(v, torch.Tensor) for g in program.graphs.values() for n in g.nodes for v in n.meta.values()
    )


def test_recordings_on_demand(program):
    recording = program.recording()
    assert program.recording() is recording
    block = program.module("blocks.1")
    (call,) = recording.calls[block]
    assert torch.equal(call.kwargs["skip"], X)
    assert torch.equal(block(*call.args, **call.kwargs), call.output)
    assert len(recording.calls[program.module("shared")]) == 2
    only = program.recording([block])
    assert list(only.calls) == [block]
    program.touch()
    assert program.recording() is not recording


def test_recording_in_the_programs_phase():
    model = nn.Sequential(nn.BatchNorm1d(6)).eval()
    program = capture_program(model, (X,), training=True)
    assert program.training
    assert not model.training
    given = program.recording().calls[model][0].output
    assert torch.allclose(given.mean(0), torch.zeros(6), atol=1e-5)
    assert not model.training
    assert model[0].num_batches_tracked == 0


def test_recording_with_gradients():
    from fxopt.tracing.recording import record

    model = nn.Sequential(nn.Linear(6, 6))
    x = X.clone().requires_grad_()
    (call,) = record(model, (Inputs(x),), grad=True).calls[model]
    assert call.output.requires_grad
    assert call.args[0].requires_grad
    assert call.args[0] is not x
    (call,) = record(model, (Inputs(x),)).calls[model]
    assert not call.output.requires_grad


def test_select_matches_arguments_to_placeholders(program):
    block = program.module("blocks.1")
    specialization, values = select(block, (X,), {"skip": X * 2, "scale": 2.0})
    assert specialization is capture_of(block).specializations[0]
    assert [n.name for n in specialization.graph.nodes if n.op == "placeholder"] == ["x", "skip"]
    assert torch.equal(values[1], X * 2)
    interpreted = torch.fx.Interpreter(block, graph=specialization.graph).run(*values)
    assert torch.equal(interpreted, block(X, X * 2, scale=2.0))
    assert select(block, (X,), {}) is None


def test_modules_called_in_several_ways_keep_a_graph_each():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x):
            return self.block(self.block(x), skip=x) + self.block(x, scale=3.0)

    program = capture_program(Twice(), (X,))
    assert set(program.graphs) == {"", "block", "block#1", "block#2", "block.tail"}
    assert not capture_of(program.module("block")).misses
    assert program.graph("block", 1) is program.graphs["block#1"]


def test_capturing_again_keeps_what_is_there(program):
    before = program.graphs
    again = capture_program(program.model, (X,))
    assert again.graphs.keys() == before.keys()
    assert all(again.graphs[name] is graph for name, graph in before.items())
    uninstall(program.model)
    fresh = capture_program(program.model, (X,))
    assert fresh.graph("") is not before[""]
    assert fresh.graph("shared") is before["shared"]


def test_wrong_example_inputs():
    with pytest.raises(UsageError, match="example_inputs is of type int"):
        capture_program(Net(), 3)
    model = Net()
    with pytest.raises(InputError, match=r"the model \(Net\) raised TypeError"):
        capture_program(model, (X, X))
    with pytest.raises(InputError, match=r"module 'blocks.0.mix' \(Linear\) raised RuntimeError"):
        capture_program(model, (torch.randn(4, 5),))
    assert all(capture_of(m) is None for m in model.modules())


def test_a_graph_that_is_wrong_is_given_up(monkeypatch):
    trace = ModuleTracer.trace

    def mistaken(self, signature):
        specialization = trace(self, signature)
        if self.owner == "blocks.1":
            next(n for n in specialization.graph.nodes if n.name == "mul").args = (
                specialization.graph.find_nodes(op="call_module")[0],
                2.0,
            )
        return specialization

    monkeypatch.setattr(ModuleTracer, "trace", mistaken)
    model = Net()
    expected = model(X)
    program = capture_program(model, (X,))
    assert "another result" in program.opaque["blocks.1"].reason
    assert set(program.opaque) == {"blocks.1"}
    assert torch.equal(model(X), expected)


def test_dynamic_classes_of_others_compose(program):
    block = program.module("blocks.0")
    expected = block(X)
    capture = capture_of(block)
    uninstall(block)
    block.__class__ = _doubling(Block)
    install(block, capture)
    assert torch.equal(block(X), expected * 2)
    assert isinstance(block, Block)
    assert user_class(type(block)) is Block
    assert capture_of(block).base is _doubling(Block)
    recompile(block)
    other = copy.deepcopy(block)
    assert torch.equal(other(X), expected * 2)
    import pickle

    assert torch.equal(pickle.loads(pickle.dumps(block))(X), expected * 2)
    uninstall(block)
    assert type(block) is _doubling(Block)


_made: dict[type, type] = {}


def _doubling(base: type) -> type:
    if base not in _made:
        body = {
            "mix": property(lambda self: lambda x: self._modules["mix"](x)),
            "__call__": lambda self, *a, **k: base.__call__(self, *a, **k) * 2,
            "_fxopt_base": base,
            "_fxopt_recipe": (_doubling, (base,)),
        }
        _made[base] = type(base.__name__, (base,), body)
    return _made[base]
