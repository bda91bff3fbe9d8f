"""Conversions that ended a process, as native code may: they are tried in a process of their own from then on."""

from __future__ import annotations

import hashlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from ...decision_files import note_name
from ...settings import current, environment_with

__all__ = ["noted", "try_apart"]

_MOST_SECONDS = 300.0
_CODE = "from fxopt.layers.delegated.trial import convert; convert()"


@contextmanager
def noted(what: str, trial: Callable[[], None]) -> Generator[None]:
    """Leave a note in the folder of decisions while the block runs: it stays where that ends the process.

    Where an earlier process has left one, the `trial` comes first; if that raises, the note stays. Where nothing can
    be noted, the block runs all the same.
    """
    path = _path(what)
    file = None if path is None else _locked(path)
    if path is None or file is None:
        yield
        return
    try:
        if os.fstat(file).st_size and os.fstat(file).st_nlink:
            trial()
        with suppress(OSError):
            os.write(file, b"converting\n")
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink(missing_ok=True)
    finally:
        os.close(file)


def _path(what: str) -> Path | None:
    folder = current().cache
    if folder is None:
        return None
    return folder / note_name(hashlib.sha256(what.encode(errors="surrogatepass")).hexdigest())


def _locked(path: Path) -> int | None:
    """Open a note that no process holds; the system lets go of it where a process ends. None where that fails."""
    try:
        import fcntl
    except ImportError:  # a system without such locks
        return None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return None
    return file


def try_apart(region: Any, inputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Prepare a region in a process of its own; raise RuntimeError if that ends it, or takes too long."""
    before = "its conversion has ended a process before"
    try:
        given = pickle.dumps((region, [each.detach() for each in inputs], [each.detach() for each in tensors]))
        ended = _ended_by(given)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{before}, and takes more than {_MOST_SECONDS:.0f} s in one of its own") from None
    except Exception as error:  # what no pickle holds, or no process can be started
        raise RuntimeError(f"{before}, and it cannot be tried in one of its own: {error}") from error
    if ended:
        raise RuntimeError(f"{before}, and one of its own now ({ended})")


def _ended_by(given: bytes) -> str:
    """Return the name of the signal that ended a process which converts what it is given, or ""; RuntimeError where it
    did not come to that.
    """
    environment = environment_with(FXOPT_CACHE="0", PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    command = [sys.executable, "-c", _CODE]
    done = subprocess.run(  # noqa: S603
        command, env=environment, input=given, capture_output=True, timeout=_MOST_SECONDS, check=False
    )
    if done.returncode > 0:
        said = done.stderr.decode(errors="replace").split("\n")
        raise RuntimeError(next(filter(None, reversed(said)), f"it ended with {done.returncode}"))
    return signal.Signals(-done.returncode).name if done.returncode else ""


def convert() -> None:
    """Prepare the region that this process is given by its parent; what that raises, it raises there, too."""
    region, inputs, tensors = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the parent alone
    with suppress(Exception):
        region.prepare(inputs, tensors)
