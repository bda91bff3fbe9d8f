"""delegate: what engines compute, what stays a call between regions, and what stays as it was."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.engines import X, delegated, engines, linears, one_engine, openvino_only, reasons, regions, same
from torch import Tensor, nn

import fxopt
from fxopt.errors import EngineWarning, StateError
from fxopt.storage import byte_text
from fxopt.transforms.delegate.delegate import Engine, engine_named


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.Hardswish(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip
    model(torch.randn(8, 3, 10, 10))  # statistics that are none of the first ones
    return model.eval()


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32,
    )  # fmt: skip
    return transformers.BertModel(config).eval()


def vit() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=4
    )
    return transformers.ViTModel(config).eval()


def ids(*size: int) -> Tensor:
    return torch.randint(0, 50, size, generator=torch.Generator().manual_seed(0))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "convolutional": (convolutional, torch.randn, [(2, 3, 10, 10), (1, 3, 10, 10), (3, 3, 12, 9)]),
    "bert": (bert, ids, [(2, 7), (1, 7), (3, 11)]),
    "vit": (vit, torch.randn, [(2, 3, 16, 16), (3, 3, 16, 16)]),
}


def test_without_example_inputs_nothing_is_handed_over() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
    with pytest.warns(fxopt.NothingDoneWarning, match="no example_inputs"):
        fast = fxopt.optimize(model, "delegate")
    assert not regions(fast)
    fast = fxopt.optimize(model, "inference{engine=auto}", verify=False)
    assert any(each.pass_name == "delegate" for each in fxopt.plan(fast).decisions)


# -- results ---------------------------------------------------------------------------------------------------------


@engines
def test_detach_is_no_determinant(engine: str) -> None:
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).relu().detach())

    model = Detached().eval()
    fast = delegated(model, engine)
    assert len(regions(fast)) == 1
    same(fast, model)


@one_engine
def test_a_region_needs_no_tensors_of_the_model(engine: str, computed: list[str]) -> None:
    class Products(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x @ x.transpose(0, 1)).relu() @ x

    model = Products().eval()
    fast = delegated(model, engine)
    same(fast, model)
    computed.clear()
    same(fast, model)
    assert computed == [engine]


@engines
@pytest.mark.parametrize("kind", MODELS)
def test_an_engine_computes_whole_models_of_any_batch_and_length(kind: str, engine: str, computed: list[str]) -> None:
    make, draw, sizes = MODELS[kind]
    model = make()
    fast = delegated(model, engine, draw(*sizes[0]))
    assert len(regions(fast)) == 1
    for size in sizes:
        x = draw(*size)
        same(fast, model, x)
        computed.clear()
        same(fast, model, x)
        assert computed == [engine]
    before, after = model.state_dict(), fast.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


@one_engine
def test_gradients_training_and_float64_are_the_models_own(engine: str, computed: list[str]) -> None:
    model = convolutional()
    x = torch.randn(2, 3, 10, 10)
    fast = delegated(model, engine, x)
    computed.clear()
    for each in (model, fast):
        each(x).square().mean().backward()
    for one, other in zip(fast.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    same(copy.deepcopy(fast).double(), copy.deepcopy(model).double(), x.double())
    same(fast.train(), model.train(), x)
    assert not computed
    same(fast.eval(), model.eval(), x)  # batch norms counted


@one_engine
def test_parameters_are_the_models_own_at_each_call(engine: str) -> None:
    model = linears()
    fast = delegated(model, engine)
    same(fast, model)
    for each in (model, fast):
        with torch.no_grad():
            each[0].weight.mul_(2)
        each[2].bias = nn.Parameter(torch.ones(8))
    same(fast, model)
    other = linears()
    nn.init.ones_(other[0].weight)
    fast.load_state_dict(other.state_dict())
    same(fast, other)


# -- mixed models ----------------------------------------------------------------------------------------------------


class Called(nn.Linear):
    def __call__(self, *args: object, **kwargs: object) -> Tensor:
        return super().__call__(*args, **kwargs) + 1


def hooked() -> nn.Module:
    layer = nn.Linear(8, 8)
    layer.register_forward_hook(lambda module, args, result: result * 2)
    return layer


@one_engine
@pytest.mark.parametrize(
    ("make", "reason"), [(hooked, "it has hooks"), (lambda: Called(8, 8), "it has a __call__ of its own")]
)
def test_what_must_stay_a_call_stays_between_regions(
    make: Callable[[], nn.Module], reason: str, engine: str, computed: list[str]
) -> None:
    model = linears(make())
    fast = delegated(model, engine)
    assert len(regions(fast)) == 2
    assert [node.target for node in fxopt.graphs(fast)[""].find_nodes(op="call_module")] == ["3"]
    assert reasons(fast) == {"3": reason}
    assert "(root): 5 operations in 2 regions" in str(fxopt.report(fast))
    for rows in (4, 1, 7):
        x = torch.randn(rows, 8)
        same(fast, model, x)
        computed.clear()
        same(fast, model, x)
        assert computed == [engine] * 2


@one_engine
def test_dropout_that_is_on_in_evaluation_stays_outside(engine: str) -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x, 0.5, training=True)

    model = linears(Noisy())
    fast = delegated(model, engine)
    assert len(regions(fast)) == 2
    results = list[Tensor]()
    for each in (model, fast):
        torch.manual_seed(1)
        with torch.no_grad():
            results.append(each(X))
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)


# -- plans, copies, restore ------------------------------------------------------------------------------------------


@one_engine
def test_a_plan_repeats_it(engine: str, computed: list[str]) -> None:
    model = linears(hooked())
    fast = delegated(model, engine)
    again = fxopt.optimize(model, plan=fxopt.plan(fast), example_inputs=X)
    assert len(regions(again)) == 2
    computed.clear()
    same(again, model)
    assert set(computed) == {engine}


@one_engine
@pytest.mark.parametrize("passes", ["delegate{{engine={}}}", "delegate"])
@pytest.mark.parametrize("how", ["plan", "archive", "pickle"])
def test_what_was_saved_computes_without_its_engine_and_by_it_once_it_is_there(
    how: str, passes: str, engine: str, tmp_path: Path, computed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, archive = linears(Called(8, 8)), tmp_path / "model.fxopt"
    fast = fxopt.optimize(model, passes.format(engine), example_inputs=X, measure=False)
    fxopt.save(fast, archive)
    pickled = pickle.dumps(fast)
    loads: dict[str, Callable[[], nn.Module]] = {
        "plan": lambda: fxopt.optimize(model, plan=fxopt.plan(fast), example_inputs=X),
        "archive": lambda: fxopt.load(archive, model=linears(Called(8, 8))),
        "pickle": lambda: pickle.loads(pickled),
    }
    computed.clear()
    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        patch.setattr(Engine, "reason_against", lambda self, dtype: "it is not there")
        loaded = loads[how]()
        same(loaded, model)
        same(loaded, model)
    told = [str(each.message) for each in warned if issubclass(each.category, EngineWarning)]
    assert not computed
    assert len(told) == 1
    assert "it is not there" in told[0]
    fxopt.refresh(loaded)
    same(loaded, model)
    computed.clear()
    same(loaded, model)
    assert len(computed) == len(regions(loaded)) == 2


@one_engine
def test_nothing_that_is_saved_names_the_version_of_an_engine(engine: str, tmp_path: Path) -> None:
    fast, archive = delegated(linears(), engine), tmp_path / "model.fxopt"
    fxopt.save(fast, archive)
    with zipfile.ZipFile(archive) as opened:
        saved = [opened.read(name) for name in opened.namelist()]
    version = engine_named(engine).version.encode()
    assert not [each for each in (*saved, pickle.dumps(fast)) if engine.encode() in each and version in each]


@one_engine
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "archive"])
def test_copies_stand_by_themselves(how: str, engine: str, tmp_path: Path, computed: list[str]) -> None:
    model = linears()
    fast = delegated(model, engine)
    if how == "archive":
        fxopt.save(fast, tmp_path / "model.fxopt")
        copied = fxopt.load(tmp_path / "model.fxopt", model=linears())
    else:
        copied = copy.deepcopy(fast) if how == "deepcopy" else pickle.loads(pickle.dumps(fast))
    same(copied, model)
    computed.clear()
    same(copied, model)
    assert computed == [engine]
    with torch.no_grad():
        copied[0].weight.zero_()
        assert not torch.allclose(copied(X), model(X))
    same(fast, model)


@one_engine
def test_restore_gives_the_model_back(engine: str, computed: list[str]) -> None:
    model = linears()
    restored = fxopt.restore(delegated(model, engine))
    assert type(restored) is nn.Sequential
    computed.clear()
    with torch.no_grad():
        assert torch.equal(restored(X), model(X))
    assert not computed


# -- release ---------------------------------------------------------------------------------------------------------


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 4096), nn.ReLU(), nn.Linear(4096, 8)).eval()


def released(engine: str) -> nn.Module:
    return fxopt.optimize(wide(), f"delegate{{engine={engine}}},release", example_inputs=X, measure=False)


def are_in_files(model: nn.Module) -> list[bool]:
    """Say of each parameter whether it lies in a file that is mapped into memory."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()]
    files = [[int(end, 16) for end in line[0].split("-")] for line in lines if "/fxopt-" in line[-2] + line[-1]]
    return [any(low <= each.data_ptr() < high for low, high in files) for each in model.parameters()]


