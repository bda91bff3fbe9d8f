"""quantize: options and what is refused of them; layers in their places; state there and back."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.cpus import needs_static_int8
from torch import Tensor, nn

import fxopt
from fxopt.errors import ModeError, OrderError, UsageError
from fxopt.passes.pipeline import parse
from fxopt.runtime.state import quantized as quantized_weight
from fxopt.transforms.quantize import Quantize
from fxopt.transforms.quantize.kernels import kernel_problem

SCHEMES = ("int8_dynamic", "int8_weight", "int4_weight", "float8")
X = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, 128, dtype=dtype), nn.Linear(128, 32, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def quantized(model: nn.Module, scheme: str = "int8_dynamic", x: Tensor = X, **options: Any) -> Any:
    pass_ = Quantize(scheme=scheme, **{"aim": "size", **options})  # pyright: ignore[reportArgumentType]
    return fxopt.optimize(model, pass_, example_inputs=(x,))


def decisions(model: nn.Module) -> list[tuple[str, str]]:
    return [(decision.status, decision.reason) for decision in fxopt.plan(model).decisions]


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().abs().max() / expected.detach().abs().max())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_layers_are_replaced_in_their_places(scheme: str):
    model = Net().eval()
    fast = quantized(model, scheme)
    assert decisions(fast) == [("applied", "")] * 2
    assert [type(child).__name__ != "Linear" for child in fast.children()] == [True, True]
    assert list(dict(fast.named_children())) == ["up", "down"]
    assert 0 < error(fast(X), model(X)) < 0.2
    assert type(model.up) is nn.Linear


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_layer_computes_with_the_weight_that_its_state_dict_shows(scheme: str):
    fast = quantized(Net().eval(), scheme)
    plain = nn.Linear(64, 128)
    plain.load_state_dict({name[3:]: tensor for name, tensor in fast.state_dict().items() if name.startswith("up.")})
    assert error(fast.up(X), plain(X)) < 0.02  # activations are rounded to 8 bits
    assert torch.equal(fast.up.weight, plain.weight)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoints_go_both_ways_bit_by_bit(scheme: str, dtype: torch.dtype):
    model = Net(dtype).eval()
    x = X.to(dtype)
    fast = quantized(model, scheme, x)
    before = fast(x)
    saved = fast.state_dict()
    assert {name: (t.shape, t.dtype) for name, t in saved.items()} == {
        name: (t.shape, t.dtype) for name, t in model.state_dict().items()
    }
    for state in (saved, model.state_dict()):
        for parameter in fast.buffers():
            parameter.zero_()
        fast.load_state_dict(state)
        assert torch.equal(fast(x), before)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_copies_pickles_and_threads_compute_the_same(scheme: str):
    fast = quantized(Net().eval(), scheme)
    expected = fast(X)
    assert torch.equal(copy.deepcopy(fast)(X), expected)
    assert torch.equal(pickle.loads(pickle.dumps(fast))(X), expected)
    file = io.BytesIO()
    torch.save(fast, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    found: list[Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(loaded(X))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for each in found:  # products of floats are split otherwise where threads are free
        torch.testing.assert_close(each, expected)


def test_restore_gives_floats():
    fast = quantized(Net().eval())
    back = fxopt.restore(fast)
    assert type(back.up) is nn.Linear and error(back(X), fast(X)) < 0.05
    assert isinstance(back.up.weight, nn.Parameter)


def test_training_is_refused_by_name():
    with pytest.raises(ModeError, match="quantize"):
        quantized(Net().eval()).train()


def test_gradients_reach_inputs_and_other_parameters():
    model = Net().eval()
    fast = quantized(model)
    found, expected = (X.clone().requires_grad_() for _ in range(2))
    fast(found).sum().backward()
    model(expected).sum().backward()
    assert error(found.grad, expected.grad) < 0.1  # pyright: ignore[reportArgumentType]
    assert error(fast.up.bias.grad, model.up.bias.grad) < 0.1  # pyright: ignore[reportArgumentType]
    assert [name for name, _ in fast.named_parameters()] == ["up.bias"]


def test_twice_is_once():
    fast = quantized(Net().eval())
    for scheme in ("int8_dynamic", "int4_weight"):
        again = quantized(fast, scheme)
        found = decisions(again)[len(decisions(fast)) :]
        assert [(status, reason.partition(";")[0]) for status, reason in found] == [
            ("refused", "it is quantized already")
        ] * 2
        assert torch.equal(again(X), fast(X))


class Branching(nn.Module):
    """Compute something else in training, so that capturing it looks at both modes."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = Net(), nn.BatchNorm1d(32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.net(x))
        return y.relu() if self.training else y


