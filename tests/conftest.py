"""What every test stands on: `fxopt` is this checkout, torch has one thread and a seed, GPU tests need a GPU."""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest

CHECKOUT = Path(__file__).resolve().parent.parent


def _fxopt_is_this_checkout() -> bool:
    spec = importlib.util.find_spec("fxopt")
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve().parent == CHECKOUT


def _put_checkout_on_path() -> None:
    """Make `import fxopt` find this checkout, whatever its folder is called, here and in child processes."""
    site = Path(tempfile.mkdtemp(prefix="fxopt-tests-"))
    (site / "fxopt").symlink_to(CHECKOUT, target_is_directory=True)
    sys.path.insert(0, str(site))
    atexit.register(site.rmdir)
    atexit.register((site / "fxopt").unlink)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))


if not _fxopt_is_this_checkout():
    _put_checkout_on_path()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a background job; what tests start would have it, too
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("FXOPT_ENGINES", "0")  # tests of presets are of fxopt's own rewrites; those of engines name them
os.environ.setdefault("FXOPT_CACHE", "0")  # each test decides anew; those of the cache have folders of their own
os.environ.setdefault(
    "FXOPT_TIME_BUDGET", "10"
)  # what is decided hangs on no busy machine; tests of budgets give theirs

hypothesis.settings.register_profile("fxopt", deadline=None, derandomize=True, max_examples=30)
hypothesis.settings.register_profile("nightly", deadline=None, max_examples=2000)
hypothesis.settings.load_profile("fxopt")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that have tests marked `slow`; skip tests marked `gpu` where there is no CUDA device."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@dataclass
class Done:
    """What a run of the command line gave."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out)


@pytest.fixture
def fxopt(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Return a function that runs the command line in this process."""

    from fxopt.cli import main

    def run(*arguments: object) -> Done:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exited:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Done(int(exited.value.code or 0), out, err)

    return run


@pytest.fixture(scope="session")
def checkout() -> Path:
    """Return the root of the repository."""
    return CHECKOUT


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Give torch one thread: tests run side by side, and two pools on the same cores only fight."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Start each test from the same random state and give the outer one back."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture(scope="module")
def of_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what two processes of a gloo group get from the functions `on_rank_...` of the test file, by name."""
    from ranks import results_of

    return results_of(request.path, 2, tmp_path_factory.mktemp("ranks"))