@engines
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_released_parameters_lie_in_files_and_everything_computes_as_before(engine: str, computed: list[str]) -> None:
    model, fast = wide(), released(engine)
    assert "2 weights, 256 KiB, that engines hold, moved to files" in str(fxopt.report(fast))
    size = byte_text(sum(each.nbytes for each in model.parameters()))
    holds = f"{engine} holds about {size} more, made of the model's parameters and buffers"
    assert holds in fxopt.report(fast).to_json()["messages"]
    assert are_in_files(fast) == [True, False, True, False]
    assert not any(each.requires_grad for each in fast.parameters())
    computed.clear()
    same(fast, model)
    assert computed == [engine]  # nothing was converted or compared anew
    for rows in (1, 7):  # other sizes, gradients and other types still compute by the model's own operations
        x = torch.randn(rows, 8)
        same(fast, model, x)
    x = X.clone().requires_grad_()
    fast(x).sum().backward()
    assert x.grad is not None
    for copied in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)), fxopt.restore(fast)):
        assert not any(are_in_files(copied)) or type(copied) is nn.Sequential
        same(copied, model)
    for name, value in fast.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])
    with torch.no_grad():
        fast[0].weight.mul_(2)
        model[0].weight.mul_(2)
    same(fast, model)
    fast.load_state_dict(wide().state_dict())
    same(fast, wide())
    same(fast.double(), wide().double(), X.double())