def test_a_quantized_model_can_be_optimized_again():
    fast = quantized(Branching().eval())
    again = fxopt.optimize(fast, "inference", example_inputs=(X,), measure=False)
    assert torch.equal(again(X), fast(X))
    with pytest.raises(UsageError, match=r"'prune': 'net.up' is quantized already; .* fxopt.restore\(model\)"):
        fxopt.optimize(fast, "prune", example_inputs=(X,))
    with pytest.raises(UsageError, match=r"'qat': 'net.up' is quantized already"):
        fxopt.optimize(fast, "qat", example_inputs=(X,))
    with pytest.raises(ModeError):
        fxopt.optimize(fast, "inference", phase="train", example_inputs=(X,))


def test_an_optimizer_has_nothing_to_move_to():
    model = Net().eval()
    with pytest.raises(UsageError, match=r"'quantize' is for inference: .*; leave optimizer= out"):
        fxopt.optimize(model, "compress", example_inputs=(X,), optimizer=torch.optim.SGD(model.parameters()))


def test_a_model_in_training_is_refused():
    with pytest.raises(UsageError, match=r"in training; call model.eval\(\) first"):
        fxopt.optimize(Net(), "quantize", example_inputs=(X,))
    head = nn.Linear(32, 32)
    fast = quantized(nn.Sequential(Net().eval(), head))
    assert ("applied", "") in decisions(fast) and type(fast[1]) is nn.Linear  # what is frozen is in evaluation


def test_no_rows_and_other_shapes():
    model = Net().eval()
    for scheme in SCHEMES:
        fast = quantized(model, scheme)
        assert fast(X[:0]).shape == (0, 32)
        assert fast(X[0]).shape == (32,)
        assert error(fast(X.view(2, 3, 64)), model(X.view(2, 3, 64))) < 0.2


@pytest.mark.parametrize("keep", ["up", ["up"], nn.Linear, [nn.Linear, "down"], ("u*",)])
def test_layers_are_kept_by_name_and_by_class(keep: Any):
    fast = quantized(Net().eval(), keep=keep)
    assert type(fast.up) is nn.Linear
    assert (type(fast.down) is nn.Linear) is ("Linear" in str(keep))


def test_kept_layers_stay():
    for word in ("down", "do*", "Linear"):
        assert type(quantized(Net().eval(), keep=(word,)).down) is nn.Linear


def test_a_budget_that_does_not_hold_puts_layers_back():
    fast = quantized(Net().eval(), budget=1e-5)
    assert {status for status, _ in decisions(fast)} == {"refused"}
    assert all("more than the budget of 1e-05" in reason for _, reason in decisions(fast))
    assert type(fast.up) is nn.Linear


def test_archives_hold_small_numbers(tmp_path: Path):
    model = nn.Sequential(nn.Linear(256, 256, bias=False)).eval()
    x = torch.randn(4, 256)
    sizes: list[int] = []
    for scheme in ("int8_dynamic", "int4_weight"):
        fast = quantized(model, scheme, x)
        fxopt.save(fast, tmp_path / "model.fxopt", factory="torch.nn:Identity")
        sizes.append((tmp_path / "model.fxopt").stat().st_size)
        loaded = fxopt.load(tmp_path / "model.fxopt", model=model)
        assert torch.equal(loaded(x), fast(x))
        assert type(loaded[0]) is type(fast[0]) or type(loaded[0]).__name__ == type(fast[0]).__name__
    assert sizes[0] < 0.3 * 4 * 256 * 256 and sizes[1] < 0.2 * 4 * 256 * 256


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_kernel_that_is_wrong_is_found_out(scheme: str, monkeypatch: pytest.MonkeyPatch):
    classes: Any = type(quantized(Net().eval(), scheme).up).__mro__
    kind = next(each for each in classes if "kernel" in vars(each))
    right = kind.kernel
    kernel_problem.cache_clear()
    monkeypatch.setattr(kind, "kernel", lambda self, x: right(self, x) * 1.03)
    assert "the kernel for 64 to 128 is off by" in decisions(quantized(Net().eval(), scheme))[0][1]
    kernel_problem.cache_clear()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rows", [1, 130])
