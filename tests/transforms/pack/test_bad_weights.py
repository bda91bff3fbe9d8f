"""pack on weights, machines and changes that it cannot take: refused by name, or right."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.compat import packed
from fxopt.compat.packed import why_no_packing
from fxopt.errors import InputError
from fxopt.transforms.pack import Pack

pytestmark = pytest.mark.skipif(bool(why_no_packing(torch.float32)), reason=why_no_packing(torch.float32))

IMAGES = torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


def convolution() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(8, 4, 3), nn.ReLU()).eval()


def linear() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 4), nn.ReLU()).eval()


def decided(model: nn.Module, x: Tensor, pass_: Pack | None = None) -> list[str]:
    """Return why layers stay as they are."""
    fast = fxopt.optimize(model, pass_ or Pack(), example_inputs=x, measure=False)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    return [decision.reason for decision in fxopt.plan(fast).decisions]


def test_a_cpu_without_bfloat16_is_refused_and_told_that_it_would_be_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    class Without:
        def __getattr__(self, name: str) -> object:
            return (lambda: False) if name == "_is_mkldnn_bf16_supported" else object()

    monkeypatch.setattr(packed, "_OPERATORS", Without())
    monkeypatch.setattr("fxopt.transforms.pack.pack.why_no_packing", why_no_packing.__wrapped__)
    (reason,) = decided(convolution(), IMAGES, Pack(torch.bfloat16))
    assert "no instructions for bfloat16" in reason and "slower" in reason


@pytest.mark.parametrize(("build", "x"), [(convolution, IMAGES), (linear, ROWS)])
def test_of_weights_made_in_inference_mode_plain_copies_are_packed(
    build: Callable[[], nn.Sequential], x: Tensor
) -> None:
    with torch.inference_mode():
        model = build()
    fast = fxopt.optimize(model, "pack", example_inputs=x, measure=False)
    assert not any(parameter.is_inference() for parameter in fast.parameters())
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
        fast[0].weight.mul_(2), fast[0].bias.mul_(2)  # type: ignore[index, union-attr, operator]
        torch.testing.assert_close(fast(x), model(x) * 2)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_sparse_weights_are_refused() -> None:
    model = linear()
    model[0].weight = nn.Parameter(model[0].weight.detach().to_sparse_csr(), requires_grad=False)
    model[0].bias = None
    with pytest.raises(InputError, match="the model cannot be copied"):  # torch copies no such parameters
        fxopt.optimize(model, "pack", example_inputs=ROWS)


def test_quantized_weights_are_refused() -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = linear()
    quantize_(model, Int8WeightOnlyConfig())
    (reason,) = decided(model, ROWS)
    assert "no plain tensor" in reason


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_convolutions_of_another_type_after_packing_compute_as_torch_does(dtype: torch.dtype) -> None:
    model = convolution()
    fast = fxopt.optimize(model, "pack", example_inputs=IMAGES, measure=False)
    with torch.no_grad():
        torch.testing.assert_close(fast(IMAGES), model(IMAGES))
        assert torch.equal(fast.to(dtype)(IMAGES.to(dtype)), model.to(dtype)(IMAGES.to(dtype)))
        torch.testing.assert_close(fast.float()(IMAGES), model.float()(IMAGES))


def test_threads_see_old_or_new_convolutions_and_nothing_else() -> None:
    model = convolution()
    fast = fxopt.optimize(model, "pack", example_inputs=IMAGES, measure=False)
    results: list[Tensor] = []

    def call() -> None:
        with torch.no_grad():
            results.extend(fast(IMAGES) for _ in range(30))

    thread = threading.Thread(target=call)
    with torch.no_grad():
        old = model(IMAGES)
        thread.start()
        fast[0].weight.copy_(model[0].weight * 2)  # type: ignore[index, operator, union-attr]
        thread.join()
        model[0].weight.mul_(2)
        new = model(IMAGES)
        torch.testing.assert_close(fast(IMAGES), new)
    assert all(any(torch.allclose(each, known, atol=1e-5) for known in (old, new)) for each in results)