@engines
def test_a_released_model_is_exported_with_its_weights(engine: str, tmp_path: Path) -> None:
    model, fast = wide(), released(engine)
    expected = model(X)
    torch.testing.assert_close(torch.export.export(fast, (X,)).module()(X), expected, atol=1e-5, rtol=1e-4)
    fxopt.export(fast, tmp_path / "wide.pt2", (X,))
    torch.testing.assert_close(torch.export.load(tmp_path / "wide.pt2").module()(X), expected, atol=1e-5, rtol=1e-4)
    fxopt.export(fast, tmp_path / "wide.onnx", (X,))
    session = pytest.importorskip("onnxruntime").InferenceSession(tmp_path / "wide.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: X.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), expected, atol=1e-5, rtol=1e-4)


@one_engine
def test_a_full_disk_is_told_of(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(StateError, match=r"No space left on device\): set TMPDIR"):
        released(engine)


@one_engine
def test_tied_weights_stay_tied_in_files(engine: str) -> None:
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(3)]).eval()
    model[1].weight = model[0].weight
    x = torch.randn(4, 256)
    fast = fxopt.optimize(model, f"delegate{{engine={engine}}},release", example_inputs=x, measure=False)
    assert are_in_files(fast) == [True, False, False, True, False]
    assert fast[0].weight is fast[1].weight
    same(fast, model, x)