def test_a_kernel_that_is_wrong_at_other_rows_is_found_out(scheme: str, rows: int, monkeypatch: pytest.MonkeyPatch):
    classes: Any = type(quantized(Net().eval(), scheme).up).__mro__
    kind = next(each for each in classes if "kernel" in vars(each))
    right = kind.kernel
    kernel_problem.cache_clear()
    monkeypatch.setattr(kind, "kernel", lambda self, x: right(self, x) * (len(x) != rows))
    assert f"with {rows} rows" in decisions(quantized(Net().eval(), scheme))[0][1]
    kernel_problem.cache_clear()


def test_a_wrong_gradient_is_found_out(monkeypatch: pytest.MonkeyPatch):
    product = Tensor.__matmul__
    kernel_problem.cache_clear()
    monkeypatch.setattr(Tensor, "__matmul__", lambda one, other: product(one, other) * 0)  # in the backward alone
    assert "in the gradient of its input" in decisions(quantized(Net().eval()))[0][1]
    kernel_problem.cache_clear()


@pytest.mark.parametrize(("form", "group", "low"), [("int8", 0, -127), ("int8", -1, -127), ("int4", 32, -7)])
def test_scales_are_those_of_torchao(form: str, group: int, low: int):
    primitives: Any = pytest.importorskip("torchao.quantization.quant_primitives")
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    block = {0: (1, 64), -1: (8, 64)}.get(group, (1, group))
    symmetric = primitives.MappingType.SYMMETRIC
    expected, _ = primitives.choose_qparams_affine(weight, symmetric, block, torch.int8, low, -low)
    _, found = quantized_weight(weight, form, group)
    assert torch.allclose(found.float().flatten(), expected.flatten(), rtol=2**-8 if form == "int4" else 1e-6)


class Reader(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(16, 32, **options)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return self.lstm(x)


@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}, {"bias": False, "num_layers": 2}]
)
def test_lstms_are_quantized(options: dict[str, Any]):
    model, x = Reader(**options).eval(), torch.randn(5, 3, 16)
    fast = quantized(model, x=x)
    assert type(fast.lstm).__name__ == "Int8DynamicLSTM"
    with torch.no_grad():
        (output, state), (expected, expected_state) = fast(x), model(x)
        assert 0 < error(output, expected) < 0.05
        assert all(error(one, other) < 0.05 for one, other in zip(state, expected_state, strict=True))
        assert torch.equal(pickle.loads(pickle.dumps(copy.deepcopy(fast)))(x)[0], output)
        saved = fast.state_dict()
        assert list(saved) == list(model.state_dict())
        fast.load_state_dict(saved)
        assert torch.equal(fast(x)[0], output)
        assert error(fast(x[:, 0])[0], model(x[:, 0])[0]) < 0.05
        packed = nn.utils.rnn.pack_padded_sequence(
            x, [3] * 5 if options.get("batch_first") else [5, 4, 2], batch_first=options.get("batch_first", False)
        )
        assert error(fast.lstm(packed)[0].data, model.lstm(packed)[0].data) < 0.05
        assert error(fxopt.restore(fast)(x)[0], expected) < 0.05
    fast(x.requires_grad_())[0].sum().backward()
    assert x.grad is not None and all(parameter.grad is not None for parameter in fast.parameters())
    for dtype in (torch.bfloat16, torch.float64):
        result = fast.to(dtype)(x.detach().to(dtype).requires_grad_())[0]  # with gradients, in floating point
        assert result.dtype is dtype and error(result, model.to(dtype)(x.to(dtype))[0]) < 0.05
        with torch.no_grad():
            assert fast(x.to(dtype))[0].dtype is dtype


def test_a_projected_lstm_is_refused():
    fast = quantized(Reader(proj_size=8).eval(), x=torch.randn(5, 3, 16))
    assert decisions(fast) == [("refused", "its hidden state is projected, for which there is no kernel")]


class Convolving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 32, 3, bias=False), nn.BatchNorm2d(32)
        self.conv2, self.head = nn.Conv2d(32, 32, 3), nn.Linear(32 * 16, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv2(self.norm(self.conv(x)).relu()).relu().flatten(1))


