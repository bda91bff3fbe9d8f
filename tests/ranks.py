"""Run the functions `on_rank_...` of a test file in processes of one gloo group, and keep what they give."""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import os
import pickle
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

PRELOADED = ["torch", "torch.distributed.fsdp", "fxopt.api", "transformers.modeling_utils"]
"""What a server imports once, so that each process of each group begins as a copy of it."""


def results_of(file: Path, size: int, folder: Path) -> list[dict[str, Any]]:
    """Return what each process gets from the functions of a file, by name."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    processes = [context.Process(target=_run, args=(str(file), rank, size, str(folder))) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    errors = [path.read_text() for path in sorted(folder.glob("errors*")) if path.stat().st_size]
    assert [process.exitcode for process in processes] == [0] * size, "\n".join(errors)
    return [pickle.loads((folder / f"results{rank}").read_bytes()) for rank in range(size)]


def _run(file: str, rank: int, size: int, folder: str) -> None:
    """Run in a new process: what it says goes into a file, for the report of a failure."""
    said = os.open(f"{folder}/errors{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(said, 2)
    try:
        _in_a_group(file, rank, size, folder)
    except BaseException:
        traceback.print_exc()
        raise


def _in_a_group(file: str, rank: int, size: int, folder: str) -> None:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=90)
    )
    module = _imported(file)
    runs = {name: run for name, run in vars(module).items() if name.startswith("on_rank_")}
    results = {name.removeprefix("on_rank_"): run() for name, run in runs.items()}
    (Path(folder) / f"results{rank}").write_bytes(pickle.dumps(results))
    gc.collect()  # models go before the process group that they hold
    distributed.destroy_process_group()


def _imported(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[Path(file).stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