@openvino_only
@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="needs signals")
def test_signals_are_handled_though_engines_go_in_another_order_than_they_came(engine: str) -> None:
    """Each core of OpenVINO changes the stack on which signals are handled; in a process of its own: it may crash."""
    code = (
        "import gc, os, signal, fxopt; from support.engines import X, delegated, linears\n"
        f"held = [delegated(linears(), {engine!r}) for _ in range(3)]\n"
        "for _ in range(3):\n"
        "    held.pop(0); gc.collect()\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('handled'))\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
    )
    folders = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "handled"), done.stderr


def test_a_cache_that_notes_what_it_was_given_stays_right() -> None:
    """A T5 says in its cache which layers were updated; a store into a dictionary computes no number."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=50, decoder_start_token_id=0
    )
    model, x = transformers.T5ForConditionalGeneration(config).eval(), ids(2, 6)
    given = {"input_ids": x, "decoder_input_ids": x[:, :3]}
    fast = fxopt.optimize(model, "delegate{engine=onnxruntime}", example_inputs=given, measure=False)
    assert "applied" in {each.status for each in fxopt.plan(fast).decisions}
    with torch.no_grad():
        found, expected = fast(**given), model(**given)
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-5, rtol=1e-4)
    assert found.past_key_values.is_updated == expected.past_key_values.is_updated


@one_engine
def test_a_cache_of_fixed_length_is_not_filled_while_regions_are_looked_for(engine: str) -> None:
    """Each run of a graph with such a cache takes a place in it; those that use the call next need the places, too."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=32, pad_token_id=0)
    model, x, static = transformers.GPT2LMHeadModel(config).eval(), ids(1, 6) + 1, {"cache_implementation": "static"}
    made = fxopt.Inputs.generating(x, max_new_tokens=4, **static)
    fast = fxopt.optimize(model, f"delegate{{engine={engine}}}", example_inputs=made, measure=False)
    assert "applied" in {each.status for each in fxopt.plan(fast).decisions}
    kwargs = {"max_new_tokens": 8, "do_sample": False, **static}
    assert torch.equal(fast.generate(x, **kwargs), model.generate(x, **kwargs))


@one_engine
def test_sizes_that_do_not_come_again_are_not_computed_twice(engine: str) -> None:
    """As graphs of other numbers of nodes: each would be compared, and the engine would gain nothing for it."""
    model = linears()
    fast = delegated(model, engine)
    (held,) = regions(fast)[0]._converted.values()
    with torch.no_grad():
        for length in range(10, 40):
            same(fast, model, torch.randn(length, 8))
        compared = len(held.by_shapes)
        assert compared < 15
        for _ in range(2):  # the second call of a size is compared, and the third finds the session
            same(fast, model, torch.randn(39, 8))
        assert len(held.by_shapes) == compared + 1
        for length in range(10, 15):
            same(fast, model, torch.randn(length, 8))  # these do come again, so new ones are compared at once
        same(fast, model, torch.randn(60, 8))
    assert len(held.by_shapes) == compared + 2


def test_examples_with_padding_and_without() -> None:
    """The graph for a call without padding asks for its numbers, and is none for a padded one."""
    model, x = bert(), ids(2, 8)
    mask = torch.ones_like(x)
    mask[0, 5:] = 0
    plain, padded = {"input_ids": x, "attention_mask": torch.ones_like(x)}, {"input_ids": x, "attention_mask": mask}
    fast = fxopt.optimize(model, "inference{engine=none}", example_inputs=[plain, padded], measure=False)
    for given in (plain, padded):
        with torch.no_grad():
            found, expected = fast(**given), model(**given)
        torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-4)
