from __future__ import annotations

from pathlib import Path

import pytest

from fxopt.errors import UsageError
from fxopt.settings import Measure, Settings, current


def test_nothing_set_means_the_defaults():
    assert current({}) == Settings()
    assert current({"FXOPT_VERIFY": ""}) == Settings()


def test_each_variable_is_read():
    environment = {
        "FXOPT_VERIFY": "0",
        "FXOPT_MEASURE": "off",
        "FXOPT_PASS_TIMEOUT": "2.5",
        "FXOPT_REPRODUCER_DIR": "/somewhere",
        "FXOPT_TIME_BUDGET": "30",
        "FXOPT_KERNEL_CACHE": "/elsewhere",
        "FXOPT_ENGINES": "0",
        "FXOPT_CACHE": "/decisions",
    }
    paths = Path("/somewhere"), "30", Path("/elsewhere")
    assert current(environment) == Settings(False, Measure.NO, 2.5, *paths, False, Path("/decisions"))


def test_the_cache_is_a_folder_or_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/of/mine")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    own = Path("/home/of/mine/.cache/fxopt/decisions")
    assert current({}).cache == own
    assert current({"FXOPT_CACHE": "on"}).cache == own
    assert current({"FXOPT_CACHE": "0"}).cache is None
    assert current({"FXOPT_CACHE": "~/here"}).cache == Path("/home/of/mine/here")
    assert current({"FXOPT_CACHE": "here"}).cache == Path("here").absolute()
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says its specification
    assert current({}).cache == own
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert current({}).cache == Path("/caches/fxopt/decisions")


def test_without_a_home_nothing_is_cached(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert current({}).cache is None


def test_the_process_environment_is_read_at_each_call(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FXOPT_PASS_TIMEOUT", "7")
    assert current().pass_timeout == 7


def test_measure_takes_a_third_word():
    assert current({"FXOPT_MEASURE": "Cold"}).measure is Measure.COLD
    with pytest.raises(UsageError, match="use 1, 0 or cold"):
        current({"FXOPT_MEASURE": "warm"})


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("FXOPT_VERIFY", "maybe"),
        ("FXOPT_MEASURE", "2"),
        ("FXOPT_PASS_TIMEOUT", "soon"),
        ("FXOPT_PASS_TIMEOUT", "-1"),
        ("FXOPT_PASS_TIMEOUT", "nan"),
        ("FXOPT_PASS_TIMEOUT", "inf"),
    ],
)
def test_a_wrong_value_is_named(key: str, text: str):
    with pytest.raises(UsageError, match=f"{key}='{text}'"):
        current({key: text})
