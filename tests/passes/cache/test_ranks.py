"""Two processes of a group: rank 0 looks into the cache, and the other follows, whatever its own cache has."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from across_ranks import shared_folder
from torch import distributed, nn

import fxopt

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def optimized(folder: Path | None) -> tuple[bool, dict[str, Any], float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)).eval()
    before = os.environ.get("FXOPT_CACHE")
    os.environ["FXOPT_CACHE"] = "0" if folder is None else str(folder)
    try:
        fast = fxopt.optimize(model, "fold_batchnorm, pack", example_inputs=X)
    finally:
        os.environ["FXOPT_CACHE"] = before or "0"
    report = fxopt.report(fast).to_json()
    return report["cached"] is not None, fxopt.plan(fast).to_json(), float((fast(X) - model(X)).abs().max())


def on_rank_caches() -> dict[str, Any]:
    folder = shared_folder()
    return {
        "decided": optimized(folder / "one"),
        "on rank 0 alone": optimized(folder / "one" if distributed.get_rank() == 0 else None),
        "on rank 1 alone": optimized(folder / "one" if distributed.get_rank() == 1 else None),
    }


def applied(plan: dict[str, Any]) -> list[str]:
    return [each["key"] for each in plan["decisions"] if each["status"] == "applied"]


def test_whoever_has_an_entry_all_ranks_do_the_same(of_ranks: list[dict[str, Any]]):
    first, second = (each["caches"] for each in of_ranks)
    assert [first[name][0] for name in first] == [False, True, False]
    assert [second[name][0] for name in second] == [False, False, False]
    for name in first:
        assert applied(first[name][1]) == applied(second[name][1])
        assert max(first[name][2], second[name][2]) < 1e-5
    assert applied(first["on rank 0 alone"][1]) == applied(first["decided"][1])
