"""flatten_calls: what it writes out, what stays a call, and when the modules are called as before."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import fxopt
from fxopt.passes.pipeline import parse
from fxopt.settings import Measure
from fxopt.testing import assert_equivalent
from fxopt.tracing.program import capture_program
from fxopt.transforms.flatten_calls import FlattenCalls, flatten_calls

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Dropout(rate))
        self.norm = nn.LayerNorm(8)
        self.factor = 2.0

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.norm(x + self.body(x) * scale) * self.factor


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, training=self.training)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def network() -> Model:
    torch.manual_seed(0)
    model = Model()
    model(torch.randn(16, 8))  # statistics that are none of the first ones
    return model.eval()


def flat(model: nn.Module, x: object = X, **options: object) -> nn.Module:
    return fxopt.optimize(model, FlattenCalls(), example_inputs=x, measure=False, **options)  # type: ignore[arg-type]


def count_calls(model: nn.Module, x: Tensor = X) -> int:
    """Return how many modules a call of a model calls."""
    calls: list[object] = []
    original = nn.Module._call_impl

    def counted(self: nn.Module, *args: object, **kwargs: object) -> object:
        calls.append(self)
        return original(self, *args, **kwargs)

    nn.Module._call_impl = counted  # type: ignore[method-assign]
    wrapped, nn.Module._wrapped_call_impl = nn.Module._wrapped_call_impl, counted  # type: ignore[method-assign]
    try:
        with torch.no_grad():
            model(x)
    finally:
        nn.Module._call_impl, nn.Module._wrapped_call_impl = original, wrapped  # type: ignore[method-assign]
    return len(set(calls))


def same(one: nn.Module, other: nn.Module, x: Tensor = X) -> None:
    with torch.no_grad():
        assert torch.equal(one(x), other(x))


# -- it fires --------------------------------------------------------------------------------------------------------


def test_it_writes_out_all_calls() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2, bias=False)).eval()
    fast = flat(model)
    assert [(node.op, node.name) for node in fxopt.graphs(fast)[""].nodes] == [
        ("placeholder", "input_1"), ("get_attr", "weight"), ("get_attr", "bias"), ("call_function", "linear"),
        ("call_function", "relu"), ("get_attr", "weight_1"), ("call_function", "linear_1"), ("output", "output"),
    ]  # fmt: skip
    assert (count_calls(model), count_calls(fast)) == (5, 1)
    same(fast, model)


def test_a_tree_of_modules_is_one_function() -> None:
    model = network()
    fast = flat(model)
    assert count_calls(model) == 18
    assert count_calls(fast) == 1
    same(fast, model)
    assert_equivalent(fast, model, (X,))
    assert [d.detail for d in fxopt.plan(fast).decisions] == ["17 calls written out"]


def test_gradients_in_evaluation_and_what_training_runs() -> None:
    model = network()
    fast = flat(model)
    fast(X).sum().backward()
    model(X).sum().backward()
    for mine, theirs in zip(fast.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]
    for each in (fast, model):
        each.train()
        torch.manual_seed(3)
        each(X)
    torch.manual_seed(3)
    expected = model(X)
    torch.manual_seed(3)
    assert torch.equal(fast(X), expected)
    assert torch.equal(fast.head[1].running_mean, model.head[1].running_mean)  # type: ignore[index]
    same(fast.eval(), model.eval())


def test_a_model_in_training_draws_the_same_numbers() -> None:
    model = network().train()
    fast = flat(model)
    assert count_calls(copy.deepcopy(fast)) == 2  # the batch norm counts its batches
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = model(X)
        torch.manual_seed(seed)
        assert torch.equal(fast(X), expected)


# -- parameters stay what they are -----------------------------------------------------------------------------------


def test_parameters_are_read_at_each_call() -> None:
    model, other = network(), network()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.5)
    fast = flat(model)
    fast.load_state_dict(other.state_dict())
    same(fast, other)
    for each in (fast, other):
        each.blocks[0].body[0].weight = nn.Parameter(torch.eye(8))  # type: ignore[index]
    same(fast, other)
    for each in (fast, other):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each(X).sum().backward()
        optimizer.step()
    same(fast, other)
    assert list(fast.state_dict()) == list(model.state_dict())
    same(fast.double(), other.double(), X.double())
    assert count_calls(fast, X.double()) == 1


def test_a_bias_that_was_none() -> None:
    model = network()
    fast = flat(model)
    for each in (fast, model):
        each.blocks[0].body[0].bias = nn.Parameter(torch.ones(8))  # type: ignore[index]
    same(fast, model)


def test_functional_call_and_vmap() -> None:
    model = network()
    fast = flat(model)
    state = {name: tensor + 1 for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    with torch.no_grad():
        expected = torch.func.functional_call(model, state, (X,))
        assert torch.equal(torch.func.functional_call(fast, state, (X,)), expected)


# -- modules that are no longer what they were -----------------------------------------------------------------------


def test_hooks_registered_later_run() -> None:
    fast = flat(network())
    seen: list[object] = []
    handle = fast.blocks[1].norm.register_forward_hook(lambda *_: seen.append(1))  # type: ignore[index]
    fast(X)
    assert seen == [1]
    handle.remove()
    fast(X)
    assert seen == [1]
    assert count_calls(fast) == 1


def test_hooks_on_all_modules_run() -> None:
    fast = flat(network())
    fast(X)
    seen: list[object] = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        fast(X)
    finally:
        handle.remove()
    assert len(seen) == 18


def _replaced_forward(model: Model) -> None:
    model.blocks[0].norm.forward = lambda x: x + 1  # type: ignore[method-assign]


def _appended(model: Model) -> None:
    model.head.append(nn.Tanh())


def _parametrized(model: Model) -> None:
    torch.manual_seed(0)
    parametrizations.weight_norm(model.head[0])
    model.head[0].parametrizations.weight.original0.data.mul_(3)  # type: ignore[union-attr]


CHANGES: dict[str, Callable[[Model], object]] = {
    "child": lambda model: model.head.__setitem__(2, nn.Tanh()),
    "child of a child": lambda model: setattr(model.blocks[0], "norm", nn.Identity()),
    "appended": _appended,
    "factor": lambda model: setattr(model.blocks[0], "factor", 5.0),
    "eps": lambda model: setattr(model.head[1], "eps", 0.5),
    "forward": _replaced_forward,
    "mode of one": lambda model: model.head[1].train(),
    "parametrization": _parametrized,
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(change: str) -> None:
    model = network()
    fast = flat(model)
    same(fast, model)
    before = fast(X)
    for each in (fast, model):
        CHANGES[change](each)  # type: ignore[arg-type]
    same(fast, model)
    assert not torch.equal(fast(X), before)


def test_the_mode_of_one_module_that_passes_it_on() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Noisy()).eval()
    fast = flat(model)
    assert count_calls(fast) == 1
    same(fast, model)
    for each in (fast, copy.deepcopy(fast)):
        each[1].train()  # type: ignore[index]
        assert (each(X) == 0).any()


class Called(nn.Linear):
    def __call__(self, *args: object, **kwargs: object) -> Tensor:
        return super().__call__(*args, **kwargs) + 1


def test_what_stays_a_call() -> None:
    model = network()
    model.head[3] = Called(8, 3)
    parametrizations.weight_norm(model.head[0])
    model.blocks[0].body.register_forward_hook(lambda *_: None)
    fast = flat(model)
    same(fast, model)
    reasons = {d.label: d.reason for d in fxopt.plan(fast).decisions if d.status == "refused"}
    assert reasons == {
        "blocks.0.body": "it has hooks", "head.0": "it has parametrizations", "head.3": "it has a __call__ of its own",
    }  # fmt: skip


class Padded(nn.Module):
    """Pads by the size of what it is given, as the layers of MobileNetV2 do."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(2, 2, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        size = int(x.shape[-1])
        return self.convolution(F.pad(x, (0, 1 if size % 2 == 0 else 2)))


