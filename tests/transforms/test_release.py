"""release: packed weights are held once, calls compute as before, and what wants the numbers says what to do."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

import fxopt
from fxopt.compat.packed import why_no_packing
from fxopt.errors import FxoptError, StateError
from fxopt.runtime.record import Plan

ROWS = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
pytestmark = pytest.mark.skipif(bool(why_no_packing(torch.float32)), reason=why_no_packing(torch.float32))
needs_bfloat16 = pytest.mark.skipif(bool(why_no_packing(torch.bfloat16)), reason=why_no_packing(torch.bfloat16))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).eval()


def released(model: nn.Module, x: Tensor = ROWS, before: str = "pack") -> Any:
    return fxopt.optimize(model, f"{before},release", example_inputs=x, measure=False)


def reasons(model: nn.Module) -> list[str]:
    return [each.reason for each in fxopt.plan(model).decisions if each.pass_name == "release"]


def in_memory() -> int:
    """Return the bytes of all tensors of this process that lie on the CPU, packed ones left out."""
    gc.collect()
    tensors = (each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter))
    own = (each for each in tensors if not is_functorch_wrapped_tensor(each))
    plain = (each for each in own if each.layout is torch.strided)
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in plain if t.is_cpu}.values())


BEFORE = ["pack", "inference", pytest.param("pack{dtype=bfloat16}", marks=needs_bfloat16)]


@pytest.mark.parametrize("before", BEFORE)
def test_calls_compute_as_before(before: str) -> None:
    model, packed = mlp(), fxopt.optimize(mlp(), before, example_inputs=ROWS, measure=False)
    fast = released(model, before=before)
    assert reasons(fast) == [""]
    for rows in (ROWS, ROWS[:7], torch.randn(2, 3, 64)):
        with torch.no_grad():
            expected = packed(rows)
        assert torch.equal(fast(rows), expected)  # in grad mode, too: nothing of it can be trained
    assert [tuple(p.shape) for p in fast.parameters()] == [tuple(p.shape) for p in model.parameters()]
    assert sum(p.numel() for p in fast.parameters()) == sum(p.numel() for p in model.parameters())


def test_memory_of_the_weights_is_free_and_the_users_model_is_untouched() -> None:
    model, weights = mlp(), 4 * 2 * 64 * 256
    packed = fxopt.optimize(model, "pack", example_inputs=ROWS, measure=False)
    with_both = in_memory()
    del packed
    fast = released(model)
    assert with_both - in_memory() >= weights
    assert not model[0].weight.is_meta and fast[0].weight.is_meta and not fast[0].bias.is_meta
    with torch.no_grad():
        torch.testing.assert_close(fast(ROWS), model(ROWS))


def saved(model: nn.Module) -> None:
    fxopt.save(model, "unwritten.fxopt", factory=f"{__name__}:mlp")


def with_gradients(model: nn.Module) -> None:
    model(ROWS.clone().requires_grad_())


def under_autocast(model: nn.Module) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        model(ROWS)


WANT_NUMBERS: dict[str, Callable[[Any], object]] = {
    "state dict": lambda m: m.state_dict(),
    "state dict of a layer": lambda m: m[0].state_dict(),
    "fxopt.state_dict": fxopt.state_dict,
    "copy": copy.deepcopy,
    "pickle": pickle.dumps,
    "restore": fxopt.restore,
    "save": saved,
    "gradients": with_gradients,
    "autocast": under_autocast,
    "half": lambda m: m.half(),
    "to": lambda m: m.to(torch.float64),
    "data": lambda m: m[0].weight.data.sum(),
    "sum": lambda m: m[0].weight.sum(),
    "forward of a layer": lambda m: m[0](ROWS),
    "export": lambda m: torch.export.export(m, (ROWS,)),
}


@pytest.mark.parametrize("case", WANT_NUMBERS)
def test_what_wants_the_numbers_says_what_to_do(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fast = released(mlp())
    expected = fast(ROWS)
    with pytest.raises(StateError, match=r"'0.weight' was released .* load the checkpoint into a fresh model"):
        WANT_NUMBERS[case](fast)
    assert torch.equal(fast.eval()(ROWS), expected)


@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.share_memory, lambda m: m.to("meta")])
def test_a_conversion_that_is_refused_has_converted_nothing(convert: Callable[[nn.Module], object]) -> None:
    fast = released(nn.Sequential(nn.LayerNorm(64), mlp()).eval())
    expected = fast(ROWS)
    for part in (fast, fast[1]):
        with pytest.raises(StateError, match=r"'1.0.weight' was released"):
            convert(part)
    assert {each.dtype for each in fast.parameters()} == {torch.float32}
    assert torch.equal(fast(ROWS), expected) and torch.equal(fast.float().to("cpu")(ROWS), expected)


def test_the_compiler_says_so_in_an_error_of_its_own() -> None:
    fast = released(mlp())
    with pytest.raises(RuntimeError, match=r"'0.weight' was released .* load the checkpoint into a fresh model"):
        torch.compile(fast, backend="eager")(ROWS)
    assert fast(ROWS).shape == ROWS.shape


def test_the_original_forward_says_so_too() -> None:
    fast = released(nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.5), nn.Linear(256, 8)).eval(), before="inference")
    expected = fast(ROWS)
    with pytest.raises(StateError, match=r"'0.weight' was released"):
        fast.train()(ROWS)
    assert torch.equal(fast.eval()(ROWS), expected)


def test_another_optimization_is_refused() -> None:
    with pytest.raises(FxoptError, match=r"'release', which comes last.* as it was before$"):
        fxopt.optimize(released(mlp()), "pack", example_inputs=ROWS)


def test_checkpoints_assigned_bring_the_weights_back() -> None:
    other = mlp()
    nn.init.normal_(other[0].weight)
    fast = released(mlp())
    fast.load_state_dict(other.state_dict(), assign=True)
    with torch.no_grad():
        torch.testing.assert_close(fast(ROWS), other(ROWS))
    assert list(fast.state_dict()) == list(other.state_dict())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(128, 64), nn.Linear(64, 64), nn.Linear(64, 128, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(self.embedding(x))))


def test_tied_weights_and_those_of_folded_norms_stay() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 128, (4, 16))
    fast = released(Tied().eval(), tokens)
    assert fast.body.weight.is_meta and not fast.head.weight.is_meta
    assert "it is tied to 'embedding.weight', and stays" in reasons(fast)
    images, convolutions = torch.randn(2, 8, 9, 9), nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16))
    model = nn.Sequential(convolutions, nn.ReLU(), nn.Conv2d(16, 8, 3)).eval()
    fast = released(model, images, "inference")
    assert fast[2].weight.is_meta and not fast[0][0].weight.is_meta
    with torch.no_grad():
        torch.testing.assert_close(fast(images), model(images))


class ReadTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight) + self.weight.mean()


def test_a_weight_that_something_else_reads_stays() -> None:
    model = ReadTwice().eval()
    fast = released(model)
    assert reasons(fast) == ["'mean' reads it, too, and it stays"] and not fast.weight.is_meta
    with torch.no_grad():
        torch.testing.assert_close(fast(ROWS), model(ROWS))


def test_a_transposed_weight_stays() -> None:
    plan = fxopt.plan(fxopt.optimize(mlp(), "pack", example_inputs=ROWS[:1], measure=False)).to_json()
    plan["decisions"][0]["site"]["data"]["transposed"] = ["layer.0"]
    packed = fxopt.optimize(mlp(), plan=Plan.from_json(plan), example_inputs=ROWS[:1])
    fast = fxopt.optimize(packed, "release", example_inputs=ROWS[:1], measure=False)
    assert "a TransposedLinear holds it in another form, and it stays" in reasons(fast)
    assert not fast[0].weight.is_meta and fast[2].weight.is_meta


NOTHING_PACKED = "nothing is packed: 'pack' is not listed before it, or found no layer that gains"
FOLDED = "1 packed weight made of several tensors (a norm is folded in): all of these stay"


@pytest.mark.parametrize(
    ("model", "passes", "reason"),
    [
        (nn.ReLU(), "release", NOTHING_PACKED),
        (nn.ReLU(), "pack,release", NOTHING_PACKED),
        (nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16)), "fold_batchnorm,pack,release", FOLDED),
    ],
)
def test_where_nothing_is_released_it_says_why(model: nn.Module, passes: str, reason: str) -> None:
    fast = fxopt.optimize(model.eval(), passes, example_inputs=torch.randn(2, 8, 9, 9), measure=False)
    assert reasons(fast) == [reason]


def test_half_a_checkpoint_is_never_loaded() -> None:
    fast, other = released(mlp()), mlp()
    nn.init.ones_(other[0].bias)
    before = [bias.clone() for bias in (fast[0].bias, fast[2].bias)]
    for part, state in ((fast, other.state_dict()), (fast[0], other[0].state_dict())):
        with pytest.raises(StateError, match=r"'0.weight' was released .* assign=True"):
            part.load_state_dict(state)
    assert all(map(torch.equal, before, (fast[0].bias, fast[2].bias)))
    fast.load_state_dict({"0.bias": other[0].bias}, strict=False)  # no number of a released weight is in it
    assert torch.equal(fast[0].bias, other[0].bias)


def test_graphs_that_nothing_calls_any_more_read_nothing() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1, n_embd=32, n_head=2, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    tokens = torch.randint(0, 64, (4, 16))
    fast = released(model, tokens)
    assert reasons(fast)[0].startswith("it is tied to 'transformer.wte.weight'")
    assert sum(parameter.is_meta for parameter in fast.parameters()) == 4
    with torch.no_grad():
        torch.testing.assert_close(fast(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize(("count", "said"), [(1, "1 weight, 64 KiB freed"), (2, "2 weights, 128 KiB freed")])
def test_the_report_says_what_is_freed(count: int, said: str) -> None:
    layers = (nn.Linear(64, 256), nn.Linear(256, 64))[:count]
    report = str(fxopt.report(released(nn.Sequential(*layers).eval())))
    row = next(line for line in report.splitlines() if line.startswith("| release"))
    assert f"{said}; state_dict() and copies raise from now on" in row and "outputs are as before" in row
    assert "unverified" not in row


def test_moves_that_change_nothing_do_nothing_and_weights_print() -> None:
    fast = released(mlp())
    expected = fast(ROWS)
    for moved in (fast.to("cpu"), fast.cpu(), fast.float(), fast.to(torch.float32)):
        assert torch.equal(moved(ROWS), expected)
    printed = "tensor(..., device='meta', size=(256, 64))"
    assert printed in repr(fast[0].weight) and printed in f"{fast[0].weight}"


@pytest.mark.parametrize(
    ("wants", "named"),
    [
        (lambda m: m.state_dict(), "'state_dict'"),
        (lambda m: m.state_dict(keep_vars=True), "'state_dict'"),
        (copy.deepcopy, "a copy"),
        (pickle.dumps, "a pickle"),
        (lambda m: m[0].weight.data, "'.data'"),
        (lambda m: m.half(), "'half'"),
        (with_gradients, "'linear'"),
        (lambda m: ROWS.to(m[0].weight), "'to'"),
    ],
)
def test_messages_name_what_the_user_did(wants: Callable[[Any], object], named: str) -> None:
    with pytest.raises(StateError, match=f"'0.weight' was released after it was packed, and {named}"):
        wants(released(mlp()))


def test_empty_batches_give_empty_results() -> None:
    fast, images = released(mlp()), torch.randn(2, 8, 9, 9)
    assert fast(ROWS[:0]).shape == (0, 64) and fast(ROWS[:0]).is_cpu
    convolutions = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1)).eval()
    assert released(convolutions, images)(images[:0]).shape == (0, 8, 7, 7)


class LearnedQueries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.ones(32, 64))
        self.of_queries, self.of_rows = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.of_queries(self.queries) + self.of_rows(x)


def test_layers_of_parameters_compute_as_torch_does_and_stay() -> None:
    fast = released(LearnedQueries().eval())
    assert fast.of_rows.weight.is_meta and not fast.of_queries.weight.is_meta
    assert any("computes it of a parameter" in reason for reason in reasons(fast))


def test_a_packed_buffer_stays():
    class Projected(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("projection", torch.randn(64, 64))

        def forward(self, x):
            return torch.nn.functional.linear(x, self.projection).relu()

    x, model = torch.randn(8, 64), Projected().eval()
    fast = fxopt.optimize(model, "pack,release", example_inputs=(x,), measure=False)
    torch.testing.assert_close(fast(x), model(x))
    reasons = [each.reason for each in fxopt.plan(fast).decisions if each.pass_name == "release"]
    assert reasons == ["it is a buffer, and stays"]
