"""Models of transformers are written out whole; a call of another shape still gives the right result."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.compat import has_hooks

transformers = pytest.importorskip("transformers")


def written_out(model: nn.Module, x: object) -> nn.Module:
    fast = fxopt.optimize(model, "flatten_calls", example_inputs=x, measure=False)  # type: ignore[arg-type]
    assert not fxopt.graphs(fast)[""].find_nodes(op="call_module")
    assert [each.status for each in fxopt.plan(fast).decisions] == ["applied"]
    return fast


def same(fast: nn.Module, model: nn.Module, *args: Any, **kwargs: Any) -> None:
    with torch.no_grad():
        found, expected = fast(*args, **kwargs), model(*args, **kwargs)
    assert type(found) is type(expected)
    assert list(found) == list(expected)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])


def ids(*size: int) -> Tensor:
    return torch.randint(0, 50, size, generator=torch.Generator().manual_seed(0))


def bert() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32,
    )  # fmt: skip
    return transformers.BertModel(config).eval()


def test_a_bert_with_its_attentions() -> None:
    model = bert()
    fast = written_out(model, ids(2, 7))
    for size in ((2, 7), (1, 7), (3, 11), (2, 1)):
        same(fast, model, ids(*size))
    same(fast, model, ids(2, 7), attention_mask=torch.ones(2, 7, dtype=torch.int64).tril())
    same(fast, model, ids(2, 7), output_hidden_states=True)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Return a list that grows by each module that is called."""
    found, call = list[nn.Module](), nn.Module._call_impl

    def noted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found.append(module)
        return call(module, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "_call_impl", noted)
    return found


@pytest.mark.parametrize("before", [True, False])
def test_hooks_that_a_call_for_hidden_states_leaves_cost_nothing(before: bool, called: list[nn.Module]) -> None:
    model = bert()
    if before:
        model(ids(2, 7), output_hidden_states=True)
    fast = written_out(model, ids(2, 7))
    same(fast, model, ids(2, 7), output_hidden_states=True)
    layers = cast("Any", fast).encoder.layer
    assert all(map(has_hooks, layers))
    for size in ((2, 7), (1, 5)):
        called.clear()
        same(fast, model, ids(*size))
        assert not set(layers) & set(called)
    same(fast, model, ids(2, 7), output_hidden_states=True)


def test_a_hook_of_ones_own_beside_them_runs() -> None:
    model, seen = bert(), list[nn.Module]()
    model(ids(2, 7), output_hidden_states=True)
    fast = written_out(model, ids(2, 7))
    layer = cast("Any", fast).encoder.layer[1]
    layer.register_forward_hook(lambda module, *_: seen.append(module))
    same(fast, model, ids(2, 7))
    assert seen == [layer]


def test_a_mobilenet_that_pads_by_sizes() -> None:
    torch.manual_seed(0)
    config = transformers.MobileNetV2Config(
        image_size=32, depth_multiplier=0.25, min_depth=8, depth_divisible_by=8, num_labels=3
    )
    model = transformers.MobileNetV2ForImageClassification(config).eval()
    fast = written_out(model, torch.randn(2, 3, 32, 32))
    for size in ((2, 3, 32, 32), (1, 3, 32, 32), (2, 3, 33, 31), (1, 3, 48, 40)):
        same(fast, model, torch.randn(size))