@pytest.mark.parametrize("kind", ["linears", "convolutions"])
@needs_static_int8
def test_compress_makes_a_model_small_whatever_it_is_made_of(kind: str, tmp_path: Path):
    torch.manual_seed(0)
    model, x = (Net(), X) if kind == "linears" else (Convolving(), torch.randn(4, 3, 8, 8))
    expected = model.eval()(x)
    small = fxopt.optimize(model, "compress", example_inputs=(x,), time_budget=60)
    assert error(small(x), expected) < 0.1
    before, after = tmp_path / "before.fxopt", tmp_path / "after.fxopt"
    fxopt.save(fxopt.optimize(model, []), before, factory="torch.nn:Identity")
    fxopt.save(small, after, factory="torch.nn:Identity")
    held = {type(module).__name__ for module in small.modules()}
    assert "WeightOnlyLinear" in held or "Int8WeightLinear" in held, held
    assert ("Conv2d" in held) is False
    assert after.stat().st_size < 0.75 * before.stat().st_size
    assert torch.equal(fxopt.load(after, model=model)(x), small(x))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_under_autocast_and_on_what_is_not_finite(scheme: str):
    fast = quantized(Net().eval(), scheme)
    with torch.no_grad(), torch.autocast("cpu"):
        assert error(fast(X).float(), fast(X.bfloat16()).float()) < 0.1
    with torch.no_grad():
        assert not fast(torch.full_like(X, float("nan"))).isfinite().any()
        assert fast(torch.zeros_like(X)).isfinite().all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_exporters_and_compilers_get_what_the_kernels_compute(scheme: str, tmp_path: Path):
    fast = quantized(Net().eval(), scheme)
    with torch.no_grad():
        expected = fast(X)
        allowed = 1e-5 if scheme in ("int8_dynamic", "float8") else 2**-7  # a step of bfloat16
        exported = torch.export.export(fast, (X,)).module()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            can_trace = scheme != "float8"  # TorchScript cannot read bytes as float8
            traced: Any = [torch.jit.trace(fast, X, check_trace=False)] if can_trace else []
        compiled = torch.compile(fast, backend="eager")
        for found in (exported, compiled, *traced):
            assert error(found(X), expected) < allowed
    path = tmp_path / "model.pt2"
    fxopt.export(fast, path, (X,))
    loaded = fxopt.load(path)
    with torch.no_grad():
        assert error(loaded(X), expected) < allowed and loaded(X[:1]).shape == (1, 32)
    held = torch.export.load(path).state_dict.values()
    assert sum(t.nbytes for t in held) < 0.3 * sum(t.nbytes for t in Net().state_dict().values())


def test_gradients_pass_what_exporters_round():
    fast, x = quantized(Net().eval()), X.clone().requires_grad_()
    torch.compile(fast, backend="eager")(x).sum().backward()
    compiled, x.grad = x.grad, None
    fast(x).sum().backward()
    assert compiled is not None and x.grad is not None and error(compiled, x.grad) < 1e-4


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "int7"}, "scheme='int7'"),
        ({"keep": ("dwn",)}, "keep='dwn' names nothing in the model; did you mean 'down'"),
        ({"budget": -1.0}, "budget=-1.0"),
        ({"group_size": 0}, "group_size=0"),
        ({"scheme": "int4_weight", "group_size": 48}, "group_size=48; the int4 kernel takes 32, 64, 128, 256"),
        ({"aim": "beauty"}, "aim='beauty'"),
        ({"keep": [3]}, "keep has a value of type int; give names of modules, or classes"),
        ({"calibration": [X]}, "calibration= is for scheme=int8_static, and scheme=int8_dynamic does not read it"),
        ({"scheme": "int8_weight", "group_size": 32}, "group_size= is for scheme=int4_weight, and scheme=int8_weight"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str):
    with pytest.raises(UsageError) as caught:
        fxopt.optimize(Net().eval(), Quantize(**options), example_inputs=(X,))
    assert message in str(caught.value)


def test_no_engine_is_a_clear_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.backends.quantized, "engine", "qnnpack")
    with pytest.raises(UsageError, match=r"'qnnpack'; set torch.backends.quantized.engine = "):
        fxopt.optimize(Net().eval(), Quantize(), example_inputs=(X,))


def test_float8_for_speed_is_refused_where_nothing_multiplies_it():
    fast = fxopt.optimize(Net().eval(), Quantize("float8"), example_inputs=(X,))
    reason = "it is on cpu, and float8 is fast on GPUs since Ada and Hopper only; "
    assert decisions(fast) == [("refused", f"{reason}aim=size holds its weight in float8 all the same")] * 2


