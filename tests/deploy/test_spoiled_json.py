"""Entries of an archive's and a plan's JSON, deleted, renamed or of another type, are read rightly or refused."""

from __future__ import annotations

import copy
import itertools
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxopt
from fxopt.deploy.container import write_container
from fxopt.runtime.record import Plan

OTHERS: tuple[Any, ...] = ("deleted", "renamed", None, True, -1, 2**63, 1e308, "", "float7", [], {}, {"a": [1]})
TRIED = 100
X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).eval()


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container inside a JSON value with each of its keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield value, key
        yield from places(item)


def spoil(value: Any, number: int, other: Any) -> Any:
    """Return a copy in which one entry was deleted, renamed, or replaced."""
    changed = copy.deepcopy(value)
    holder, key = next(itertools.islice(places(changed), number, None))
    before = holder.pop(key) if other in ("deleted", "renamed") else None
    if other == "renamed" and isinstance(holder, dict):
        holder[f"{key}_"] = before
    elif other not in ("deleted", "renamed"):
        holder[key] = other
    return changed


def spoiled(value: Any) -> Iterator[Any]:
    """Yield as many spoiled copies as are tried, spread over all entries, each way in turn."""
    every = list(itertools.product(range(sum(1 for _ in places(value))), OTHERS))
    turned = sorted(every, key=lambda each: hash((each[0] * 31 + OTHERS.index(each[1]) * 17) % 101))
    return (spoil(value, *each) for each in turned[:: max(1, len(turned) // TRIED)])


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("spoiled") / "model.fxopt"
    passes = "prune{method=structured},fold_batchnorm,quantize{scheme=int8_weight}"
    fxopt.save(fxopt.optimize(network(), passes, example_inputs=X, measure=False), path)
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_spoiled_manifests_are_refused_or_load(members: dict[str, bytes], tmp_path: Path):
    manifest, path, refused = json.loads(members["manifest.json"]), tmp_path / "spoiled.fxopt", 0
    rest = {name: data for name, data in members.items() if name != "manifest.json"}
    right = fxopt.load(_written(path, manifest, rest), model=network())(X)
    for changed in spoiled(manifest):
        try:
            torch.testing.assert_close(fxopt.load(_written(path, changed, rest), model=network())(X), right)
        except fxopt.FxoptError:
            refused += 1
    assert refused > TRIED // 3


def _written(path: Path, manifest: dict[str, Any], rest: dict[str, bytes]) -> Path:
    write_container(path, {key: each for key, each in manifest.items() if key != "files"}, rest)
    return path


@pytest.mark.parametrize(("key", "word"), [("dtype", "float7"), ("size", 2**63)])
def test_words_and_sizes_of_a_manifest_that_torch_does_not_know_are_refused(
    members: dict[str, bytes], tmp_path: Path, key: str, word: object
):
    manifest = json.loads(members["manifest.json"])
    step = next(each for each in manifest["state_map"]["steps"] if key in each)
    step[key] = word
    rest = {name: data for name, data in members.items() if name != "manifest.json"}
    with pytest.raises(fxopt.FxoptError, match="its weights have no original names"):
        fxopt.load(_written(tmp_path / "spoiled.fxopt", manifest, rest), model=network())


def test_spoiled_plans_are_refused_or_replayed(members: dict[str, bytes]):
    plan, refused = json.loads(members["plan.json"]), 0
    for changed in spoiled(plan):
        try:
            fxopt.optimize(network(), plan=Plan.from_json(changed), example_inputs=X, measure=False)
        except fxopt.FxoptError:
            refused += 1
    assert refused > TRIED // 3


def test_a_plan_whose_site_is_described_as_another_one_is_refused(members: dict[str, bytes]):
    plan = json.loads(members["plan.json"])
    next(each for each in plan["decisions"] if each["site"])["site"]["parts"].pop()
    with pytest.raises(fxopt.PlanError, match="of pass 'prune' is described as"):
        fxopt.optimize(network(), plan=Plan.from_json(plan), example_inputs=X)
