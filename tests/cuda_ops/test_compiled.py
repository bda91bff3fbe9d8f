"""Which compiled operators a process uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fxopt.cuda_ops import compiled as room


def test_operators_are_loaded_for_the_gpu_in_use_and_for_no_other(monkeypatch: Any) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(room, "_loaded", {})
    monkeypatch.setattr(room, "compiled", lambda source, architecture: Path(f"{source.stem}-{architecture}"))
    monkeypatch.setattr(torch.ops, "load_library", lambda place: loaded.append(str(place)))
    room._native.cache_clear()  # pyright: ignore[reportPrivateUsage]
    try:
        for capability in ((9, 0), (9, 0)):
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
            room.native("triangles")
        assert loaded == ["triangles-sm_90"]
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
        with pytest.raises(OSError, match="loaded for sm_90 in this process, and the GPU in use is sm_80"):
            room.native("triangles")
    finally:
        room._native.cache_clear()  # pyright: ignore[reportPrivateUsage]
