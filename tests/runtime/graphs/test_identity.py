"""A captured model is still the user's: class, attributes, hooks, copies, pickles, and what torch does with it."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxopt.errors import CaptureError, ModeError
from fxopt.runtime.graphs import EVAL_ONLY, Capture, capture_of, install, own, recompile, uninstall
from fxopt.tracing.program import capture_program

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
REGISTRY: list[str] = []


class Base(nn.Module):
    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        REGISTRY.append(cls.__name__)


class Net(Base):
    """The user's words."""

    scale = 2.0

    def __init__(self, width: int = 6):
        super().__init__()
        self.width = width
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(6, width), nn.Tanh()) for _ in range(2))
        self.tied = nn.Linear(6, width)
        self.heads[1][0].weight = self.tied.weight
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("offset", torch.ones(width))

    def forward(self, x: torch.Tensor, shift: float = 1.0) -> torch.Tensor:
        """Compute."""
        y = sum(head(x) for head in self.heads) + self.tied(x) * shift
        y = F.max_pool1d(y.unsqueeze(0), 1).squeeze(0)
        return self.norm(y) * self.scale + self.offset

    def size(self):
        return self.width


@pytest.fixture
def net():
    return capture_program(Net(), (X,)).model


def test_class_names_and_attributes_stay(net):
    plain = Net()
    assert isinstance(net, Net)
    assert type(net).__name__ == "Net"
    assert type(net).__qualname__ == "Net"
    assert type(net).__module__ == __name__
    assert type(net).__doc__ == "The user's words."
    assert repr(net) == repr(plain)
    assert net.size() == 6
    assert [n for n, _ in net.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert list(net.state_dict()) == list(plain.state_dict())
    assert net.forward.__doc__ == "Compute."
    assert net.forward.__annotations__ == plain.forward.__annotations__
    import inspect

    assert inspect.signature(net.forward) == inspect.signature(plain.forward)
    assert inspect.signature(type(net)) == inspect.signature(Net)


def test_subclass_hooks_of_the_user_see_nothing():
    before = list(REGISTRY)
    capture_program(Net(), (X,))
    assert before == REGISTRY == ["Net"]


def test_calling_the_class_makes_a_plain_model(net):
    other = type(net)(3)
    assert type(other) is Net
    assert other.width == 3
    assert other(X).shape == (4, 3)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_run_from_graphs_too(net, duplicate):
    net.eval()
    other = duplicate(net)
    assert isinstance(other, Net)
    assert type(other).__name__ == "Net"
    assert torch.equal(other(X), net(X))
    assert capture_of(other) is not None
    assert capture_of(other.heads[0]) is capture_of(other.heads[1])
    assert other.heads[1][0].weight is other.tied.weight
    assert [n.name for n in capture_of(other).specializations[0].graph.nodes] == [
        n.name for n in capture_of(net).specializations[0].graph.nodes
    ]
    first, second = (next(iter(capture_of(m).specializations[0].graph.nodes)).meta for m in (net, other))
    assert first == second


def test_a_copy_is_edited_on_its_own(net):
    net.eval()
    expected = net(X)
    own(net)
    other = copy.deepcopy(net)
    for model in (other, net):
        graph = own(model).specializations[0].graph
        output = graph.output_node()
        with graph.inserting_before(output):
            output.args = (graph.call_function(torch.neg, (output.args[0],)),)
        recompile(model)
        assert torch.equal(model(X), -expected)
        assert sum(node.target is torch.neg for node in graph.nodes) == 1
    assert torch.equal(other(X), -expected)


def test_weights_only_files_and_whole_models_save(net):
    net.eval()
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    assert torch.equal(other(X), net(X))
    assert capture_of(other) is not None


def test_uninstall_gives_the_class_back(net):
    net.eval()
    expected = net(X)
    for module in net.modules():
        uninstall(module)
    assert type(net) is Net
    assert "_fxopt_capture" not in net.__dict__
    assert type(net.heads[0]) is nn.Sequential
    assert torch.equal(net(X), expected)
    uninstall(net)


def test_hooks_run(net):
    seen = []
    net.heads[0].register_forward_hook(lambda m, a, out: seen.append("after") or out + 1)
    net.tied.register_forward_pre_hook(lambda m, a: seen.append("before") or (a[0] * 2,))
    net.register_full_backward_hook(lambda m, gi, go: seen.append("backward"))
    net(X.clone().requires_grad_()).sum().backward()
    plain = Net()
    plain.load_state_dict(net.state_dict())
    plain.heads[0].register_forward_hook(lambda m, a, out: out + 1)
    plain.tied.register_forward_pre_hook(lambda m, a: (a[0] * 2,))
    assert sorted(seen) == ["after", "backward", "before"]
    net.eval(), plain.eval()
    assert torch.equal(net(X), plain(X))


def test_hooks_present_at_capture_run_once_per_call(agree):
    model = Net()
    model.heads[0].register_forward_hook(lambda m, a, out: out + 1)
    model.tied.register_forward_pre_hook(lambda m, a: (a[0] * 2,))
    model.heads[1].register_forward_pre_hook(lambda m, a, k: ((a[0].repeat(2, 1)[: len(a[0])],), k), with_kwargs=True)
    agree(model, (X,), (torch.randn(9, 6),))


def test_to_double_half_and_state_dicts(net):
    net.eval().double()
    assert net(X.double()).dtype == torch.float64
    net.float()
    other = Net().eval()
    other.load_state_dict(net.state_dict())
    assert torch.equal(other(X), net(X))
    net.load_state_dict({k: v * 0 for k, v in net.state_dict().items()}, assign=True)
    assert net(X).abs().sum() == 0


def test_replaced_children_and_parameters_are_used(net):
    net.eval()
    net.tied = nn.Linear(6, 6)
    net.heads[0] = nn.Linear(6, 6)
    net.heads[1][0].bias = nn.Parameter(torch.full((6,), 5.0))
    plain = copy.deepcopy(net)
    for module in plain.modules():
        uninstall(module)
    assert torch.equal(net(X), plain(X))


def test_changed_loops_run_the_modules_own_forward(net):
    net.eval()
    net.heads.append(nn.Linear(6, 6))
    net.heads[0].append(nn.ReLU())
    plain = copy.deepcopy(net)
    for module in plain.modules():
        uninstall(module)
    assert torch.equal(net(X), plain(X))
    assert capture_of(net).misses.total() == 1
    assert "heads has 2 items" in next(iter(capture_of(net).misses))


def test_setting_an_attribute_that_a_graph_holds_drops_it(net):
    net.eval()
    before = net(X)
    net.scale = 4.0
    assert not capture_of(net).specializations
    assert torch.allclose(net(X) - 1, (before - 1) * 2, atol=1e-5)
    assert "attribute 'scale'" in next(iter(capture_of(net).misses))
    fresh = capture_program(Net(), (X,)).model
    fresh.width = 3  # read by no graph
    assert capture_of(fresh).specializations


class DynamicAttribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = torch.tensor(2.0)
        self.limit = 3

    def forward(self, x):
        return x.clamp(max=self.limit) / self.temperature


def test_plain_tensor_attributes_are_read_at_each_call():
    model = capture_program(DynamicAttribute(), (X,)).model
    model.temperature = torch.tensor(4.0)
    assert torch.equal(model(X), X.clamp(max=3) / 4)
    assert capture_of(model).specializations
    model.limit = 0
    assert torch.equal(model(X), X.clamp(max=0) / 4)


def test_compile_takes_the_whole_graph(net):
    net.eval()
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    for batch in (4, 5, 6):
        x = torch.randn(batch, 6)
        torch.testing.assert_close(compiled(x), net(x))


def test_export(net):
    net.eval()
    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(net, (X,), dynamic_shapes=({0: batch},))
    x = torch.randn(9, 6)
    torch.testing.assert_close(exported.module()(x), net(x))
    assert {s.target for s in exported.graph_signature.input_specs if s.target} <= set(net.state_dict())


def test_train_refuses_where_rewrites_are_for_evaluation(net):
    net.__dict__[EVAL_ONLY] = ("fold_batchnorm",)
    net.eval()
    with pytest.raises(ModeError, match="fold_batchnorm"):
        net.train()
    with pytest.raises(ModeError, match="fold_batchnorm"):
        net.training = True
    assert not any(module.training for module in net.modules())
    net.train(False)
    net.training = False


def test_a_module_without_graphs_can_still_be_captured():
    module = nn.Linear(6, 6)
    install(module, Capture(nn.Linear, []))
    assert isinstance(module, nn.Linear)
    assert module(X).shape == (4, 6)
    assert torch.equal(pickle.loads(pickle.dumps(module))(X), module(X))
    with pytest.raises(CaptureError, match="no graph"):
        own(nn.Linear(6, 6))


def test_a_foreign_subclass_refuses_recompilation(net):
    net.__class__ = type("Sharded", (type(net),), {})
    with pytest.raises(CaptureError, match="rewrite the model first"):
        recompile(net)


def test_classes_are_shared_and_go_away():
    models = [capture_program(Net(), (X,)).model for _ in range(2)]
    assert type(models[0]) is type(models[1])
    dead = weakref.ref(type(capture_program(DynamicAttribute(), (X,)).model))
    gc.collect()
    assert dead() is None


class Long(nn.Module):
    def forward(self, x):
        for _ in range(3000):
            x = x + 1
        return x


def test_long_graphs_pickle():
    model = capture_program(Long(), (X,)).model
    other = pickle.loads(pickle.dumps(model))
    assert torch.equal(other(X), model(X))
    assert len(capture_of(copy.deepcopy(model)).specializations[0].graph.nodes) == 3002
