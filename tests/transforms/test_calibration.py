"""torchao's messages are silenced when it is imported and called; those of others are not."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import logging, warnings
import torch
from fxopt.compat.quantized import Observer
logging.getLogger("torchao").setLevel(logging.INFO)
filters = list(warnings.filters)
for kind in ("histogram", "minmax", "moving_average"):
    observer = Observer(kind)
    observer.see(torch.zeros(4))
    observer.scale_and_zero_point()
assert logging.getLogger("torchao").level == logging.INFO and logging.getLogger().level == logging.WARNING
assert warnings.filters == filters
logging.getLogger("torchao").warning("heard again")
"""


def test_torchao_is_not_heard():
    command = [sys.executable, "-W", "error", "-c", SCRIPT]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ})
    assert (finished.returncode, finished.stderr) == (0, "heard again\n")
