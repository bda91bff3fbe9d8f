"""Run the functions `on_rank_...` of a test file in this process, one of a gloo group, and keep what they give.

python ranks.py FILE RANK SIZE FOLDER
"""

from __future__ import annotations

import importlib.util
import pickle
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import torch
from torch import distributed


def main(file: str, rank: str, size: str, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=int(rank),
        world_size=int(size),
        timeout=timedelta(seconds=90),
    )
    module = _imported(file)
    runs = {name: run for name, run in vars(module).items() if name.startswith("on_rank_")}
    results = {name.removeprefix("on_rank_"): run() for name, run in runs.items()}
    (Path(folder) / f"results{rank}").write_bytes(pickle.dumps(results))
    distributed.destroy_process_group()


def _imported(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[Path(file).stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(*sys.argv[1:])