@pytest.mark.gpu
def test_float8_computes_on_gpus_that_multiply_it():
    model, x = Net().eval().cuda(), X.cuda()
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU multiplies no float8")
    fast = fxopt.optimize(model, Quantize("float8"), example_inputs=(x,), measure=False)
    assert decisions(fast) == [("applied", "")] * 2
    with torch.no_grad():
        assert 0 < error(fast(x), model(x)) < 0.1
        exported = torch.export.export(fast, (x,)).module()
        assert error(exported(x), fast(x)) < 2**-6


def test_a_weight_that_is_not_finite_is_named():
    model = Net().eval()
    model.up.weight.data[0, 0] = float("nan")
    fast = quantized(model)
    assert ("refused", "'up.weight' has elements that are not finite") in decisions(fast)


def test_refusals_name_the_reason():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hooked, self.tied, self.other = (nn.Linear(64, 64) for _ in range(3))
            self.read, self.unused = nn.Linear(64, 64), nn.Linear(64, 64)
            self.hooked.register_forward_hook(lambda *_: None)
            self.other.weight = self.tied.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.other(self.tied(self.hooked(x))) @ self.read.weight + self.read(x)

    reasons = dict.fromkeys(reason for _, reason in decisions(quantized(Odd().eval())))
    assert list(reasons) == [
        "it has hooks, which the layer in its place would not have",
        "its weight is tied to 'other.weight'",
        "its weight is tied to 'tied.weight'",
        "'(root)' reads its weight",
        "the example inputs never call it",
    ]


def test_what_torch_computes_as_one_function_is_refused():
    model = nn.Sequential(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), nn.Linear(64, 32)).eval()
    x = torch.randn(2, 5, 64)
    fast = quantized(model, x=x)
    with torch.no_grad():
        assert 0 < error(fast(x), model(x)) < 0.05
    bypassed = "torch's encoder layer computes with its weights, and does not call it in evaluation"
    one = "torch computes it as one function of its weights, in which no layer can be replaced"
    assert [reason for status, reason in decisions(fast) if status == "refused"] == [bypassed, bypassed, one]


def test_fused_members_are_refused():
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads, self.out = nn.ModuleList(nn.Linear(64, 32) for _ in range(4)), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.stack([head(x) for head in self.heads], 1))

    pipeline = "fuse_ensembles{lowering=bmm},quantize{aim=size}"
    fast = fxopt.optimize(Heads().eval(), pipeline, example_inputs=(X,), measure=False)
    assert type(fast.out).__name__ == "Int8DynamicLinear"
    stacked = "the weights of its members are stacked, and there is no kernel for batched products of small numbers"
    assert ("refused", stacked) in decisions(fast)


@pytest.mark.filterwarnings("ignore")
def test_layers_of_torch_geometric_are_named():
    geometric: Any = pytest.importorskip("torch_geometric.nn")
    given = {"x": torch.randn(6, 16), "edge_index": torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]])}
    fast = fxopt.optimize(geometric.GCN(16, 32, 2, 8).eval(), "quantize", example_inputs=given, measure=False)
    reasons = {each.label: each.reason for each in fxopt.plan(fast).decisions}
    assert reasons.keys() == {"convs.0.lin", "convs.1.lin"}
    assert all("it is a Linear of torch_geometric" in reason for reason in reasons.values())


def test_float64_is_refused():
    fast = quantized(Net(torch.float64).eval(), x=X.double())
    assert all("convert it to float32" in reason for _, reason in decisions(fast))


def test_it_is_not_sharded_afterwards():
    for pipeline in ("quantize,fsdp", "fsdp,quantize"):
        with pytest.raises(OrderError, match="cannot be split over processes"):
            fxopt.optimize(Net().eval(), pipeline, example_inputs=(X,))


OPTIONS = st.tuples(
    st.sampled_from(SCHEMES),
    st.lists(st.sampled_from(["down", "up", "*"]), max_size=2).map(tuple),
    st.one_of(st.none(), st.floats(1e-3, 1)),
    st.booleans(),
    st.sampled_from([32, 64]),
    st.sampled_from(["speed", "size"]),
)


@given(OPTIONS)
def test_options_are_read_as_they_are_written(options: tuple[Any, ...]):
    wanted = Quantize(*options)
    assert parse(str(wanted)) == (wanted,)
    assert "calibration" not in str(Quantize(calibration=[X]))


def test_a_cpu_without_vnni_is_named_where_layers_are_quantized_all_the_same(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fxopt.transforms.quantize.layerwise.needs_reduced_range", lambda: True)
    fast = quantized(Net().eval(), "int8_dynamic")
    assert "this CPU has no VNNI: activations have 7 bits" in str(fxopt.report(fast).to_json())
