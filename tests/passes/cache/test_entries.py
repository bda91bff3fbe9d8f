"""The folder of decisions: whole files or none, whoever writes; bounded; nothing damaged is believed."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fxopt.passes.cache import Cache, Entry
from fxopt.runtime.record import Decision, Plan

KEY = "ab" * 32
FIGURES = {"speedup": 2.0, "before_us": 2.0, "after_us": 1.0, "lowerings": {"loop": 2.0}, "checked": "float64"}
PLAN = Plan(("pack",), "eval", (Decision(0, "pack", "(root)", "applied", figures=FIGURES, site={"data": {}}),))
TIMINGS = {
    "before_ms": 2.0, "after_ms": 1.0, "speedup": 2.0, "speedup_low": 1.9, "speedup_high": 2.1,
    "sizes": {"batch 2": {"speedup": 2.0, "speedup_low": 1.9, "speedup_high": 2.1}},
    "untimed_sizes": {"batch 8": "why"},
}  # fmt: skip
MEMORY = {"live_before": 4, "live_after": 2, "peak_before": 4, "peak_after": 2}
ENTRY = Entry(PLAN, TIMINGS, MEMORY, rounding=1e-4, granted=2.0, forward=0.05, fixed=(True, False))


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "below" / "decisions")


def written(cache: Cache, key: str = KEY) -> Path:
    cache.write(key, ENTRY)
    return cache.folder / f"{key}.json"


def test_what_is_written_is_read(cache: Cache):
    assert cache.read(KEY) is None
    written(cache)
    found = cache.read(KEY)
    assert found is not None
    assert dataclasses.replace(found, made="") == ENTRY
    assert found.made[:2] == "20"
    assert cache.read("cd" * 32) is None


def change(*path: Any, to: Any) -> Callable[[Any], Any]:
    """Return a function that puts something else at a place of an entry."""

    def changed(data: Any) -> Any:
        inside = data
        for step in path[:-1]:
            inside = inside[step]
        inside[path[-1]] = to
        return data

    return changed


@pytest.mark.parametrize(
    "damage",
    [
        change("format", to=1),
        change("made", to="yesterday"),
        change("made", to=7),
        change("plan", to=None),
        change("plan", "schema_version", to=99),
        change("plan", "phase", to="both"),
        change("plan", "decisions", to=[1]),
        change("plan", "decisions", 0, "status", to="done"),
        change("plan", "decisions", 0, "figures", "speedup", to="fast"),
        change("plan", "decisions", 0, "figures", "speedup", to=10**300),
        change("plan", "decisions", 0, "figures", "lowerings", to=3),
        change("plan", "decisions", 0, "figures", "lowerings", "loop", to=None),
        change("plan", "decisions", 0, "site", to={"data": 3}),
        change("timings", to={"speedup": 2.0}),
        change("timings", "sizes", to=[2.0]),
        change("timings", "untimed_sizes", "batch 8", to=1),
        change("timings", "before_ms", to=True),
        change("memory", to={"live_before": 1}),
        change("rounding", to=None),
        change("rounding", to=True),
        change("granted", to="long"),
        change("fixed", to=None),
        change("forward", to=[0.1]),
        lambda _: [],
        lambda _: None,
    ],
)
def test_an_entry_of_another_form_is_none(cache: Cache, damage: Callable[[Any], Any]):
    path = written(cache)
    path.write_text(json.dumps(damage(json.loads(path.read_text()))))
    assert cache.read(KEY) is None


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"\xff\xfe\x00", b"[" * 100_000, b"1" * 10_000, b'{"format": NaN}', b"\x80\x04N.",
        b" " * (16 * 2**20 + 1),
    ],
)  # fmt: skip
def test_what_is_no_entry_is_none(cache: Cache, data: bytes):
    written(cache).write_bytes(data)
    assert cache.read(KEY) is None


def test_a_number_that_becomes_infinite_is_not_believed(cache: Cache):
    path = written(cache)
    path.write_text(path.read_text().replace('"before_ms":2.0', '"before_ms":1e999'))
    assert cache.read(KEY) is None
    path = written(cache)
    path.write_text(path.read_text().replace('"data":{}', '"data":{"scale":1e999}'))
    assert cache.read(KEY) is None


def test_the_oldest_go_first(cache: Cache, monkeypatch: pytest.MonkeyPatch):
    keys = [f"{number:064x}" for number in range(4)]
    sizes = [written(cache, key).stat().st_size for key in keys[:3]]
    for age, key in enumerate(keys[:3]):
        os.utime(cache.folder / f"{key}.json", (1000 + age, 1000 + age))
    assert cache.read(keys[0]) is not None  # used now
    monkeypatch.setattr("fxopt.decision_files.MOST_BYTES", sum(sizes) + 10)
    written(cache, keys[3])
    assert [cache.read(key) is not None for key in keys] == [True, False, True, True]
    count, size = cache.usage()
    assert count == 3
    assert size <= sum(sizes) + 10


def test_clearing_leaves_other_files(cache: Cache):
    path = written(cache)
    size = path.stat().st_size
    mine = cache.folder / "notes.json"
    mine.write_text("mine")
    left = cache.folder / f".{path.name}.0123456789ab.tmp"
    left.write_text("of a process that was killed")
    assert cache.clear() == (1, size)
    assert [each.name for each in cache.folder.iterdir()] == ["notes.json"]
    assert cache.clear() == (0, 0)


def test_what_a_killed_writer_left_goes(cache: Cache):
    path = written(cache)
    old, new = (cache.folder / f".{path.name}.{each}.tmp" for each in ("00", "11"))
    for each in (old, new):
        each.write_text("half")
    os.utime(old, (1000, 1000))
    written(cache)
    assert not old.exists()
    assert new.exists()  # another process may be writing it


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    below_a_file = Cache(tmp_path / "file" / "decisions")
    written(below_a_file)
    assert below_a_file.read(KEY) is None
    assert below_a_file.usage() == (0, 0)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fxopt.passes.cache.entries.write_atomically", full)
    cache = Cache(tmp_path / "disk")
    written(cache)
    assert cache.read(KEY) is None


def test_what_could_not_be_read_is_not_written(cache: Cache):
    cache.write(KEY, Entry(PLAN, {"speedup": object()}))
    cache.write(KEY, Entry(PLAN, {**TIMINGS, "before_ms": float("inf")}))
    assert cache.usage() == (0, 0)


WRITER = """
import sys
from pathlib import Path
from fxopt.passes.cache import Cache, Entry
from fxopt.runtime.record import Decision, Plan
decisions = tuple(Decision(0, "pack", f"place {n}", "applied", detail=sys.argv[2] * 100) for n in range(100))
cache = Cache(Path(sys.argv[1]))
for _ in range(150):
    cache.write("ab" * 32, Entry(Plan(("pack",), "eval", decisions)))
    found = cache.read("ab" * 32)
    assert found is not None
    assert len({each.detail for each in found.plan.decisions}) == 1
"""


def test_processes_that_write_at_once_leave_whole_entries(cache: Cache):
    cache.folder.mkdir(parents=True)
    processes = [subprocess.Popen([sys.executable, "-c", WRITER, cache.folder, letter]) for letter in "ab"]
    assert [process.wait() for process in processes] == [0, 0]
    assert cache.read(KEY) is not None
    assert [each.name for each in cache.folder.iterdir()] == [f"{KEY}.json"]
