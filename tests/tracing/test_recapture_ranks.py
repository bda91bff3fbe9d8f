"""Several processes: capture is fixed, and a guard that fails on one rank ends them all."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

SCRIPT = textwrap.dedent(
    """
    import os, sys, time
    import torch
    import torch.distributed as dist
    from torch import nn
    import fxopt

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, flag=False):
            x.exp()  # dead code: a pass removes it
            return self.linear(x) * 2 if flag else self.linear(x)

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    fast = fxopt.optimize(Net().eval(), example_inputs=(torch.ones(2, 4),), measure=False)
    fast(torch.ones(2, 4))
    print(f"ready {dist.get_rank()}\\n", end="", flush=True)
    dist.barrier()
    if dist.get_rank() == 1:
        fast(torch.ones(2, 4), True)
    dist.barrier()
    print("went on", flush=True)
    """
)


def test_a_failed_guard_ends_all_ranks(tmp_path: Path):
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode != 0
    assert "ready 0" in done.stdout
    assert "ready 1" in done.stdout
    assert "went on" not in done.stdout
    assert "GuardError: module '(root)' (Net) is called as it was not captured: flag is False" in done.stderr
    assert "2 processes" in done.stderr
