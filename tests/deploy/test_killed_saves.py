"""A process that is killed while it saves leaves the old file or the new one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = '''
"""Fork children that save two models in turn to one path, kill each at some moment, and look at what is there."""

import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from torch import nn

import fxopt

torch.set_num_threads(1)
seed, rounds, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])


def model(value):
    made = nn.Sequential(nn.Linear(400, 400), nn.Linear(400, 400)).requires_grad_(False)
    for parameter in made.parameters():
        parameter.fill_(value)
    return fxopt.optimize(made.eval(), [], example_inputs=(torch.ones(1, 400),))


def save(which):
    fxopt.save(models[which], folder / "model", factory="torch.nn:Sequential")


models, contents, draw = [model(1.0), model(2.0)], [], random.Random(seed)
for which in (1, 0):
    save(which)
    contents.insert(0, (folder / "model").read_bytes())
start = time.perf_counter()
save(0)
duration = time.perf_counter() - start
counts = Counter()
# On a busy machine all children may be killed before they have saved once: then later ones are given more time.
while counts.total() < rounds or (len(counts) < 2 and counts.total() < 10 * rounds):
    child = os.fork()
    if child == 0:
        while True:
            save(1)
            save(0)
    time.sleep(draw.random() * 4 * duration * (1 + counts.total() / rounds))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    found = (folder / "model").read_bytes()
    counts[contents.index(found) if found in contents else "another"] += 1
rest = [path.name for path in folder.iterdir() if path.name != "model"]
strange = [name for name in rest if not re.fullmatch(r"\\.model\\.[0-9a-f]{12}\\.tmp", name)]
save(1)
print(json.dumps({"counts": counts, "left": len(rest), "strange": strange}))
'''


@pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forked")
def test_the_old_file_or_the_new_one_is_there(tmp_path: Path):
    command = [sys.executable, "-c", SCRIPT, "0", "40", str(tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr[-2000:]
    result = json.loads(finished.stdout)
    assert set(result["counts"]) == {"0", "1"}, result
    assert result["strange"] == []
    assert result["left"] > 0, "no child was killed in the middle of a save"
