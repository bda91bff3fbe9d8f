from __future__ import annotations

from typing import Any

import pytest
import torch

from fxopt.demo import Demo, MultiHead, Vmapped, build, example_inputs


def test_the_same_model_and_inputs_each_time_and_no_trace_on_the_random_state():
    before = torch.get_rng_state()
    assert all(torch.equal(a, b) for a, b in zip(build().parameters(), build().parameters(), strict=True))
    assert torch.equal(*example_inputs(), *example_inputs())
    assert torch.equal(torch.get_rng_state(), before)


def test_what_it_is_compared_with_computes_the_same():
    model, x = MultiHead(5), torch.randn(3, 16)
    other = Vmapped(model)
    torch.testing.assert_close(other(x), model(x))
    assert sum(p.numel() for p in other.parameters()) == sum(p.numel() for p in model.parameters())


def test_torch_compile_is_timed_where_asked(monkeypatch: pytest.MonkeyPatch):
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or model)
    result = Demo(2, 1, 1, compiled=True, show=lambda _: None).run()
    assert list(result["speed"]["inference"]) == ["loop", "vmap", "torch.compile", "fxopt"]
    assert len(compiled) == 2


def test_threads_are_given_back():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        seen: list[int] = []
        Demo(2, 1, 1, compiled=False, show=lambda _: seen.append(torch.get_num_threads())).run()
        assert set(seen) == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
