"""What passes for several processes need before any work: a process group of `torch.distributed`."""

from __future__ import annotations

import sys
from pathlib import Path

from torch import distributed

from ...errors import UsageError

__all__ = ["require_process_group"]


def require_process_group(name: str, processes: int = 2) -> None:
    """Make sure that the process group of a pass for several processes is initialized.

    Args:
        name: of the pass.
        processes: how many to start, for the message.

    Raises:
        UsageError: it is not; the message has the command to run.
    """
    if distributed.is_available() and distributed.is_initialized():
        return
    if distributed.is_available() and distributed.is_torchelastic_launched():
        step = "call torch.distributed.init_process_group() before fxopt.optimize"
    else:
        script = Path(sys.argv[0]).name or "train.py"
        step = (
            f"run `torchrun --nproc-per-node={processes} {script}`, and call "
            "torch.distributed.init_process_group() in it before fxopt.optimize"
        )
    raise UsageError(f"pass '{name}' works on several processes, and there is no process group; {step}")