class Counting(nn.Module):
    """Writes into a buffer before a layer that decides by a size of what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.padded = nn.Conv1d(2, 2, 1), Padded()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.padded(self.first(x))


def test_layers_that_decide_by_sizes_of_what_is_computed_are_written_out_and_ask() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv1d(2, 2, 1), Padded(), Padded()).eval(), torch.randn(1, 2, 16)
    fast = fxopt.optimize(model, "flatten_calls", example_inputs=x, measure=False)
    assert not fxopt.graphs(fast)[""].find_nodes(op="call_module")
    for size in (16, 15, 14, 13, 16):
        given = torch.randn(3, 2, size)
        with torch.no_grad():
            assert torch.equal(fast(given), model(given))
            assert torch.equal(pickle.loads(pickle.dumps(fast))(given), model(given))


def test_what_was_written_before_is_not_written_again_where_a_size_is_another() -> None:
    torch.manual_seed(0)
    model, x = Counting().eval(), torch.randn(1, 2, 16)
    fast = fxopt.optimize(model, "flatten_calls", example_inputs=x, measure=False)
    before = fast.calls.item()
    with torch.no_grad():
        given = torch.randn(1, 2, 15)
        assert torch.equal(fast(given), model(given))
    assert fast.calls.item() == before + 1


class Sum(nn.Module):
    def forward(self, parts: list[Tensor]) -> Tensor:
        return parts[0] if parts[0].shape != parts[1].shape else parts[0] + parts[1]


class OfLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.sum = nn.Linear(8, 8), nn.Linear(8, 8), Sum()

    def forward(self, x: Tensor) -> Tensor:
        return self.sum([self.first(x), self.second(x)])


def test_a_module_that_decides_by_what_is_in_a_list_stays_a_call() -> None:
    model = OfLists().eval()
    fast = flat(model)
    assert count_calls(fast) == 2
    same(fast, model)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_what_holds_compiled_modules_or_other_tensors_stays() -> None:
    inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    model = nn.Sequential(inner, torch.jit.trace(nn.Linear(8, 8), X)).eval()
    assert _decided(model) == {"": "it holds a module that TorchScript compiled", "0": ""}
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(inner, nn.Linear(8, 8)).eval()
    quantization.quantize_(model[1], quantization.Int8WeightOnlyConfig())
    assert set(_decided(model).values()) == {"the model holds tensors that are no plain ones"}


def _decided(model: nn.Module) -> dict[str, str]:
    fast = flat(model)
    same(fast, model)
    return {decision.label: decision.reason for decision in fxopt.plan(fast).decisions}


def test_compilers_see_the_modules() -> None:
    model = network()
    fast = flat(model)
    program = torch.export.export(fast, (X,))
    paths = [str(node.meta.get("nn_module_stack")) for node in program.graph.nodes]
    assert any("blocks.1.norm" in path for path in paths)
    same(program.module(), model)


# -- copies ----------------------------------------------------------------------------------------------------------


def _archived(model: nn.Module, path: Path) -> nn.Module:
    fxopt.save(model, path / "model.fxopt")
    return fxopt.load(path / "model.fxopt", model=network())


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save", "archive"])
def test_copies_stand_by_themselves(how: str, tmp_path: Path) -> None:
    fast = flat(network())
    fast(X)
    file = io.BytesIO()
    if how == "torch.save":
        torch.save(fast, file)
        file.seek(0)
    made: Callable[[], nn.Module] = {
        "deepcopy": lambda: copy.deepcopy(fast), "pickle": lambda: pickle.loads(pickle.dumps(fast)),
        "torch.save": lambda: torch.load(file, weights_only=False), "archive": lambda: _archived(fast, tmp_path),
    }[how]  # fmt: skip
    copied = made()
    same(copied, fast)
    assert count_calls(copied) == 1
    with torch.no_grad():
        copied.head[0].weight.zero_()  # type: ignore[index]
    assert not torch.equal(copied(X), fast(X))
    copied.blocks[0].factor = 7.0  # type: ignore[index]
    assert count_calls(fast) == 1
    assert count_calls(copied) == 18


def test_restore_gives_the_modules_back() -> None:
    model = network()
    restored = fxopt.restore(flat(model))
    assert type(restored) is Model
    same(restored, model)
    assert count_calls(restored) == 18


def test_twice_is_once_and_a_plan_repeats_it() -> None:
    model = network()
    fast = flat(model)
    again = flat(fast)
    assert count_calls(again) == 1
    same(again, model)
    replayed = fxopt.optimize(model, FlattenCalls(), example_inputs=X, plan=fxopt.plan(fast))
    assert count_calls(replayed) == 1
    same(replayed, model)


def test_after_other_passes() -> None:
    model = network()
    fast = fxopt.optimize(model, "fold_batchnorm,flatten_calls", example_inputs=X, measure=False)
    with torch.no_grad():
        torch.testing.assert_close(fast(X), model(X))
    assert count_calls(fast) == 1
    fast.blocks[0].norm.register_forward_hook(lambda *_: None)  # type: ignore[index]
    with torch.no_grad():
        torch.testing.assert_close(fast(X), model(X))


def test_a_model_whose_work_takes_long_beside_its_calls_is_left_alone() -> None:
    model, x = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()).eval(), torch.randn(512, 2048)
    (decision,) = fxopt.plan(fxopt.optimize(model, FlattenCalls(), example_inputs=x, verify=False)).decisions
    assert decision.status == "refused" and decision.reason.startswith("2 calls in ")
    assert [d.status for d in fxopt.plan(flat(model, x)).decisions] == ["applied"]


@pytest.mark.parametrize(
    ("seconds", "made", "refused"),
    [((2e-2, 1e-2, 1e-6), 3, ""), ((2e-2, 1e-2, 5e-3), 3, "2 calls in 5 ms"), ((9.0,), 1, "2 calls in 9e+03 ms")],
)
def test_of_calls_that_wait_for_a_busy_machine_the_quickest_counts(
    monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, ...], made: int, refused: str
) -> None:
    program = capture_program(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), torch.randn(2, 8))
    program.forward_seconds, program.measuring, taken = 10.0, Measure.YES, iter(seconds)
    monkeypatch.setattr(flatten_calls, "forward_seconds", lambda *_, **__: next(taken))
    reasons = [each.reason for each in FlattenCalls().find(program) if isinstance(each, fxopt.Refusal)]
    assert [reason.partition(":")[0] for reason in reasons] == [refused] * bool(refused)
    assert len(list(taken)) == len(seconds) - made


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x) for head in self.heads])


def test_modules_that_another_pass_took_out_are_left_alone() -> None:
    model = Heads().eval()
    fast = fxopt.optimize(model, "fuse_ensembles,flatten_calls", example_inputs=X, measure=False)
    decisions = fxopt.plan(fast).decisions
    assert [(each.pass_name, each.status) for each in decisions] == [("fuse_ensembles", "applied")]
    assert len(fxopt.plan(flat(model)).decisions) == 1


class Named(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))


def test_a_class_of_ones_own_over_sequential_sees_a_new_child() -> None:
    fast = flat(Named().eval())
    assert count_calls(fast) == 1
    fast.append(nn.Tanh())
    with torch.no_grad():
        assert fast(X).abs().max() <= 1 and count_calls(fast) == 5


def test_threads() -> None:
    model = network()
    fast = flat(model)
    with torch.no_grad():
        expected = model(X)
    wrong: list[object] = []

    def call() -> None:
        for _ in range(50):
            with torch.no_grad():
                if not torch.equal(fast(X), expected):
                    wrong.append(1)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for count in range(20):
        fast.blocks[0].note = count  # type: ignore[index,assignment]
    for thread in threads:
        thread.join()
    assert not wrong


def test_it_is_its_text() -> None:
    assert parse(str(FlattenCalls())) == (FlattenCalls(),) or list(parse("flatten_calls")) == [FlattenCalls()]


@pytest.mark.parametrize(
    ("norm", "taken", "refused"),
    [
        (nn.BatchNorm1d(4), (3, 4), (3, 4, 4, 4)),
        (nn.BatchNorm2d(4), (2, 4, 4, 4), (4, 4, 4)),
        (nn.BatchNorm3d(4), (2, 4, 3, 3, 3), (4, 4, 4)),
    ],
)
def test_batch_norms_refuse_what_has_other_dimensions(
    norm: nn.Module, taken: tuple[int, ...], refused: tuple[int, ...]
) -> None:
    model, x = nn.Sequential(norm, nn.ReLU()).eval(), torch.randn(taken)
    fast = fxopt.optimize(model, "flatten_calls", example_inputs=(x,), measure=False)
    assert [decision.status for decision in fxopt.plan(fast).decisions] == ["applied"]
    torch.testing.assert_close(fast(x), model(x))
    for each in (model, fast):
        with pytest.raises(ValueError, match=f"got {len(refused)}D input"):
            each(torch.randn(refused))
